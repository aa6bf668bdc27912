"""Which lines two files share: patience (lines that are unique on both sides) first, difflib in the gaps.

Unique lines anchor functions to themselves, which keeps a hunk readable, and they cut a file into gaps
so small that difflib's quadratic worst case does not matter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from patchkit.diff.model import Hunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Beyond this many pairs a gap without anchors is replaced as a whole.
_MAX_GAP = 4_000_000


def hunks(old: bytes, new: bytes, *, context: int = 3) -> tuple[Hunk, ...]:
    """The hunks, with ``context`` lines around, that turn ``old`` into ``new``."""
    a, b = _lines(old), _lines(new)
    groups: list[list[tuple[int, int, int, int]]] = []
    for change in _changes(a, b):
        if groups and change[0] - groups[-1][-1][1] <= 2 * context:
            groups[-1].append(change)
        else:
            groups.append([change])
    made = []
    heading, read = b"", 0  # each line is looked at once, however many hunks there are
    for group in groups:
        start = max(group[0][0] - context, 0)
        heading = _heading(a, read, start) or heading
        read = max(read, start)
        made.append(_hunk(a, b, group, context, heading))
    return tuple(made)


def _hunk(
    a: list[bytes], b: list[bytes], group: list[tuple[int, int, int, int]], context: int, heading: bytes
) -> Hunk:
    lead = min(context, group[0][0])
    start, new_start = group[0][0] - lead, group[0][2] - lead
    end = min(len(a), group[-1][1] + context)
    body: list[bytes] = []
    at = start
    for low, high, new_low, new_high in group:
        body += (b" " + line for line in a[at:low])
        body += (b"-" + line for line in a[low:high])
        body += (b"+" + line for line in b[new_low:new_high])
        at = high
    body += (b" " + line for line in a[at:end])
    hunk = Hunk(0, start, new_start, tuple(body), heading)
    # The header counts from 1, except on a side without lines.
    return Hunk(0, start + bool(hunk.old_count), new_start + bool(hunk.new_count), hunk.body, hunk.section)


def _heading(a: list[bytes], low: int, high: int) -> bytes:
    """The last line of ``a[low:high]`` that starts like a definition, as git shows it after the ``@@``."""
    for line in reversed(a[low:high]):
        if line[:1].isalpha() or line[:1] in (b"_", b"$"):
            return line[:80].rstrip()
    return b""


def _lines(data: bytes) -> list[bytes]:
    """Lines with their newline; only a newline byte ends one (``splitlines`` would split at a CR too)."""
    pieces = data.split(b"\n")
    last = pieces.pop()
    lines = [piece + b"\n" for piece in pieces]
    if last:
        lines.append(last)
    return lines


def _changes(a: Sequence[bytes], b: Sequence[bytes]) -> Iterator[tuple[int, int, int, int]]:
    """Ranges ``a[low:high]`` that become ``b[new_low:new_high]``, from the top down, never adjacent."""
    at_a = at_b = 0
    for low, new_low, length in [*_merged(_matches(a, b)), (len(a), len(b), 0)]:
        if low > at_a or new_low > at_b:
            yield at_a, low, at_b, new_low
        at_a, at_b = low + length, new_low + length


def _merged(blocks: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join blocks that touch on both sides."""
    current: tuple[int, int, int] | None = None
    for low, new_low, length in blocks:
        if current is not None and (current[0] + current[2], current[1] + current[2]) == (low, new_low):
            current = current[0], current[1], current[2] + length
            continue
        if current is not None:
            yield current
        current = low, new_low, length
    if current is not None:
        yield current


def _matches(a: Sequence[bytes], b: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """Blocks of equal lines ``a[i:i+n] == b[j:j+n]``, in order and not overlapping."""
    head = 0
    while head < min(len(a), len(b)) and a[head] == b[head]:
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    if head:
        yield 0, 0, head
    at_a = at_b = head
    end_a, end_b = len(a) - tail, len(b) - tail
    for anchor_a, anchor_b in [*_anchors(a, b, head, end_a, end_b), (end_a, end_b)]:
        yield from _gap(a, b, at_a, anchor_a, at_b, anchor_b)
        if anchor_a < end_a or anchor_b < end_b:
            yield anchor_a, anchor_b, 1
        at_a, at_b = anchor_a + 1, anchor_b + 1
    if tail:
        yield end_a, end_b, tail


def _gap(
    a: Sequence[bytes], b: Sequence[bytes], low: int, high: int, new_low: int, new_high: int
) -> Iterator[tuple[int, int, int]]:
    size, new_size = high - low, new_high - new_low
    if size <= 0 or new_size <= 0 or size * new_size > _MAX_GAP:
        return
    matcher = SequenceMatcher(None, a[low:high], b[new_low:new_high], autojunk=False)
    for block in matcher.get_matching_blocks():
        if block.size:
            yield low + block.a, new_low + block.b, block.size


def _anchors(
    a: Sequence[bytes], b: Sequence[bytes], head: int, end_a: int, end_b: int
) -> list[tuple[int, int]]:
    """The longest increasing run of lines that are unique on both sides."""
    count_a, count_b = Counter(a[head:end_a]), Counter(b[head:end_b])
    places = {line: index for index, line in enumerate(b[head:end_b], head) if count_b[line] == 1}
    pairs = [
        (index, places[line])
        for index, line in enumerate(a[head:end_a], head)
        if count_a[line] == 1 and line in places
    ]
    tops: list[int] = []  # smallest last b of an increasing run of each length
    rows: list[int] = []  # which pair that is
    previous = [-1] * len(pairs)
    for number, (_, place) in enumerate(pairs):
        slot = bisect_left(tops, place)
        tops[slot : slot + 1] = [place]
        rows[slot : slot + 1] = [number]
        previous[number] = rows[slot - 1] if slot else -1
    run = []
    number = rows[-1] if rows else -1
    while number >= 0:
        run.append(pairs[number])
        number = previous[number]
    return run[::-1]
