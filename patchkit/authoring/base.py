"""The files that a patch is made against: the pristine tree, with the patches below it applied in memory."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring.errors import NotPristineError, ReleaseMismatchError, ReleaseUnknownError
from patchkit.diff.model import Content
from patchkit.selection import UnknownReleaseError, public
from patchkit.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from patchkit.catalog import Catalog, Patch, Variant
    from patchkit.manifest import Manifest
    from patchkit.target import Target


class Base:
    """Contents by root-relative path. ``read`` has the form that ``diff.apply`` asks for.

    The wheel's RECORD is the witness that a file is pristine; a folder or a checkout has none, and is
    believed. ``on`` names the patches below, in order; what those stand on is put below them by itself.
    """

    def __init__(
        self, target: Target, catalog: Catalog, *, release: str | None = None, on: Sequence[str] = ()
    ) -> None:
        if release is None and target.release is None:
            raise ReleaseUnknownError(target.distribution, target.root)
        if release is not None and target.release is not None and public(release) != public(target.release):
            raise ReleaseMismatchError(target.distribution, release, target.release)
        self.target = target
        self.release = public(release or target.release or "")
        self.tree = Tree(target.root)
        self._recorded = {entry.path: entry.sha256 for entry in target.record if entry.sha256 is not None}
        self._contents: dict[str, Content | None] = {}
        self._touched: dict[str, set[str]] = {}  # by patch below, in order
        for name in on:
            self._put_below(catalog, catalog[name], ())

    @property
    def on(self) -> tuple[str, ...]:
        return tuple(self._touched)

    def below(self, paths: Iterable[str]) -> tuple[str, ...]:
        """The patches below that touch any of these paths: what a manifest has as ``on``."""
        wanted = set(paths)
        return tuple(name for name, touched in self._touched.items() if touched & wanted)

    def _put_below(self, catalog: Catalog, patch: Patch, trail: tuple[str, ...]) -> None:
        if patch.name in self._touched or patch.name in trail:
            return
        variant = self.variant(patch)
        if variant is None:
            serving = [one for one in patch.variants if self._serves(one)]
            if not serving:
                raise UnknownReleaseError(patch, self.target)
            variant = min(serving, key=lambda one: len(one.manifest.on))
            for name in variant.manifest.on:
                self._put_below(catalog, catalog[name], (*trail, patch.name))
        parsed = diff.parse(variant.diff_bytes(), name=variant.diff_path)
        self._contents.update(variant.manifest.apply(parsed, self.read))
        self._touched[patch.name] = touched(variant.manifest)

    def variant(self, patch: Patch) -> Variant | None:
        """The patch's variant for this release on just those patches below that touch its files."""
        for variant in patch.variants:
            manifest = variant.manifest
            if self._serves(variant) and set(manifest.on) == set(self.below(touched(manifest))):
                return variant
        return None

    def _serves(self, variant: Variant) -> bool:
        return self.release in {public(one) for one in variant.manifest.releases}

    def read(self, path: str) -> Content | None:
        return self._contents[path] if path in self._contents else self.pristine(path)

    def pristine(self, path: str) -> Content | None:
        data = self.tree.read(path)
        if data is None:
            return None
        recorded = self._recorded.get(path)
        if recorded is not None and hashlib.sha256(data).hexdigest() != recorded:
            raise NotPristineError(path, self.target.root)
        return Content(data, stat.S_IMODE(os.stat(self.tree.path(path)).st_mode))

    def has_file(self, path: str) -> bool:
        if path in self._contents:
            return self._contents[path] is not None
        return os.path.isfile(self.tree.path(path))

    def has_folder(self, path: str) -> bool:
        return os.path.isdir(self.tree.path(path))


def touched(manifest: Manifest) -> set[str]:
    """Every path that the variant changes, makes or removes."""
    return {path for pin in manifest.files for path in (pin.path, pin.source or pin.path)}
