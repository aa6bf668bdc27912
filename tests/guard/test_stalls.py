"""A process that hangs must not hang the guard. Missing pages (userfaultfd) and a silent disk (FUSE) make real ones."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from patchkit.guard import Verdict, inspect, procfs, stalls
from patchkit.guard.memory import ProcessMemory
from tests.guard.processes import IMPORT, WAIT, Engine, needs_root

# The table of a module's names lies in pages that nobody ever fills: whoever reads them waits in the kernel.
HOLE = f"""
    import ctypes, fcntl, gc, os, platform, struct, sys, types
    gc.disable()
    libc = ctypes.CDLL(None, use_errno=True)
    number = {{"x86_64": 323, "aarch64": 282}}[platform.machine()]
    handle = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
    if handle < 0:
        print("refused", flush=True)
        sys.exit()
    import engine
    held = types.ModuleType("engine.held")
    for count in range(20_000):
        setattr(held, f"name{{count}}", None)
    sys.modules["engine.held"] = held
    table = ctypes.c_size_t.from_address(id(held.__dict__) + 32).value
    start = table & -4096
    fcntl.ioctl(handle, 0xC018AA3F, struct.pack("<QQQ", 0xAA, 0, 0))  # UFFDIO_API
    fcntl.ioctl(handle, 0xC020AA00, struct.pack("<QQQQ", start, 65536, 1, 0))  # UFFDIO_REGISTER, missing
    assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(65536), 4) == 0  # MADV_DONTNEED
    {WAIT}
"""


@pytest.fixture
def hung(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(stalls, "STALL_S", 0.5)
    process = engine.start(HOLE)
    if process.said == ["refused"]:  # type: ignore[attr-defined]
        pytest.skip("this kernel does not let us use userfaultfd")
    return process.pid


def threads() -> int:
    return sum(thread.name == "patchkit-guard" for thread in threading.enumerate())


def test_a_process_that_hangs_cannot_be_told_and_the_others_are(engine: Engine, hung: int):
    others = [engine.start(IMPORT).pid for _ in range(3)]
    findings = inspect(engine.root, engine.files)
    verdicts = {holder.pid: holder.verdict for holder in findings.holders}
    assert verdicts[hung] is Verdict.CANNOT_TELL
    assert {verdicts[pid] for pid in others} == {Verdict.LOADED}
    holder = next(holder for holder in findings.holders if holder.pid == hung)
    assert holder.blocks
    assert "gave no answer" in holder.evidence


def test_a_second_look_at_it_does_not_wait_again(engine: Engine, hung: int):
    assert engine.look(hung) is not None
    before = threads()
    assert before >= 1
    for _ in range(5):
        holder = engine.look(hung)
        assert holder is not None
        assert holder.verdict is Verdict.CANNOT_TELL
    assert threads() == before


def test_after_its_end_nothing_is_left(engine: Engine, hung: int):
    assert engine.look(hung) is not None
    assert stalls.is_stalled(hung)
    engine.stop()
    until = time.monotonic() + 20
    while stalls.is_stalled(hung) and time.monotonic() < until:
        time.sleep(0.01)
    assert not stalls.is_stalled(hung)
    assert engine.look(hung) is None


def test_a_process_that_was_stopped_to_be_read_goes_on_although_the_reading_hangs(engine: Engine, hung: int):
    with pytest.raises(stalls.StalledError):
        stalls.bounded(hung, lambda: read_while_stopped(hung))
    procfs.resume(hung)
    known = procfs.stat(hung)
    assert known is not None
    assert known.state not in "Tt"


def read_while_stopped(pid: int) -> None:
    with procfs.stopped(pid):
        maps = procfs.maps(pid)
        memory = ProcessMemory(pid)
        for line in maps.splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split(b"-"))
            memory.read_into(start, bytearray(end - start), min(end - start, 1 << 20))


# Replacing a mapping whose changes are not written yet waits for the writing, with the address space locked.
LOCKED = f"""
    import ctypes, engine, mmap, os, sys
    file = open({{file!r}}, "r+b")
    pages = mmap.mmap(file.fileno(), 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    pages[0] = 1
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    print("ready", flush=True)
    libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3, 0x32, -1, 0)
    {WAIT}
"""


@pytest.fixture
def silent_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    place = tmp_path / "silent"
    place.mkdir()
    program = str(pathlib.Path(__file__).with_name("silent_fuse.py"))
    with subprocess.Popen([sys.executable, program, str(place)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            if not os.path.exists("/dev/fuse") or server.stdout.readline() != b"mounted\n":
                pytest.skip("this kernel does not let us mount a file system of our own")
            yield place
        finally:
            server.kill()  # what waits for it goes on then
            subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


@needs_root
def test_a_process_whose_address_space_is_locked_cannot_be_told(
    engine: Engine, silent_disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even ``/proc/PID/maps`` and ``cmdline`` answer."""
    monkeypatch.setattr(stalls, "STALL_S", 0.5)
    other = engine.start(IMPORT)
    process = engine.start(LOCKED.format(file=str(silent_disk / "file")))
    while (known := procfs.stat(process.pid)) and known.state != "D":
        time.sleep(0.01)
    with pytest.raises(stalls.StalledError):
        procfs.maps(process.pid)
    assert procfs.arguments(process.pid) == []
    found = {holder.pid: holder for holder in inspect(engine.root, engine.files).holders}
    assert found[other.pid].verdict is Verdict.LOADED
    holder = found[process.pid]
    assert (holder.verdict, holder.blocks) == (Verdict.CANNOT_TELL, True)
    assert "gave no answer" in holder.evidence
    assert holder.hint
    assert holder.hint.startswith("it hangs in the kernel")


def test_an_interpreter_by_another_name_that_hangs_cannot_be_told_either(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    """It is known from its maps, which could be read, though nothing behind them could."""
    monkeypatch.setattr(stalls, "STALL_S", 0.5)
    python = os.path.realpath(sys.executable)
    program = tmp_path / "database"
    shutil.copy(python, program)
    base = os.path.dirname(os.path.dirname(python))
    libraries = {"PYTHONHOME": base, "LD_LIBRARY_PATH": f"{base}/lib"}
    process = engine.start(HOLE, python=str(program), env=libraries)
    if process.said == ["refused"]:  # type: ignore[attr-defined]
        pytest.skip("this kernel does not let us use userfaultfd")
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.CANNOT_TELL, True)


def test_progress_is_not_a_stall(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stalls, "STALL_S", 0.3)

    def slow() -> str:
        for _ in range(10):
            time.sleep(0.1)
            stalls.beat()
        return "done"

    assert stalls.bounded("slow", slow) == "done"


def test_a_file_that_is_never_answered_is_left(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """A FIFO without a writer: opening it waits as ``/proc/PID/maps`` of a locked address space does."""
    monkeypatch.setattr(stalls, "STALL_S", 0.3)
    fifo = tmp_path / "maps"
    os.mkfifo(fifo)
    with pytest.raises(stalls.StalledError):
        stalls.bounded("fifo", lambda: procfs._slurp(str(fifo)))
    assert stalls.is_stalled("fifo")
    with open(fifo, "wb") as late:
        late.write(b"late")
    until = time.monotonic() + 20
    while stalls.is_stalled("fifo") and time.monotonic() < until:
        time.sleep(0.01)
    assert stalls.bounded("fifo", lambda: "again") == "again"


def test_a_driver_that_hangs_does_not_count_against_the_process_that_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(stalls, "STALL_S", 0.4)
    never = threading.Event()

    def look(number: int) -> str:
        with pytest.raises(stalls.StalledError):
            stalls.apart(f"driver {number}", never.wait, 1.5)
        return "answered"

    assert stalls.ask_all([1, 2], look) == {1: "answered", 2: "answered"}
    never.set()


def test_errors_are_raised_where_the_question_was_asked():
    asked: list[int] = []

    def ask(number: int) -> int:
        asked.append(number)
        return 1 // (3 - number)

    with pytest.raises(ZeroDivisionError):
        stalls.ask_all([1, 2, 3, 4], ask)
    assert asked == [1, 2, 3]
