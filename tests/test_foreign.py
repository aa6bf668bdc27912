"""Links and pipes planted in ``.patchkit``: refused, and what they lead to stays as it is."""

from __future__ import annotations

import os
import shutil

import pytest

from patchkit import lease
from patchkit.history import History, record

NAMES = [
    "state.json",
    "journal.json",
    "history.jsonl",
    "history.head",
    "statcache.json",
    "lock",
    ".gitignore",
    "applied",
    "leases",
    "rescued",
    f"undo.{'0' * 32}",
    "applied/p1.patch",
    "leases/abc.demopkg.json",
]
COMMANDS = [
    ("status",),
    ("check",),
    ("verify",),
    ("log",),
    ("restore", "--dry-run"),
    ("restore", "--force"),
    ("apply", "p1"),
    ("recover",),
    ("recover", "--force"),
]


@pytest.fixture
def planted(site, rooted, tmp_path):
    """A tree with p1 applied and edited since, and a place outside of it that must not change."""
    rooted("apply", "p1")
    (site / "demopkg/core.py").write_bytes(b"edited\n")
    lease.claim(str(site), "demopkg", ["p1"], "abc", "python serve.py").abandon()
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder/litter.tmp").write_bytes(b"mine\n")
    (outside / "file").write_bytes(b"")
    return site


def contents(folder):
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("name", NAMES)
def test_no_link_is_followed(planted, rooted, tmp_path, name):
    path, outside = planted / ".patchkit" / name, tmp_path / "outside"
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    is_folder = name in ("applied", "leases", "rescued") or name.startswith("undo.")
    path.symlink_to(outside / ("folder" if is_folder else "file"))
    before = contents(outside), contents(planted)
    for command in COMMANDS:
        done = rooted(*command, code=4)
        assert f"{path} is a symlink" in done.err
        assert done.err.count("\n") == 1
        assert (contents(outside), contents(planted)) == before


@pytest.mark.parametrize("name", ["state.json", "journal.json", "history.jsonl", "leases/abc.demopkg.json"])
def test_a_pipe_does_not_make_a_command_wait(planted, rooted, name):
    path = planted / ".patchkit" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    for command in COMMANDS:
        assert f"{path} is not a file" in rooted(*command, code=4).err


def test_a_file_in_the_place_of_a_folder_is_named(planted, rooted):
    (planted / ".patchkit/rescued").write_bytes(b"")
    assert "rescued is not a folder" in rooted("restore", "--force", code=4).err


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_file_that_another_user_planted_does_not_steer_root(planted, rooted):
    os.chown(planted / ".patchkit/state.json", 1234, 1234)
    assert "belongs to user id 1234" in rooted("restore", code=4).err


def test_a_history_with_another_name_grows_alone(planted, tmp_path):
    """`cp -al` of a whole environment: the copy's history is not this tree's."""
    path = planted / ".patchkit/history.jsonl"
    os.link(path, tmp_path / "copy")
    before = path.read_bytes()
    History(str(planted)).append({**record("apply", []), "id": "x"})
    assert (tmp_path / "copy").read_bytes() == before
    assert path.read_bytes().startswith(before)
    assert len(History(str(planted)).records()) == 2
    assert History(str(planted)).verify() is None
