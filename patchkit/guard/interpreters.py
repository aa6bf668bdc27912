"""Find CPython in a process: which mapped object exports ``_PyRuntime``, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkit.guard import elf, layout, procfs
from patchkit.guard.memory import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from patchkit.guard.memory import Memory
    from patchkit.guard.procfs import MappedAs

Mapped = tuple[int, "MappedAs", str]


class Finder:
    """Remembers, for each file and way to map it, what it exports: processes share their programs.

    A file that is mapped as data exports nothing there, and everything where it is loaded. Nothing is
    remembered of a process that changed under the look-up, nor of one that could not be read.
    """

    def __init__(self) -> None:
        self._exports: dict[tuple[MappedAs, str], dict[str, int]] = {}

    def find(
        self, memory: Memory, maps: bytes, current: Callable[[], bytes] | None = None
    ) -> dict[str, int] | None:
        """Addresses of ``layout.SYMBOLS`` in the process, or None if it has no CPython.

        Programs are always looked at (an interpreter may be linked into anything), libraries only if
        something in the maps has to do with Python. ``current`` reads the maps anew. Raises PermissionError.
        """
        fresh: dict[tuple[MappedAs, str], dict[str, int]] = {}
        try:
            for base, mapped, path in _in_order(maps):
                known = self._exports.get((mapped, path))
                if known is None:
                    try:
                        found = elf.symbols(memory, base, layout.SYMBOLS)
                    except (elf.NotElfError, UnreadableError, OverflowError):
                        continue
                    known = fresh[mapped, path] = {name: address - base for name, address in found.items()}
                if "_PyRuntime" in known:
                    return {name: base + offset for name, offset in known.items()}
            return None
        finally:
            if fresh and current is not None and current() == maps:
                self._exports.update(fresh)


def _in_order(maps: bytes) -> Iterator[Mapped]:
    """The mapped files, those first that are likely to be CPython."""
    first = next(procfs.mapped_objects(maps), None)
    if first is None:
        return
    yield first
    # A program is not always the first: with an unlimited stack, or started through ld.so, it lies after
    # its libraries. A file that is only data is not read: it may lie on a disk that does not answer.
    loaded = procfs.executable_programs(maps)
    programs: list[Mapped] = []
    if loaded - {first[1][0]}:
        programs = [one for one in procfs.mapped_objects(maps) if one[1][0] in loaded and one != first]
    yield from programs
    if b"python" not in maps:
        return
    rest = (one for one in procfs.mapped_objects(maps) if one != first and one not in programs)
    libraries = [one for one in rest if ".so" in one[2]]
    yield from sorted(libraries, key=lambda one: "libpython" not in one[2])
