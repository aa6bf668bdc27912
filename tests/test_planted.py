"""Links, pipes and folders in the place of the files of ``.patchkit``: refused, and never followed."""

from __future__ import annotations

import os
import shutil

import pytest

from patchkit import lease
from patchkit.history import History, record
from tests.support import DEMO, files, snapshot

FOLDERS = ("applied", "leases", "rescued", "undo." + "0" * 32)
NAMES = (
    *FOLDERS,
    ".gitignore",
    "applied/p1.patch",
    "history.head",
    "history.jsonl",
    "journal.json",
    "leases/abc.demopkg.json",
    "lock",
    "state.json",
    "state.json.0123abcd.tmp",
    "statcache.json",
)
COMMANDS = (
    ("status",),
    ("check",),
    ("verify",),
    ("log",),
    ("log", "--verify"),
    ("restore",),
    ("restore", "--force"),
    ("apply", "p1"),
    ("recover",),
    ("recover", "--force"),
)


@pytest.fixture
def outside(tmp_path):
    """Where a link could lead; ``plant`` puts there what patchkit had written."""
    folder = tmp_path / "outside"
    (folder / "folder").mkdir(parents=True)
    return folder


def plant(site, outside, name, kind):
    path = site / ".patchkit" / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.copytree(path, outside / "folder", dirs_exist_ok=True)
        shutil.rmtree(path)
    elif path.exists():
        shutil.move(path, outside / "file")
    if kind == "link":
        good = outside / ("folder" if name in FOLDERS else "file")
        if name not in FOLDERS and not good.exists():
            good.write_bytes(b"mine\n")
        path.symlink_to(good)
    elif kind == "dangling":
        path.symlink_to(outside / "new")
    elif kind == "pipe":
        os.mkfifo(path)
    return path


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_planted_is_refused_and_never_followed(site, rooted, outside, name, kind):
    rooted("apply", "p1")
    lease.claim(str(site), "demopkg", ["p1"], "abc", "python serve.py").abandon()
    path = plant(site, outside, name, kind)
    before, there = snapshot(outside), files(site)
    for command in COMMANDS:
        done = rooted(*command, code=4)
        assert str(path) in done.err, command
        assert "look into it, then remove it" in done.err
        assert done.err.count("\n") == 1
        assert snapshot(outside) == before, command
        assert files(site) == there, command


@pytest.mark.parametrize("name", [".gitignore", "applied/p1.patch", "history.head", "history.jsonl", "lock"])
def test_a_folder_in_the_place_of_a_file_is_named(site, rooted, name):
    rooted("apply", "p1")
    path = site / ".patchkit" / name
    path.unlink()
    path.mkdir()
    for command in COMMANDS:
        assert f"{path} is not a file" in rooted(*command, code=4).err, command


def test_a_history_that_shares_its_bytes_with_another_tree_s_grows_alone(site, rooted, tmp_path):
    """A copy of a tree made by hard links (`cp -al`)."""
    rooted("apply", "p1")
    other = tmp_path / "other.jsonl"
    os.link(site / ".patchkit/history.jsonl", other)
    before = other.read_bytes()
    rooted("restore")
    assert other.read_bytes() == before
    assert len(History(str(site)).records()) == 2
    assert History(str(site)).verify() is None
    History(str(site)).append({**record("run", []), "id": "1"})
    assert other.read_bytes() == before


def test_a_link_to_a_file_of_a_distribution_is_no_state_of_ours(site, rooted):
    """A link is refused wherever it leads: inside the root, too."""
    rooted("apply", "p1")
    (site / ".patchkit/history.jsonl").unlink()
    (site / ".patchkit/history.jsonl").symlink_to("../demopkg/util.py")
    rooted("restore", code=4)
    assert (site / "demopkg/util.py").read_bytes() == DEMO["1.0"]["demopkg/util.py"]


def test_a_file_in_the_place_of_a_folder_is_named(site, rooted):
    rooted("apply", "p1")
    (site / ".patchkit/rescued").write_bytes(b"")
    for command in COMMANDS:
        assert "rescued is not a folder" in rooted(*command, code=4).err


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_file_that_another_user_planted_does_not_steer_root(site, rooted):
    rooted("apply", "p1")
    os.chown(site / ".patchkit/state.json", 1234, 1234)
    for command in COMMANDS:
        assert "belongs to user id 1234" in rooted(*command, code=4).err
