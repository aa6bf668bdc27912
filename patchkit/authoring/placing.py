"""Where the paths and hunks of a diff written elsewhere belong in an installed tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring.errors import StripLevelError
from patchkit.diff.errors import DiffError, MalformedDiffError, MismatchError, UnsafePathError
from patchkit.diff.hunks import in_order
from patchkit.diff.model import Content, Diff, FileDiff, Hunk

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """The diff with paths of the root, and the paths (as the diff has them) that are not in the tree."""

    diff: Diff
    placement: Placement
    outside: tuple[str, ...]


@dataclass(frozen=True)
class Moved:
    """A hunk whose old lines stand at another line; both are 1-based."""

    path: str
    old_line: int
    new_line: int


# -- paths ----------------------------------------------------------------------------------------


def place(data: bytes, name: str, base: Base, strip: int | None = None, prefix: str | None = None) -> Placed:
    """Parse, and find the strip level from the tree unless it is given.

    A level fits the better, the more files it finds; of several that find as many, those to which the
    diff really applies. Raises ``StripLevelError`` when none or two fit.
    """
    whole, cut = _parse(data, name, strip)
    prefixes = ["", *base.target.packages] if prefix is None else [prefix.strip("/")]
    candidates = [
        Placement(level, prefix and prefix + "/")
        for level in ([strip] if strip is not None else range(cut, cut + _DEEPEST))
        for prefix in prefixes
    ]
    placed = [_placed(whole, cut, candidate, base) for candidate in candidates]
    best = max(len(one.diff.files) for one in placed)
    fits = [one for one in placed if len(one.diff.files) == best]
    first = whole.files[0].path
    if not best:
        raise StripLevelError(name, (), base.target.distribution, first)
    if len(fits) > 1:
        fits = [one for one in fits if _applies(one.diff, base)] or fits
    if len(fits) > 1:
        readings = [(one.placement.label, one.diff.files[0].path) for one in fits]
        raise StripLevelError(name, readings, base.target.distribution, first)
    return fits[0]


def _parse(data: bytes, name: str, strip: int | None) -> tuple[Diff, int]:
    """The diff and how many components are already cut: one, where the names allow it (``a/``, ``b/``)."""
    if strip == 0:
        return diff.parse(data, name=name, strip=0), 0
    try:
        return diff.parse(data, name=name, strip=1), 1
    except (UnsafePathError, MalformedDiffError) as error:
        # Names without a folder have nothing to cut; any other refusal stands.
        try:
            return diff.parse(data, name=name, strip=0), 0
        except DiffError:
            raise error from None


def _placed(whole: Diff, cut: int, placement: Placement, base: Base) -> Placed:
    inside, outside = [], []
    made: set[str] = set()
    for file in whole.files:
        path = _map(file.path, cut, placement)
        source = None if file.source is None else _map(file.source, cut, placement)
        if path is None or (file.source is not None and source is None):
            outside.append(file.path)
            continue
        moved = replace(file, path=path, source=source)
        if _belongs(moved, base, made):
            inside.append(moved)
            made.add(path)
        else:
            outside.append(file.path)
    return Placed(Diff(whole.name, tuple(inside)), placement, tuple(outside))


def _map(path: str, cut: int, placement: Placement) -> str | None:
    parts = path.split("/")[placement.strip - cut :]
    return placement.prefix + "/".join(parts) if parts else None


def _belongs(file: FileDiff, base: Base, made: set[str]) -> bool:
    """Whether the section is about the installed distribution: a file that it has, or a new one beside
    files that it has. A missing file in a folder that exists belongs too: then the release is wrong.
    """
    path = file.old_path
    if not (base.target.owns(path) and base.target.owns(file.path)):
        return False
    if path in made or base.has_file(path):
        return True
    folder = path.rpartition("/")[0]
    if file.change == "add":
        # New folders are common in a new subpackage, but not right below the root.
        folder = "/".join(path.split("/")[:1]) if "/" in path else ""
    return base.has_folder(folder) if folder else False


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
