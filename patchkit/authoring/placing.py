"""Where the paths and hunks of a diff written elsewhere belong in an installed tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring.errors import StripLevelError
from patchkit.diff.errors import (
    DiffError,
    MalformedDiffError,
    MismatchError,
    UnsafePathError,
    UnsupportedDiffError,
)
from patchkit.diff.hunks import in_order
from patchkit.diff.model import Content, Diff, FileDiff, Hunk, Unusable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from patchkit.authoring.base import Base

_DEEPEST = 8  # strip levels that are tried


@dataclass(frozen=True)
class Placement:
    """How a path of the diff becomes one of the root: ``strip`` components are cut (as ``patch -p``), then
    ``prefix`` is put before it.
    """

    strip: int
    prefix: str = ""

    @property
    def label(self) -> str:
        return f"-p {self.strip}" + (f" --prefix {self.prefix}" if self.prefix else "")


@dataclass(frozen=True)
class Placed:
    """Diffs with paths of the root; for each, the paths (as it has them) that are not in the tree. ``found``
    counts the sections about a file that is there, and those about a new file. ``unusable`` is about the
    tree, and cannot be applied.
    """

    placement: Placement
    diffs: tuple[Diff, ...]
    outside: tuple[tuple[str, ...], ...]
    found: tuple[int, int]
    unusable: tuple[Unusable, ...] = ()

    @property
    def joined(self) -> Diff:
        return Diff(self.diffs[0].name, tuple(file for one in self.diffs for file in one.files))

    @property
    def example(self) -> str:
        return next(file.path for one in self.diffs for file in one.files)


@dataclass(frozen=True)
class Moved:
    """A hunk whose old lines stand at another line; both are 1-based."""

    path: str
    old_line: int
    new_line: int


# -- paths ----------------------------------------------------------------------------------------


def place(
    sources: Sequence[tuple[str, bytes]], base: Base, strip: int | None = None, prefix: str | None = None
) -> Placed:
    """Parse diffs (name, bytes) that belong together, and find their strip level from the tree unless it is
    given.

    A level fits the better, the more files it finds. Of several that find as many, a path that names the
    package itself is believed before one that needs a prefix, and then those to which the diffs really
    apply. Raises ``StripLevelError`` when none or two fit.
    """
    parsed = [_parse(data, name, strip) for name, data in sources]
    name = sources[0][0]
    lowest = min(cut for _, cut in parsed)
    candidates = [
        Placement(level, before and before + "/")
        for before in (["", *base.target.packages] if prefix is None else [prefix.strip("/")])
        for level in ([strip] if strip is not None else range(lowest, lowest + _DEEPEST))
    ]
    different: dict[tuple[Diff, ...], Placed] = {}
    for candidate in candidates:
        one = _placed(parsed, candidate, base)
        different.setdefault(one.diffs, one)
    best = max(one.found for one in different.values())
    if not any(best):
        first = parsed[0][0].files[0].path
        raise StripLevelError(name, (), base.target.distribution, first)
    fits = [one for one in different.values() if one.found == best]
    fits = [one for one in fits if not one.placement.prefix] or fits
    if len(fits) > 1:
        fits = [one for one in fits if _applies(one.joined, base)] or fits
    if len(fits) > 1:
        readings = [(one.placement.label, one.example) for one in fits]
        raise StripLevelError(name, readings, base.target.distribution, fits[0].example)
    return fits[0]


def _parse(data: bytes, name: str, strip: int | None) -> tuple[Diff, int]:
    """The diff and how many components are already cut: none, where both sides have the same names
    (``--no-prefix``, Subversion), else one (``a/``, ``b/``).
    """
    refusals: dict[int, DiffError] = {}
    for cut in (0, 1) if strip is None else (1, 0) if strip else (0,):
        try:
            return diff.parse(data, name=name, strip=cut, pass_over=True), cut
        except (UnsafePathError, MalformedDiffError, UnsupportedDiffError) as error:
            refusals[cut] = error
    raise refusals.get(1, refusals[0])


def _placed(parsed: Sequence[tuple[Diff, int]], placement: Placement, base: Base) -> Placed:
    diffs, outsides = [], []
    made: set[str] = set()
    unusable: list[Unusable] = []
    old = new = 0
    for whole, cut in parsed:
        inside: list[FileDiff] = []
        outside: list[str] = []
        for file in whole.files:
            path = _map(file.path, cut, placement)
            source = None if file.source is None else _map(file.source, cut, placement)
            if path is None or (file.source is not None and source is None):
                outside.append(file.path)
                continue
            moved = replace(file, path=path, source=source)
            if not _belongs(moved, base, made):
                outside.append(file.path)
                continue
            if file.change != "add":
                old += base.has_file(moved.old_path)
            else:
                # Whether its folder is there says nothing: a new file may come with a new folder.
                new += 1
            inside.append(moved)
            made.add(path)
        for one in whole.unusable:
            path = _map(one.path, cut, placement)
            if path is not None and base.target.owns(path):
                unusable.append(one)
            else:
                outside.append(one.path)
        diffs.append(Diff(whole.name, tuple(inside)))
        outsides.append(tuple(outside))
    return Placed(placement, tuple(diffs), tuple(outsides), (old, new), tuple(unusable))


def _map(path: str, cut: int, placement: Placement) -> str | None:
    parts = path.split("/")[placement.strip - cut :]
    return placement.prefix + "/".join(parts) if parts else None


def _belongs(file: FileDiff, base: Base, made: set[str]) -> bool:
    """Whether the section is about the installed distribution: a file that it has, or one in a folder that
    it has. A file that is missing from such a folder belongs too: then the release is wrong.
    """
    path = file.old_path
    if not (base.target.owns(path) and base.target.owns(file.path)):
        return False
    if path in made or base.has_file(path):
        return True
    # A new file may come with new folders; one that is to be changed cannot.
    folder = path.split("/")[0] if file.change == "add" else path.rpartition("/")[0]
    return base.has_folder(folder)


def _applies(placed: Diff, base: Base) -> bool:
    try:
        diff.apply(placed, base.read)
    except DiffError:
        return False
    return True


# -- hunks ----------------------------------------------------------------------------------------


def rebase(placed: Diff, read: Callable[[str], Content | None]) -> tuple[Diff, list[Moved]]:
    """The diff with each hunk at the line where its old lines stand, unchanged and exactly once, and what
    moved. A hunk that fits where it is stays. Raises ``MismatchError`` where that is not possible.
    """
    files: list[FileDiff] = []
    moved: list[Moved] = []
    for number, file in enumerate(placed.files):
        if file.hunks and file.change in ("modify", "rename"):
            before = diff.apply(Diff(placed.name, tuple(files)), read) if number else {}
            content = before[file.old_path] if file.old_path in before else read(file.old_path)
            if content is not None:
                file, changed = _rebased(placed, file, content.data)  # noqa: PLW2901
                moved += changed
        files.append(file)
    return Diff(placed.name, tuple(files)), moved


def _rebased(placed: Diff, file: FileDiff, data: bytes) -> tuple[FileDiff, list[Moved]]:
    lines = data.split(b"\n")
    lines[:-1] = [line + b"\n" for line in lines[:-1]]
    starts: dict[int, int] = {}
    for hunk in file.hunks:
        starts[hunk.line] = _find(placed, file, hunk, lines)
    moved = [
        Moved(file.old_path, hunk.old_start, starts[hunk.line])
        for hunk in file.hunks
        if starts[hunk.line] != hunk.old_start
    ]
    if not moved:
        return file, []
    delta = 0
    places: dict[int, Hunk] = {}
    end = 0
    for hunk in in_order(replace(hunk, old_start=starts[hunk.line]) for hunk in file.hunks):
        if hunk.old_index < end:
            raise MismatchError(
                "this hunk and the one above stand on the same lines of the file",
                patch=placed.name,
                line=hunk.line,
                file=file.path,
            )
        end = hunk.old_index + hunk.old_count
        places[hunk.line] = replace(hunk, new_start=hunk.old_index + delta + bool(hunk.new_count))
        delta += hunk.new_count - hunk.old_count
    return replace(
        file, hunks=tuple(places[hunk.line] for hunk in file.hunks), old_id=None, new_id=None
    ), moved


def _find(placed: Diff, file: FileDiff, hunk: Hunk, lines: list[bytes]) -> int:
    """The line (1-based) at which the hunk's old lines stand."""
    old = hunk.old_lines
    if not old:
        return hunk.old_start  # an insertion without context has nothing to find it by
    if lines[hunk.old_index : hunk.old_index + len(old)] == old:
        return hunk.old_start
    found = [
        index
        for index in range(len(lines) - len(old) + 1)
        if lines[index] == old[0] and lines[index : index + len(old)] == old
    ]
    if len(found) == 1:
        return found[0] + 1
    reason = f"stand {len(found)} times in the file" if found else "do not stand in the file"
    raise MismatchError(
        f"the old lines of this hunk {reason}", patch=placed.name, line=hunk.line, file=file.old_path
    )
