"""Diffs are written as git writes them, the same bytes every time, and small for small edits."""

from __future__ import annotations

import random
import subprocess

import pytest

from patchkit import diff as d
from patchkit.diff import comparison
from patchkit.diff.model import Content, Diff

SOURCE = b"import os\n\n\ndef first():\n    return 1\n\n\ndef second():\n    x = 1\n    y = 2\n    z = 3\n    return x\n"


def written(
    old: Content | None, new: Content | None, path: str = "pkg/f.py", source: str | None = None
) -> bytes:
    section = d.compare(path, old, new, source=source)
    assert section is not None
    return d.render(Diff("p", (section,)))


def test_an_edit_reads_as_git_would_write_it(tmp_path):
    new = SOURCE.replace(b"return x", b"return y")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/f.py").write_bytes(SOURCE)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    (tmp_path / "pkg/f.py").write_bytes(new)
    command = ["git", "diff", "--full-index"]
    theirs = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
    # But for the mode that git repeats where it does not change.
    assert written(Content(SOURCE, 0o644), Content(new, 0o644)) == theirs.replace(b" 100644\n", b"\n")


@pytest.mark.parametrize(
    ("old", "new"), [(SOURCE, SOURCE), (b"", b""), (b"\0", b"\0")], ids=["text", "empty", "binary"]
)
def test_no_change_is_no_section(old, new):
    assert d.compare("f", Content(old, 0o644), Content(new, 0o664)) is None
    assert d.compare("f", None, None) is None


def test_only_the_execute_bit_of_a_mode_counts():
    section = d.compare("f", Content(SOURCE, 0o664), Content(SOURCE, 0o775))
    assert section is not None
    assert (section.old_mode, section.new_mode, section.hunks) == (0o644, 0o755, ())


def test_names_with_spaces_end_with_a_tab_and_odd_ones_are_quoted():
    old, new = Content(b"a\n", 0o644), Content(b"b\n", 0o644)
    assert b"--- a/x y\t\n+++ b/x y\t\n" in written(old, new, "x y")
    assert b'--- "a/\\303\\251\\n"\n' in written(old, new, "\u00e9\n")


def test_a_rename_without_edits_is_three_lines():
    content = Content(SOURCE, 0o644)
    assert written(content, content, "g", "f") == b"diff --git a/g b/g\n".replace(b"a/g", b"a/f") + (
        b"rename from f\nrename to g\n"
    )


def test_an_inserted_function_is_one_hunk_of_added_lines():
    body = b"".join(b"def f%d(x):\n    y = x\n    return y\n\n" % number for number in range(30))
    new = body.replace(b"def f15(x):", b"def new(x):\n    y = x\n    return y\n\ndef f15(x):")
    (hunk,) = comparison.hunks(body, new)
    assert [entry[:1] for entry in hunk.body if entry[:1] != b" "] == [b"+"] * 4


@pytest.mark.parametrize("seed", range(5))
def test_a_text_without_unique_lines_still_comes_out_right(seed):
    chance = random.Random(seed)
    old, new = (
        b"".join(chance.choice([b"a\n", b"b\n", b"\n"]) for _ in range(chance.randrange(400)))
        for _ in range(2)
    )
    patch = written(Content(old, 0o644), Content(new, 0o644), "f")
    assert d.apply(d.parse(patch), {"f": Content(old, 0o644)}.get) == {"f": Content(new, 0o644)}


def test_two_long_texts_without_a_line_in_common_are_replaced_whole():
    old, new = b"a\n" * 5000 + b"x\n", b"b\n" * 5000 + b"y\n"
    (hunk,) = comparison.hunks(old, new)
    assert (hunk.old_count, hunk.new_count) == (5001, 5001)


def test_what_is_written_is_the_same_twice():
    old, new = Content(SOURCE, 0o644), Content(SOURCE[::-1], 0o755)
    assert written(old, new) == written(old, new)
