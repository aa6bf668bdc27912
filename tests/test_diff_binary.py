"""git's binary patches, as the real git writes them and as nobody should."""

from __future__ import annotations

import base64
import subprocess
import tracemalloc
import zlib

import pytest

from patchkit import diff as d
from patchkit.diff import binary, errors as e
from patchkit.diff.model import Content

OLD = bytes(range(256)) * 16
NEW = OLD[:1000] + b"\0new" + OLD[1000:]


def from_git(folder, old: bytes | None, new: bytes | None, *options: str) -> bytes:
    def git(*args: str) -> bytes:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, check=True)
        return done.stdout

    git("init", "-q")
    if old is not None:
        (folder / "f").write_bytes(old)
    git("add", "-A")
    if old is not None:
        (folder / "f").unlink()
    if new is not None:
        (folder / "f").write_bytes(new)
    if old is None:
        git("add", "-N", ".")
    return git("diff", "--binary", *options)


def outcome(patch: bytes, old: bytes | None) -> bytes | None:
    files = {} if old is None else {"f": Content(old, 0o644)}
    parsed = d.parse(patch, name="p")
    made = d.apply(parsed, files.get)
    after = {path: content for path, content in made.items() if content is not None}
    back = d.apply(d.reverse(parsed), after.get)
    assert back == ({"f": None} if old is None else files)
    return None if made["f"] is None else made["f"].data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OLD, NEW),
        (OLD, b"\0short"),
        (b"\0", b"\0" * 70000),
        (OLD, b"now text\n"),
        (b"text\n", OLD),
        (None, NEW),
        (OLD, None),
        (OLD, OLD[::-1]),
        (b"\0" * 200_000 + OLD, b"\0" * 200_000 + OLD[:5] + b"x" + OLD[5:]),
    ],
    ids=["delta", "literal", "grows", "to-text", "from-text", "new", "gone", "all-new", "long-copy"],
)
def test_what_git_writes_gives_the_bytes_back(tmp_path, old, new):
    patch = from_git(tmp_path, old, new)
    assert b"GIT binary patch" in patch
    assert outcome(patch, old) == new


def test_git_really_writes_deltas_here(tmp_path):
    assert b"\ndelta " in from_git(tmp_path, OLD, NEW)


def test_a_binary_file_with_other_bytes_is_refused(tmp_path):
    patch = from_git(tmp_path, OLD, NEW)
    with pytest.raises(e.MismatchError):
        outcome(patch, OLD + b"\0")


def test_one_direction_only_applies_but_does_not_reverse(tmp_path):
    patch = from_git(tmp_path, OLD, NEW)
    half = patch[: patch.index(b"\n\n") + 2]
    parsed = d.parse(half)
    made = d.apply(parsed, {"f": Content(OLD, 0o644)}.get)
    assert made["f"] == Content(NEW, 0o644)
    with pytest.raises(e.NotReversibleError) as caught:
        d.reverse(parsed)
    assert caught.value.code == "diff-not-reversible"


@pytest.mark.parametrize("cut", [1, 2, 3, 10, 60, 200])
def test_a_truncated_binary_patch_is_refused(tmp_path, cut):
    patch = from_git(tmp_path, OLD, NEW)
    whole = patch[: patch.index(b"\n\n") + 2]
    with pytest.raises(d.DiffError):
        outcome(whole[:-cut], OLD)


def test_every_changed_byte_of_the_data_is_noticed(tmp_path):
    patch = from_git(tmp_path, OLD, b"\0short and sweet")
    start = patch.index(b"literal")
    end = patch.index(b"\n\n")
    tried = 0
    for at in range(start, end):
        bad = patch[:at] + bytes([patch[at] ^ 1]) + patch[at + 1 :]
        tried += 1
        try:
            made = d.apply(d.parse(bad), {"f": Content(OLD, 0o644)}.get)
        except d.DiffError:
            continue
        assert made["f"] == Content(b"\0short and sweet", 0o644)
    assert tried > 30


def section(kind: bytes, size: int, data: bytes, old: bytes, new: bytes) -> bytes:
    head = b"diff --git a/f b/f\nindex %s..%s 100644\nGIT binary patch\n%s %d\n" % (
        binary.blob_id(old, "0" * 40).encode(), binary.blob_id(new, "0" * 40).encode(), kind, size
    )  # fmt: skip
    return head + b"".join(binary.encode_lines(data)) + b"\n"


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        b"\x03",
        b"\x03\x05\x00",
        b"\x03\x05\x05ab",
        b"\x03\x05\x91\x00\x7f",
        b"\x03\x05\x91",
        b"\x04\x03\x90\x03",
        b"\x03\x02\x03abc",
        b"\x03\x05\x02ab",
        b"\xff" * 20,
    ],
)
def test_hostile_deltas_are_refused(delta):
    patch = section(b"delta", len(delta), delta, b"\0ab", b"\0abcd")
    with pytest.raises(e.MalformedDiffError):
        d.apply(d.parse(patch), {"f": Content(b"\0ab", 0o644)}.get)


def test_data_that_inflates_beyond_its_size_costs_no_memory():
    bomb = zlib.compress(b"\0" * (60 << 20), 9)
    lines = []
    for start in range(0, len(bomb), 52):
        piece = bomb[start : start + 52]
        letter = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[len(piece) - 1 : len(piece)]
        lines.append(letter + base64.b85encode(piece, pad=True) + b"\n")
    patch = section(b"literal", 10, b"", b"\0", b"\0\0")
    patch = patch[: patch.index(b"literal 10\n") + 11] + b"".join(lines) + b"\n"
    tracemalloc.start()
    with pytest.raises(e.MalformedDiffError, match="10 bytes"):
        d.parse(patch)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_content_over_64_mib_is_refused_before_it_is_inflated():
    patch = section(b"literal", 1, b"\0", b"\0", b"\0\0").replace(b"literal 1\n", b"literal 68000000\n")
    with pytest.raises(e.DiffTooLargeError):
        d.parse(patch)


def test_a_delta_that_announces_too_much_is_refused():
    delta = b"\x02" + b"\xff\xff\xff\x7f" + b"\x90\x02"
    patch = section(b"delta", len(delta), delta, b"\0a", b"\0\0")
    with pytest.raises(d.DiffError, match="limit"):
        d.apply(d.parse(patch), {"f": Content(b"\0a", 0o644)}.get)
