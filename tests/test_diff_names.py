"""Quoting goes both ways, for every byte that a file name can hold."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, strategies as st

from patchkit.diff import names

name = st.binary(min_size=1, max_size=20).filter(lambda data: b"\0" not in data)


@given(name)
def test_a_quoted_name_unquotes_to_itself(data):
    quoted = names.quote(data)
    assert (names.unquote(quoted[1:-1]) if quoted.startswith(b'"') else quoted) == data
    assert b"\n" not in quoted


def test_names_are_quoted_as_git_quotes_them(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for byte in range(1, 256):
        if byte != ord("/"):
            path = bytes(tmp_path) + b"/x" + bytes([byte]) + b"y"
            with open(path, "wb"):
                pass
    listed = subprocess.run(
        ["git", "-c", "core.quotePath=true", "ls-files", "--others"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    ).stdout
    ours = {names.quote(b"x" + bytes([byte]) + b"y") for byte in range(1, 256) if byte != ord("/")}
    assert ours == set(listed.removesuffix(b"\n").split(b"\n"))


@given(st.text(max_size=20))
def test_a_shown_path_is_one_line_of_ascii(text):
    shown = names.show(text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape"))
    assert shown.isascii()
    assert "\n" not in shown


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/x",
        "../x",
        "a/../x",
        "a//b",
        "a/",
        "./a",
        "a\0b",
        ".patchkit/x",
        ".GIT/x",
        "x" * 256,
        "x/" * 2048 + "y",
    ],
)
def test_paths_that_are_not_plain_are_refused(path):
    with pytest.raises(ValueError):  # noqa: PT011 (the reason is for people)
        names.check_path(path)


@pytest.mark.parametrize(
    "path", ["a", "a/b", ".github/x", "a b", "a\\b", "-x", "...", "a\udcff", ".gitignore"]
)
def test_plain_paths_pass(path):
    names.check_path(path)


def test_a_line_of_endless_names_is_refused_at_once():
    with pytest.raises(ValueError, match="too long"):
        names.git_pairs(b"a " * 1_000_000)
