"""One change at a time; the refusal names who holds the tree; without a lock nothing is written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import threading

import pytest

from patchkit.foreign import ForeignStateError
from patchkit.history import History
from patchkit.lock import LockedError, LockUnsupportedError, tree_lock
from patchkit.state import State
from tests.support import DEMO, P1, Done, files, patched, snapshot


def test_the_refusal_names_the_holder_and_its_command(site, rooted):
    rooted("apply", "p1")
    with tree_lock(str(site)):
        done = rooted.spawn("restore", code=3)
    assert f"is being changed by process {os.getpid()} on " in done.err
    assert "--wait" in done.err
    assert files(site) == patched(DEMO["1.0"], P1, "p1")
    rooted("restore")


def test_wait_waits(site, rooted):
    rooted("apply", "p1")
    with tree_lock(str(site)):
        process = rooted.popen("restore", "--wait", "60s")
        line = process.stderr.readline()  # it says that it waits
        assert "waiting" in line
        assert files(site) == patched(DEMO["1.0"], P1, "p1")
    process.communicate()
    assert process.returncode == 0
    assert files(site) == DEMO["1.0"]


def test_the_lock_dies_with_its_process(site):
    code = (
        "import os, signal, sys\nfrom patchkit.lock import tree_lock\n"
        "with tree_lock(sys.argv[1]):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(site)], check=False).returncode == -9
    with tree_lock(str(site)):
        pass


def test_a_lock_is_not_inherited_by_what_we_start(site):
    with tree_lock(str(site)):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with tree_lock(str(site)):
            pass
    finally:
        child.communicate(b"\n")


def test_it_is_refused_within_one_process_too(site):
    with tree_lock(str(site)), pytest.raises(LockedError), tree_lock(str(site)):
        pass


def test_after_the_holder_has_left_nobody_is_named(site):
    with tree_lock(str(site)):
        assert json.loads((site / ".patchkit/lock").read_bytes())["pid"] == os.getpid()
    assert (site / ".patchkit/lock").read_bytes() == b""


@pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_that_cannot_lock_is_refused_clearly(site, rooted, name):
    """What flock(2) says on an NFS without a lock manager, or on a FUSE file system without locks."""
    before = snapshot(site)
    strace = [
        "strace",
        "-f",
        "-qqq",
        "-o",
        os.devnull,
        "-e",
        "trace=flock",
        "-e",
        f"inject=flock:error={name}",
    ]
    done = rooted.spawn("apply", "p1", prefix=strace, code=3)
    assert "its file system cannot lock files" in done.err
    assert os.strerror(getattr(errno, name)) in done.err
    assert done.err.count("\n") == 1
    assert snapshot(site) == before


def test_another_error_of_the_lock_is_not_taken_for_a_holder(site, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error"), tree_lock(str(site)):
        pass
    assert issubclass(LockUnsupportedError, Exception)


def test_a_symlink_in_the_place_of_the_lock_is_not_followed(site, tmp_path):
    with tree_lock(str(site)):
        pass
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine\n")
    (site / ".patchkit/lock").unlink()
    (site / ".patchkit/lock").symlink_to(victim)
    with pytest.raises(ForeignStateError, match="is a symlink"), tree_lock(str(site)):
        pass
    assert victim.read_bytes() == b"mine\n"


def test_a_hundred_processes_leave_one_consistent_state_and_an_unbroken_history(site, rooted):
    """Half of them apply and half restore; some wait, some are refused, none gets half of its way."""
    choice = random.Random(7)
    commands = [
        ([*command, *wait], wait)
        for command in (["apply", "p1"], ["restore"])
        for wait in [["--wait", "300s"]] * 35 + [[]] * 15
    ]
    choice.shuffle(commands)
    ended: list[tuple[list[str], Done]] = []
    gate = threading.Semaphore(16)  # that many at once; a machine of two cores has no use for more

    def start(command, wait):
        with gate:
            ended.append((wait, rooted.spawn(*command, code=None)))

    threads = [threading.Thread(target=start, args=one) for one in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 100
    for wait, done in ended:
        assert done.code == 0 or (done.code == 3 and not wait), done
        assert "Traceback" not in done.err
    state = State.load(str(site))
    expected = patched(DEMO["1.0"], P1, "p1") if state.stack else DEMO["1.0"]
    assert files(site) == expected
    assert History(str(site)).verify() is None
    actions = [entry["action"] for entry in History(str(site)).records()]
    assert actions == [("apply", "restore")[n % 2] for n in range(len(actions))]
    assert "the chain holds" in rooted("log", "--verify").out
    rooted("restore", "--verify")
    assert files(site) == DEMO["1.0"]
