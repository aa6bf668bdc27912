"""Another process's memory, read in batches and without stopping it.

``process_vm_readv`` copies up to 1,024 remote ranges a call. Nothing is ever written to, stopped in
or injected into the other process.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import struct
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Protocol

from patchkit.guard import stalls

if TYPE_CHECKING:
    from collections.abc import Sequence

_IOV_MAX = 1024  # UIO_MAXIOV: more ranges in one call are EINVAL
_BATCH_BYTES = 1 << 24  # a torn size field must not make us allocate gigabytes
_U64 = struct.Struct("<Q")


class UnreadableError(OSError):
    """An address range is not mapped in the other process."""


class Memory(Protocol):
    """What the readers of foreign memory need; addresses and sizes are in bytes."""

    def read(self, address: int, size: int) -> bytes: ...
    def read_equal(self, addresses: Sequence[int], size: int) -> bytes: ...
    def read_ranges(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[bytes]: ...
    def word(self, address: int) -> int: ...


class ProcessMemory:
    """The memory of process ``pid``.

    Raises ``ProcessLookupError`` when the process is gone, ``PermissionError`` when the kernel does not
    let us read it, and ``UnreadableError`` for an unmapped range.
    """

    _libc: ClassVar[ctypes.CDLL | None] = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        if ProcessMemory._libc is None:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.process_vm_readv.argtypes = (
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_ulong,
                ctypes.c_void_p,
                ctypes.c_ulong,
                ctypes.c_ulong,
            )
            libc.process_vm_readv.restype = ctypes.c_ssize_t
            ProcessMemory._libc = libc
        self._readv = ProcessMemory._libc.process_vm_readv

    def _call(self, target: int, size: int, ranges: int, count: int) -> int:
        """Copy ``count`` iovecs at local address ``ranges`` to ``target``; returns the bytes copied."""
        local = array.array("Q", (target, size))
        got: int = self._readv(self.pid, local.buffer_info()[0], 1, ranges, count, 0)
        stalls.beat()
        if got >= 0:
            return got
        code = ctypes.get_errno()
        if code == errno.EFAULT:
            return 0
        raise OSError(code, os.strerror(code))  # becomes PermissionError or ProcessLookupError

    def read(self, address: int, size: int) -> bytes:
        """Exactly ``size`` bytes at ``address``."""
        if not 0 <= size <= _BATCH_BYTES or not 0 < address < 1 << 63:
            raise UnreadableError(errno.EFAULT, f"no {size} bytes at {address:#x}")
        buffer = bytearray(size)
        into = (ctypes.c_char * size).from_buffer(buffer)
        ranges = array.array("Q", (address, size))
        if self._call(ctypes.addressof(into), size, ranges.buffer_info()[0], 1) != size:
            raise UnreadableError(errno.EFAULT, f"no {size} bytes at {address:#x}")
        return bytes(buffer)

    def read_into(self, address: int, buffer: bytearray, size: int) -> int:
        """Copy ``size`` bytes at ``address`` into ``buffer``; returns how many of them could be read."""
        into = (ctypes.c_char * size).from_buffer(buffer)
        ranges = array.array("Q", (address, size))
        return self._call(ctypes.addressof(into), size, ranges.buffer_info()[0], 1)

    def word(self, address: int) -> int:
        """The pointer-sized number at ``address``."""
        value: int = _U64.unpack(self.read(address, 8))[0]
        return value

    def read_equal(self, addresses: Sequence[int], size: int) -> bytes:
        """``size`` bytes at each of ``addresses``, joined; zeros where nothing could be read."""
        return bytes(self._gather(addresses, [size] * len(addresses)))

    def read_ranges(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """The bytes of each range; zeros where nothing could be read."""
        joined = bytes(self._gather(addresses, sizes))
        ends = list(accumulate(sizes))
        return [joined[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def _gather(self, addresses: Sequence[int], sizes: Sequence[int]) -> bytearray:
        total = sum(sizes)
        buffer = bytearray(total)
        if not total:
            return buffer
        into = ctypes.addressof((ctypes.c_char * total).from_buffer(buffer))
        flat = array.array("Q", bytes(16 * len(addresses)))
        flat[0::2] = array.array("Q", addresses)
        flat[1::2] = array.array("Q", sizes)
        ranges = flat.buffer_info()[0]
        index, offset = 0, 0
        while index < len(addresses):
            count = min(_IOV_MAX, len(addresses) - index)
            size = sum(sizes[index : index + count])
            got = self._call(into + offset, size, ranges + 16 * index, count)
            if got == size:
                index += count
                offset += size
                continue
            # A transfer ends at the first range that is not mapped: leave zeros there and go on.
            done = 0
            while done + sizes[index] <= got:
                done += sizes[index]
                index += 1
            start = offset + done
            torn = got - done
            buffer[start : start + torn] = bytes(torn)
            offset = start + sizes[index]
            index += 1
        return buffer
