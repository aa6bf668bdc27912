"""Bad input: one clear line, the right exit code, nothing written."""

from __future__ import annotations

import json
import os

import pytest

from tests import support
from tests.support import DEMO, Kit, Venv, snapshot


def whole(root):
    """Everything, the state folder included."""
    return {str(path.relative_to(root)): path.lstat().st_mtime_ns for path in sorted(root.rglob("*"))}


def refused(kit, root, *command, code, words):
    before = whole(root)
    done = kit(*command, code=code)
    assert done.err.count("\n") == 1, done
    assert done.err.startswith("patchkit: ")
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err, done
    assert whole(root) == before
    answer = kit(*command, "--json", code=code)
    assert answer.json["ok"] is False
    assert answer.json["errors"][0]["message"]
    assert answer.err == ""
    assert whole(root) == before


@pytest.mark.parametrize("command", ["apply", "restore", "show", "diff", "verify"])
def test_an_unknown_patch_with_the_nearest_name(site, rooted, command):
    refused(rooted, site, command, "p11", code=2, words=["no patch named 'p11'", "did you mean 'p1'?"])


def test_an_unknown_release_with_the_nearest_and_the_port_command(tmp_path, patches, wheels):
    venv = Venv.create(tmp_path / "venv")
    venv.uv("install", wheels["2.0"])
    kit = Kit(["--python", str(venv.python), "--patches", str(patches)])
    words = ["no variant for demopkg 2.0", "nearest is for 1.0", "patchkit port p1 --to 2.0"]
    refused(kit, venv.site, "apply", "p1", code=4, words=words)


def test_a_distribution_that_is_not_installed(tmp_path, patches):
    venv = Venv.create(tmp_path / "venv")
    kit = Kit(["--python", str(venv.python), "--patches", str(patches)])
    refused(
        kit, venv.site, "apply", "p1", code=4, words=["'demopkg' is not installed in", "--python or --root"]
    )


def test_a_modified_file(site, rooted):
    (site / "demopkg/core.py").write_bytes(b"mine\n")
    refused(rooted, site, "apply", "p1", code=4, words=["demopkg/core.py is not the file of", "reinstall"])


def test_a_missing_file(site, rooted):
    (site / "demopkg/core.py").unlink()
    refused(rooted, site, "apply", "p1", code=4, words=["demopkg/core.py is missing from"])


def test_a_file_where_the_patch_creates_one(site, rooted):
    (site / "demopkg/extra").mkdir()
    (site / "demopkg/extra/dump.py").write_bytes(b"mine\n")
    refused(rooted, site, "apply", "p1", code=4, words=["demopkg/extra/dump.py exists"])


def test_a_file_where_the_patch_needs_a_folder(site, rooted):
    (site / "demopkg/extra").write_bytes(b"mine\n")
    refused(rooted, site, "apply", "p1", code=4, words=["demopkg/extra"])


def test_a_root_that_is_no_root(tmp_path, patches, site):
    for path, words in (
        (tmp_path / "nowhere", ["no such folder"]),
        (site / "demopkg/core.py", ["not a folder"]),
    ):
        kit = Kit(["--root", str(path), "--patches", str(patches)])
        refused(kit, site, "apply", "p1", code=2, words=[str(path), *words])
    empty = tmp_path / "empty"
    empty.mkdir()
    kit = Kit(["--root", str(empty), "--patches", str(patches)])
    refused(kit, empty, "apply", "p1", code=4, words=["'demopkg' is not installed"])


def test_an_interpreter_that_is_none(tmp_path, patches, site):
    for path in (tmp_path / "nowhere", site / "demopkg/core.py"):
        kit = Kit(["--python", str(path), "--patches", str(patches)])
        refused(kit, site, "apply", "p1", code=2, words=[f"--python {path}"])
    kit = Kit(["--python", str(tmp_path), "--patches", str(patches)])
    refused(kit, site, "apply", "p1", code=2, words=[f"--python {tmp_path}: a folder, not a program"])


@pytest.mark.parametrize(
    ("option", "words"),
    [("--root", "--root '': names no folder"), ("--python", "--python '': names no program")],
)
def test_an_empty_name_of_a_tree_is_not_the_default_one(patches, site, option, words):
    refused(Kit([option, "", "--patches", str(patches)]), site, "apply", "p1", code=2, words=[words])


def test_a_patches_folder_that_is_none(tmp_path, site):
    kit = Kit(["--root", str(site), "--patches", str(tmp_path / "nowhere")])
    refused(kit, site, "apply", "p1", code=2, words=["nowhere: No such file"])
    kit = Kit(["--root", str(site), "--patches", str(site / "demopkg/core.py")])
    refused(kit, site, "apply", "p1", code=2, words=["core.py: not a folder"])


def test_a_diff_that_is_not_the_pinned_one(site, rooted, patches):
    diff = patches / "p1/demopkg-1.0.patch"
    diff.write_bytes(diff.read_bytes().replace(b"\n", b"\r\n"))
    refused(rooted, site, "apply", "p1", code=4, words=["its manifest pins", "line-ending"])


def test_a_patch_that_reaches_out_of_its_distribution(venv, kit, patches):
    (venv.site / "other.py").write_bytes(b"1\n")
    support.write_patch(patches, "far", {"other.py": b"1\n"}, {"other.py": b"2\n"})
    refused(kit, venv.site, "apply", "far", code=4, words=["other.py"])


def test_order_and_conflict(site, rooted, patches):
    new = {"demopkg/util.py": b"x\n"}
    support.write_patch(patches, "second", DEMO["1.0"], new, toml='after = ["p1"]\n')
    support.write_patch(patches, "enemy", DEMO["1.0"], new, toml='conflicts = ["p1"]\n')
    refused(rooted, site, "apply", "second", code=4, words=["must be applied after p1"])
    refused(rooted, site, "apply", "p1", "enemy", code=4, words=["'enemy' conflicts with 'p1'"])


def test_all_patches_or_none(site, rooted, patches):
    support.write_patch(
        patches, "bad", {**DEMO["1.0"], "demopkg/util.py": b"other\n"}, {"demopkg/util.py": b"x\n"}
    )
    refused(rooted, site, "apply", "p1", "bad", code=4, words=["demopkg/util.py"])


def test_a_missing_backup_that_cannot_be_rebuilt(site, rooted, patches):
    rooted("apply", "p1")
    (patches / "p1").rename(patches / "elsewhere")  # its diff would do
    (site / "demopkg/core.py.bak_p1").unlink()
    (site / ".patchkit/applied/p1.patch").unlink()
    before = snapshot(site)
    done = rooted("restore", code=4)
    assert "demopkg/core.py.bak_p1 is missing" in done.err
    assert "reinstall demopkg" in done.err
    assert done.err.count("\n") == 1
    assert snapshot(site) == before
    (patches / "elsewhere").rename(patches / "p1")
    rooted("restore", "--verify")  # the folder has the very diff, which undone gives the bytes
    assert support.files(site) == DEMO["1.0"]


def test_a_restore_of_what_is_not_applied_is_a_no_op_with_a_note(site, rooted):
    before = whole(site)
    assert "'p1' is not applied" in rooted("restore", "p1").out
    rooted("restore")
    assert whole(site) == before


@pytest.mark.parametrize("name", ["state.json", "journal.json"])
@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b'{"schema": 99}', 4, "schema is 99; this patchkit reads schema 1"),
        (b'{"schema": 1}', 5, "damaged"),
        (b"\x00\xff", 5, "not valid JSON"),
        (b"[]", 5, "not a JSON object"),
        (b"", 5, "not valid JSON"),
        (b'{"schema": 1, "stack": [{"manifest": 3}], "kept": [], "steps": 3}', 5, "damaged"),
        (b'{"schema": 1, "stack": 7, "kept": null, "steps": [{"number": 0}]}', 5, "damaged"),
        (b"[" * 100_000, 5, "not valid JSON"),
    ],
    ids=["schema", "empty object", "bytes", "list", "empty", "wrong types", "other types", "deep"],
)
def test_a_state_or_journal_that_cannot_be_read_is_never_guessed_at(site, rooted, name, data, code, words):
    rooted("apply", "p1")
    (site / ".patchkit" / name).write_bytes(data)
    before = snapshot(site)
    for command in (["restore"], ["apply", "p1"], ["status"], ["check"]):
        done = rooted(*command, code=code)
        assert words in done.err, done
        assert done.err.count("\n") == 1
    assert snapshot(site) == before


def test_a_journal_that_points_out_of_the_root_is_not_followed(site, rooted, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine\n")
    rooted("apply", "p1")
    step = {
        "number": 0, "verb": "put", "path": "../victim", "before": None, "folder": None, "temp": "../victim",
        "after": {"kind": "file", "sha256": "0" * 64, "size": 5},
    }  # fmt: skip
    history = {"distribution": "demopkg", "release": "1.0"}
    journal = {
        "schema": 1,
        "id": "0" * 32,
        "pid": 1,
        "host": "x",
        "phase": "open",
        "steps": [step],
        "history": history,
    }
    for one, words in (("../..", "32 hex digits"), ("0" * 32, "not a plain path below the root")):
        (site / ".patchkit/journal.json").write_text(json.dumps({**journal, "id": one}))
        assert words in rooted("recover", code=5).err
        assert victim.read_bytes() == b"mine\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_state_folder_that_another_user_planted_does_not_steer_root(site, rooted):
    (site / ".patchkit").mkdir()
    os.chown(site / ".patchkit", 1234, 1234)
    refused(rooted, site, "apply", "p1", code=4, words=["belongs to user id 1234"])


def test_a_state_folder_that_is_a_symlink_is_refused(site, rooted, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (site / ".patchkit").symlink_to(tmp_path / "elsewhere")
    refused(rooted, site, "apply", "p1", code=4, words=["is a symlink"])
    assert not list((tmp_path / "elsewhere").iterdir())
