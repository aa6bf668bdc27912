from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from patchkit.guard import procfs


def test_a_process_whose_name_has_parentheses_and_spaces(tmp_path: pathlib.Path):
    program = tmp_path / "a) R (b c"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "60"])
    try:
        deadline = time.monotonic() + 10
        while (
            (known := procfs.stat(process.pid))
            and known.command != "a) R (b c"
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert known is not None
        assert (known.command, known.parent, known.kernel, known.ended) == (
            "a) R (b c",
            os.getpid(),
            False,
            False,
        )
        assert abs(known.started - time.time()) < 30
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone():
    process = subprocess.Popen(["true"])
    process.wait()
    assert procfs.stat(process.pid) is None
    assert procfs.uids(process.pid) is None
    assert procfs.arguments(process.pid) == []
    assert procfs.environment(process.pid) == {}
    assert procfs.descriptors(process.pid) == {}
    with pytest.raises(OSError, match="No such"):
        procfs.maps(process.pid)


def test_the_kernels_own_threads_are_known():
    known = procfs.stat(2)
    if known is None or known.command != "kthreadd":
        pytest.skip("no kernel threads in this PID namespace")
    assert known.kernel


def test_a_command_line_is_one_readable_line():
    assert procfs.title(["/bin/x", "-c", "a\nb\tc   d\x1b[31m"], "x") == "/bin/x -c a b c d?[31m"
    assert procfs.title([], "kworker") == "[kworker]"
    assert len(procfs.title(["x" * 5000], "x")) == 200


def test_mapped_files_are_known_after_their_removal(tmp_path: pathlib.Path):
    library = tmp_path / "with space.so"
    library.write_bytes(pathlib.Path(sys.executable).resolve().read_bytes()[: 1 << 16])
    import mmap

    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert str(library) in procfs.mapped_paths(procfs.maps(os.getpid()))
        library.unlink()
        maps = procfs.maps(os.getpid())
        assert str(library) in procfs.mapped_paths(maps)
        assert str(library) in {path for _, _, path in procfs.mapped_objects(maps)}


def test_ancestors_end_at_the_first_process():
    assert os.getppid() in procfs.ancestors(os.getpid())
    assert os.getpid() not in procfs.ancestors(os.getpid())


@pytest.mark.parametrize("already", [False, True])
def test_a_stopped_process_goes_on_unless_it_was_stopped_before(already: bool):
    process = subprocess.Popen(["sleep", "60"])
    try:
        if already:
            process.send_signal(signal.SIGSTOP)
            while (known := procfs.stat(process.pid)) and known.state != "T":
                time.sleep(0.01)
        with procfs.stopped(process.pid):
            known = procfs.stat(process.pid)
            assert known is not None
            assert known.state == "T"
        deadline = time.monotonic() + 5
        while (
            (known := procfs.stat(process.pid))
            and (known.state == "T") != already
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert known is not None
        assert (known.state == "T") == already
    finally:
        process.kill()
        process.wait()
