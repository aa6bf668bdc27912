"""Find CPython in a process: which mapped object exports ``_PyRuntime``, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkit.guard import elf, layout, procfs
from patchkit.guard.memory import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from patchkit.guard.memory import Memory


class Finder:
    """Remembers, for each mapped file, what it exports: processes share their programs."""

    def __init__(self) -> None:
        self._exports: dict[tuple[bytes, str], dict[str, int]] = {}

    def find(self, memory: Memory, maps: bytes) -> dict[str, int] | None:
        """Addresses of ``layout.SYMBOLS`` in the process, or None if it has no CPython.

        The program itself is always looked at (an interpreter may be linked into anything), its
        libraries only if something in the maps has to do with Python. Raises PermissionError.
        """
        for base, key, path in _in_order(maps):
            known = self._exports.get((key, path))
            if known is None:
                try:
                    found = elf.symbols(memory, base, layout.SYMBOLS)
                except (elf.NotElfError, UnreadableError, OverflowError):
                    found = {}
                known = {name: address - base for name, address in found.items()}
                self._exports[(key, path)] = known
            if "_PyRuntime" in known:
                return {name: base + offset for name, offset in known.items()}
        return None


def _in_order(maps: bytes) -> Iterator[tuple[int, bytes, str]]:
    """The mapped files, those first that are likely to be CPython."""
    objects = procfs.mapped_objects(maps)
    program = next(objects, None)
    if program is None:
        return
    yield program
    if b"python" not in maps:
        return
    rest = {path: (base, key, path) for base, key, path in objects}
    likely = [path for path in rest if "libpython" in path]
    for path in likely:
        yield rest[path]
    for path, found in rest.items():
        if path not in likely and ".so" in path:
            yield found
