"""Two hosts on one tree: the other one has a name, a boot, and processes of its own, in namespaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from patchkit import lease
from tests.support import DEMO, P1, bare, files, patched, snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: namespaces")
OTHER = 'hostname node7 && mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
WAIT = "import time; print('runs', flush=True); time.sleep(600)"


class Host:
    """``node7``, which sees the same file system and none of this host's processes."""

    def __init__(self, kit, folder):
        self.kit = kit
        self.boot = folder / "boot_id"
        self.boot.write_text(f"{uuid.uuid4()}\n")
        self.folder = folder

    def popen(self, *arguments):
        flags = ["--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = ["unshare", *flags, "sh", "-c", OTHER, self.boot]
        command += [sys.executable, "-m", "patchkit", *self.kit.where, *arguments]
        return subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=bare(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments, code=0):
        process = self.popen(*arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"{out}\n{err}"
        return out + err


@pytest.fixture
def before(venv):
    return snapshot(venv.site)


@pytest.fixture
def node7(kit, tmp_path, before):
    return Host(kit, tmp_path)


@pytest.fixture
def theirs(node7, venv):
    """A session of node7 whose command runs."""
    process = node7.popen("run", "p1", "--", venv.python, "-c", WAIT)
    assert process.stdout.readline() == "runs\n"
    yield process
    process.kill()
    process.communicate()


def _end(process):
    """Ask patchkit over there to end: the child of unshare."""
    (child,) = (int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == process.pid)
    os.kill(child, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    return err


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_another_hosts_session_is_respected_and_named(theirs, kit, venv, before):
    assert "node7" in kit.spawn("status").out
    refused = kit.spawn("restore", code=3).err
    assert "on node7" in refused
    assert "last heartbeat" in refused
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    assert "restored  p1" in _end(theirs)
    assert snapshot(venv.site) == before


def test_this_hosts_session_is_respected_there(node7, kit, venv, before, tmp_path):
    command = [sys.executable, "-m", "patchkit", *kit.where, "run", "p1", "--", venv.python, "-c", WAIT]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as ours:
        assert ours.stdout.readline() == "runs\n"
        assert f"process {ours.pid}" in node7("restore", code=3)
        assert "in use by session" in node7("status")
        ours.send_signal(signal.SIGTERM)
        ours.communicate(timeout=60)
    assert snapshot(venv.site) == before


def test_sessions_of_two_hosts_share_and_the_last_one_restores(theirs, kit, venv, before, tmp_path):
    command = [sys.executable, "-m", "patchkit", *kit.where, "run", "p1", "--", "true"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "stays for session" in done.stderr
    assert "on node7" in done.stderr
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    assert "restored  p1" in _end(theirs)
    assert snapshot(venv.site) == before


def test_a_host_that_dies_is_waited_for_until_its_heartbeat_is_old(theirs, kit, venv, before):
    theirs.kill()
    theirs.wait(60)
    # Nobody here can know that it is dead.
    assert "on node7" in kit.spawn("restore", code=3).err
    assert "nothing to recover" in kit.spawn("recover").out
    (found,) = lease.leases(str(venv.site))
    old = time.time() - lease.EXPIRY_S - 1
    os.utime(found.path, (old, old))
    assert "abandoned session" in kit.spawn("check", code=1).out
    assert "restored p1" in kit.spawn("recover").out
    assert snapshot(venv.site) == before
