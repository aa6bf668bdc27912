"""The files that a patch is made against: the pristine tree, with the patches below it applied in memory."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring.errors import (
    NotPristineError,
    NoVariantHereError,
    ReleaseMismatchError,
    ReleaseUnknownError,
)
from patchkit.diff.model import Content
from patchkit.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.catalog import Catalog, Patch, Variant
    from patchkit.target import Target


class Base:
    """Contents by root-relative path. ``read`` has the form that ``diff.apply`` asks for.

    The wheel's RECORD is the witness that a file is pristine; a folder or a checkout has none, and is
    believed.
    """

    def __init__(self, target: Target, *, release: str | None, catalog: Catalog, on: Sequence[str] = ()) -> None:
        if release is None and target.release is None:
            raise ReleaseUnknownError(target.distribution, target.root)
        if release is not None and target.release not in (None, release):
            raise ReleaseMismatchError(target.distribution, release, target.release)
        self.target = target
        self.release = release or target.release or ""
        self.on = tuple(on)
        self.tree = Tree(target.root)
        self._recorded = {entry.path: entry.sha256 for entry in target.record if entry.sha256 is not None}
        self._below: dict[str, Content | None] = {}
        for name in on:
            self._put_below(catalog[name])

    def _put_below(self, patch: Patch) -> None:
        variant = variant_for(patch, self.release)
        if variant is None:
            raise NoVariantHereError(patch.name, self.target.label, patch.releases)
        parsed = diff.parse(variant.diff_bytes(), name=variant.diff_path)
        self._below.update(variant.manifest.apply(parsed, self.read))

    def read(self, path: str) -> Content | None:
        return self._below[path] if path in self._below else self.pristine(path)

    def pristine(self, path: str) -> Content | None:
        data = self.tree.read(path)
        if data is None:
            return None
        recorded = self._recorded.get(path)
        if recorded is not None and hashlib.sha256(data).hexdigest() != recorded:
            raise NotPristineError(path, self.target.root)
        return Content(data, stat.S_IMODE(os.stat(self.tree.path(path)).st_mode))

    def has_file(self, path: str) -> bool:
        return self._below[path] is not None if path in self._below else os.path.isfile(self.tree.path(path))

    def has_folder(self, path: str) -> bool:
        return os.path.isdir(self.tree.path(path))


def variant_for(patch: Patch, release: str, on: Sequence[str] | None = None) -> Variant | None:
    """The variant that serves ``release``, on the patches ``on`` (None: preferably on pristine files)."""
    serving = [variant for variant in patch.variants if release in variant.manifest.releases]
    if on is None:
        return min(serving, key=lambda variant: len(variant.manifest.on), default=None)
    return next((variant for variant in serving if variant.manifest.on == tuple(on)), None)
