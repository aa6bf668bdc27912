"""The second witness: code of a file that ``sys.modules`` no longer shows.

The path is searched in anonymous memory. Finding it proves nothing (a log line, a list of files): it
counts only as the characters of a str object to which a live code object's ``co_filename`` points.
A process that mentions the path very often (a list of files, a log) is asked the other way round: every
code object, and what its ``co_filename`` says.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from patchkit.guard.memory import ProcessMemory, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from patchkit.guard.cpython import Interpreter

_REGION = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) r[w-].p \S+ \S+ 0 *(|\[heap\]|\[anon[^\]]*\])$", re.MULTILINE
)
_LARGE = 64 << 20  # numpy's and torch's buffers are; CPython's arenas seldom are
_LARGE_HEAP = 1 << 30  # code objects over 512 bytes come from malloc, hence from [heap]
_CHUNK = 256 << 10  # stays in the processor's cache between reading and searching
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PRESENT = 0xC0  # in the top byte of a pagemap entry: in memory, or swapped out
_LONGEST_PATH = 4096
_MOST_MENTIONS = 64  # each costs several reads, and each string a search of its own
_SLICE = 4096  # code objects that are looked at together
_LEAST_POINTER = 0x100  # upper half: 3.14 keeps flags there; pointers to the heap are larger


@dataclass
class Scan:
    """Paths whose code is alive; bytes that were searched, and that were left out."""

    paths: set[str] = field(default_factory=set)
    searched: int = 0
    skipped: int = 0
    regions: int = 0

    @property
    def omission(self) -> str:
        """What the evidence must say about memory that was not searched."""
        if not self.skipped:
            return ""
        what, were, them = ("mapping", "was", "it") if self.regions == 1 else ("mappings", "were", "them")
        return (
            f"; {self.regions} {what} over {_LARGE >> 20} MiB ({self.skipped >> 20} MiB) {were} skipped: "
            f"--thorough searches {them}"
        )


def scan(
    pid: int,
    interpreter: Interpreter,
    maps: bytes,
    files: Sequence[str],
    folders: Iterable[str],
    *,
    thorough: bool = False,
) -> Scan:
    """Search process ``pid`` for live code of ``files`` (their paths' tails, relative to a root).

    ``folders`` are paths of folders as the process names them: they tell how wide the characters of its
    paths are.
    """
    result = Scan()
    memory = ProcessMemory(pid)
    ranges = list(_resident(pid, _regions(maps, result, thorough=thorough)))
    result.searched = sum(size for _, size in ranges)
    widest = max(("".join(folders)), default="a")
    needles = [needle for name in files for needle in _spellings(name, widest)]
    mentions = list(islice(_find(memory, ranges, needles), _MOST_MENTIONS + 1))
    if len(mentions) > _MOST_MENTIONS:
        result.paths = _by_code(memory, interpreter, ranges, files)
        return result
    strings: dict[int, str] = {}
    for address, needle in mentions:
        strings.update(_owner(memory, interpreter, address, len(needle)))
    pointers = {struct.pack("<Q", owner): owner for owner in strings}
    offset = interpreter.layout.filename
    for address, needle in _find(memory, ranges, list(pointers)):
        if address % 8 == 0 and _is_code(memory, interpreter, address - offset):
            result.paths.add(strings[pointers[needle]])
    return result


def _by_code(
    memory: ProcessMemory, interpreter: Interpreter, ranges: list[tuple[int, int]], files: Sequence[str]
) -> set[str]:
    """The paths that end like one of ``files``, of all code objects that are alive."""
    tails = tuple(files)
    texts: dict[int, str | None] = {}
    paths: set[str] = set()
    kind = struct.pack("<Q", interpreter.symbols["PyCode_Type"])
    # The type is a code object's second word.
    found = (address - 8 for address, _ in _find(memory, ranges, [kind]) if address % 8 == 0)
    while codes := list(islice(found, _SLICE)):
        raw = memory.read_equal([code + interpreter.layout.filename for code in codes], 8)
        owners = struct.unpack(f"<{len(codes)}Q", raw)
        fresh = list({owner for owner in owners if owner not in texts})
        texts.update(zip(fresh, interpreter.strings(fresh), strict=True))
        for code, owner in zip(codes, owners, strict=True):
            text = texts[owner]
            if text is not None and text.endswith(tails) and _is_code(memory, interpreter, code):
                paths.add(text)
    return paths


def _spellings(name: str, widest: str) -> list[bytes]:
    """How a path that ends with ``name`` may lie in memory: all characters of a str have one width."""
    widest = max(widest, *name)
    found = [] if max(name) > "\xff" else [name.encode("latin-1")]
    if widest > "\xff":
        found.append(name.encode("utf-16-le", "surrogatepass"))
    if widest > "\uffff":
        found.append(name.encode("utf-32-le", "surrogatepass"))
    return found


def _regions(maps: bytes, result: Scan, *, thorough: bool) -> Iterator[tuple[int, int]]:
    for found in _REGION.finditer(maps):
        start, end = int(found[1], 16), int(found[2], 16)
        limit = _LARGE_HEAP if found[3] == b"[heap]" else _LARGE
        if end - start > limit and not thorough:
            result.skipped += end - start
            result.regions += 1
        else:
            yield start, end


def _resident(pid: int, regions: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Address and size of what is in memory: a reserved page that was never touched holds nothing."""
    try:
        pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        for start, end in regions:
            yield start, end - start
        return
    try:
        for start, end in regions:
            pages = (end - start) // _PAGE
            raw = os.pread(pagemap, 8 * pages, start // _PAGE * 8)
            if len(raw) != 8 * pages:
                yield start, end - start
                continue
            flags = raw[7::8].translate(_PRESENCE)
            at = flags.find(b"\1")
            while at >= 0:
                stop = flags.find(b"\0", at)
                stop = stop if stop >= 0 else pages
                yield start + at * _PAGE, (stop - at) * _PAGE
                at = flags.find(b"\1", stop)
    finally:
        os.close(pagemap)


_PRESENCE = bytes(1 if byte & _PRESENT else 0 for byte in range(256))


def _find(
    memory: ProcessMemory, ranges: list[tuple[int, int]], needles: list[bytes]
) -> Iterator[tuple[int, bytes]]:
    """Addresses at which one of ``needles`` lies. Ranges are read in chunks that overlap."""
    if not needles:
        return
    overlap = max(map(len, needles)) - 1
    buffer = bytearray(_CHUNK + overlap)  # one for all: touching new pages takes longer than the search
    for start, size in ranges:
        for at in range(0, size, _CHUNK):
            got = memory.read_into(start + at, buffer, min(_CHUNK + overlap, size - at))
            for needle in needles:
                hit = buffer.find(needle, 0, got)
                while hit >= 0:
                    yield start + at + hit, needle
                    hit = buffer.find(needle, hit + 1, got)


def _owner(
    memory: ProcessMemory, interpreter: Interpreter, address: int, size: int
) -> Iterator[tuple[int, str]]:
    """The str object whose text ends with the ``size`` bytes at ``address``, if it is one."""
    back = min(4 * _LONGEST_PATH, address)
    window = b""
    while back >= 64:
        try:
            window = memory.read(address - back, back)
            break
        except UnreadableError:
            back //= 2
    kind = struct.pack("<Q", interpreter.symbols["PyUnicode_Type"])
    at = window.rfind(kind)
    while at >= 8:
        owner = address - len(window) + at - 8
        if owner % 8 == 0:
            text = interpreter.strings([owner])[0]
            if text is not None and interpreter.text_end(owner) == address + size:
                yield owner, text
                return
        at = window.rfind(kind, 0, at)


def _is_code(memory: ProcessMemory, interpreter: Interpreter, address: int) -> bool:
    """Whether a live code object lies at ``address``."""
    symbols = interpreter.symbols
    try:
        count, kind = struct.unpack("<QQ", memory.read(address, 16))
        name = memory.word(address + interpreter.layout.name)
        # A freed block keeps its type, but its count is overwritten by the allocator's own pointer.
        alive = count & 0xFFFFFFFF > 0 and count >> 32 < _LEAST_POINTER
        return kind == symbols["PyCode_Type"] and alive and memory.word(name + 8) == symbols["PyUnicode_Type"]
    except (UnreadableError, OverflowError):
        return False
