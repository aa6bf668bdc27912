"""Where CPython keeps what the guard reads, for each version that was verified.

3.9 to 3.12: tables, taken from each version's own headers. 3.13 and 3.14: ``_PyRuntime`` begins with
``_Py_DebugOffsets``, which says it itself. All for LP64 (x86-64 and aarch64 lay these structures out
alike). An unknown minor version, or a free-threaded build, is refused: a
guess could call a process clean that is not.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkit.guard.memory import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from patchkit.guard.memory import Memory

SYMBOLS = (
    "_PyRuntime",
    "Py_Version",  # since 3.11
    "Py_GenericAliasType",  # since 3.9
    "PyDict_Type",
    "PyModule_Type",
    "PyUnicode_Type",
    "PyCode_Type",
)

COOKIE = b"xdebugpy"
TOO_OLD = "a CPython older than 3.9, which is not supported"


class UnsupportedInterpreterError(Exception):
    """A CPython that this module has no verified layout for; the text says which and why."""


@dataclass(frozen=True)
class Layout:
    """Byte offsets into CPython's structures.

    ``head`` is in ``_PyRuntimeState``; ``next`` and ``modules`` in ``PyInterpreterState``; ``filename``
    and ``name`` in ``PyCodeObject``; ``keys`` in ``PyDictObject``. ``ascii`` and ``compact`` are the
    sizes of the two string headers, after which the characters follow. ``wide_entries`` says that a
    dict's keys have the layout of 3.9 and 3.10 (no kind, each entry with its hash).
    """

    head: int
    next: int
    modules: int
    filename: int
    name: int
    ascii: int
    compact: int
    wide_entries: bool = False
    keys: int = 32


_OLD = Layout(head=32, next=0, modules=856, filename=104, name=112, ascii=48, compact=72, wide_entries=True)
_TABLES = {
    (3, 9): _OLD,
    (3, 10): _OLD,
    (3, 11): Layout(head=40, next=0, modules=888, filename=112, name=120, ascii=48, compact=72),
    (3, 12): Layout(head=40, next=0, modules=944, filename=112, name=120, ascii=40, compact=56),
}


@dataclass(frozen=True)
class _Words:
    """Indices of 8-byte words in ``_Py_DebugOffsets``."""

    head: int
    next: int
    modules: int
    filename: int
    name: int
    ob_type: int
    ma_keys: int
    state: int
    length: int
    ascii: int


_SELF_DESCRIBED = {
    (3, 13): _Words(5, 8, 11, 35, 36, 45, 57, 68, 69, 70),
    (3, 14): _Words(5, 8, 12, 40, 41, 51, 67, 78, 79, 80),
}


def version_text(version: int) -> str:
    """``3.11.2`` for ``0x030b02f0``."""
    return f"{version >> 24}.{version >> 16 & 0xFF}.{version >> 8 & 0xFF}"


def find(memory: Memory, symbols: Mapping[str, int]) -> tuple[Layout, int]:
    """The layout and ``sys.hexversion`` of an interpreter whose exported ``symbols`` are known.

    The version is 0 for 3.9 and 3.10, which do not export it: the caller must check
    ``sys.hexversion`` (it must anyway: that is what proves the table right for this build).
    """
    if not symbols.keys() & {"Py_Version", "Py_GenericAliasType"}:
        raise UnsupportedInterpreterError(TOO_OLD)
    runtime = symbols["_PyRuntime"]
    try:
        start = memory.read(runtime, 8 * 96)
    except UnreadableError:
        raise UnsupportedInterpreterError("CPython whose runtime state cannot be read") from None
    if "Py_Version" not in symbols:
        return _OLD, 0
    (version,) = struct.unpack("<I", memory.read(symbols["Py_Version"], 4))
    minor = (version >> 24, version >> 16 & 0xFF)
    if minor in _TABLES:
        return _TABLES[minor], version
    if minor not in _SELF_DESCRIBED:
        raise UnsupportedInterpreterError(f"CPython {version_text(version)}, whose layout is not verified")
    words = struct.unpack("<96Q", start)
    if start[:8] != COOKIE or words[1] != version:
        raise UnsupportedInterpreterError(f"CPython {version_text(version)} without its table of offsets")
    if words[2]:
        raise UnsupportedInterpreterError(f"free-threaded CPython {version_text(version)}")
    at = _SELF_DESCRIBED[minor]
    # These the readers have built in; the table must agree with them.
    if (words[at.ob_type], words[at.length], words[at.state]) != (8, 16, 32):
        raise UnsupportedInterpreterError(f"CPython {version_text(version)} with an unusual object layout")
    ascii_size = words[at.ascii]
    return (
        Layout(
            head=words[at.head],
            next=words[at.next],
            modules=words[at.modules],
            filename=words[at.filename],
            name=words[at.name],
            ascii=ascii_size,
            compact=ascii_size + 16,  # utf8_length and utf8
            keys=words[at.ma_keys],
        ),
        version,
    )
