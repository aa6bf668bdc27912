"""What is accepted, byte for byte, and what is refused, with the line that is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from patchkit import diff as d
from patchkit.diff import errors as e
from patchkit.diff.model import Content


def tree(**files: bytes) -> dict[str, Content]:
    """Files by name, ``__`` for ``/`` and ``_`` for ``.`` before the suffix."""
    return {name.replace("__", "/"): Content(data, 0o644) for name, data in files.items()}


def applied(patch: bytes, files: dict[str, Content], strip: int = 1) -> dict[str, Content]:
    """The tree after the patch, having also gone back from it to the tree before."""
    parsed = d.parse(patch, name="p.patch", strip=strip)
    result = d.apply(parsed, files.get)
    after = {path: content for path, content in {**files, **result}.items() if content is not None}
    undone = {**after, **d.apply(d.reverse(parsed), after.get)}
    assert {path: content for path, content in undone.items() if content is not None} == files
    return after


def refused(patch: bytes, files: dict[str, Content] | None = None, strip: int = 1) -> d.DiffError:
    with pytest.raises(d.DiffError) as caught:
        d.apply(d.parse(patch, name="p.patch", strip=strip), (files or {}).get)
    error = caught.value
    assert error.exit_code == 4
    assert error.path == f"p.patch:{error.line}"
    assert str(error).startswith(error.path)
    assert "\n" not in str(error)
    return error


ABC = b"a\nb\nc\n"
HEAD = b"--- a/f\n+++ b/f\n"
GIT = b"diff --git a/f b/f\n"


# -- accepted -------------------------------------------------------------------------------------


def test_a_plain_diff_changes_the_named_line():
    assert applied(HEAD + b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n", tree(f=ABC)) == tree(f=b"a\nB\nc\n")


def test_time_stamps_of_plain_diffs_are_read_past():
    patch = (
        b"diff -ruN old/f new/f\n--- old/f\t2026-01-02 03:04:05.123456789 +0100\n"
        b"+++ new/f\t2026-01-02 03:04:06.123456789 +0100\n@@ -2 +2 @@\n-b\n+B\n"
    )
    assert applied(patch, tree(f=ABC)) == tree(f=b"a\nB\nc\n")


@pytest.mark.parametrize(
    "stamp",
    [
        b"",
        b"\t1970-01-01 00:00:00.000000000 +0000",
        b"\t1969-12-31 19:00:00.000000000 -0500",
        b"\t2026-01-02 03:04:05 +0000",
    ],
)
def test_a_file_that_only_the_hunk_header_says_is_new_is_new(stamp):
    patch = b"--- old/n" + stamp + b"\n+++ new/n\n@@ -0,0 +1,2 @@\n+x\n+y\n"
    assert d.parse(patch).files[0].change == "add"
    assert applied(patch, {}) == tree(n=b"x\ny\n")


@pytest.mark.parametrize(
    "stamp", [b"1970-01-01 00:00:00.000000000 +0000", b"1970-01-01 08:00:00.000000000 +0800"]
)
def test_a_file_dated_to_the_epoch_is_deleted(stamp):
    patch = b"--- old/f\t2026-01-01 00:00:00\n+++ new/f\t" + stamp + b"\n@@ -1,3 +0,0 @@\n-a\n-b\n-c\n"
    assert applied(patch, tree(f=ABC)) == {}


def test_a_plain_diff_may_empty_a_file_without_deleting_it():
    patch = HEAD + b"@@ -1,3 +0,0 @@\n-a\n-b\n-c\n"
    assert d.apply(d.parse(patch), tree(f=ABC).get) == tree(f=b"")


def test_dev_null_creates_and_deletes():
    create = b"--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
    delete = b"--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert applied(create, {}) == tree(n=b"x\n")
    assert applied(delete, tree(n=b"x\n")) == {}


@pytest.mark.parametrize("names", [(b"f.orig", b"f"), (b"f~", b"f"), (b"f.bak", b"f")])
def test_a_diff_against_a_backup_patches_the_file(names):
    patch = b"--- x/%s\n+++ x/%s\n@@ -2 +2 @@\n-b\n+B\n" % names
    assert applied(patch, tree(f=ABC)) == tree(f=b"a\nB\nc\n")


def test_no_context_at_all_inserts_and_deletes_at_the_named_place():
    files = tree(f=b"1\n2\n3\n4\n")
    assert applied(HEAD + b"@@ -2,0 +3 @@\n+x\n", files) == tree(f=b"1\n2\nx\n3\n4\n")
    assert applied(HEAD + b"@@ -0,0 +1 @@\n+x\n@@ -4 +4,0 @@\n-4\n", files) == tree(f=b"x\n1\n2\n3\n")


def test_uneven_context_six_lines_above_and_three_below_is_no_end_of_file():
    lines = [b"%d\n" % n for n in range(20)]
    body = b"".join(b" " + line for line in lines[4:10]) + b"-10\n+ten\n"
    body += b"".join(b" " + line for line in lines[11:14])
    want = [*lines[:10], b"ten\n", *lines[11:]]
    assert applied(HEAD + b"@@ -5,10 +5,10 @@\n" + body, tree(f=b"".join(lines))) == tree(f=b"".join(want))


def test_hunks_out_of_order_are_applied_where_they_say():
    lines = [b"%d\n" % n for n in range(1, 10)]
    patch = HEAD + b"@@ -8 +9 @@\n-8\n+eight\n@@ -2 +2,2 @@\n-2\n+two\n+and\n"
    want = b"1\ntwo\nand\n3\n4\n5\n6\n7\neight\n9\n"
    assert applied(patch, tree(f=b"".join(lines))) == tree(f=want)


def test_adjacent_hunks_do_not_overlap():
    patch = HEAD + b"@@ -1 +1 @@\n-a\n+A\n@@ -2 +2 @@\n-b\n+B\n"
    assert applied(patch, tree(f=ABC)) == tree(f=b"A\nB\nc\n")


def test_an_insertion_beside_a_change_keeps_its_side():
    patch = HEAD + b"@@ -1,0 +2 @@\n+x\n@@ -2 +3 @@\n-b\n+B\n"
    assert applied(patch, tree(f=ABC)) == tree(f=b"a\nx\nB\nc\n")


def test_equal_text_elsewhere_attracts_no_hunk():
    block = b"begin\nx\nend\n"
    patch = HEAD + b"@@ -7,3 +7,3 @@\n begin\n-x\n+y\n end\n"
    assert applied(patch, tree(f=block * 4)) == tree(f=block * 2 + b"begin\ny\nend\n" + block)


@pytest.mark.parametrize("unfinished", [False, True])
def test_every_line_of_a_long_file_is_found_where_it_is(unfinished):
    lines = [b"%d" % number + b"." * (number * 7 % 90) + b"\n" for number in range(1, 40_001)]
    if unfinished:
        lines[-1] = lines[-1][:-1]
    old = b"".join(lines)
    for number in [*range(1, 30), *range(500, 40_000, 1999), 39_998, 39_999, 40_000]:
        entry = lines[number - 1]
        mark = b"" if entry.endswith(b"\n") else b"\n" + MARK
        patch = HEAD + b"@@ -%d +%d @@\n-%s%s+!%s%s" % (number, number, entry, mark, entry, mark)
        want = b"".join([*lines[: number - 1], b"!" + entry, *lines[number:]])
        assert d.apply(d.parse(patch), tree(f=old).get) == tree(f=want)
    assert isinstance(refused(HEAD + b"@@ -40001 +40001 @@\n-x\n+y\n", tree(f=old)), e.MismatchError)


@pytest.mark.parametrize(
    "odd",
    [b"x\x0cy", b"x\xc2\x85y", b"x\xe2\x80\xa8y", b"x\rz", b"\xff\xfe\x80", b"", b"\\ No newline", b"-- q"],
)
def test_only_a_newline_ends_a_line(odd):
    patch = HEAD + b"@@ -1,3 +1,3 @@\n " + odd + b"\n-" + odd + b"\n+" + odd + b"!\n c\n"
    files = tree(f=odd + b"\n" + odd + b"\nc\n")
    assert applied(patch, files) == tree(f=odd + b"\n" + odd + b"!\nc\n")


def test_crlf_files_keep_their_line_ends():
    patch = HEAD + b"@@ -1,2 +1,2 @@ def f():\r\n a\r\n-b\r\n+B\r\n"
    assert applied(patch, tree(f=b"a\r\nb\r\n")) == tree(f=b"a\r\nB\r\n")


def test_removed_and_added_lines_may_look_like_headers():
    patch = HEAD + b"@@ -1,2 +1,2 @@\n--- a/x\n+++ b/x\n @@ -1 +1 @@\n"
    assert applied(patch, tree(f=b"-- a/x\n@@ -1 +1 @@\n")) == tree(f=b"++ b/x\n@@ -1 +1 @@\n")


MARK = b"\\ No newline at end of file\n"


@pytest.mark.parametrize(
    ("body", "old", "new"),
    [
        (b"@@ -1,2 +1,2 @@\n-a\n+A\n b\n" + MARK, b"a\nb", b"A\nb"),
        (b"@@ -1,2 +1,2 @@\n a\n-b\n+b\n" + MARK, b"a\nb\n", b"a\nb"),
        (b"@@ -1,2 +1,2 @@\n a\n-b\n" + MARK + b"+b\n", b"a\nb", b"a\nb\n"),
        (b"@@ -1,2 +1,2 @@\n a\n-b\n" + MARK + b"+B\n" + MARK, b"a\nb", b"a\nB"),
        (b"@@ -1,2 +1,2 @@\n a\n+B\n" + MARK + b"-b\n" + MARK, b"a\nb", b"a\nB"),
        (b"@@ -1,2 +1 @@\n a\n-b\n\\ Kein Zeilenumbruch am Dateiende.\n", b"a\nb", b"a\n"),
    ],
)
def test_a_missing_last_newline_is_kept_added_and_removed(body, old, new):
    assert applied(HEAD + body, tree(f=old)) == tree(f=new)


def test_an_empty_context_line_may_have_lost_its_space():
    patch = HEAD + b"@@ -1,3 +1,3 @@\n a\n\n-c\n+C\n"
    assert applied(patch, tree(f=b"a\n\nc\n")) == tree(f=b"a\n\nC\n")


def test_empty_files_come_and_go():
    new = GIT + b"new file mode 100644\nindex 0000000..e69de29\n"
    gone = GIT + b"deleted file mode 100644\nindex e69de29..0000000\n"
    assert applied(new, {}) == tree(f=b"")
    assert applied(gone, tree(f=b"")) == {}


def test_an_empty_file_filled_is_changed_not_created():
    patch = GIT + b"index e69de29..587be6b 100644\n--- a/f\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"
    assert d.parse(patch).files[0].change == "modify"
    assert applied(patch, tree(f=b"")) == tree(f=b"x\n")


def test_a_plain_diff_fills_an_empty_file():
    assert d.apply(d.parse(HEAD + b"@@ -0,0 +1 @@\n+x\n"), tree(f=b"").get) == tree(f=b"x\n")


def test_a_rename_without_and_with_edits():
    plain = b"diff --git a/f b/g\nsimilarity index 100%\nrename from f\nrename to g\n"
    edits = plain.replace(b"100", b"66") + b"--- a/f\n+++ b/g\n@@ -2 +2 @@\n-b\n+B\n"
    assert applied(plain, tree(f=ABC)) == tree(g=ABC)
    assert applied(edits, tree(f=ABC)) == tree(g=b"a\nB\nc\n")
    file = d.parse(edits).files[0]
    assert (file.change, file.source, file.path) == ("rename", "f", "g")


def test_a_rename_is_stripped_like_its_header():
    patch = (
        b"diff --git a/python/x/f b/python/x/g\nsimilarity index 100%\n"
        b"rename from python/x/f\nrename to python/x/g\n"
    )
    assert d.parse(patch, strip=2).files[0].path == "x/g"
    assert d.parse(patch, strip=2).files[0].source == "x/f"
    bare = patch.replace(b"a/", b"").replace(b"b/", b"")
    assert d.parse(bare, strip=0).files[0].path == "python/x/g"
    assert d.parse(bare, strip=1).files[0].path == "x/g"


def test_a_mode_change_alone_and_with_edits():
    mode = GIT + b"old mode 100644\nnew mode 100755\n"
    edit = mode + b"--- a/f\n+++ b/f\n@@ -2 +2 @@\n-b\n+B\n"
    assert applied(mode, tree(f=ABC)) == {"f": Content(ABC, 0o755)}
    assert applied(edit, tree(f=ABC)) == {"f": Content(b"a\nB\nc\n", 0o755)}


def test_a_file_keeps_the_mode_that_no_line_changes():
    files = {"f": Content(ABC, 0o664)}
    assert d.apply(d.parse(GIT + HEAD + b"@@ -2 +2 @@\n-b\n+B\n"), files.get)["f"] == Content(
        b"a\nB\nc\n", 0o664
    )


def test_a_new_file_has_the_stated_mode_or_0644():
    stated = GIT + b"new file mode 100755\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"
    assert d.apply(d.parse(stated), {}.get) == {"f": Content(b"x\n", 0o755)}
    assert d.apply(d.parse(b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"), {}.get) == {
        "f": Content(b"x\n", 0o644)
    }


NAMES = [
    (b"a b c", b"diff --git a/a b c b/a b c\n--- a/a b c\t\n+++ b/a b c\t\n", "a b c"),
    (b"tab", b'diff --git "a/t\\tb" "b/t\\tb"\n--- "a/t\\tb"\n+++ "b/t\\tb"\n', "t\tb"),
    (b"quote", b'diff --git "a/q\\"\\\\" "b/q\\"\\\\"\n--- "a/q\\"\\\\"\n+++ "b/q\\"\\\\"\n', 'q"\\'),
    (b"unicode", b'diff --git "a/\\303\\251" "b/\\303\\251"\n--- "a/\\303\\251"\n+++ "b/\\303\\251"\n', "é"),
    (b"raw", "diff --git a/é b/é\n--- a/é\n+++ b/é\n".encode(), "é"),
    (b"latin", b"--- a/\xe9\n+++ b/\xe9\n", "\udce9"),
    (b"newline", b'--- "a/x\\ny"\n+++ "b/x\\ny"\n', "x\ny"),
]


@pytest.mark.parametrize(("_", "header", "path"), NAMES, ids=[name[0].decode() for name in NAMES])
def test_names_are_unquoted(_, header, path):
    files = {path: Content(ABC, 0o644)}
    assert applied(header + b"@@ -2 +2 @@\n-b\n+B\n", files) == {path: Content(b"a\nB\nc\n", 0o644)}


def test_a_name_with_spaces_is_found_without_a_header_of_its_own():
    patch = b"diff --git a/x b/y b/x b/y\nold mode 100644\nnew mode 100755\n"
    assert d.parse(patch).files[0].path == "x b/y"


def test_a_mail_from_format_patch_may_surround_the_sections():
    patch = (
        b"From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\n"
        b"Subject: [PATCH] x\n\n--- a word\nbody\n---\n f | 2 +-\n 1 file changed\n\n"
        + GIT
        + HEAD
        + b"@@ -2 +2 @@\n-b\n+B\n-- \n2.39.5\n\n"
    )
    assert applied(patch, tree(f=ABC)) == tree(f=b"a\nB\nc\n")


def test_a_second_section_may_continue_the_first():
    one = GIT + b"index aaaaaaa..bbbbbbb 100644\n" + HEAD + b"@@ -2 +2 @@\n-b\n+B\n"
    two = GIT + b"index bbbbbbb..ccccccc 100644\n" + HEAD + b"@@ -2 +2,2 @@\n-B\n+BB\n+x\n"
    assert applied(one + two, tree(f=ABC)) == tree(f=b"a\nBB\nx\nc\n")


def test_a_file_may_make_way_for_a_folder():
    patch = (
        GIT + b"deleted file mode 100644\n--- a/f\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-a\n-b\n-c\n"
        b"diff --git a/f/g b/f/g\nnew file mode 100644\n--- /dev/null\n+++ b/f/g\n@@ -0,0 +1 @@\n+x\n"
    )
    assert applied(patch, tree(f=ABC)) == {"f/g": Content(b"x\n", 0o644)}


# -- refused --------------------------------------------------------------------------------------

EDIT = b"@@ -2 +2 @@\n-b\n+B\n"


@pytest.mark.parametrize(
    "name",
    [
        b"../f",
        b"a/../f",
        b"a/../../etc/passwd",
        b"/etc/passwd",
        b"a//f",
        b"a/./f",
        b"a/",
        b"f",
        b"a/.patchkit/state.json",
        b"a/.git/config",
    ],
)
def test_paths_outside_the_root_are_refused(name):
    error = refused(b"--- %s\n+++ %s\n" % (name, name) + EDIT)
    assert isinstance(error, e.UnsafePathError)
    assert error.line == 1


def test_climbing_out_by_a_rename_is_refused():
    patch = b"diff --git a/f b/../g\nsimilarity index 100%\nrename from f\nrename to ../g\n"
    assert isinstance(refused(patch, tree(f=ABC)), e.UnsafePathError)


def test_a_nul_in_a_quoted_name_is_refused():
    assert "NUL" in str(refused(b'--- "a/x\\000y"\n+++ "b/x\\000y"\n' + EDIT))


@pytest.mark.parametrize("name", [b'"a/x', b'"a/\\q"', b'"a/x"y'])
def test_broken_quoting_is_refused(name):
    assert isinstance(refused(b"--- %s\n+++ %s\n" % (name, name) + EDIT), e.MalformedDiffError)


@pytest.mark.parametrize(
    "head", [b"--- /dev/null\n+++ b/f\n", GIT + b"new file mode 100644\n--- /dev/null\n+++ b/f\n"]
)
def test_creating_over_an_existing_file_is_refused(head):
    error = refused(head + b"@@ -0,0 +1 @@\n+x\n", tree(f=ABC))
    assert isinstance(error, e.TargetExistsError)
    assert error.file == "f"


def test_creating_an_empty_file_over_an_empty_file_is_refused():
    assert isinstance(refused(GIT + b"new file mode 100644\n", tree(f=b"")), e.TargetExistsError)


def test_renaming_onto_an_existing_file_is_refused():
    patch = b"diff --git a/f b/g\nsimilarity index 100%\nrename from f\nrename to g\n"
    assert isinstance(refused(patch, tree(f=ABC, g=ABC)), e.TargetExistsError)


def test_a_file_below_a_file_is_refused():
    patch = HEAD + EDIT + b"--- /dev/null\n+++ b/f/g\n@@ -0,0 +1 @@\n+x\n"
    assert isinstance(refused(patch, tree(f=ABC)), e.PathCollisionError)


@pytest.mark.parametrize(
    "patch",
    [
        HEAD + EDIT,
        GIT + b"deleted file mode 100644\n",
        b"diff --git a/f b/g\nrename from f\nrename to g\n",
        GIT + b"old mode 100644\nnew mode 100755\n",
    ],
)
def test_a_missing_file_is_refused(patch):
    assert isinstance(refused(patch), e.TargetMissingError)


def test_deleting_more_or_less_than_the_file_is_refused():
    patch = b"--- a/f\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-a\n-b\n-c\n"
    assert isinstance(refused(patch, tree(f=ABC + b"more\n")), e.MismatchError)
    assert isinstance(refused(patch, tree(f=b"a\nb\n")), e.MismatchError)
    assert isinstance(refused(GIT + b"deleted file mode 100644\n", tree(f=ABC)), e.MismatchError)


@pytest.mark.parametrize(
    ("data", "patch_line", "target_line"),
    [
        (b"a\nX\nc\n", 5, 2),
        (b"X\nb\nc\n", 4, 1),
        (b"a\nb\nX\n", 7, 3),
        (b"a\nb\n", 7, 3),
        (b"", 4, 1),
        (b"a\nb\nc", 7, 3),
        (b"a\r\nb\nc\n", 4, 1),
        (b"a \nb\nc\n", 4, 1),
    ],
)
def test_a_mismatch_names_the_line_of_the_patch_and_of_the_file(data, patch_line, target_line):
    error = refused(HEAD + b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n", tree(f=data))
    assert isinstance(error, e.MismatchError)
    assert (error.line, error.target_line) == (patch_line, target_line)
    assert f"f:{target_line}" in str(error)


def test_a_hunk_that_says_line_17_never_lands_on_line_12():
    lines = [b"%d\n" % n for n in range(1, 31)]
    lines[11] = b"target\n"
    patch = HEAD + b"@@ -17 +17 @@\n-target\n+hit\n"
    error = refused(patch, tree(f=b"".join(lines)))
    assert isinstance(error, e.MismatchError)
    assert error.target_line == 17


@pytest.mark.parametrize("start", [5, 9, 10**9])
def test_a_hunk_below_the_end_of_the_file_is_refused(start):
    assert isinstance(
        refused(HEAD + b"@@ -%d +%d @@\n-b\n+B\n" % (start, start), tree(f=ABC)), e.MismatchError
    )
    insertion = HEAD + b"@@ -%d,0 +%d @@\n+B\n" % (start, start + 1)
    assert isinstance(refused(insertion, tree(f=ABC)), e.MismatchError)


def test_nothing_is_glued_to_a_last_line_without_newline():
    assert isinstance(refused(HEAD + b"@@ -2,0 +3 @@\n+x\n", tree(f=b"a\nb")), e.MismatchError)


def test_a_line_without_newline_must_be_the_last_of_the_file():
    error = refused(HEAD + b"@@ -1 +1 @@\n-a\n+A\n" + MARK, tree(f=ABC))
    assert isinstance(error, e.MismatchError)
    assert isinstance(refused(HEAD + b"@@ -1 +1 @@\n-a\n" + MARK + b"+A\n", tree(f=ABC)), e.MismatchError)


def test_a_block_that_ends_inside_a_line_does_not_match():
    assert isinstance(
        refused(HEAD + b"@@ -1 +1 @@\n-a\n" + MARK + b"+A\n" + MARK, tree(f=b"ab")), e.MismatchError
    )


@pytest.mark.parametrize(
    "shift", [tuple(by * (place == at) for at in range(4)) for place in range(4) for by in (1, -1)]
)
def test_each_number_of_a_hunk_header_must_be_right(shift):
    numbers = tuple(number + by for number, by in zip((3, 3, 3, 3), shift, strict=True))
    patch = HEAD + b"@@ -%d,%d +%d,%d @@\n" % numbers + b" 3\n-4\n+four\n 5\n"
    error = refused(patch, tree(f=b"1\n2\n3\n4\n5\n6\n"))
    assert error.line == 3


def test_a_count_that_is_too_small_for_a_real_body_is_told_with_both_numbers():
    patch = b"--- /dev/null\n+++ b/n\n@@ -0,0 +1,54 @@\n" + b"+x\n" * 58
    error = refused(patch)
    assert isinstance(error, e.MiscountedHunkError)
    assert "+1,54" in str(error)
    assert "58" in str(error)


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_truncated_hunk_is_refused(cut):
    whole = HEAD + b"@@ -1,4 +1,4 @@\n a\n-b\n+B\n c\n-d\n+D\n"
    assert applied(whole, tree(f=b"a\nb\nc\nd\n")) == tree(f=b"a\nB\nc\nD\n")
    lines = whole.splitlines(keepends=True)
    assert isinstance(refused(b"".join(lines[: len(lines) - cut]), tree(f=b"a\nb\nc\nd\n")), d.DiffError)


def test_a_patch_cut_inside_its_last_line_is_refused():
    error = refused(HEAD + b"@@ -2 +2 @@\n-b\n+Bett", tree(f=ABC))
    assert "cut short" in str(error)


def test_a_signature_may_lack_its_last_newline():
    patch = GIT + HEAD + EDIT + b"-- \n2.39.5"
    assert applied(patch, tree(f=ABC)) == tree(f=b"a\nB\nc\n")


@pytest.mark.parametrize("line", [b"Only in new: my file\n", b"Only in new/x: y\n"])
@pytest.mark.parametrize("first", [False, True])
def test_a_file_that_the_diff_only_mentions_is_refused(line, first):
    section = HEAD + EDIT
    error = refused(line + section if first else section + line, tree(f=ABC))
    assert isinstance(error, e.UnsupportedDiffError)
    assert "diff -ruN" in str(error)


def test_a_hunk_without_a_change_is_refused():
    assert isinstance(refused(HEAD + b"@@ -1,3 +1,3 @@\n a\n b\n c\n", tree(f=ABC)), e.MalformedDiffError)


@pytest.mark.parametrize(
    "hunks",
    [
        b"@@ -1,2 +1,2 @@\n-a\n+A\n b\n@@ -2,2 +2,2 @@\n b\n-c\n+C\n",
        b"@@ -2 +2 @@\n-b\n+B\n@@ -2 +2 @@\n-b\n+B\n",
        b"@@ -2,0 +3 @@\n+x\n@@ -2,0 +4 @@\n+y\n",
    ],
)
def test_hunks_that_overlap_are_refused(hunks):
    assert isinstance(refused(HEAD + hunks, tree(f=ABC)), e.OverlappingHunksError)


@pytest.mark.parametrize("marker", [b"<<<<<<< HEAD\n", b"<<<<<<<\n"])
def test_conflict_markers_together_are_refused(marker):
    body = b"+" + marker + b"+x\n+=======\n+y\n+>>>>>>> theirs\n"
    error = refused(HEAD + b"@@ -1,0 +2,5 @@\n" + body, tree(f=ABC))
    assert isinstance(error, e.ConflictMarkersError)
    assert error.line == 4


def test_one_marker_alone_is_an_underline():
    patch = HEAD + b"@@ -1,0 +2,2 @@\n+=======\n+>>>>>>> quoted\n"
    assert applied(patch, tree(f=ABC)) == tree(f=b"a\n=======\n>>>>>>> quoted\nb\nc\n")


def test_conflict_markers_are_seen_across_hunks():
    patch = HEAD + b"@@ -1,0 +2 @@\n+<<<<<<< a\n@@ -2,0 +4 @@\n+=======\n@@ -3,0 +6 @@\n+>>>>>>> b\n"
    assert isinstance(refused(patch, tree(f=ABC)), e.ConflictMarkersError)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n\n", b"hello\nworld\n", b"\x7fELF\x00\x01", b"<html>404</html>\n", b"From: x\n\n-- \n2.3\n"],
)
def test_what_is_not_a_patch_is_refused(data):
    assert isinstance(refused(data), e.NotADiffError)


@pytest.mark.parametrize(
    "tail",
    [
        b"garbage\n",
        b"+extra\n",
        b"-extra\n",
        b" extra\n",
        b"@@ -9 +9 @@ x\n",
        b"@@ broken @@\n",
        b"+++ b/g\n",
        b"--- a/g\n",
        b"new file mode 100644\n",
        b"index aaaaaaa..bbbbbbb\n",
        b"Only in b: x\n",
        b"Binary files a/x and b/x differ\n",
    ],
)
def test_text_between_sections_is_refused(tail):
    error = refused(GIT + HEAD + EDIT + tail, tree(f=ABC))
    assert error.line in (4, 7)


@pytest.mark.parametrize(
    "section",
    [
        b"new file mode 100644\nnew file mode 100644\n",
        b"old mode 100644\n",
        b"new mode 100755\nold mode 100644\n",
        b"old mode 100644\nnew mode 100644\n",
        b"old mode 100644\nnew mode 100645\n",
        b"rename from f\n",
        b"rename to g\nrename from f\n",
        b"similarity index 100%\n",
        b"similarity index 101%\nrename from f\nrename to g\n",
        b"index zzzzzzz..aaaaaaa\n",
        b"new file mode 100644\ndeleted file mode 100644\n",
        b"deleted file mode 100644\nnew file mode 100644\n",
        b"new file mode 100644\n" + HEAD + EDIT,
        b"new file mode 100644\n--- /dev/null\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n",
        b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n",
        b"--- a/f\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-a\n-b\n-c\n",
        b"--- a/g\n+++ b/g\n" + EDIT,
        b"--- a/f\n+++ b/g\n" + EDIT,
        b"index aaaaaaa..bbbbbbb 100644\n",
        b"",
        HEAD,
        b"rename from f\nrename to f\n",
    ],
)
def test_a_section_that_contradicts_itself_is_refused(section):
    assert isinstance(refused(GIT + section, tree(f=ABC)), e.MalformedDiffError)


@pytest.mark.parametrize(
    "section",
    [
        b"new file mode 120000\n",
        b"new file mode 160000\n",
        b"old mode 100644\nnew mode 120000\n",
        b"index aaaaaaa..bbbbbbb 160000\n" + HEAD + EDIT,
        b"similarity index 90%\ncopy from f\ncopy to g\n",
        b"index aaaaaaa..bbbbbbb 100644\nBinary files a/f and b/f differ\n",
        b"index aaaaaaa..bbbbbbb 100644\nGIT binary patch\nliteral 0\nHcmV?d00001\n\n",
    ],
)
def test_links_submodules_copies_and_binary_without_data_are_refused(section):
    error = refused(GIT + section, tree(f=ABC))
    assert isinstance(error, e.UnsupportedDiffError)
    assert error.hint


def test_the_combined_diff_of_a_merge_is_refused():
    assert isinstance(refused(b"diff --cc f\n--- a/f\n+++ b/f\n@@@ -1,1 -1,1 +1,1 @@@\n- a\n"), d.DiffError)


def test_a_patch_whose_own_lines_became_crlf_is_refused_as_such():
    patch = (GIT + HEAD + EDIT).replace(b"\n", b"\r\n")
    assert "CRLF" in str(refused(patch, tree(f=ABC)))


def test_a_file_twice_is_refused_unless_the_second_continues_the_first():
    one = GIT + b"index aaaaaaa..bbbbbbb 100644\n" + HEAD + EDIT
    other = GIT + b"index aaaaaaa..ccccccc 100644\n" + HEAD + b"@@ -3 +3 @@\n-c\n+C\n"
    assert isinstance(refused(one + other, tree(f=ABC)), e.PathCollisionError)
    assert isinstance(refused(one + one, tree(f=ABC)), e.DiffError)


@pytest.mark.parametrize("pair", [("f", "F"), ("x/f", "X/g"), ("\u00e9", "e\u0301")])
def test_paths_that_some_file_systems_take_for_one_are_refused(pair):
    patch = b"".join(b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n" % path.encode() for path in pair)
    assert isinstance(refused(patch), e.PathCollisionError)


def test_the_execute_bit_must_be_what_the_diff_says_it_was():
    files = {"f": Content(ABC, 0o755)}
    assert isinstance(refused(GIT + b"old mode 100644\nnew mode 100755\n", files), e.MismatchError)


def test_a_patch_over_64_mib_is_refused():
    patch = b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+" + b"x" * (64 << 20) + b"\n"
    assert isinstance(refused(patch), e.DiffTooLargeError)


def test_nothing_is_returned_when_the_last_section_fails():
    patch = HEAD + EDIT + b"--- a/g\n+++ b/g\n" + EDIT
    assert isinstance(refused(patch, tree(f=ABC)), e.TargetMissingError)


def test_the_line_of_a_later_section_is_named():
    error = refused(HEAD + EDIT + b"--- a/g\n+++ b/g\n" + EDIT, tree(f=ABC))
    assert error.line == 6


def test_a_huge_hunk_number_is_a_clear_refusal():
    assert isinstance(
        refused(HEAD + b"@@ -99999999999999 +1 @@\n-b\n+B\n", tree(f=ABC)), e.MalformedDiffError
    )
    assert isinstance(refused(HEAD + b"@@ -1,999999999 +1 @@\n-b\n+B\n", tree(f=ABC)), e.MiscountedHunkError)


# -- whatever comes -------------------------------------------------------------------------------

PIECES = [
    b"diff --git a/f b/f\n", b'diff --git "a/\\303" "b/f"\n', b"diff --git \n", b"diff --git a b c d\n", b"--- a/f\n",
    b"+++ b/f\n", b"--- \n", b"+++ \n", b"--- /dev/null\n", b"+++ /dev/null\n", b"@@ -1 +1 @@\n", b"@@ -0,0 +1 @@\n",
    b"@@ -1,0 +2 @@\n", b"@@ -2,3 +2,3 @@ x\n", b"@@", b"-b\n", b"+B\n", b" a\n", b"\n", b"\\ No newline\n", b"\\\n",
    b"new file mode 100644\n", b"deleted file mode 100755\n", b"old mode 100644\n", b"new mode 100755\n",
    b"rename from f\n", b"rename to g\n", b"rename to \n", b"similarity index 9%\n", b"index 0123456..89abcde 100644\n",
    b"index " + b"0" * 40 + b".." + b"1" * 40 + b"\n", b"GIT binary patch\n", b"literal 0\n", b"delta 3\n",
    b"HcmV?d00001\n", b"A\n", b"~~~\n", b"-- \n", b"2.39\n", b"Only in a: b\n", b"--- a/f\t1970-99-99 99:99:99\n",
    b"--- a/f\t1970-01-01 00:00:00 +0000\n", b"+++ b/f\t1970-01-01 00:00:00 -9999\n", b'--- "a/\\', b"\x00\xff\r\n",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=6)), max_size=14),
    strip=st.integers(0, 2),
)
def test_any_bytes_are_a_diff_or_a_diff_error(pieces, strip):
    files = tree(f=ABC)
    try:
        parsed = d.parse(b"".join(pieces), strip=strip)
        made = d.apply(parsed, files.get)
    except d.DiffError:
        return
    after = {path: content for path, content in {**files, **made}.items() if content is not None}
    undone = {**after, **d.apply(d.reverse(parsed), after.get)}
    # A plain diff that only fills an empty file cannot say whether there was one.
    assert {path: content for path, content in undone.items() if content is not None} == files
