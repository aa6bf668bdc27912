"""Paths stay below the root; fingerprints say what stands at a path."""

from __future__ import annotations

import os

import pytest

from patchkit.tree import Fingerprint, Meta, NotAFileError, Tree, UnsafePathError, fingerprint, read_xattrs


@pytest.fixture
def tree(site):
    return Tree(os.path.realpath(site))


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a/", "./a", "a\0b", "..", "."]
)
def test_a_path_that_is_not_plain_is_refused(tree, path):
    with pytest.raises(UnsafePathError):
        tree.path(path)


def test_dots_within_a_name_are_plain(tree):
    assert tree.path("demopkg/..x..py").endswith("/demopkg/..x..py")


def test_a_folder_symlink_within_the_root_is_followed_and_one_out_of_it_refused(site, tree, tmp_path):
    (site / "inside").symlink_to("demopkg")
    (site / "outside").symlink_to(tmp_path)
    assert tree.read("inside/core.py") == (site / "demopkg/core.py").read_bytes()
    with pytest.raises(UnsafePathError, match="leads out of the root"):
        tree.path("outside/x.py")


def test_a_sibling_whose_name_begins_like_the_root_is_outside(site, tree):
    sibling = site.with_name(site.name + "-other")
    sibling.mkdir()
    (site / "link").symlink_to(sibling)
    with pytest.raises(UnsafePathError):
        tree.path("link/x")


def test_reading(site, tree, tmp_path):
    assert tree.read("demopkg/nothing.py") is None
    assert tree.read("demopkg") is None
    assert tree.read("demopkg/core.py/below") is None
    (site / "link").symlink_to("demopkg/core.py")
    assert tree.read("link") == (site / "demopkg/core.py").read_bytes()
    (site / "dangling").symlink_to("nowhere")
    with pytest.raises(NotAFileError, match="dangling symlink"):
        tree.read("dangling")
    os.mkfifo(site / "pipe")
    with pytest.raises(NotAFileError, match="device, pipe or socket"):
        tree.read("pipe")


def test_fingerprints(site):
    data = (site / "demopkg/core.py").read_bytes()
    assert fingerprint(str(site / "demopkg/core.py")) == Fingerprint.of_data(data)
    assert fingerprint(str(site / "demopkg")) == Fingerprint("dir")
    assert fingerprint(str(site / "nothing")) is None
    assert fingerprint(str(site / "demopkg/core.py/x")) is None
    (site / "link").symlink_to("demopkg/core.py")
    assert fingerprint(str(site / "link")) == Fingerprint("link", target="demopkg/core.py")
    os.mkfifo(site / "pipe")
    assert fingerprint(str(site / "pipe")) == Fingerprint("other")


def test_missing_folders_come_outermost_first(tree):
    assert tree.missing_folders("demopkg/a/b/c.py") == ["demopkg/a", "demopkg/a/b"]
    assert tree.missing_folders("demopkg/core.py") == []


def test_metadata_is_that_of_the_file_a_link_leads_to(site):
    core = site / "demopkg/core.py"
    core.chmod(0o640)
    os.setxattr(core, "user.note", b"x")
    (site / "link").symlink_to(core)
    meta = Meta.of(str(site / "link"))
    assert (meta.mode, meta.mtime_ns) == (0o640, core.stat().st_mtime_ns)
    assert ("user.note", b"x") in read_xattrs(str(core))
