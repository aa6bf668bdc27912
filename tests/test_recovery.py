"""An interrupted transaction is finished or undone by the next command that writes, or by `recover`."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from patchkit.journal import Journal
from patchkit.lock import tree_lock
from tests import support
from tests.support import DEMO, P1, Kit, files, patched, snapshot

CORE = "demopkg/core.py"
PATCHED = patched(DEMO["1.0"], P1, "p1")


def killed(kit, *command, call, count, also=()):
    """Run a command that dies at its ``count``-th ``call``; whether it got that far."""
    strace = [
        "strace",
        "-f",
        "-qqq",
        "-o",
        os.devnull,
        "-e",
        f"trace={call}{',linkat' if also else ''}",
        *also,
    ]
    done = kit.spawn(
        *command, prefix=[*strace, "-e", f"inject={call}:signal=SIGKILL:when={count}"], code=None
    )
    return done.code != 0


def swapped(site, kit):
    """An apply of p1 that died with all its files in place and no commit mark."""
    for count in range(1, 40):
        assert killed(kit, "apply", "p1", call="unlink", count=count)
        journal = Journal.load(str(site))
        if journal is not None and files(site) == PATCHED:
            assert journal.phase == "open"
            return
        kit("recover")
    raise AssertionError("never swapped")


@pytest.mark.parametrize("command", [["restore"], ["apply", "p1"]])
def test_the_next_command_that_writes_recovers_and_says_so(site, rooted, command):
    swapped(site, rooted)
    done = rooted(*command)
    assert "undid an interrupted apply of p1" in done.out
    assert files(site) == (PATCHED if command[0] == "apply" else DEMO["1.0"])


def test_what_was_recovered_is_said_even_if_the_command_is_refused(site, rooted):
    swapped(site, rooted)
    (site / "demopkg/core.py.orig").touch()
    (site / CORE).write_bytes(b"someone's\n")
    done = rooted("apply", "p1", code=4)
    assert "undid an interrupted apply of p1; left alone, because something else changed them" in done.err
    assert (site / CORE).read_bytes() == b"someone's\n"
    assert [path.read_bytes() for path in (site / ".patchkit/rescued").iterdir()] == [DEMO["1.0"][CORE]]


def test_status_check_and_dry_runs_only_report(site, rooted):
    swapped(site, rooted)
    before = snapshot(site)
    assert "apply was interrupted; 'patchkit recover' finishes or undoes it" in rooted("status").out
    assert rooted("status", "--json").json["data"]["targets"][0]["interrupted"] is True
    rooted("check", code=1)
    rooted("apply", "p1", "-n", code=5)
    assert snapshot(site) == before
    rooted("recover")
    assert files(site) == DEMO["1.0"]


def test_recover_twice_is_as_good_as_once(site, rooted):
    swapped(site, rooted)
    rooted("recover")
    assert "nothing to recover" in rooted("recover").out


def test_recovery_respects_the_guard(venv, patches, kit):
    """A server that was started on the half-patched tree: its files do not change under it."""
    guarded = Kit(["--python", str(venv.python), "--patches", str(patches)], guard=True)
    swapped(venv.site, kit)
    code = "import demopkg.core, sys; print('up', flush=True); sys.stdin.read()"
    server = subprocess.Popen(
        [venv.python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        assert server.stdout.readline() == "up\n"
        before = snapshot(venv.site)
        for command in (["recover"], ["restore"], ["apply", "p1"]):
            done = guarded(*command, code=3)
            assert f"process {server.pid}" in done.err
            assert snapshot(venv.site) == before
    finally:
        server.communicate()
    guarded("recover")
    assert files(venv.site) == DEMO["1.0"]


def test_an_interrupted_first_apply_is_found_after_an_uninstall(venv, kit):
    swapped(venv.site, kit)
    venv.uv("uninstall", "demopkg")
    assert "was interrupted" in kit("status").out
    kit("restore")
    assert files(venv.site) == {}


def test_an_older_undo_folder_is_never_taken_for_ours(site, rooted):
    """Left by a transaction whose journal someone removed."""
    swapped(site, rooted)
    (site / ".patchkit/journal.json").unlink()
    for path, data in DEMO["1.0"].items():
        (site / path).write_bytes(data)
    for path in (*site.rglob("*.bak_p1"), *site.rglob("extra/*.py")):
        path.unlink()
    (site / "demopkg/extra").rmdir()
    (site / ".patchkit/state.json").unlink(missing_ok=True)
    assert list((site / ".patchkit").glob("undo.*"))
    rooted("apply", "p1")
    rooted("restore", "--verify")
    assert files(site) == DEMO["1.0"]


def test_a_change_in_progress_is_not_called_interrupted(site, rooted):
    swapped(site, rooted)
    with tree_lock(str(site)):
        assert f"apply in progress, by process {os.getpid()} on" in rooted("status").out
        assert f"process {os.getpid()} on" in rooted("check", code=1).out
        assert "is being changed by" in rooted("apply", "p1", "-n", code=3).err
    assert "was interrupted" in rooted("status").out
    rooted("recover")
    assert files(site) == DEMO["1.0"]


def every_kill(site, kit, *, also=()):
    """Kill an apply at each rename, and at some of the many unlinks; after each, recover and compare."""
    before = snapshot(site)
    kills = 0
    for call, step in (("rename", 1), ("unlink", 6)):
        for count in range(1, 80, step):
            if not killed(kit, "apply", "p1", call=call, count=count, also=also):
                break
            kills += 1
            kit("recover")
            assert files(site) in (DEMO["1.0"], PATCHED)
            kit("restore", "--verify")
            assert snapshot(site) == before
        kit("restore", "--verify")
        assert snapshot(site) == before
    assert kills > 10


def test_recovery_without_hard_links(site, rooted):
    every_kill(site, rooted, also=["-e", "inject=linkat:error=EPERM"])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_recovery_where_the_state_lies_on_another_file_system(site, rooted):
    (site / ".patchkit").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(site / ".patchkit")], check=True)
    try:
        every_kill(site, rooted)
    finally:
        subprocess.run(["umount", "-l", str(site / ".patchkit")], check=True)


def test_a_disk_that_is_full_during_recovery_is_told_and_repaired_later(site, rooted):
    swapped(site, rooted)
    strace = [
        "strace",
        "-f",
        "-qqq",
        "-o",
        os.devnull,
        "-e",
        "trace=rename",
        "-e",
        "inject=rename:error=ENOSPC",
    ]
    done = rooted.spawn("recover", prefix=strace, code=5)
    assert "a transaction could not be undone" in done.err
    assert "run 'patchkit recover'" in done.err
    rooted("recover")
    assert files(site) == DEMO["1.0"]


def test_a_pristine_file_keeps_its_inode_and_time_through_crash_and_recovery(site, rooted):
    info = (site / CORE).stat()
    swapped(site, rooted)
    assert (site / CORE).stat().st_ino != info.st_ino
    rooted("recover")
    now = (site / CORE).stat()
    assert (now.st_ino, now.st_mtime_ns, now.st_nlink) == (info.st_ino, info.st_mtime_ns, 1)
    assert time.time_ns() > now.st_mtime_ns
    assert support.snapshot(site)[CORE][0] == "file"
