"""``patchkit refresh``: turn the edits in the scratch copy into the diff and its manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring import scratch as scratches, store
from patchkit.authoring.errors import NothingChangedError, ScratchError
from patchkit.diff.model import Content, Diff, FileDiff

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchkit.authoring.base import Base
    from patchkit.catalog import Catalog, Variant
    from patchkit.manifest import Manifest

_SIMILAR = 0.5  # git's threshold for a rename
_MAX_COMPARED = 1 << 20

Contents = dict[str, "Content | None"]


@dataclass(frozen=True)
class Refreshed:
    """``changed`` is False when no byte of the patch was written. ``dropped`` are releases that the variant
    served before, and for which the new files are not known to be equal.
    """

    patch: str
    stem: str
    manifest: Manifest
    changed: bool
    dropped: tuple[str, ...]


def refresh(name: str, *, base: Base, catalog: Catalog) -> Refreshed:
    """Write the diff from the base to the scratch copy; without one, check that the patch still fits.

    Files of the patch that are not in the scratch copy stay as the patch has them. While the result is the
    same, so is every byte of the diff. Raises ``NothingChangedError`` when there is nothing to write.
    """
    folder = store.folder_of(catalog, name)
    distribution = store.distribution_of(catalog, name, None)
    variant = scratches.own_variant(catalog, name, base)
    before = {} if variant is None else _unpinned(variant, base)
    scratch = scratches.load(folder)
    if scratch is None and os.path.isdir(os.path.join(folder, scratches.FOLDER)):
        # Taken for no scratch copy, it would look as if there were no edits.
        raise ScratchError(
            os.path.join(folder, scratches.FOLDER),
            f"has no {scratches.INDEX}",
            f"'patchkit new {name}' mends it",
        )
    wanted: Contents = dict(before)
    if scratch is not None:
        scratches.check_base(scratch, base)
        present = list(scratch.present())
        wanted.update(dict.fromkeys(scratch.opened - set(present)))
        for path in present:
            wanted[path] = scratch.read(path)
    if variant is not None and not _differ(wanted, before, base.read):
        patch_bytes = _bytes_of(variant)
        stem = variant.diff_path.removesuffix(".patch")
    else:
        sections = _sections(wanted, base.read)
        if not sections:
            raise NothingChangedError(name, folder if scratch is None else scratch.files)
        head = b"" if variant is None else store.preamble(_bytes_of(variant))
        patch_bytes = head + diff.render(Diff(name, sections))
        if variant is not None:
            stem = variant.diff_path.removesuffix(".patch")
        else:
            touched = {path for section in sections for path in (section.path, section.old_path)}
            stem = store.variant_stem(folder, distribution, base.release, base.below(touched))
            store.check_free(stem, patch_bytes)
    manifest, dropped = _manifest(name, distribution, patch_bytes, stem, variant, base)
    changed = store.write_variant(stem, patch_bytes, manifest)
    return Refreshed(name, stem, manifest, changed, dropped)


def _bytes_of(variant: Variant) -> bytes:
    with open(variant.diff_path, "rb") as file:
        return file.read()


def _unpinned(variant: Variant, base: Base) -> Contents:
    """What the diff makes of the base, whatever its manifest says: an author may have edited the diff."""
    return diff.apply(diff.parse(_bytes_of(variant), name=variant.diff_path), base.read)


def _differ(wanted: Contents, before: Contents, read: Callable[[str], Content | None]) -> bool:
    return any(
        not _same(content, before[path] if path in before else read(path)) for path, content in wanted.items()
    )


def _same(one: Content | None, other: Content | None) -> bool:
    """Equal as a diff sees it: bytes, and whether it can be executed."""
    if one is None or other is None:
        return one is other
    return one.data == other.data and bool(one.mode & 0o100) == bool(other.mode & 0o100)


def _sections(wanted: Contents, read: Callable[[str], Content | None]) -> tuple[FileDiff, ...]:
    """One section a file, in the order of the paths; a new file that is mostly a deleted one is a rename."""
    olds = {path: read(path) for path in wanted}
    gone = [path for path in sorted(wanted) if wanted[path] is None and olds[path] is not None]
    sources: dict[str, str] = {}
    for path in sorted(wanted):
        content = wanted[path]
        if content is not None and olds[path] is None:
            source = _closest(content, [(one, olds[one]) for one in gone if one not in sources.values()])
            if source is not None:
                sources[path] = source
    sections = []
    for path in sorted(wanted):
        if path in sources.values():
            continue
        source = sources.get(path)
        old = olds[path] if source is None else olds[source]
        section = diff.compare(path, old, wanted[path], source=source)
        if section is not None:
            sections.append(section)
    return tuple(sections)


def _closest(new: Content, gone: list[tuple[str, Content | None]]) -> str | None:
    """The deleted file that this new one was, if at least half of it is the same lines."""
    best, source = _SIMILAR, None
    lines = new.data.split(b"\n")
    for path, old in gone:
        if old is None or not old.data or not new.data:
            continue
        if old.data == new.data:
            return path
        if max(len(old.data), len(new.data)) > _MAX_COMPARED:
            continue
        matcher = SequenceMatcher(None, old.data.split(b"\n"), lines)
        if matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
            best, source = ratio, path
    return source


def _manifest(
    name: str, distribution: str, patch_bytes: bytes, stem: str, variant: Variant | None, base: Base
) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest, and the releases that it no longer serves."""

    def build(releases: tuple[str, ...]) -> Manifest:
        parsed = diff.parse(patch_bytes, name=stem + ".patch")
        return store.build_manifest(
            base, parsed, patch_bytes, patch=name, distribution=distribution, releases=releases
        )

    manifest = build((base.release,))
    if variant is None:
        return manifest, ()
    listed = variant.manifest.releases
    known = {pin.source or pin.path: pin.before for pin in variant.manifest.files}
    if all(known.get(pin.source or pin.path, False) == pin.before for pin in manifest.files):
        return build(listed), ()
    return manifest, tuple(release for release in listed if release != base.release)
