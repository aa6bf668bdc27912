"""Processes that change while they are read: imports, forks, exec, exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from patchkit import processes
from patchkit.guard import Findings, Verdict, inspect, procfs
from patchkit.guard.inspection import Inspection
from tests.guard.processes import (
    IMPORT,
    VICTIM,
    WAIT,
    Engine,
)


def test_a_forked_child_and_a_forkserver_child_are_found(engine: Engine, python: str):
    engine.start(
        """
        import multiprocessing, os, sys, time
        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["engine.models.victim"])
            child = context.Process(target=time.sleep, args=(600,))
            child.start()
            time.sleep(0.5)
            print(child.pid, flush=True)
            sys.stdin.read()
        """,
        python=python,
    )
    child = int(engine.processes[-1].said[0])  # type: ignore[attr-defined]
    try:
        holder = engine.look(child)
        assert holder is not None
        assert holder.verdict is Verdict.LOADED
        assert (engine.look() or holder).verdict is not Verdict.CANNOT_TELL
    finally:
        os.kill(child, signal.SIGKILL)


CHANGING = """
    import sys, threading, types
    {first}
    def churn():
        number = 0
        while True:
            number += 1
            name = f"made{{number % 5000}}"
            module = types.ModuleType(name)
            module.__file__ = "/somewhere/" + name
            sys.modules[name] = module
            sys.modules.pop(f"made{{(number * 7) % 5000}}", None)
    threading.Thread(target=churn, daemon=True).start()
    {wait}
"""


def test_a_process_that_changes_sys_modules_all_the_time_is_found(engine: Engine, python: str):
    engine.start(CHANGING.format(first="import engine.models.victim", wait=WAIT), python=python)
    for _ in range(3):
        holder = engine.look()
        assert holder is not None
        assert holder.verdict is Verdict.LOADED


def test_stopping_to_read_settles_a_process_that_changes_all_the_time(engine: Engine, python: str):
    process = engine.start(CHANGING.format(first="import engine.models", wait=WAIT), python=python)
    for _ in range(2):
        holder = engine.look(stop_to_read=True)
        assert holder is not None
        assert holder.verdict is Verdict.NOT_LOADED
    status = procfs.stat(process.pid)
    assert status is not None
    assert status.state not in "Tt"


def test_processes_that_exec_and_exit_while_they_are_read_do_no_harm(engine: Engine):
    code = "import os, sys, engine; os.execv(sys.executable, [sys.executable, '-c', 'import engine'])"
    stop = time.monotonic() + 4
    running: list[subprocess.Popen[bytes]] = []
    while time.monotonic() < stop:
        running = [process for process in running if process.poll() is None]
        while len(running) < 4:
            running.append(subprocess.Popen([sys.executable, "-c", code], env={"PYTHONPATH": engine.root}))
        found = inspect(engine.root, engine.files)
        assert isinstance(found, Findings)
        assert not [holder for holder in found.holders if holder.verdict is Verdict.LOADED]
    for process in running:
        process.wait()


def test_a_zombie_holds_nothing(engine: Engine):
    process = engine.start(IMPORT)
    os.kill(process.pid, signal.SIGKILL)
    while (known := procfs.stat(process.pid)) is not None and not known.ended:
        time.sleep(0.01)
    assert engine.look() is None


def test_a_process_whose_main_thread_has_ended_is_found(engine: Engine, python: str):
    process = engine.start(
        """
        import ctypes, sys, threading, engine.models.victim
        def run():
            while "State:\\tZ" not in open("/proc/self/status").read():
                threading.Event().wait(0.01)
            print("ready", flush=True)
            sys.stdin.read()
        threading.Thread(target=run).start()
        ctypes.CDLL(None).pthread_exit(None)
        """,
        python=python,
    )
    known = procfs.stat(process.pid)
    assert known is not None
    assert (known.state, known.ended) == ("Z", False)
    seen = processes.look(process.pid)
    assert seen is not None
    assert not seen.ended
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))
    assert abs(holder.started - known.started) < 0.005
    assert python in holder.command


def test_a_process_that_starts_during_a_look_is_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The first process that is looked at holds the look up until another has imported the file."""
    look, late = Inspection._look, []

    def slow(self: Inspection, pid: int, maps: bytes):
        if not late:
            late.append(engine.start(IMPORT).pid)
        return look(self, pid, maps)

    monkeypatch.setattr(Inspection, "_look", slow)
    holders = {holder.pid: holder.verdict for holder in inspect(engine.root, engine.files).holders}
    assert holders == {late[0]: Verdict.LOADED}
