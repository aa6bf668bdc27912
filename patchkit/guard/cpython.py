"""``sys.modules`` of another CPython process, read from outside.

``_PyRuntime`` leads to the interpreters, each interpreter to its ``sys.modules``, each module to its
dict and so to ``__file__``. All objects of one kind are read in one batch. The process runs on
meanwhile: what changed between two looks is read again, and what cannot be a CPython object is never
believed. Each reading proves its own offsets: ``sys.modules["sys"].modules`` must be the very dict that
the interpreter state points to, and ``sys.hexversion`` the version that the layout is for.
"""

from __future__ import annotations

import array
import struct
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

from patchkit.guard import layout as layouts
from patchkit.guard.memory import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from patchkit.guard.memory import Memory

_SLICE = 1024  # modules read at once; what belongs to them stays in the processor's cache
_LOOKS = 6  # at a sys.modules that changes while it is read
_MAX_INTERPRETERS = 256
_MAX_ENTRIES = 1 << 22
_USUAL = 5  # __name__, __doc__, __package__, __loader__ and __spec__ come first
_SHORT = 192  # bytes read at once for a string: header and most paths
_HEADER = 40  # of a dict's keys
_TABLE = 240  # bytes read at once of a dict's keys: header, index and the first entries of most modules
_ADDRESSES = 1 << 63

_HEAD = struct.Struct("<QQQ")  # ob_refcnt, ob_type, the first field
_TWO = struct.Struct("<QQQQ")  # key, value, key, value
_TWO_WIDE = struct.Struct("<8xQQ8xQQ")  # each with its hash before it
# A str's state: two bits say how it is interned, then kind (3 bits), compact, ascii.
_STATE, _COMPACT_ASCII = 0b1111100, 0b1100100

Entry = tuple[int, int]  # addresses of a key and a value
Shape = tuple[int, int, int]  # address or offset of a dict's entries, size of one, number


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
        # Addresses of key strings: all whose text is known, and the few that matter.
        self._named_keys: set[int] = set()
        self._file_keys: set[int] = set()
        self._cached_keys: set[int] = set()

    def snapshot(self, enough: Callable[[set[str]], bool] = lambda _: False) -> Snapshot:
        """Read all interpreters of the process, or until ``enough``.

        That is called with the paths that were found since it was called last.

        Raises ``TornError`` if it makes no sense, and what ``Memory`` raises.
        """
        result = Snapshot(version=layouts.version_text(self.hexversion) if self.hexversion else "")
        states = self._states()
        read = [self._read_state(state, result, enough) for state in states]
        if not any(read):
            # Nothing proves the layout then. It is just starting, or ending, or Python is linked in
            # and not used; or the table is wrong for this build.
            raise TornError("no interpreter that can be read is running in it")
        return result

    def _states(self) -> list[int]:
        state = self.memory.word(self.symbols["_PyRuntime"] + self.layout.head)
        states: list[int] = []
        while state and len(states) < _MAX_INTERPRETERS:
            states.append(state)
            state = self.memory.word(state + self.layout.next)
        return states

    def _read_state(self, state: int, result: Snapshot, enough: Callable[[set[str]], bool]) -> bool:
        """Read one interpreter; False when it has no ``sys.modules`` (yet, or any more)."""
        address = self.memory.word(state + self.layout.modules)
        if not address:
            return False
        entries, whole = self._entries(address)
        others = self._prove(address, entries, result)
        done: set[Entry] = set()
        fresh = entries
        holes: set[Entry] = set()
        for _ in range(_LOOKS):
            result.looks += 1
            unread: list[Entry] = []
            # The newest first: a model or a plugin is imported late.
            for end in range(len(fresh), 0, -_SLICE):
                some = fresh[max(0, end - _SLICE) : end]
                paths: set[str] = set()
                unread += self._read_modules(some, paths)
                result.paths |= paths
                if enough(paths):
                    result.modules += len(done) + len(fresh) - max(0, end - _SLICE)
                    return True
            before, (entries, again) = entries, self._entries(address)
            settled = whole and again
            if settled and not unread and entries == before:
                break  # the usual case: nothing changed meanwhile
            done.update(fresh)
            done.difference_update(unread)
            fresh = [entry for entry in entries if entry not in done]
            if settled and not fresh:
                break
            # An entry seen in two looks and readable in none is a hole; one that came meanwhile is the
            # same as an import a moment after this look.
            holes, whole = set(fresh).intersection(before), again
        else:
            result.complete = result.complete and whole and not holes
        result.modules += len(entries)
        for other in others:
            paths = set()
            self._read_modules(self._entries(other)[0], paths)
            result.paths |= paths
            enough(paths)
        return True

    def _prove(self, modules: int, entries: list[Entry], result: Snapshot) -> list[int]:
        """Check the layout against ``sys`` itself; returns other dicts that serve as ``sys.modules``."""
        system = self._module_named("sys", entries)
        if system is None:
            raise TornError("sys.modules has no module sys")
        values = {
            name: value
            for (key, value), name in self._with_names(self._entries(system)[0])
            if name in {"modules", "hexversion", "prefix", "path"}
        }
        other = values.get("modules", 0)
        number = self._small_int(values.get("hexversion", 0))
        if self.hexversion and number != self.hexversion:
            raise TornError("sys.hexversion is not the version of the interpreter")
        if not self.hexversion:
            if number >> 16 not in {0x0309, 0x030A}:
                raise layouts.UnsupportedInterpreterError(layouts.TOO_OLD)
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

    def _module_named(self, wanted: str, entries: list[Entry]) -> int | None:
        """The dict of module ``wanted``."""
        for some in (entries[:8], entries):
            for (_, value), name in self._with_names(some):
                if name == wanted:
                    _, kind, members = _HEAD.unpack(self.memory.read(value, 24))
                    if kind == self.symbols["PyModule_Type"]:
                        return int(members)
        return None

    def _with_names(self, entries: list[Entry]) -> Iterable[tuple[Entry, str | None]]:
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

    def _entries(self, address: int) -> tuple[list[Entry], bool]:
        """Key and value addresses of the live entries of the dict at ``address``.

        The second value says that the table stayed in place while it was read: then each entry that was
        there all the time is among them. A table that was resized meanwhile is read again, once.
        """
        if self._type_of(address) != self.symbols["PyDict_Type"]:
            raise TornError("not a dict")
        found: list[Entry] = []
        for _ in range(2):
            used, keys, values = self._dict_head(self.memory.read(address, 48))
            if values:
                raise TornError("a split dict")
            try:
                start, size, count = self._keys_shapes(self.memory.read(keys, _HEADER), _HEADER)[0]
                if not 0 <= count <= _MAX_ENTRIES:
                    continue
                found = self._live(self.memory.read(keys + start, size * count), size)
            except UnreadableError:
                continue
            # While CPython copies a table on resize, the new one already counts and says that it is empty.
            copying = 2 * len(found) < used
            if not copying and self._dict_head(self.memory.read(address, 48))[1] == keys:
                return found, True
        return found, False

    def _dict_head(self, raw: bytes) -> tuple[int, int, int]:
        """``ma_used``, ``ma_keys`` and ``ma_values``."""
        (used,) = struct.unpack_from("<Q", raw, 16)
        keys, values = struct.unpack_from("<QQ", raw, self.layout.keys)
        return used, keys, values

    @staticmethod
    def _live(raw: bytes, size: int) -> list[Entry]:
        words = struct.unpack(f"<{len(raw) // 8}Q", raw)
        if size == 16:
            pairs = zip(words[0::2], words[1::2], strict=True)
        else:
            pairs = zip(words[1::3], words[2::3], strict=True)
        return [(key, value) for key, value in pairs if key and value]

    # -- modules -------------------------------------------------------------------------------------

    def _read_modules(self, entries: list[Entry], paths: set[str]) -> list[Entry]:
        """Add to ``paths`` those of the modules in ``entries``; returns those entries that could not be read.

        Each step reads one structure of all modules at once: the module, its dict, the dict's keys with
        the entries where ``__file__`` usually is, the text. With thousands of modules what Python does in
        between takes as long as the reading: hence columns, not tuples.
        """
        if not entries:
            return []
        words = _words(self.memory.read_equal([value + 8 for _, value in entries], 16))
        kinds, firsts = words[0::2], words[1::2]
        unread = [entry for entry, kind in zip(entries, kinds, strict=True) if not kind]
        # Anything may be in sys.modules: None, or an object that is not a module.
        fit = [0x1000 < first < _ADDRESSES for first in firsts]
        members = list(compress(entries, fit))
        dicts = [first + 8 for first in compress(firsts, fit)]
        width = self.layout.keys // 8 + 1  # words from ob_type to ma_values
        words = _words(self.memory.read_equal(dicts, 8 * width))
        kinds, keys, values = words[0::width], words[width - 2 :: width], words[width - 1 :: width]
        dict_type = self.symbols["PyDict_Type"]
        # No dict: what the class of such an object does with attributes is not ours to know.
        fit = [
            kind == dict_type and table > 0 and not value
            for kind, table, value in zip(kinds, keys, values, strict=True)
        ]
        return unread + self._read_tables(list(compress(members, fit)), list(compress(keys, fit)), paths)

    def _read_tables(self, entries: list[Entry], keys: list[int], paths: set[str]) -> list[Entry]:
        """Add the paths found in the dicts with these ``keys`` objects; returns what could not be read."""
        pointers: dict[int, None] = {}
        if not self._file_keys:  # to learn the address of the string "__file__"
            shapes = self._keys_shapes(self.memory.read_equal(keys[:16], _HEADER), _HEADER)
            self._find_paths(_places(keys, shapes), pointers)
        raw = self.memory.read_equal(keys, _TABLE)
        known = self._file_keys
        width, pair = (24, _TWO_WIDE) if self.layout.wide_entries else (16, _TWO)
        skipped = _USUAL * width
        last = _TABLE - skipped - pair.size
        elsewhere: list[int] = []
        for at, (start, size, count) in enumerate(self._keys_shapes(raw, _TABLE)):
            if size == width and 0 <= start <= last and count > _USUAL + 1:
                key, value, next_key, next_value = pair.unpack_from(raw, at * _TABLE + start + skipped)
                if key in known:
                    pointers[value] = None
                    continue
                if next_key in known:
                    pointers[next_value] = None
                    continue
            elsewhere.append(at)
        unread = self._read_large_tables([(entries[at], keys[at]) for at in elsewhere], pointers)
        paths.update(text for text in self.strings(list(pointers)) if text)
        return unread

    def _read_large_tables(self, tables: list[tuple[Entry, int]], pointers: dict[int, None]) -> list[Entry]:
        """The same for dicts whose usual place lies further on, or that have ``__file__`` elsewhere."""
        keys = [address for _, address in tables]
        shapes = self._keys_shapes(self.memory.read_equal(keys, _HEADER), _HEADER)
        rest = self._usual_places(_places(keys, shapes), pointers)
        # What is left has __file__ elsewhere, or none at all: a builtin, or a namespace package.
        self._find_paths(rest, pointers)
        return [entry for (entry, _), shape in zip(tables, shapes, strict=True) if not _is_sane(shape)]

    def _usual_places(self, places: list[Shape], pointers: dict[int, None]) -> list[Shape]:
        """Look where importlib puts ``__file__``: the sixth entry, in a package the seventh.

        Returns the dicts that have it elsewhere, if at all.
        """
        width, pair = (24, _TWO_WIDE) if self.layout.wide_entries else (16, _TWO)
        fit = [place for place in places if place[1] == width and place[2] > _USUAL + 1]
        rest = [place for place in places if place[1] != width or place[2] <= _USUAL + 1]
        raw = self.memory.read_equal([address + width * _USUAL for address, _, _ in fit], pair.size)
        known = self._file_keys
        for place, (key, value, next_key, next_value) in zip(fit, pair.iter_unpack(raw), strict=True):
            if key in known:
                pointers[value] = None
            elif next_key in known:
                pointers[next_value] = None
            else:
                rest.append(place)
        return rest

    def _find_paths(self, places: list[Shape], pointers: dict[int, None]) -> None:
        """Look for ``__file__``, or else ``__cached__``, among all entries of each dict."""
        raws = self.memory.read_ranges(
            [address for address, _, _ in places], [size * count for _, size, count in places]
        )
        found = [dict(self._live(raw, place[1])) for raw, place in zip(raws, places, strict=True)]
        unknown = list({key for entries in found for key in entries} - self._named_keys)
        self._named_keys.update(unknown)
        for key, text in zip(unknown, self.strings(unknown), strict=True):
            if text == "__file__":
                self._file_keys.add(key)
            elif text == "__cached__":
                self._cached_keys.add(key)
        for entries in found:
            for wanted in (self._file_keys, self._cached_keys):
                pointers.update((entries[key], None) for key in wanted if key in entries)

    def _keys_shapes(self, headers: bytes, stride: int) -> list[Shape]:
        """From keys objects' first bytes (``stride`` of each): offset, size and number of their entries.

        The number is negative where nothing could be read (a living object has references) or what was read
        is no table: it was freed meanwhile.
        """
        if self.layout.wide_entries:
            wide = struct.Struct(f"<Qq16xq{stride - 40}x")  # dk_refcnt, dk_size, dk_nentries
            return [
                (
                    40 + slots * (1 if slots <= 0xFF else 2 if slots <= 0xFFFF else 4),
                    24,
                    count if references and 0 < slots <= _MAX_ENTRIES else -1,
                )
                for references, slots, count in wide.iter_unpack(headers)
            ]
        # dk_refcnt, dk_log2_index_bytes, dk_kind, dk_nentries
        usual = struct.Struct(f"<Q1xBB13xq{stride - 32}x")
        return [
            (32 + (1 << (index_bytes & 31)), 16 if unicode else 24, count if references else -1)
            for references, index_bytes, unicode, count in usual.iter_unpack(headers)
        ]

    # -- strings -------------------------------------------------------------------------------------

    def strings(self, addresses: Sequence[int]) -> list[str | None]:
        """The texts of the str objects at ``addresses``; None where there is none."""
        raw = self.memory.read_equal(addresses, _SHORT)
        room = _SHORT - self.layout.ascii
        usual = struct.Struct(f"<16xQ8xI{self.layout.ascii - 36}x{room}s")
        texts: list[str | None] = []
        unusual: list[int] = []
        for length, state, body in usual.iter_unpack(raw):
            if state & _STATE == _COMPACT_ASCII and length <= room:
                texts.append(body[:length].decode("latin-1"))
            else:
                unusual.append(len(texts))
                texts.append(None)
        for index in unusual:
            try:
                texts[index] = self._string(addresses[index])
            except UnreadableError:
                continue
        return texts

    def _string(self, address: int) -> str | None:
        """One text of any length and kind. Raises ``UnreadableError``."""
        place = self._text_place(self.memory.read(address, self.layout.ascii))
        if place is None:
            return None
        start, size, encoding = place
        try:
            return self.memory.read(address + start, size).decode(encoding, "surrogatepass")
        except UnicodeDecodeError:
            return None  # not a string after all: a dict's keys may be anything

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


def _words(raw: bytes) -> array.array[int]:
    return array.array("Q", raw)


def _is_sane(shape: Shape) -> bool:
    return 0 <= shape[2] <= _MAX_ENTRIES


def _places(keys: Sequence[int], shapes: Sequence[Shape]) -> list[Shape]:
    """Where the entries of the ``keys`` objects are, as far as these could be read."""
    return [
        (address + shape[0], shape[1], shape[2])
        for address, shape in zip(keys, shapes, strict=False)
        if _is_sane(shape)
    ]
