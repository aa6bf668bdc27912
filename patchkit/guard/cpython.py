"""``sys.modules`` of another CPython process, read from outside.

``_PyRuntime`` leads to the interpreters, each interpreter to its ``sys.modules``, each module to its
dict and so to ``__file__``. All objects of one kind are read in one batch. The process runs on
meanwhile: what changed between two looks is read again, and what cannot be a CPython object is never
believed. Each reading proves its own offsets: ``sys.modules["sys"].modules`` must be the very dict that
the interpreter state points to, and ``sys.hexversion`` the version that the layout is for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchkit.guard import layout as layouts
from patchkit.guard.memory import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from patchkit.guard.memory import Memory

_LOOKS = 8  # at a sys.modules that changes while it is read
_MAX_INTERPRETERS = 256
_MAX_ENTRIES = 1 << 22
_LEADING = 10  # __file__ and __cached__ are set before a module's own names
_SHORT = 192  # bytes read at once for a string: header and most paths

_HEAD = struct.Struct("<QQQ")  # ob_refcnt, ob_type, the first field
_MODULE_KEYS = ("__file__", "__cached__")


class TornError(Exception):
    """What was read is not what CPython keeps there: changed meanwhile, or another layout."""


@dataclass
class Snapshot:
    """What one process has imported.

    ``paths`` are the values of ``__file__`` and ``__cached__`` as they stand in the process, relative
    ones too. ``complete`` is False when some entry could not be read in any look.
    """

    version: str = ""
    paths: set[str] = field(default_factory=set)
    search_path: tuple[str, ...] = ()
    prefix: str = ""
    modules: int = 0
    looks: int = 0
    complete: bool = True


class Interpreter:
    """The CPython of one process; ``symbols`` are the addresses of ``layout.SYMBOLS`` in it."""

    def __init__(self, memory: Memory, symbols: Mapping[str, int]) -> None:
        self.memory = memory
        self.symbols = symbols
        self.layout, self.hexversion = layouts.find(memory, symbols)
        self._named_keys: dict[int, str] = {}  # address of a key string: its text

    def snapshot(self) -> Snapshot:
        """Read all interpreters of the process.

        Raises ``TornError`` if it makes no sense, and what ``Memory`` raises.
        """
        result = Snapshot(version=layouts.version_text(self.hexversion) if self.hexversion else "")
        states = self._states()
        read = [self._read_state(state, result) for state in states]
        if not any(read):
            # Nothing proves the layout then. It is just starting, or ending, or Python is linked in
            # and not used; or the table is wrong for this build.
            raise TornError("no interpreter is running in it")
        return result

    def _states(self) -> list[int]:
        state = self.memory.word(self.symbols["_PyRuntime"] + self.layout.head)
        states: list[int] = []
        while state and len(states) < _MAX_INTERPRETERS:
            states.append(state)
            state = self.memory.word(state + self.layout.next)
        return states

    def _read_state(self, state: int, result: Snapshot) -> bool:
        """Read one interpreter; False when it has no ``sys.modules`` (yet, or any more)."""
        address = self.memory.word(state + self.layout.modules)
        if not address:
            return False
        entries = self._entries(address)
        proven = self._prove(address, entries, result)
        done: set[tuple[int, int]] = set()
        before: set[tuple[int, int]] = set(entries)
        for _ in range(_LOOKS):
            result.looks += 1
            done |= self._read_modules([entry for entry in entries if entry not in done], result)
            entries = self._entries(address)
            now = set(entries)
            # An entry seen in two looks and never readable is a hole; one that came meanwhile is the
            # same as an import a moment after this look.
            missing = now - done
            if not missing:
                break
            before, stayed = now, missing & before
        else:
            result.complete = result.complete and not stayed
        result.modules += len(entries)
        for other in proven:
            self._read_modules(self._entries(other), result)
        return True

    def _prove(self, modules: int, entries: list[tuple[int, int]], result: Snapshot) -> list[int]:
        """Check the layout against ``sys`` itself; returns other dicts that serve as ``sys.modules``."""
        system = self._module_named("sys", entries)
        if system is None:
            raise TornError("sys.modules has no module sys")
        values = {
            name: value
            for (key, value), name in self._with_names(self._entries(system))
            if name in {"modules", "hexversion", "prefix", "path"}
        }
        other = values.get("modules", 0)
        number = self._small_int(values.get("hexversion", 0))
        if self.hexversion and number != self.hexversion:
            raise TornError("sys.hexversion is not the version of the interpreter")
        if not self.hexversion:
            if number >> 16 not in {0x0309, 0x030A}:
                raise layouts.UnsupportedInterpreterError("CPython older than 3.9")
            self.hexversion = number
        result.version = layouts.version_text(number)
        if "prefix" in values:
            result.prefix = self.strings([values["prefix"]])[0] or result.prefix
        if "path" in values:
            result.search_path += self._string_list(values["path"])
        if other == modules or not other:
            return []
        # A program may bind sys.modules to another dict: imports then go through both.
        return [other] if self._type_of(other) == self.symbols["PyDict_Type"] else []

    def _module_named(self, wanted: str, entries: list[tuple[int, int]]) -> int | None:
        """The dict of module ``wanted``."""
        for some in (entries[:8], entries):
            for (_, value), name in self._with_names(some):
                if name == wanted:
                    _, kind, members = _HEAD.unpack(self.memory.read(value, 24))
                    if kind == self.symbols["PyModule_Type"]:
                        return int(members)
        return None

    def _with_names(self, entries: list[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], str | None]]:
        return zip(entries, self.strings([key for key, _ in entries]), strict=True)

    def _type_of(self, address: int) -> int:
        return self.memory.word(address + 8)

    def _small_int(self, address: int) -> int:
        """A non-negative int of one 30-bit digit (``sys.hexversion`` is one)."""
        if not address:
            return 0
        (digit,) = struct.unpack("<I", self.memory.read(address + 24, 4))
        return int(digit)

    def _string_list(self, address: int) -> tuple[str, ...]:
        _, _, size, items = struct.unpack("<QQQQ", self.memory.read(address, 32))
        if not items or size > 4096:
            return ()
        pointers = struct.unpack(f"<{size}Q", self.memory.read(items, 8 * size))
        return tuple(text for text in self.strings(pointers) if text is not None)

    # -- dicts ---------------------------------------------------------------------------------------

    def _keys_shape(self, header: bytes) -> tuple[int, int, int]:
        """From a keys object's first 40 bytes: offset of its entries, their size, their number."""
        if self.layout.wide_entries:
            slots, count = struct.unpack_from("<q16xq", header, 8)
            width = 1 if slots <= 0xFF else 2 if slots <= 0xFFFF else 4
            return 40 + slots * width, 24, count
        (count,) = struct.unpack_from("<q", header, 24)
        return 32 + (1 << (header[9] & 63)), 16 if header[10] else 24, count

    def _entries(self, address: int) -> list[tuple[int, int]]:
        """Key and value addresses of the live entries of the dict at ``address``.

        Taken in two reads; a dict that was resized between them is read again.
        """
        if self._type_of(address) != self.symbols["PyDict_Type"]:
            raise TornError("not a dict")
        for _ in range(_LOOKS):
            used, keys, values = self._dict_head(self.memory.read(address, 48))
            if values:
                raise TornError("a split dict")
            try:
                start, size, count = self._keys_shape(self.memory.read(keys, 40))
                if not 0 <= count <= _MAX_ENTRIES:
                    continue
                raw = self.memory.read(keys + start, size * count)
            except UnreadableError:
                continue
            found = self._live(raw, size)
            if self._dict_head(self.memory.read(address, 48))[:2] == (used, keys) and len(found) == used:
                return found
        # It never held still: what was seen last is good for a look, and the next look decides.
        return found if keys else []

    def _dict_head(self, raw: bytes) -> tuple[int, int, int]:
        """``ma_used``, ``ma_keys`` and ``ma_values``."""
        keys = self.layout.keys
        return (
            struct.unpack_from("<Q", raw, 16)[0],
            struct.unpack_from("<Q", raw, keys)[0],
            struct.unpack_from("<Q", raw, keys + 8)[0],
        )

    @staticmethod
    def _live(raw: bytes, size: int) -> list[tuple[int, int]]:
        words = struct.unpack(f"<{len(raw) // 8}Q", raw)
        if size == 16:
            pairs = zip(words[0::2], words[1::2], strict=True)
        else:
            pairs = zip(words[1::3], words[2::3], strict=True)
        return [(key, value) for key, value in pairs if key and value]

    # -- modules -------------------------------------------------------------------------------------

    def _read_modules(self, entries: Sequence[tuple[int, int]], result: Snapshot) -> set[tuple[int, int]]:
        """Add the paths of the modules in ``entries``; returns those entries that could be read."""
        if not entries:
            return set()
        dict_type = self.symbols["PyDict_Type"]
        heads = self.memory.read_equal([value for _, value in entries], 24)
        members: list[tuple[tuple[int, int], int]] = []
        done: set[tuple[int, int]] = set()
        for entry, (_, kind, first) in zip(entries, _HEAD.iter_unpack(heads), strict=True):
            if kind and 0x1000 < first < 1 << 63:
                members.append((entry, first))
            elif kind:
                done.add(entry)  # None, or another object that is not a module
        raw = self.memory.read_equal([address for _, address in members], 48)
        tables: list[tuple[tuple[int, int], int]] = []
        for index, (entry, _) in enumerate(members):
            at = 48 * index
            if struct.unpack_from("<Q", raw, at + 8)[0] != dict_type:
                done.add(entry)  # no module: what its class does is not ours to know
                continue
            _, keys, values = self._dict_head(raw[at : at + 48])
            if values or not keys:
                done.add(entry)
            else:
                tables.append((entry, keys))
        done |= self._read_tables(tables, result)
        return done

    def _read_tables(
        self, tables: list[tuple[tuple[int, int], int]], result: Snapshot
    ) -> set[tuple[int, int]]:
        raw = self.memory.read_equal([keys for _, keys in tables], 40)
        places: list[tuple[tuple[int, int], int, int, int]] = []
        for index, (entry, keys) in enumerate(tables):
            start, size, count = self._keys_shape(raw[40 * index : 40 * index + 40])
            if 0 <= count <= _MAX_ENTRIES:
                places.append((entry, keys + start, size, count))
        pointers: dict[int, None] = {}
        rest = self._find_paths(places, _LEADING, pointers)
        rest = self._find_paths(rest, _MAX_ENTRIES, pointers)
        # What is left has no __file__: a builtin, or a namespace package.
        texts = self.strings(list(pointers))
        result.paths.update(text for text in texts if text)
        return {entry for entry, _, _, _ in places}

    def _find_paths(
        self,
        places: list[tuple[tuple[int, int], int, int, int]],
        limit: int,
        pointers: dict[int, None],
    ) -> list[tuple[tuple[int, int], int, int, int]]:
        """Look for ``__file__`` in the first ``limit`` entries of each dict; returns those without."""
        raws = self.memory.read_ranges(
            [address for _, address, _, _ in places],
            [size * min(count, limit) for _, _, size, count in places],
        )
        found = [dict(self._live(raw, place[2])) for raw, place in zip(raws, places, strict=True)]
        unknown = {key for entries in found for key in entries}.difference(self._named_keys)
        ordered = list(unknown)
        for key, text in zip(ordered, self._short_names(ordered), strict=True):
            self._named_keys[key] = text
        wanted = [key for key, text in self._named_keys.items() if text in _MODULE_KEYS]
        files = {key for key in wanted if self._named_keys[key] == "__file__"}
        without = []
        for place, entries in zip(places, found, strict=True):
            for key in wanted:
                if key in entries:
                    pointers[entries[key]] = None
            if files.isdisjoint(entries) and place[3] > limit:
                without.append(place)
        return without

    # -- strings -------------------------------------------------------------------------------------

    def _short_names(self, addresses: list[int]) -> list[str]:
        """The text of ASCII strings that may be one of the wanted keys; others come back empty."""
        raw = self.memory.read_equal(addresses, self.layout.ascii + 12)
        step = self.layout.ascii + 12
        names = []
        for at in range(0, len(raw), step):
            (length,) = struct.unpack_from("<Q", raw, at + 16)
            start = at + self.layout.ascii
            names.append(raw[start : start + length].decode("latin-1") if length in {8, 10} else "")
        return names

    def strings(self, addresses: Sequence[int]) -> list[str | None]:
        """The texts of the str objects at ``addresses``; None where there is none."""
        raw = self.memory.read_equal(addresses, _SHORT)
        texts: list[str | None] = []
        again: list[tuple[int, int, int, str]] = []  # position, address of the text, bytes, encoding
        for index, address in enumerate(addresses):
            block = raw[_SHORT * index : _SHORT * (index + 1)]
            if block[8:16] == b"\0" * 8:
                # At the very end of a mapping a long read fails where the object itself is readable.
                try:
                    block = self.memory.read(address, self.layout.ascii)
                except UnreadableError:
                    texts.append(None)
                    continue
            place = self._text_place(block)
            if place is None:
                texts.append(None)
                continue
            start, size, encoding = place
            if start + size <= len(block):
                texts.append(block[start : start + size].decode(encoding, "surrogatepass"))
            else:
                again.append((index, address + start, size, encoding))
                texts.append(None)
        bodies = self.memory.read_ranges([item[1] for item in again], [item[2] for item in again])
        for (index, _, _, encoding), body in zip(again, bodies, strict=True):
            texts[index] = body.decode(encoding, "replace")
        return texts

    def text_end(self, address: int) -> int:
        """The address behind the last character of the str object at ``address``."""
        place = self._text_place(self.memory.read(address, self.layout.ascii))
        return address + place[0] + place[1] if place else 0

    def _text_place(self, header: bytes) -> tuple[int, int, str] | None:
        """Where the characters of a compact string are: offset, size in bytes, encoding."""
        (length,) = struct.unpack_from("<Q", header, 16)
        (state,) = struct.unpack_from("<I", header, 32)
        kind, compact, plain = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        if not compact or kind not in {1, 2, 4} or length > 1 << 16:
            return None
        start = self.layout.ascii if plain else self.layout.compact
        return start, length * kind, {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind]
