from __future__ import annotations

import os
import pathlib

import pytest

from patchkit.guard.places import Tree, View, source_of


@pytest.mark.parametrize(
    ("cached", "source"),
    [
        ("/a/__pycache__/m.cpython-311.pyc", "/a/m.py"),
        ("/a/__pycache__/m.cpython-311.opt-2.pyc", "/a/m.py"),
        ("/a/__pycache__/__init__.pypy39.pyc", "/a/__pycache__/__init__.pypy39.pyc"),
        ("/a/__pycache__/dotted.name.cpython-39.pyc", "/a/dotted.name.py"),
        ("__pycache__/m.cpython-311.pyc", "m.py"),
        ("/a/m.pyc", "/a/m.pyc"),
        ("/a/m.py", "/a/m.py"),
    ],
)
def test_the_source_of_a_bytecode_file(cached: str, source: str):
    assert source_of(cached) == source


def make(tmp_path: pathlib.Path) -> pathlib.Path:
    root = tmp_path / "root"
    (root / "pkg/sub").mkdir(parents=True)
    (root / "pkg/sub/m.py").write_text("a")
    return root


def test_a_path_through_links_and_dots_means_the_same_file(tmp_path: pathlib.Path):
    root = make(tmp_path)
    (tmp_path / "one").symlink_to("root")
    (tmp_path / "two").symlink_to(tmp_path / "one/pkg")
    (tmp_path / "file.py").symlink_to("two/sub/m.py")
    (tmp_path / "again.py").symlink_to(tmp_path / "file.py")
    tree = Tree(str(tmp_path / "one"), ["pkg/sub/m.py"])
    for path in (
        "root/pkg/sub/m.py",
        "one/pkg/sub/m.py",
        "two/sub/m.py",
        "file.py",
        "again.py",
        "root/pkg/../pkg/sub/./m.py",
    ):
        assert tree.match(View(), str(tmp_path / path)) == "pkg/sub/m.py", path
    assert tree.match(View(), str(tmp_path / "root/pkg/sub/other.py")) is None
    assert tree.match(View(), str(root / "pkg/m.py")) is None


def test_names_that_do_not_exist_are_placed_by_the_nearest_folder(tmp_path: pathlib.Path):
    root = make(tmp_path)
    tree = Tree(str(root), ["pkg/new/deep/m.py"])
    assert tree.match(View(), str(root / "pkg/new/deep/m.py")) == "pkg/new/deep/m.py"
    assert tree.match(View(), str(root / "pkg/other/deep/m.py")) is None


def test_a_hard_link_elsewhere_is_another_file(tmp_path: pathlib.Path):
    root = make(tmp_path)
    os.link(root / "pkg/sub/m.py", tmp_path / "m.py")
    assert Tree(str(root), ["pkg/sub/m.py"]).match(View(), str(tmp_path / "m.py")) is None


def test_a_root_that_is_not_there_matches_nothing(tmp_path: pathlib.Path):
    tree = Tree(str(tmp_path / "gone"), ["pkg/m.py"])
    assert tree.root_identity is None
    assert tree.match(View(), "/etc/passwd") is None


def test_links_that_go_round_end(tmp_path: pathlib.Path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    tree = Tree(str(tmp_path), ["a"])
    assert tree.match(View(), str(tmp_path / "b" / "c")) is None
    assert tree.match(View(), str(tmp_path / "b")) == "a"


def test_below_another_root_absolute_links_stay_inside(tmp_path: pathlib.Path):
    base = tmp_path / "container"
    (base / "data/pkg").mkdir(parents=True)
    (base / "data/pkg/m.py").write_text("a")
    (base / "app").symlink_to("/data")
    (base / "up").symlink_to("../../../../../data")
    (base / "loop").symlink_to("/loop")
    tree = Tree(str(base / "data"), ["pkg/m.py"])
    view = View(str(base))
    for path in ("/data/pkg/m.py", "/app/pkg/m.py", "/up/pkg/m.py", "/app/../app/pkg/./m.py"):
        assert tree.match(view, path) == "pkg/m.py", path
    assert tree.match(view, "/loop/pkg/m.py") is None
    assert tree.match(View(), "/app/pkg/m.py") is None


def test_paths_that_no_file_system_has(tmp_path: pathlib.Path):
    tree = Tree(str(make(tmp_path)), ["pkg/sub/m.py"])
    for path in ("/", "/a\0b/m.py", "/" + "x" * 5000 + "/m.py", "/m.py/", "<frozen importlib>", ""):
        assert tree.match(View(), path) is None


def test_the_venv_around_a_root_is_found(tmp_path: pathlib.Path):
    site = tmp_path / "venv/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text("")
    tree = Tree(str(site), ["m.py"])
    assert tree.prefix == str(tmp_path / "venv")
    assert tree.is_venv
    assert not Tree(str(tmp_path), ["m.py"]).prefix


@pytest.mark.parametrize(
    "tail", ["pkg/sub/m.py", "./pkg/sub/m.py", "sub/m.py", "m.py", "sub/__pycache__/m.cpython-39.pyc"]
)
def test_a_relative_path_that_may_be_the_file(tmp_path: pathlib.Path, tail: str):
    tree = Tree(str(make(tmp_path)), ["pkg/sub/m.py"])
    assert tree.ends_like(tail) == "pkg/sub/m.py"
    assert tree.ends_like("x" + tail) is None
