"""Reading hunks: the header's numbers are binding, and the body must be exactly what they say.

Which lines belong to a hunk is known only by counting (a removed line ``-- x`` looks like a file header),
so whoever finds the end of a body has read it. ``unidiff`` would be a second reader of the same lines that
doubles the time and must be fenced at every side: it drops the lines beyond a header's count without a
word, drops a marker that is not in English, takes a marker anywhere, and lets hunks overlap (1.0.1). The
tests use it as an independent witness.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from patchkit.diff.errors import (
    ConflictMarkersError,
    MalformedDiffError,
    MiscountedHunkError,
    OverlappingHunksError,
)
from patchkit.diff.model import Hunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HEADER = re.compile(rb"@@ -(\d{1,10})(?:,(\d{1,10}))? \+(\d{1,10})(?:,(\d{1,10}))? @@(?: (.*))?", re.DOTALL)
_BODY = frozenset(b" +-")
_CONTEXT, _ADDED, _REMOVED, _MARKER = b" +-\\"


def read_hunks(lines: Sequence[bytes], start: int, name: str) -> tuple[tuple[Hunk, ...], int]:
    """The hunks from ``lines[start]`` on, and the index of the first line after them. ``lines`` are
    without their newlines; errors count from 1.
    """
    hunks: list[Hunk] = []
    index = start
    while index < len(lines) and lines[index].startswith(b"@@"):
        hunk, index = _read_hunk(lines, index, name)
        hunks.append(hunk)
    if hunks and index < len(lines) and _is_surplus(lines, index):
        raise _miscounted(lines, hunks[-1].line - 1, name)
    _check_order(hunks, name)
    _check_conflict_markers(hunks, name)
    return tuple(hunks), index


def _read_hunk(lines: Sequence[bytes], start: int, name: str) -> tuple[Hunk, int]:
    match = HEADER.fullmatch(lines[start])
    if match is None:
        raise MalformedDiffError("not a hunk header", patch=name, line=start + 1)
    old_start, new_start = int(match[1]), int(match[3])
    old_left = 1 if match[2] is None else int(match[2])
    new_left = 1 if match[4] is None else int(match[4])
    for first, count in ((old_start, old_left), (new_start, new_left)):
        if count and not first:
            raise MiscountedHunkError("a hunk with lines cannot start at line 0", patch=name, line=start + 1)
    body: list[bytes] = []
    # Which sides can still get lines: a side ends with the line that a marker follows.
    old_open = new_open = True
    index = start + 1
    changes = False
    while index < len(lines):
        line = lines[index]
        sign = line[0] if line else _CONTEXT  # editors strip the space of an empty context line
        if sign == _MARKER:
            if not body or not body[-1].endswith(b"\n") or not line.startswith(b"\\ "):
                raise MalformedDiffError("a 'No newline' marker out of place", patch=name, line=index + 1)
            old_open = old_open and body[-1][0] == _ADDED
            new_open = new_open and body[-1][0] == _REMOVED
            body[-1] = body[-1][:-1]
            index += 1
            continue
        if not (old_left or new_left):
            break
        if sign == _CONTEXT:
            fits, old_left, new_left = old_left and new_left, old_left - 1, new_left - 1
            is_open = old_open and new_open
        elif sign == _ADDED:
            fits, new_left, is_open, changes = new_left, new_left - 1, new_open, True
        elif sign == _REMOVED:
            fits, old_left, is_open, changes = old_left, old_left - 1, old_open, True
        else:
            raise _miscounted(lines, start, name)
        if not fits:
            raise _miscounted(lines, start, name)
        if not is_open:
            raise MalformedDiffError("a line after the end of the file", patch=name, line=index + 1)
        body.append((line or b" ") + b"\n")
        index += 1
    if old_left or new_left:
        raise _miscounted(lines, start, name)
    if not changes:
        raise MalformedDiffError("a hunk that changes nothing", patch=name, line=start + 1)
    return Hunk(start + 1, old_start, new_start, tuple(body), match[5] or b""), index


def _is_surplus(lines: Sequence[bytes], index: int) -> bool:
    """Whether the line after a complete hunk can only be more of its body."""
    line = lines[index]
    if not line or line[0] not in _BODY:
        return False
    return not (is_header(lines, index) or is_signature(lines, index))


def is_header(lines: Sequence[bytes], index: int) -> bool:
    """Whether a plain file header (``---`` and ``+++``) starts here."""
    return (
        lines[index].startswith(b"--- ") and index + 1 < len(lines) and lines[index + 1].startswith(b"+++ ")
    )


def is_signature(lines: Sequence[bytes], index: int) -> bool:
    """Whether the signature of ``git format-patch`` starts here: ``-- `` and git's version, or one line of
    the sender's own (``libgit2 1.4.3``, ``GitLab``) that ends the mail and cannot be a line of a hunk.
    """
    if lines[index] not in (b"-- ", b"--") or index + 1 >= len(lines):
        return False
    text = lines[index + 1]
    if re.match(rb"\d+\.\d", text):
        return True
    ends = index + 2 >= len(lines) or not lines[index + 2].strip()
    return ends and re.match(rb"[A-Za-z0-9]", text) is not None


def _miscounted(lines: Sequence[bytes], start: int, name: str) -> MiscountedHunkError:
    """The error for the hunk whose header is ``lines[start]``, with the counts that its body has."""
    old = new = 0
    index = start + 1
    while index < len(lines):
        line = lines[index]
        if is_header(lines, index) or is_signature(lines, index):
            break
        if not line or line[0] == _CONTEXT:
            old, new = old + 1, new + 1
        elif line[0] == _ADDED:
            new += 1
        elif line[0] == _REMOVED:
            old += 1
        elif line[0] != _MARKER:
            break
        index += 1
    said = lines[start].split(b" @@")[0].removeprefix(b"@@ ").decode()
    return MiscountedHunkError(
        f"the hunk's header says {said}; its body has {old} old and {new} new lines",
        patch=name,
        line=start + 1,
        hint="the patch is cut short or was edited by hand; make the diff again",
    )


def in_order(hunks: Iterable[Hunk]) -> list[Hunk]:
    """The hunks from the top of the old file down; an insertion comes before a change at its place."""
    return sorted(hunks, key=lambda hunk: (hunk.old_index, hunk.old_count))


def _check_order(hunks: Sequence[Hunk], name: str) -> None:
    delta = end = 0
    before: Hunk | None = None
    for hunk in in_order(hunks):
        old_count, new_count = hunk.old_count, hunk.new_count
        inserts_twice = (
            before is not None
            and not old_count
            and not before.old_count
            and hunk.old_index == before.old_index
        )
        if before is not None and (hunk.old_index < end or inserts_twice):
            later, earlier = max(hunk.line, before.line), min(hunk.line, before.line)
            raise OverlappingHunksError(
                f"this hunk and the one of line {earlier} change the same lines", patch=name, line=later
            )
        if hunk.new_index != hunk.old_index + delta:
            start = hunk.old_index + delta + (1 if new_count else 0)
            raise MiscountedHunkError(
                f"the hunk's header says new line {hunk.new_start}; the hunks above it make that {start}",
                patch=name,
                line=hunk.line,
                hint="a hunk is missing or a number was edited; make the diff again",
            )
        delta += new_count - old_count
        end = hunk.old_index + old_count
        before = hunk


def _check_conflict_markers(hunks: Sequence[Hunk], name: str) -> None:
    """Refuse a merge that was committed with its conflict: all three markers, in order, among the added
    lines of one file. One alone is ordinary text (a heading's underline).
    """
    wanted = 0
    opened: tuple[Hunk, int] | None = None
    for hunk in hunks:
        for index, entry in enumerate(hunk.body):
            if entry[0] != _ADDED:
                continue
            text = entry[1:].rstrip(b"\r\n")
            if text[:7] == b"<<<<<<<" and text[7:8] in (b"", b" "):
                wanted, opened = 1, (hunk, index)
            elif wanted == 1 and text == b"=======":
                wanted = 2
            elif opened and wanted == 2 and text[:7] == b">>>>>>>" and text[7:8] in (b"", b" "):
                first, at = opened
                raise ConflictMarkersError(
                    "adds the markers of a merge conflict", patch=name, line=first.patch_line(at)
                )
