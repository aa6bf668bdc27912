"""``patchkit port``: carry a patch to the release that is installed, from the nearest one it has."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkit.authoring import store
from patchkit.authoring.import_ import Imported, import_
from patchkit.errors import PatchkitError
from patchkit.selection import nearest_release

if TYPE_CHECKING:
    from patchkit.authoring.base import Base
    from patchkit.catalog import Catalog, Patch, Variant


class AlreadyServedError(PatchkitError):
    """There is nothing to port: the installed release has a variant."""

    code = "already-served"

    def __init__(self, patch: str, distribution: str, release: str) -> None:
        super().__init__(
            f"'{patch}' has a variant for {distribution} {release} already",
            hint=f"run 'patchkit apply {patch}'",
        )


class NothingToPortError(PatchkitError):
    """No variant to start from."""

    code = "nothing-to-port"

    def __init__(self, patch: str, below: tuple[str, ...]) -> None:
        on = f" on top of {', '.join(below)}" if below else ""
        super().__init__(
            f"'{patch}' has no variant{on} to start from", hint="'patchkit show' lists what it has"
        )


@dataclass(frozen=True)
class Ported:
    """``source`` is the release that the new variant was made from."""

    source: str
    imported: Imported


def port(name: str, *, base: Base, catalog: Catalog) -> Ported:
    """Make a variant of ``name`` for the base's release.

    The nearest variant's hunks may move to where their old lines stand, unchanged and exactly once; a hunk
    whose lines changed is refused with its line in the patch and in the file, for an author to settle with
    ``new`` and ``refresh``. A built-in patch is first copied to the author's own folder.
    """
    patch = catalog[name]
    if base.variant(patch) is not None:
        raise AlreadyServedError(name, patch.distribution, base.release)
    source, variant = _nearest(patch, base)
    folder = store.folder_of(catalog, name)
    if patch.builtin and not os.path.isdir(folder):
        # Whole, because a folder of that name hides the built-in one: its settings and other releases too.
        shutil.copytree(patch.folder, folder)
    return Ported(
        source,
        import_(variant.diff_path, name=name, base=base, catalog=catalog, strip=1, prefix="", move=True),
    )


def _nearest(patch: Patch, base: Base) -> tuple[str, Variant]:
    served = {
        release: variant
        for variant in patch.variants
        if set(variant.manifest.on) <= set(base.on)
        for release in variant.manifest.releases
    }
    release = nearest_release(base.release, tuple(served))
    if release is None:
        raise NothingToPortError(patch.name, base.on)
    return release, served[release]
