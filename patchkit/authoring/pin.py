"""``patchkit pin``: work out a manifest again from the diff and the installed files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring import store
from patchkit.catalog import MANIFEST_SUFFIX
from patchkit.diff.errors import DiffError
from patchkit.manifest import Manifest, ManifestError
from patchkit.selection import UnknownReleaseError

if TYPE_CHECKING:
    from patchkit.authoring.base import Base
    from patchkit.catalog import Catalog


@dataclass(frozen=True)
class Pinned:
    """``action``: ``unchanged``, ``pinned`` (other digests), ``created``, ``extended`` (one more release)."""

    patch: str
    manifest_path: str
    manifest: Manifest
    action: str


def pin(name: str, *, base: Base, catalog: Catalog) -> Pinned:
    """Pin the variant of ``name`` for the installed release, on the patches that the base has.

    A diff without a manifest gets one. A release that no variant serves joins the one whose files, before
    and after, are the same. Raises ``UnknownReleaseError``, or the ``DiffError`` of a diff that does not fit.
    """
    patch = catalog[name]
    stem = store.variant_stem(patch.folder, patch.distribution, base.release, base.on)
    if not os.path.exists(stem + ".patch"):
        # The manifest may be broken, so the file's name is asked first and the manifests second.
        variant = base.variant(patch)
        if variant is None:
            return _extend(name, base=base, catalog=catalog)
        stem = variant.diff_path.removesuffix(".patch")
    manifest_path = stem + MANIFEST_SUFFIX
    releases = _releases(manifest_path, base.release)
    with open(stem + ".patch", "rb") as file:
        patch_bytes = file.read()
    manifest = store.build_manifest(
        base,
        diff.parse(patch_bytes, name=stem + ".patch"),
        patch_bytes,
        patch=name,
        distribution=patch.distribution,
        releases=releases,
    )
    existed = os.path.exists(manifest_path)
    changed = store.write(manifest_path, manifest.to_json())
    action = "created" if not existed else "pinned" if changed else "unchanged"
    return Pinned(name, manifest_path, manifest, action)


def _releases(manifest_path: str, release: str) -> tuple[str, ...]:
    """The releases that the present manifest lists, if it can be read."""
    try:
        with open(manifest_path, "rb") as file:
            listed = Manifest.from_json(file.read(), name=manifest_path).releases
    except FileNotFoundError:
        return (release,)
    except ManifestError:
        return (release,)  # a broken manifest is what `pin` is there to mend
    return listed if release in listed else (*listed, release)


def _extend(name: str, *, base: Base, catalog: Catalog) -> Pinned:
    patch = catalog[name]
    for variant in patch.variants:
        patch_bytes = variant.diff_bytes()
        try:
            manifest = store.build_manifest(
                base,
                diff.parse(patch_bytes, name=variant.diff_path),
                patch_bytes,
                patch=name,
                distribution=patch.distribution,
                releases=(*variant.manifest.releases, base.release),
            )
        except DiffError:
            continue
        if replace(manifest, releases=variant.manifest.releases) == variant.manifest:
            store.write(variant.manifest_path, manifest.to_json())
            return Pinned(name, variant.manifest_path, manifest, "extended")
    raise UnknownReleaseError(patch, base.target)
