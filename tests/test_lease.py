"""Leases live as long as their process, and those of other hosts as long as they beat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit import lease
from patchkit.lease import LeasedError
from patchkit.lock import tree_lock
from patchkit.state import StateFileError, UnknownSchemaError
from tests.guard.processes import needs_root
from tests.support import snapshot

HOLD = (
    "import sys, time; from patchkit import lease\n"
    "lease.claim(sys.argv[1], 'demopkg', sys.argv[2:], 'aaa', 'python train.py'); print('held', flush=True)\n"
    "time.sleep(600)"
)


def _hold(site, *patches):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(site), *patches], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    process.stdout.close()
    return process


def _foreign(site, **changes):
    """The lease of another machine, as a shared file system shows it."""
    made = lease.claim(str(site), "demopkg", ["p1"], "bbb", "python serve.py")
    made.abandon()
    path = Path(made.lease.path)
    entry = {**json.loads(path.read_text()), "host": "node7", "boot_id": "another", **changes}
    path.write_text(json.dumps(entry))
    return path


def test_a_lease_lives_and_dies_with_its_process(site):
    process = _hold(site, "p1")
    (found,) = lease.live(str(site), "demopkg")
    assert (found.pid, found.patches, found.command) == (process.pid, ("p1",), "python train.py")
    process.kill()
    process.wait()
    assert lease.live(str(site), "demopkg") == []
    assert [one.session for one in lease.leases(str(site))] == ["aaa"]


def test_a_child_that_outlives_its_process_does_not_keep_the_lease(site):
    code = HOLD.replace("time.sleep(600)", "import subprocess; subprocess.Popen(['sleep', '60'])")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(site), "p1"], stdout=subprocess.DEVNULL, check=True
    )
    assert done.returncode == 0
    assert lease.live(str(site), "demopkg") == []


def test_no_command_changes_a_leased_tree_and_each_names_the_holder(site, rooted):
    rooted("apply", "p1")
    process = _hold(site, "p1")
    try:
        for command in (("restore",), ("restore", "p1", "--dry-run"), ("restore", "--force")):
            done = rooted(*command, code=3)
            assert f"process {process.pid}" in done.err
            assert "python train.py" in done.err
        overridden = rooted("restore", "--override-guard", "--reason", "I know", code=3)
        assert "session aaa" in overridden.err
        assert rooted("--json", "restore", code=3).json["errors"][0]["code"] == "leased"
        assert "nothing to do" in rooted("apply", "p1").out or "already" in rooted("apply", "p1").out
    finally:
        process.kill()
        process.wait()
    rooted("restore", "--verify")


def test_waiting_outlasts_a_lease(site, rooted):
    rooted("apply", "p1")
    process = _hold(site, "p1")
    waiting = rooted.popen("restore", "--wait", "60s")
    assert "waiting" in waiting.stderr.readline()
    process.kill()
    process.wait()
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err


@needs_root
def test_a_lease_of_a_containers_first_process_is_not_that_of_an_ancestor(site, rooted):
    """It says pid 1, as init, which is above every process, would say."""
    rooted("apply", "p1")
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", HOLD]
    holder = subprocess.Popen([*command, str(site), "p1"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.stdout.close()
    (found,) = lease.live(str(site), "demopkg")
    assert found.pid == 1
    assert not LeasedError(found).hopeless
    waiting = rooted.popen("restore", "--wait", "60s")
    said = waiting.stderr.readline()
    holder.kill()
    holder.wait()
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, said + err
    assert "waiting" in said


def test_a_lease_of_an_ancestor_cannot_be_waited_for(site, rooted):
    rooted("apply", "p1")
    code = HOLD.replace("time.sleep(600)", "import subprocess; sys.exit(subprocess.call(sys.argv[3:]))")
    claim = code.replace("sys.argv[2:]", "sys.argv[2:3]")
    inside = [sys.executable, "-m", "patchkit", *rooted.command("restore", "--wait", "60s")]
    done = subprocess.run(
        [sys.executable, "-c", claim, str(site), "p1", *inside],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "this command runs inside that session" in done.stderr
    assert "waiting" not in done.stderr


def test_another_hosts_lease_stands_until_its_heartbeat_is_old(site):
    path = _foreign(site)
    with pytest.raises(LeasedError, match=r"node7.*last heartbeat"):
        lease.refuse(str(site), "demopkg")
    old = time.time() - lease.EXPIRY_S - 1
    os.utime(path, (old, old))
    lease.refuse(str(site), "demopkg")


def test_a_stopped_holder_on_another_host_stands_without_a_heartbeat(site):
    claimed = lease.claim(str(site), "demopkg", ["p1"], "ccc", "x")
    claimed.stop()
    stopped = os.stat(claimed.lease.path)
    claimed.abandon()
    path = _foreign(site)
    os.utime(path, (stopped.st_atime, stopped.st_mtime))
    assert [one.session for one in lease.live(str(site), "demopkg")] == ["bbb"]


def test_a_lease_of_another_distribution_does_not_count(site):
    process = _hold(site, "p1")
    lease.refuse(str(site), "otherpkg")
    process.kill()
    process.wait()


def test_sweeping_keeps_what_is_alive_and_what_is_to_be_finished(site, rooted):
    before = snapshot(site)
    rooted("apply", "p1")
    process = _hold(site, "p1")
    process.kill()
    process.wait()
    with tree_lock(str(site)):
        lease.sweep(str(site))
    assert [one.session for one in lease.abandoned(str(site))] == ["aaa"]
    assert "abandoned session aaa" in rooted("check", code=1).out
    assert "abandoned session aaa" in rooted("status").out
    assert "abandoned session aaa" in rooted("apply", "p1").out
    rooted("restore")
    assert lease.leases(str(site)) == []
    assert snapshot(site) == before


def test_recover_finishes_an_abandoned_session(site, rooted):
    before = snapshot(site)
    rooted("apply", "p1")
    process = _hold(site, "p1")
    process.kill()
    process.wait()
    assert "restored p1" in rooted("recover").out
    assert snapshot(site) == before
    assert rooted("recover").out == "nothing to recover\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", StateFileError),
        ("[]", StateFileError),
        ('{"schema": 2}', UnknownSchemaError),
        ('{"schema": 1, "patches": []}', StateFileError),
        ('{"schema": 1}', StateFileError),
    ],
)
def test_a_file_that_is_no_lease_is_a_clear_error(site, text, error):
    folder = site / lease.LEASES
    folder.mkdir(parents=True)
    (folder / "x.demopkg.json").write_text(text)
    with pytest.raises(error):
        lease.leases(str(site))
