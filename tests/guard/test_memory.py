from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import pytest

from patchkit.guard.memory import ProcessMemory, UnreadableError
from tests.guard.processes import needs_root

PAGE = mmap.PAGESIZE


class Mapped:
    """Two pages of this process, the second of which may not be read."""

    def __init__(self) -> None:
        self.pages = mmap.mmap(-1, 2 * PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.pages[:PAGE] = bytes(range(256)) * (PAGE // 256)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(self.address + PAGE), PAGE, 0) == 0


@pytest.fixture(scope="module")
def mapped() -> Mapped:
    return Mapped()


@pytest.fixture
def memory() -> ProcessMemory:
    return ProcessMemory(os.getpid())


def test_reads_exactly_what_is_there(memory: ProcessMemory, mapped: Mapped):
    assert memory.read(mapped.address + 3, 5) == bytes([3, 4, 5, 6, 7])
    assert memory.word(mapped.address) == int.from_bytes(bytes(range(8)), "little")


@pytest.mark.parametrize("start", [PAGE - 4, PAGE, PAGE + 100])
def test_a_range_that_cannot_be_read_whole_is_an_error(memory: ProcessMemory, mapped: Mapped, start: int):
    with pytest.raises(UnreadableError):
        memory.read(mapped.address + start, 8)


@pytest.mark.parametrize("address", [0, 8, (1 << 63) + 5, 1 << 64, -1])
def test_garbage_addresses_are_unreadable_not_a_crash(memory: ProcessMemory, address: int):
    with pytest.raises(UnreadableError):
        memory.read(address, 8)


def test_a_torn_size_does_not_allocate(memory: ProcessMemory, mapped: Mapped):
    with pytest.raises(UnreadableError):
        memory.read(mapped.address, 1 << 50)


def test_unreadable_ranges_of_a_batch_are_zeros_and_the_others_are_right(
    memory: ProcessMemory, mapped: Mapped
):
    good = [mapped.address + offset for offset in range(0, 2000, 2)]
    bad = [mapped.address + PAGE, 0, mapped.address + PAGE - 3]
    addresses = []
    for index, address in enumerate(good):
        addresses += [address, bad[index % 3]]
    got = memory.read_equal(addresses, 8)
    for index, address in enumerate(good):
        assert got[16 * index : 16 * index + 8] == memory.read(address, 8)
        assert got[16 * index + 8 : 16 * index + 16] == bytes(8)


def test_batches_beyond_what_one_call_takes(memory: ProcessMemory, mapped: Mapped):
    sizes = [1 + index % 7 for index in range(5000)]
    addresses = [mapped.address + index % 1000 for index in range(5000)]
    got = memory.read_ranges(addresses, sizes)
    assert got == [memory.read(address, size) for address, size in zip(addresses, sizes, strict=True)]


def test_an_empty_batch(memory: ProcessMemory):
    assert memory.read_equal([], 8) == b""
    assert memory.read_ranges([], []) == []


def test_read_into_says_how_much_there_was(memory: ProcessMemory, mapped: Mapped):
    buffer = bytearray(100)
    assert memory.read_into(mapped.address + PAGE - 40, buffer, 100) == 40
    assert buffer[:40] == memory.read(mapped.address + PAGE - 40, 40)


def test_a_process_that_is_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError):
        ProcessMemory(child.pid).read(4096, 8)


@needs_root
def test_another_users_process_is_a_permission_error():
    """Asked by a user without rights, of this process."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from patchkit.guard.memory import ProcessMemory\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: ProcessMemory(int(sys.argv[1])).read(4096, 8)\n"
        "except PermissionError: print('refused')"
    )
    import patchkit

    source = os.path.dirname(os.path.dirname(os.path.abspath(patchkit.__file__)))
    done = subprocess.run(
        [sys.executable, "-c", code, str(os.getpid()), source], capture_output=True, text=True, check=True
    )
    assert done.stdout == "refused\n"
