"""A manifest is read strictly, written the same way every time, and binds the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchkit import diff as d
from patchkit.diff.model import Content
from patchkit.manifest import FilePin, Manifest, ManifestError, Pin, PinMismatchError
from tests.support import DEMO, P1, Kit, write_patch

FILES = {
    "pkg/a.py": Content(b"a\nb\n", 0o664),
    "pkg/old": Content(b"x\n", 0o644),
    "pkg/run": Content(b"r\n", 0o644),
}
PATCH = (
    b"diff --git a/pkg/a.py b/pkg/a.py\n--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -2 +2 @@\n-b\n+B\n"
    b"diff --git a/pkg/n.py b/pkg/n.py\nnew file mode 100755\n--- /dev/null\n+++ b/pkg/n.py\n"
    b"@@ -0,0 +1 @@\n+n\n"
    b"diff --git a/pkg/old b/pkg/new\nsimilarity index 100%\nrename from pkg/old\nrename to pkg/new\n"
    b"diff --git a/pkg/run b/pkg/run\nold mode 100644\nnew mode 100755\n"
)


def built(patch: bytes = PATCH, files: dict[str, Content] = FILES) -> Manifest:
    return Manifest.build(
        d.parse(patch), files.get, patch="p", distribution="pkg", releases=["1.0"], on=["q"], diff_bytes=patch
    )


def test_build_pins_before_and_after_of_every_file():
    manifest = built()
    assert [(file.path, file.change, file.source) for file in manifest.files] == [
        ("pkg/a.py", "modify", None),
        ("pkg/n.py", "add", None),
        ("pkg/new", "rename", "pkg/old"),
        ("pkg/run", "modify", None),
    ]
    first = manifest.files[0]
    assert first.before == Pin.of(FILES["pkg/a.py"])
    assert first.after == Pin.of(Content(b"a\nB\n", 0o664))
    assert [file.binds_mode for file in manifest.files] == [False, True, False, True]


def test_json_goes_both_ways_and_reads_well():
    manifest = built()
    text = manifest.to_json()
    assert Manifest.from_json(text, name="m") == manifest
    assert text.endswith(b"}\n")
    entry = json.loads(text)
    assert list(entry) == sorted(entry)
    assert entry["files"][0]["before"]["mode"] == "0664"
    assert entry["files"][2]["from"] == "pkg/old"
    assert b'\n  "diff_sha256"' in text


def test_a_path_of_any_bytes_survives_json():
    path = "pkg/\udcff\u00e9\u2028"
    manifest = Manifest(
        "p", "d", ("1",), (), "0" * 64, (FilePin(path, "delete", Pin("0" * 64, 0, 0o644), None),)
    )
    text = manifest.to_json()
    assert text.isascii()
    assert Manifest.from_json(text, name="m") == manifest


def test_two_sections_of_one_file_are_one_pin():
    again = PATCH + b"diff --git a/pkg/a.py b/pkg/a.py\n--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1 +1 @@\n-a\n+A\n"
    pins = {file.path: file for file in built(again).files}
    assert pins["pkg/a.py"].after == Pin.of(Content(b"A\nB\n", 0o664))


def test_a_file_renamed_twice_comes_from_where_it_was_first():
    more = (
        b"diff --git a/pkg/new b/pkg/newer\nsimilarity index 100%\nrename from pkg/new\nrename to pkg/newer\n"
    )
    pins = {file.path: file for file in built(PATCH + more).files}
    assert pins["pkg/newer"].source == "pkg/old"
    assert "pkg/new" not in pins


def test_a_file_renamed_and_deleted_is_deleted():
    more = b"diff --git a/pkg/new b/pkg/new\ndeleted file mode 100644\n"
    more += b"--- a/pkg/new\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    pins = {file.path: file for file in built(PATCH + more).files}
    assert pins["pkg/old"].change == "delete"
    assert "pkg/new" not in pins


def test_apply_gives_the_pinned_result():
    assert built().apply(d.parse(PATCH), FILES.get) == d.apply(d.parse(PATCH), FILES.get)


def test_another_umask_changes_nothing():
    other = {path: Content(content.data, 0o600) for path, content in FILES.items()}
    made = built().apply(d.parse(PATCH), other.get)
    assert made["pkg/a.py"] == Content(b"a\nB\n", 0o600)


@pytest.mark.parametrize(
    ("path", "content"),
    [("pkg/a.py", Content(b"a\nb\nmore\n", 0o644)), ("pkg/a.py", None), ("pkg/n.py", Content(b"", 0o644))],
)
def test_apply_refuses_other_files_than_the_pinned_ones(path, content):
    files = {**FILES, path: content}
    with pytest.raises(PinMismatchError) as caught:
        built().apply(d.parse(PATCH), files.get)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"+B", b"+C"),
        (b"new file mode 100755", b"new file mode 100644"),
        (b"rename to pkg/new", b"rename to pkg/neu"),
    ],
)
def test_apply_refuses_another_result_than_the_pinned_one(old, new):
    patch = PATCH.replace(old, new).replace(
        b"b/pkg/new", b"b/pkg/neu" if new.endswith(b"neu") else b"b/pkg/new"
    )
    with pytest.raises(PinMismatchError):
        built().apply(d.parse(patch), FILES.get)


def test_apply_refuses_a_section_that_is_not_pinned():
    more = PATCH + b"diff --git a/pkg/z b/pkg/z\nnew file mode 100644\n"
    with pytest.raises(PinMismatchError):
        built().apply(d.parse(more), FILES.get)


def entry() -> dict:
    return json.loads(built().to_json())


def changed(**keys) -> bytes:
    return json.dumps({**entry(), **keys}).encode()


def file_changed(index: int = 0, **keys) -> bytes:
    whole = entry()
    whole["files"][index].update(keys)
    return json.dumps(whole).encode()


PIN = {"sha256": "0" * 64, "size": 0, "mode": "0644"}

INVALID = {
    "not JSON": b"{",
    "not UTF-8": b'{"schema": "\xff"}',
    "nested beyond reason": b"[" * 100_000,
    "a list": b"[]",
    "NaN": b'{"schema": NaN}',
    "a key twice": b'{"schema": 1, "schema": 1}',
    "no schema": b"{}",
    "a later schema": changed(schema=2),
    "a true schema": changed(schema=True),
    "an unknown key": changed(extra=1),
    "no files": changed(files=[]),
    "files no list": changed(files={}),
    "a file no object": changed(files=[1]),
    "no release": changed(releases=[]),
    "a release twice": changed(releases=["1", "1"]),
    "a release no text": changed(releases=[1]),
    "an empty release": changed(releases=[""]),
    "releases no list": changed(releases="1.0"),
    "on no list": changed(on=None),
    "a patch with a slash": changed(patch="../p"),
    "a patch with a newline": changed(patch="p\n"),
    "upper-case hex": changed(diff_sha256="A" * 64),
    "short hex": changed(diff_sha256="a" * 63),
    "an absolute path": file_changed(path="/etc/passwd"),
    "a path that climbs": file_changed(path="pkg/../../x"),
    "a path with a dot": file_changed(path="./x"),
    "an empty path": file_changed(path=""),
    "a path no text": file_changed(path=1),
    "our own state": file_changed(path=".patchkit/state.json"),
    "a path twice": file_changed(path="pkg/n.py"),
    "a path in another case": file_changed(path="pkg/N.py"),
    "a source that is a path": file_changed(2, **{"from": "pkg/a.py"}),
    "a source that climbs": file_changed(2, **{"from": "../a"}),
    "a source of no rename": file_changed(0, **{"from": "pkg/z"}),
    "an unknown change": file_changed(change="copy"),
    "a change no text": file_changed(change=["modify"]),
    "an add with a before": file_changed(1, before=PIN),
    "a modify without an after": file_changed(0, after=None),
    "an unknown file key": file_changed(note="x"),
    "a pin no object": file_changed(before=[]),
    "a pin with more": file_changed(before={**PIN, "mtime": 1}),
    "a pin with less": file_changed(before={"sha256": "0" * 64}),
    "a negative size": file_changed(before={**PIN, "size": -1}),
    "a fraction": file_changed(before={**PIN, "size": 1.0}),
    "a true size": file_changed(before={**PIN, "size": True}),
    "a numeric mode": file_changed(before={**PIN, "mode": 420}),
    "a short mode": file_changed(before={**PIN, "mode": "644"}),
    "a setuid mode": file_changed(before={**PIN, "mode": "4755"}),
    "a mode that is not octal": file_changed(before={**PIN, "mode": "0689"}),
    "other digits in hex": file_changed(before={**PIN, "sha256": "\u0660" * 64}),
}


@pytest.mark.parametrize("data", INVALID.values(), ids=INVALID.keys())
def test_what_is_not_exactly_a_manifest_is_refused(data):
    with pytest.raises(ManifestError) as caught:
        Manifest.from_json(data, name="m.json")
    assert str(caught.value).startswith("m.json: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_every_missing_key_is_named():
    for key in entry():
        whole = entry()
        del whole[key]
        with pytest.raises(ManifestError, match=key):
            Manifest.from_json(json.dumps(whole).encode(), name="m")


def test_the_pin_command_mends_a_manifest_that_cannot_be_read(kit: Kit, patches: Path) -> None:
    write_patch(patches, "p1", DEMO["1.0"], P1)
    path = next((patches / "p1").glob("*.manifest.json"))
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"0644"', b"420"))
    assert "four octal digits" in kit("apply", "p1", code=4).err
    kit("pin", "p1")
    assert path.read_bytes() == good
