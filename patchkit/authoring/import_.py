"""``patchkit import``: take in a diff that was written elsewhere."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring import store
from patchkit.authoring.errors import HunksMovedError, NoDiffsError, OutsidePackageError
from patchkit.authoring.placing import Moved, Placed, Placement, place, rebase
from patchkit.diff import names
from patchkit.diff.errors import DiffError, MismatchError
from patchkit.diff.model import Content, Diff, FileDiff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.authoring.base import Base
    from patchkit.catalog import Catalog
    from patchkit.manifest import Manifest

_SUFFIXES = (".patch", ".diff")


@dataclass(frozen=True)
class Imported:
    """``left_out`` are paths as the diff had them; ``moved`` what ``--rebase`` moved."""

    patch: str
    stem: str
    manifest: Manifest
    placement: Placement
    left_out: tuple[str, ...]
    moved: tuple[Moved, ...]
    changed: bool


def import_(
    source: str,
    *,
    name: str,
    base: Base,
    catalog: Catalog,
    strip: int | None = None,
    prefix: str | None = None,
    only_package: bool = False,
    move: bool = False,
) -> Imported:
    """Apply the diff (or all diffs of a folder, in the order of their names) to the base in memory and
    write it, with root-relative paths and its pins, as a variant of patch ``name``.

    Raises before anything is written: ``StripLevelError``, ``OutsidePackageError``, ``HunksMovedError``,
    any ``DiffError`` (also for a symbolic link, a submodule or a binary file without data in the package),
    ``VariantExistsError``.
    """
    target = base.target
    folder = store.folder_of(catalog, name)
    distribution = store.distribution_of(catalog, name, target.distribution)
    sources = _read(source)
    placed = place(sources, base, strip, prefix)
    if placed.unusable:
        raise placed.unusable[0].error
    left_out = tuple(path for one in placed.outside for path in one)
    if left_out and not only_package:
        raise OutsidePackageError(source, left_out, distribution)
    made, moved = _join(placed.diffs, base, move=move)
    head = _origin(sources, placed)
    patch_bytes = head + diff.render(made)
    # What is pinned is what a reader of the written file will get.
    written = diff.parse(patch_bytes, name=source)
    manifest = store.build_manifest(
        base, written, patch_bytes, patch=name, distribution=distribution, releases=[base.release]
    )
    stem = store.variant_stem(folder, distribution, base.release, manifest.on)
    store.check_free(stem, patch_bytes)
    changed = store.write_toml(folder, name, distribution, manifest.on)
    changed = store.write_variant(stem, patch_bytes, manifest) or changed
    return Imported(name, stem, manifest, placed.placement, left_out, tuple(moved), changed)


def _read(source: str) -> list[tuple[str, bytes]]:
    paths = [source]
    if os.path.isdir(source):
        paths = [
            os.path.join(source, name) for name in sorted(os.listdir(source)) if name.endswith(_SUFFIXES)
        ]
        if not paths:
            raise NoDiffsError(source, "holds no .patch or .diff file")
    elif not os.path.exists(source):
        raise NoDiffsError(source, "no such file or folder")
    found = []
    for path in paths:
        with open(path, "rb") as file:
            found.append((path, file.read()))
    return found


def _origin(sources: Sequence[tuple[str, bytes]], placed: Placed) -> bytes:
    """Prose for the head of the patch: where it comes from and what was left out."""
    lines = []
    for (path, data), outside in zip(sources, placed.outside, strict=True):
        shown, digest = names.show(os.path.basename(path)), hashlib.sha256(data).hexdigest()
        lines.append(f"Imported from {shown} ({placed.placement.label}), sha256 {digest}")
        lines += [f"Left out: {names.show(one)}" for one in outside]
    return "".join(line + "\n" for line in lines).encode() + b"\n"


def _join(parts: Sequence[Diff], base: Base, *, move: bool) -> tuple[Diff, list[Moved]]:
    """One diff from several: each is made for what the ones before it leave."""
    layers = _Layers(base)
    moved: list[Moved] = []
    for one in parts:
        part = one
        if move:
            part, changes = rebase(one, layers.read)
            moved += changes
        try:
            layers.add(part)
        except MismatchError:
            _explain_move(one, layers)
            raise
    if len(parts) == 1:
        return layers.parts[0], moved
    return layers.squashed(), moved


def _explain_move(part: Diff, layers: _Layers) -> None:
    """If the hunks only stand elsewhere, say that (and how to accept it) instead of the mismatch."""
    try:
        part, changes = rebase(part, layers.read)
        diff.apply(part, layers.read)
    except DiffError:
        return
    if changes:
        raise HunksMovedError(part.name, [(one.path, one.old_line, one.new_line) for one in changes])


class _Layers:
    """The base with the diffs so far on top."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.parts: list[Diff] = []
        self.contents: dict[str, Content | None] = {}

    def read(self, path: str) -> Content | None:
        return self.contents[path] if path in self.contents else self.base.read(path)

    def add(self, part: Diff) -> None:
        self.contents.update(diff.apply(part, self.read))
        self.parts.append(part)

    def squashed(self) -> Diff:
        """One section for each path, however often the parts changed it; renames become a deletion and
        a creation where more than one part had a hand in them.
        """
        sections: list[FileDiff] = []
        for path in sorted(self.contents):
            section = diff.compare(path, self.base.read(path), self.contents[path])
            if section is not None:
                sections.append(section)
        return Diff(self.parts[0].name, tuple(sections))
