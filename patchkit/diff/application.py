"""Applying a diff in memory: each hunk exactly where its header says, or nothing at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from patchkit.diff import binary, names
from patchkit.diff.errors import (
    DiffError,
    MalformedDiffError,
    MismatchError,
    NotReversibleError,
    PathCollisionError,
    TargetExistsError,
    TargetMissingError,
)
from patchkit.diff.hunks import in_order
from patchkit.diff.model import Binary, Content, Diff, FileDiff, Hunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchkit.diff.model import Change

_E = TypeVar("_E", bound=DiffError)
_BLOCKS = (1 << 20, 1 << 14, 1 << 9)
_UNDOES: dict[Change, Change] = {"add": "delete", "delete": "add"}
_FLIPPED = {43: b"-", 45: b"+", 32: b" "}


def apply(diff: Diff, read: Callable[[str], Content | None]) -> dict[str, Content | None]:
    """The new content of each path that the diff touches, None for one that goes. ``read`` gives the
    present content of a root-relative path, None where there is none or a folder; nothing is written. Only
    paths that the diff names are asked for, and the folders above a file that it makes.

    Sections are applied in order, so that a second section for a path continues the first. A file
    keeps its mode unless the diff changes it; then its execute bit must be what the diff says it was.
    Raises ``MismatchError`` with the patch's line and the target's.
    """
    result: dict[str, Content | None] = {}
    keys: dict[str, str] = {}
    last: dict[str, FileDiff] = {}

    def present(path: str) -> Content | None:
        return result[path] if path in result else read(path)

    for file in diff.files:
        for path in {file.old_path: 0, file.path: 0}:
            _check_collision(diff, file, path, keys)
        before = last.get(file.old_path)
        if before is not None:
            _check_continues(diff, before, file)
        content = _apply_file(diff, file, present)
        if file.source is not None:
            result[file.source] = None
            last[file.source] = file
        result[file.path] = content
        last[file.path] = file
    _check_folders(diff, last, present, result)
    return result


def reverse(diff: Diff) -> Diff:
    """The diff that undoes this one. Raises ``NotReversibleError`` where it does not hold the old bytes."""
    return Diff(diff.name, tuple(_reverse_file(diff, file) for file in reversed(diff.files)))


def _reverse_file(diff: Diff, file: FileDiff) -> FileDiff:
    if file.forward is not None and file.backward is None:
        raise NotReversibleError(
            "a binary patch with one direction only",
            patch=diff.name,
            line=file.line,
            file=file.path,
            hint="make it with git diff --binary",
        )
    hunks = tuple(
        replace(
            hunk,
            old_start=hunk.new_start,
            new_start=hunk.old_start,
            body=tuple(_FLIPPED[entry[0]] + entry[1:] for entry in hunk.body),
        )
        for hunk in file.hunks
    )
    return replace(
        file,
        path=file.old_path,
        source=None if file.source is None else file.path,
        change=_UNDOES.get(file.change, file.change),
        hunks=hunks,
        old_mode=file.new_mode,
        new_mode=file.old_mode,
        forward=file.backward,
        backward=file.forward,
        old_id=file.new_id,
        new_id=file.old_id,
    )


@dataclass(frozen=True)
class _Refusal:
    """Makes the errors about one file, at its section or at the line that is given."""

    patch: str
    file: FileDiff
    line: int | None = None

    def __call__(self, error: type[_E], message: str) -> _E:
        line = self.file.line if self.line is None else self.line
        return error(message, patch=self.patch, line=line, file=self.file.path)


# -- one file -------------------------------------------------------------------------------------


def _apply_file(diff: Diff, file: FileDiff, present: Callable[[str], Content | None]) -> Content | None:
    refuse = _Refusal(diff.name, file)
    before = present(file.old_path)
    if file.change == "add":
        # A diff without git's headers cannot tell an empty file from none; the new bytes are the same.
        if before is not None and (file.new_mode is not None or before.data):
            raise refuse(TargetExistsError, f"creates {names.show(file.path)}, which exists")
        data = _apply_body(diff, file, b"")
        if before is not None:
            return Content(data, before.mode)
        return Content(data, 0o644 if file.new_mode is None else file.new_mode)
    if before is None:
        verb = {"delete": "deletes", "rename": "renames"}.get(file.change, "changes")
        raise refuse(TargetMissingError, f"{verb} {names.show(file.old_path)}, which is not there")
    data = _apply_body(diff, file, before.data)
    if file.change == "delete":
        if data:
            raise refuse(
                MismatchError, f"deletes {names.show(file.path)}, but more is in it than the diff deletes"
            )
        return None
    if file.source is not None and present(file.path) is not None:
        raise refuse(TargetExistsError, f"renames to {names.show(file.path)}, which exists")
    mode = before.mode
    if file.old_mode is not None and file.new_mode is not None:
        if bool(before.mode & 0o100) != bool(file.old_mode & 0o100):
            raise refuse(
                MismatchError,
                f"changes the mode of {names.show(file.path)} from {file.old_mode:04o}, "
                f"but it is {before.mode:04o}",
            )
        mode = file.new_mode
    return Content(data, mode)


def _apply_body(diff: Diff, file: FileDiff, old: bytes) -> bytes:
    if file.forward is not None:
        return _apply_binary(diff, file, file.forward, old)
    if not file.hunks:
        return old
    pieces: list[bytes | memoryview] = []
    view = memoryview(old)
    lines = kept = 0  # lines and bytes of the old file that are behind us
    for hunk in in_order(file.hunks):
        start = _skip_lines(old, kept, hunk.old_index - lines)
        block = b"".join(hunk.old_lines)
        end = start + len(block) if start is not None else -1
        if start is None or not old.startswith(block, start) or not _at_line_end(old, block, end):
            raise _mismatch(diff, file, hunk, old, start)
        new = b"".join(hunk.new_lines)
        # Without its newline a line must be the file's last, or the next would be glued to it.
        unfinished = new and not new.endswith(b"\n")
        if end < len(old) and unfinished:
            raise _mismatch(
                diff, file, hunk, old, end, reason="the file goes on where the diff says that it ends"
            )
        if start and new and old[start - 1 : start] != b"\n":
            raise _mismatch(diff, file, hunk, old, start, reason="the line before has no newline")
        pieces += (view[kept:start], new)
        kept = end
        lines = hunk.old_index + hunk.old_count
    pieces.append(view[kept:])
    return b"".join(pieces)


def _skip_lines(data: bytes, position: int, count: int) -> int | None:
    """Where the line that is ``count`` lines below ``position`` starts; None past the end. A last line
    without newline counts. Counts by ever smaller blocks, so that a large file costs no object per line.
    """
    for block in _BLOCKS:
        while position + block < len(data):
            found = data.count(b"\n", position, position + block)
            if found >= count:
                break
            position += block
            count -= found
    while count:
        end = data.find(b"\n", position)
        if end < 0:
            unfinished = position < len(data) and count == 1
            return len(data) if unfinished else None
        position = end + 1
        count -= 1
    return position


def _at_line_end(data: bytes, block: bytes, end: int) -> bool:
    """Whether a matched block ends where a line of the file does."""
    return not block or block.endswith(b"\n") or end == len(data)


def _mismatch(
    diff: Diff, file: FileDiff, hunk: Hunk, old: bytes, start: int | None, *, reason: str | None = None
) -> MismatchError:
    """The first line of the hunk that the file does not have, in both numberings."""
    shown = names.show(file.old_path)
    target = hunk.old_index
    if start is None:
        total = old.count(b"\n") + (not old.endswith(b"\n") and bool(old))
        return MismatchError(
            f"{shown} has {total} lines; the hunk starts at line {hunk.old_start}",
            patch=diff.name,
            line=hunk.line,
            file=file.old_path,
            target_line=total,
        )
    at = hunk.line
    if reason is None:
        for index, entry in enumerate(hunk.body):
            if entry[0] == 43:
                continue
            target += 1
            end = old.find(b"\n", start) + 1 or len(old)
            found = old[start:end]
            at = hunk.patch_line(index)
            if found != entry[1:]:
                reason = _difference(found, entry[1:])
                break
            start = end
    return MismatchError(
        f"{shown}:{target}: {reason or 'the text differs'}",
        patch=diff.name,
        line=at,
        file=file.old_path,
        target_line=target,
        hint="the patch was made for other bytes",
    )


def _difference(found: bytes, wanted: bytes) -> str:
    if not found:
        return "the file ends before this line"
    if found.rstrip(b"\r\n") == wanted.rstrip(b"\r\n"):
        ends = {b"\r\n": "CRLF", b"\n": "LF"}
        names_of = [
            next((text for end, text in ends.items() if line.endswith(end)), "no newline")
            for line in (found, wanted)
        ]
        return f"the line ends in {names_of[0]}, the diff says {names_of[1]}"
    return f"the file has {_excerpt(found)}, the diff says {_excerpt(wanted)}"


def _excerpt(line: bytes) -> str:
    text = line.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def _apply_binary(diff: Diff, file: FileDiff, patch: Binary, old: bytes) -> bytes:
    refuse = _Refusal(diff.name, file, patch.line)
    old_id, new_id = file.old_id or "", file.new_id or ""  # the scanner sees to it that both are full
    if file.change != "add" and binary.blob_id(old, old_id) != old_id:
        raise refuse(MismatchError, f"{names.show(file.old_path)} is not blob {old_id[:12]}")
    try:
        data = patch.data if patch.kind == "literal" else binary.apply_delta(patch.data, old)
    except ValueError as error:
        raise refuse(MalformedDiffError, str(error)) from None
    if file.change != "delete" and binary.blob_id(data, new_id) != new_id:
        raise refuse(MalformedDiffError, f"the binary data does not make blob {new_id[:12]}")
    return data


# -- the paths of a whole diff --------------------------------------------------------------------


def _check_collision(diff: Diff, file: FileDiff, path: str, keys: dict[str, str]) -> None:
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        piece = "/".join(parts[:depth])
        other = keys.setdefault(names.collision_key(piece), piece)
        if other != piece:
            raise PathCollisionError(
                f"{names.show(piece)} and {names.show(other)} are one path on some file systems",
                patch=diff.name,
                line=file.line,
                file=path,
            )


def _check_continues(diff: Diff, before: FileDiff, file: FileDiff) -> None:
    """Refuse a second section for a file that starts from other bytes than the first one ends with."""
    here, there = file.old_id, before.new_id if before.path == file.old_path else None
    if here is not None and there is not None:
        size = min(len(here), len(there))
        if here[:size] != there[:size]:
            raise PathCollisionError(
                f"{names.show(file.old_path)} a second time, and not continuing line {before.line}",
                patch=diff.name,
                line=file.line,
                file=file.path,
            )


def _check_folders(
    diff: Diff,
    last: dict[str, FileDiff],
    present: Callable[[str], Content | None],
    result: dict[str, Content | None],
) -> None:
    """Refuse a file below another that the diff leaves, or that is there."""
    for path, content in result.items():
        if content is None:
            continue
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            arrives = last[path].change in ("add", "rename")
            if (present(folder) if arrives else result.get(folder)) is not None:
                raise PathCollisionError(
                    f"puts {names.show(path)} below {names.show(folder)}, which is a file",
                    patch=diff.name,
                    line=last[path].line,
                    file=path,
                )
