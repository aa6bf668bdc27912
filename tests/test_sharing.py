"""Sessions beside other sessions, and beside patches that the user applied: nobody takes off what is not theirs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit import lease, processes
from tests.support import DEMO, P1, files, patched, snapshot, write_patch

SERVE = str(Path(__file__).with_name("serve.py"))
PATCHED = patched(DEMO["1.0"], P1, "p1")
# A session of the same patches between its lease and its patches, or between its restore and its end.
HOLD = (
    "import sys, time; from patchkit import lease\n"
    "lease.claim(sys.argv[1], 'demopkg', ['p1'], 'aaa', 'another'); print('held', flush=True)\n"
    "time.sleep(600)"
)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def before(venv):
    return snapshot(venv.site)


@pytest.fixture
def started():
    """Processes to be ended with the test."""
    found = []
    yield found
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with process:
            process.wait()


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _ended(process, code=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
    return err


def _leases(venv):
    return [one.session for one in lease.leases(str(venv.site))]


# -- what the user applied ------------------------------------------------------------------------


@pytest.fixture
def more(patches):
    """Patches of which none can join p1: p2 is held, p4 changes the same file, p5 is for another release."""
    write_patch(patches, "p2", DEMO["1.0"], {"demopkg/util.py": b"other = 1\n"})
    write_patch(patches, "p4", DEMO["1.0"], {"demopkg/core.py": b"other = 1\n"})
    write_patch(patches, "p5", DEMO["2.0"], {"demopkg/util.py": b"other = 1\n"}, releases=["2.0"])


@pytest.mark.parametrize(("other", "code"), [("p2", 3), ("p4", 4), ("p5", 4)])
def test_a_refusal_leaves_a_patch_of_the_user_and_no_mark(kit, venv, more, started, tmp_path, other, code):
    kit.spawn("apply", "p1")
    # A server of the user holds the files, so that taking p1 off would have to wait.
    program = f"import demopkg.util\nexec(open({SERVE!r}).read())"
    started.append(subprocess.Popen([venv.python, "-B", "-c", program, tmp_path / "r"]))
    _until((tmp_path / "r").exists)
    err = _ended(kit.session("p1", other, command=["true"]), code)
    assert "waiting" not in err
    assert "recover" not in err
    assert files(venv.site) == PATCHED
    assert _leases(venv) == []
    assert kit.spawn("recover").out == "nothing to recover\n"


def test_a_session_that_is_stopped_before_its_command_takes_off_its_own_patch_only(
    kit, venv, patches, started
):
    write_patch(patches, "p2", DEMO["1.0"], {"demopkg/util.py": b"other = 1\n"})
    kit.spawn("apply", "p1")
    _ended(kit.session("p1", "p2", command=["/dev/null"]), 126)
    # The command could not be started, after everything was applied: that is an end like any other.
    assert files(venv.site) == DEMO["1.0"]


def test_a_patch_below_another_one_is_refused_before_the_command(kit, venv, patches, tmp_path):
    core = "demopkg/core.py"
    write_patch(patches, "p3", {**DEMO["1.0"], core: P1[core]}, {core: b"third = 1\n"}, on=["p1"])
    kit.spawn("apply", "p1", "p3")
    tree = snapshot(venv.site)
    err = _ended(kit.session("p1", command=["touch", tmp_path / "started"]), 4)
    assert "'p1' lies below 'p3'" in err
    assert "name them after it" in err
    assert not (tmp_path / "started").exists()
    assert snapshot(venv.site) == tree
    assert _leases(venv) == []
    _ended(kit.session("p1", "p3", command=["touch", tmp_path / "started"]))
    assert (tmp_path / "started").exists()
    assert files(venv.site) == DEMO["1.0"]


# -- sessions that share a patch ------------------------------------------------------------------


def test_a_session_starts_while_one_with_the_same_patches_starts_or_ends(kit, venv, before, started):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, venv.site], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(other)
    assert other.stdout.readline() == "held\n"
    code = "import demopkg.core as c; assert c.answer() == 'BBB'"
    err = _ended(kit.session("p1", command=[venv.python, "-B", "-c", code]))
    assert "stays for session aaa" in err
    assert files(venv.site) == PATCHED
    other.kill()
    other.wait()
    kit.spawn("recover")
    assert snapshot(venv.site) == before


def test_a_session_that_starts_beside_others_is_never_refused_and_leaves_nothing(kit, venv, before):
    running = [kit.session("p1", command=["sleep", str(length / 4)]) for length in range(6)]
    for process in running:
        _ended(process)
    assert snapshot(venv.site) == before
    assert _leases(venv) == []


def test_a_patch_is_kept_by_whoever_ends_last_and_the_others_say_that_they_did_not(
    kit, venv, tmp_path, started
):
    keeping = kit.session(
        "p1", "--keep", command=["sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep .05; done"]
    )
    plain = kit.session("p1", command=[venv.python, "-B", SERVE, tmp_path / "r"])
    started += [keeping, plain]
    _until(lambda: (tmp_path / "r").exists() and len(_leases(venv)) == 2)
    (tmp_path / "go").touch()
    err = _ended(keeping)
    assert "still applied" not in err
    assert "not kept" in err
    plain.send_signal(signal.SIGTERM)
    assert "restored  p1" in _ended(plain, 143)
    assert files(venv.site) == DEMO["1.0"]


def test_a_session_leaves_the_patch_to_what_a_killed_one_started(kit, venv, before, started, tmp_path):
    killed = kit.session("p1", command=[venv.python, "-B", SERVE, tmp_path / "r1", "--late", "--ignore"])
    sharing = kit.session("p1", command=[venv.python, "-B", SERVE, tmp_path / "r2"])
    started += [killed, sharing]
    _until(lambda: (tmp_path / "r1").exists() and (tmp_path / "r2").exists())
    server = processes.look(int((tmp_path / "r1").read_text().split()[0]))
    (mark,) = [one.session for one in lease.leases(str(venv.site)) if one.pid == killed.pid]
    killed.kill()
    killed.wait()
    sharing.send_signal(signal.SIGTERM)
    err = _ended(sharing, 125)  # it could not put the tree back, which stays marked
    try:
        assert "stays for what another session started" in err
        assert files(venv.site) == PATCHED
        assert _leases(venv) == [mark]
        (path,) = Path().glob("patchkit-run-*.json")
        assert not json.loads(path.read_text())["predicate"]["restored"]
        # Nobody else takes it off either: that server may import the file at any moment.
        restore = [*kit.where, "restore"]
        done = subprocess.run([sys.executable, "-m", "patchkit", *restore], capture_output=True, check=False)
        assert done.returncode == 3, done.stderr
        assert f" {server.pid} ".encode() in done.stderr
    finally:
        os.kill(server.pid, signal.SIGKILL)
    kit.spawn("recover", "--wait", "20s")
    assert snapshot(venv.site) == before
    assert _leases(venv) == []
