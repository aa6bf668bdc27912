"""Large files are written past the page cache, and are the same bytes wherever that does not work."""

from __future__ import annotations

import errno
import os
import random
import resource
from pathlib import Path

import pytest

from patchkit.hidden_states.direct import ALIGNMENT, BUFFER_BYTES, DirectFile
from patchkit.hidden_states.files import durable_and_large

BYTES = random.Random(1).randbytes(3 * BUFFER_BYTES + 12345)


def written(path: Path, sizes: list[int], data: bytes = BYTES) -> DirectFile:
    """The file, after ``data`` came in pieces of ``sizes``, over and over, by both ways of writing."""
    file, at, turn = DirectFile(str(path)), 0, 0
    while at < len(data):
        piece = data[at : at + sizes[turn % len(sizes)]]
        if turn % 2:
            file.room(len(piece))[:] = piece
            file.filled(len(piece))
        else:
            assert file.write(piece) == len(piece)
        at, turn = at + len(piece), turn + 1
    assert file.tell() == len(data)
    return file


def cached(path: Path) -> bool:
    """Whether the file's first block is in the page cache: the kernel says so when it may not wait."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(ALIGNMENT)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "sizes", [[len(BYTES)], [1, 4095, 4096, 4097], [BUFFER_BYTES], [7, BUFFER_BYTES + 1], [65536]], ids=str
)
def test_whatever_the_pieces_the_bytes_are_those_that_were_written(tmp_path, sizes):
    data = BYTES if min(sizes) > 100 else BYTES[: BUFFER_BYTES + 4097]
    file = written(tmp_path / "f", sizes, data)
    file.flush()
    file.close()
    assert (tmp_path / "f").read_bytes() == data


def test_whole_blocks_do_not_stay_in_the_page_cache(tmp_path):
    (tmp_path / "usual").write_bytes(BYTES)
    assert cached(tmp_path / "usual")
    file = written(tmp_path / "f", [65536])
    if not file.direct:
        pytest.skip("this file system has no O_DIRECT")
    file.flush()
    file.close()
    assert not cached(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == BYTES


def test_what_comes_after_a_flush_is_written_too(tmp_path):
    file = written(tmp_path / "f", [65536], BYTES[:10000])
    file.flush()
    assert (tmp_path / "f").read_bytes() == BYTES[:10000]
    file.write(BYTES[10000:])
    file.flush()
    file.close()
    assert (tmp_path / "f").read_bytes() == BYTES


def test_a_system_that_refuses_direct_writes_gets_them_the_usual_way(tmp_path):
    file = DirectFile(str(tmp_path / "f"))
    file.buffer = file.buffer[1:]  # at an odd address: what stricter disks say of ours
    if file.direct:
        with pytest.raises(OSError, match="Invalid argument"):
            os.write(file.descriptor, file.buffer[:ALIGNMENT])
    file.write(BYTES)
    file.flush()
    file.close()
    assert not file.direct
    assert (tmp_path / "f").read_bytes() == BYTES


def test_memory_as_a_file_system():
    """Older kernels refuse the flag there when the file is opened, newer ones take it."""
    shared = Path("/dev/shm") / f"patchkit-direct-{os.getpid()}"
    try:
        file = written(shared, [65536])
        file.flush()
        file.close()
        assert shared.read_bytes() == BYTES
    finally:
        shared.unlink(missing_ok=True)


@pytest.mark.parametrize("limit", [BUFFER_BYTES + 100, 2 * BUFFER_BYTES, len(BYTES) - 1])
def test_a_disk_that_fills_is_an_error_and_leaves_no_file(tmp_path, limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with (
            pytest.raises(OSError, match="File too large") as caught,
            durable_and_large(str(tmp_path / "f")) as file,
        ):
            file.write(BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
