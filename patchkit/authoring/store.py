"""Writing a patch's folder: each file whole or not at all, and never over something else unasked."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring.errors import (
    BadNameError,
    NoDistributionError,
    OtherDistributionError,
    SeriesError,
    VariantExistsError,
)
from patchkit.catalog import MANIFEST_SUFFIX, PATCH_NAME, Catalog, Patch, load_patch
from patchkit.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.authoring.base import Base
    from patchkit.diff.model import Diff

TEMPORARY = ".patchkit-new-"  # a crash may leave one behind


def write(path: str, data: bytes) -> bool:
    """Replace the file's content in one step; False when it already is that."""
    try:
        with open(path, "rb") as file:
            if file.read() == data:
                return False
    except FileNotFoundError:
        pass
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=TEMPORARY)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return True


def folder_of(catalog: Catalog, name: str) -> str:
    """Where the patch lies or will lie: where the catalog finds it, else in its first folder."""
    if not PATCH_NAME.fullmatch(name):
        raise BadNameError(name)
    if name in catalog and not catalog[name].builtin:
        return catalog[name].folder
    return os.path.join(catalog.folders[0], name)


def existing(catalog: Catalog, name: str) -> Patch | None:
    """The author's own patch of that name; a built-in one does not count, it is shadowed."""
    folder = folder_of(catalog, name)
    if not os.path.isfile(os.path.join(folder, "patch.toml")):
        return None
    patch = load_patch(folder)
    if patch.members:
        raise SeriesError(name, patch.members)
    return patch


def distribution_of(catalog: Catalog, name: str, asked: str | None) -> str:
    """The patch's distribution, which must not contradict the one asked for."""
    patch = existing(catalog, name)
    if patch is None:
        if asked is None:
            raise NoDistributionError(name)
        return asked
    if asked is not None and _canonical(asked) != _canonical(patch.distribution):
        raise OtherDistributionError(
            name, patch.distribution, asked, os.path.join(patch.folder, "patch.toml")
        )
    return patch.distribution


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def variant_stem(folder: str, distribution: str, release: str, on: Sequence[str]) -> str:
    """The variant's path without a suffix."""
    below = f".on-{'+'.join(on)}" if on else ""
    return os.path.join(folder, f"{distribution}-{release}{below}")


def write_toml(folder: str, name: str, distribution: str, after: Sequence[str], summary: str = "") -> bool:
    """A first ``patch.toml``; an existing one is the author's and stays."""
    path = os.path.join(folder, "patch.toml")
    if os.path.exists(path):
        return False
    listed = ", ".join(f'"{one}"' for one in after)
    text = (
        f'schema = 1\nname = "{name}"\ndistribution = "{distribution}"\nsummary = "{summary}"\n'
        f"after = [{listed}]\nconflicts = []\n"
    )
    return write(path, text.encode())


def check_free(stem: str, patch_bytes: bytes) -> None:
    """Refuse to replace another variant of the same name."""
    path = stem + ".patch"
    if os.path.exists(path):
        with open(path, "rb") as file:
            if file.read() != patch_bytes:
                raise VariantExistsError(path)


def build_manifest(
    base: Base, made: Diff, patch_bytes: bytes, *, patch: str, distribution: str, releases: Sequence[str]
) -> Manifest:
    paths = {path for file in made.files for path in (file.path, file.old_path)}
    return Manifest.build(
        made,
        base.read,
        patch=patch,
        distribution=distribution,
        releases=releases,
        on=base.below(paths),
        diff_bytes=patch_bytes,
    )


def write_variant(stem: str, patch_bytes: bytes, manifest: Manifest) -> bool:
    """Write diff, then manifest; False when both were there already. A crash between the two leaves a
    pair that does not match, which every command refuses and ``pin`` mends.
    """
    changed = write(stem + ".patch", patch_bytes)
    return write(stem + MANIFEST_SUFFIX, manifest.to_json()) or changed


def preamble(patch_bytes: bytes) -> bytes:
    """The prose before the first section, which a refresh keeps."""
    first = diff.parse(patch_bytes).files[0].line
    return b"".join(line + b"\n" for line in patch_bytes.split(b"\n")[: first - 1])
