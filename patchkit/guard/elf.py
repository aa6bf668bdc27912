"""Exported symbols of an ELF object, read from the memory of the process that has it mapped.

Memory and not the file: the file may have been replaced or deleted since, or lie in another mount
namespace. Only 64-bit little-endian objects are read; others are refused.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from patchkit.guard.memory import Memory

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_SYMBOL_SIZE = 24
_PAGE = 4096


class NotElfError(ValueError):
    """What is mapped there is not an ELF object that we read."""


def symbols(memory: Memory, base: int, names: Iterable[str]) -> dict[str, int]:
    """Addresses of those of ``names`` that the object mapped at ``base`` exports."""
    header = memory.read(base, 64)
    if header[:6] != b"\x7fELF\x02\x01":
        raise NotElfError(f"no 64-bit little-endian ELF object at {base:#x}")
    phoff, _, _, _, phentsize, phnum = struct.unpack_from("<QQIHHH", header, 32)
    if phentsize != 56:
        raise NotElfError(f"program headers of {phentsize} bytes")
    bias: int | None = None
    dynamic = None
    for kind, _, _, vaddr, _, _, memsz, _ in struct.iter_unpack(
        "<IIQQQQQQ", memory.read(base + phoff, 56 * phnum)
    ):
        if kind == _PT_LOAD and bias is None:
            bias = base - (vaddr & -_PAGE)
        elif kind == _PT_DYNAMIC:
            dynamic = (vaddr, memsz)
    if dynamic is None or bias is None:
        return {}  # a fully static program exports nothing
    tags: dict[int, int] = {}
    for tag, value in struct.iter_unpack("<qQ", memory.read(bias + dynamic[0], dynamic[1] & -16)):
        if tag == 0:
            break
        # glibc relocates these in place, musl and the kernel's vDSO do not.
        tags.setdefault(tag, value if value >= base else value + bias)
    if _DT_STRTAB not in tags or _DT_SYMTAB not in tags:
        return {}
    find = _gnu_lookup if _DT_GNU_HASH in tags else _sysv_lookup if _DT_HASH in tags else None
    found: dict[str, int] = {}
    if find is not None:
        for name in names:
            value = find(memory, tags, name.encode("ascii"))
            if value:
                found[name] = bias + value
    return found


def _value_if_named(memory: Memory, tags: dict[int, int], index: int, name: bytes) -> int:
    entry = memory.read(tags[_DT_SYMTAB] + index * _SYMBOL_SIZE, _SYMBOL_SIZE)
    name_offset, _, _, section, value, _ = struct.unpack("<IBBHQQ", entry)
    spelled = memory.read(tags[_DT_STRTAB] + name_offset, len(name) + 1)
    return int(value) if section and spelled == name + b"\0" else 0


def _gnu_lookup(memory: Memory, tags: dict[int, int], name: bytes) -> int:
    """Look ``name`` up in a DT_GNU_HASH table; 0 when it is not there."""
    code = 5381
    for byte in name:
        code = (code * 33 + byte) & 0xFFFFFFFF
    table = tags[_DT_GNU_HASH]
    nbuckets, first, bloom_words, _ = struct.unpack("<IIII", memory.read(table, 16))
    if not nbuckets:
        return 0
    buckets = table + 16 + 8 * bloom_words
    (index,) = struct.unpack("<I", memory.read(buckets + 4 * (code % nbuckets), 4))
    if index < first:
        return 0
    chains = buckets + 4 * nbuckets
    for _ in range(4096):  # a chain is a handful of entries; the bound is against garbage
        (entry,) = struct.unpack("<I", memory.read(chains + 4 * (index - first), 4))
        if entry | 1 == code | 1:
            value = _value_if_named(memory, tags, index, name)
            if value:
                return value
        if entry & 1:
            return 0
        index += 1
    return 0


def _sysv_lookup(memory: Memory, tags: dict[int, int], name: bytes) -> int:
    """Look ``name`` up in a DT_HASH table; 0 when it is not there."""
    code = 0
    for byte in name:
        code = (code << 4) + byte
        high = code & 0xF0000000
        code = (code ^ (high >> 24)) & ~high & 0xFFFFFFFF
    table = tags[_DT_HASH]
    nbuckets, nchains = struct.unpack("<II", memory.read(table, 8))
    if not nbuckets:
        return 0
    (index,) = struct.unpack("<I", memory.read(table + 8 + 4 * (code % nbuckets), 4))
    for _ in range(4096):
        if not 0 < index < nchains:
            return 0
        value = _value_if_named(memory, tags, index, name)
        if value:
            return value
        (index,) = struct.unpack("<I", memory.read(table + 8 + 4 * nbuckets + 4 * index, 4))
    return 0
