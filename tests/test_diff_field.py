"""Diffs as other tools and mails bring them: taken as meant, or refused; and never in quadratic time."""

from __future__ import annotations

import pytest

from patchkit import diff
from patchkit.diff import Content, comparison
from patchkit.diff.errors import MalformedDiffError, MiscountedHunkError, PathCollisionError
from patchkit.manifest import Manifest, ManifestError

OLD = b"a\nb\n"
HEADER = b"--- a/f\n+++ b/f\n"
HUNK = b"@@ -1,2 +1,2 @@\n a\n-b\n+B\n"


def applied(data: bytes, **options: int) -> dict[str, Content | None]:
    return diff.apply(diff.parse(data, **options), lambda path: Content(OLD, 0o644) if path == "f" else None)


@pytest.mark.parametrize("text", [b"2.39.5\n\n", b"libgit2 1.4.3\n\n", b"GitLab\n", b"GitLab"])
def test_a_mail_may_end_with_any_signature_of_one_line(text: bytes) -> None:
    assert applied(HEADER + HUNK + b"-- \n" + text) == {"f": Content(b"a\nB\n", 0o644)}


@pytest.mark.parametrize("text", [b"", b"+x\n", b" x\n", b"-x\n", b"word\n+x\n"])
def test_a_removed_line_beyond_the_count_is_no_signature(text: bytes) -> None:
    with pytest.raises(MiscountedHunkError):
        applied(HEADER + HUNK + b"-- \n" + text)


def test_subversion_deletes_a_file_that_becomes_nonexistent() -> None:
    data = b"Index: f\n--- f\t(revision 3)\n+++ f\t(nonexistent)\n@@ -1,2 +0,0 @@\n-a\n-b\n"
    assert applied(data, strip=0) == {"f": None}


@pytest.mark.parametrize("stamp", [b"9999-12-31 23:59:59 -2300", b"0001-01-01 00:00:00 +2300"])
def test_a_time_stamp_outside_of_the_calendar_is_only_a_time_stamp(stamp: bytes) -> None:
    assert applied(b"--- a/f\n+++ b/f\t" + stamp + b"\n" + HUNK) == {"f": Content(b"a\nB\n", 0o644)}


@pytest.mark.parametrize(
    "headers",
    [
        b"new file mode 100644\nindex 0000000..2345678\n",
        b"old mode 100644\nnew mode 100755\nindex 1234567..2345678\n",
    ],
)
def test_a_git_section_that_lost_its_body_is_refused(headers: bytes) -> None:
    with pytest.raises(MalformedDiffError, match="has none"):
        applied(b"diff --git a/f b/f\n" + headers)


def test_an_empty_new_file_has_no_body_to_lose() -> None:
    data = b"diff --git a/g b/g\nnew file mode 100644\nindex 0000000..e69de29\n"
    assert applied(data) == {"g": Content(b"", 0o644)}


def test_a_git_diff_whose_headers_were_converted_says_so() -> None:
    data = b"diff --git a/f b/f\nindex 1234567..2345678 100644\n" + HEADER + HUNK
    with pytest.raises(MalformedDiffError, match="CRLF"):
        applied(data.replace(b"\n", b"\r\n"))


@pytest.mark.timeout(60)
def test_many_conflict_openers_take_linear_time() -> None:
    # Quadratic, this took minutes.
    count = 100_000
    data = b"--- /dev/null\n+++ b/g\n@@ -0,0 +1,%d @@\n" % count + b"+<<<<<<<\n" * count
    assert applied(data) == {"g": Content(b"<<<<<<<\n" * count, 0o644)}


def test_a_hunk_has_the_last_heading_above_it() -> None:
    lines = [
        b"first\n",
        *(b"  %d\n" % n for n in range(30)),
        b"second\n",
        *(b"  x%d\n" % n for n in range(30)),
    ]
    changed = [line.replace(b"  5\n", b"  A\n").replace(b"  20\n", b"  B\n") for line in lines]
    changed[-5] = b"  C\n"
    made = comparison.hunks(b"".join(lines), b"".join(changed))
    assert [hunk.section for hunk in made] == [b"first", b"first", b"second"]


def test_a_manifest_with_a_number_of_thousands_of_digits_is_a_manifest_error() -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(b'{"schema": ' + b"1" * 5000 + b"}", name="m")


def test_a_new_file_below_one_that_is_there_is_refused() -> None:
    with pytest.raises(PathCollisionError, match="which is a file"):
        applied(b"--- /dev/null\n+++ b/f/y\n@@ -0,0 +1 @@\n+a\n")
