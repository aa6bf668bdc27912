"""The whole distribution against its witness: RECORD, git, or the pinned digests."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests import support
from tests.support import DEMO, Kit, snapshot


def offenders(kit, *arguments, code=1):
    (target,) = kit("check", *arguments, "--json", code=code).json["data"]["targets"]
    return {one["path"]: one["kind"] for one in target["offenders"]}, target


def test_a_clean_wheel_is_clean_and_says_who_says_so(venv, kit):
    found, target = offenders(kit, code=0)
    assert found == {}
    assert target["witness"] == "RECORD"
    assert target["checked"] >= len(DEMO["1.0"])


def test_a_file_that_no_patch_knows_is_an_offender_too(venv, kit):
    site = venv.site
    (site / "demopkg/util.py").unlink()
    (site / "demopkg/sub/deep.py").write_bytes(b"x\n")
    (site / "demopkg/stray.py").write_bytes(b"x\n")
    (site / "demopkg/core.py.bak_other").write_bytes(b"x\n")
    (site / "demopkg/core.py.orig").write_bytes(b"x\n")
    assert offenders(kit)[0] == {
        "demopkg/util.py": "missing",
        "demopkg/sub/deep.py": "modified",
        "demopkg/stray.py": "unexpected",
        "demopkg/core.py.bak_other": "unexpected",
        "demopkg/core.py.orig": "unexpected",
    }


def test_bytecode_of_a_module_is_expected_and_of_none_is_not(venv, kit):
    venv.run("import demopkg.core, demopkg.util")
    assert offenders(kit, code=0)[0] == {}
    (venv.site / "demopkg/__pycache__/ghost.cpython-311.pyc").write_bytes(b"")
    assert offenders(kit)[0] == {"demopkg/__pycache__/ghost.cpython-311.pyc": "unexpected"}


def test_an_applied_patch_is_named_and_can_be_expected(venv, kit):
    kit("apply", "p1")
    found, target = offenders(kit)
    assert found["demopkg/core.py"] == "patched"
    assert any("patchkit restore p1" in one for one in target["complaints"])
    assert offenders(kit, "--expect", "p1", code=0)[0] == {}
    kit("restore")
    assert any("expected but not applied" in one for one in offenders(kit, "--expect", "p1")[1]["complaints"])


def test_a_changed_backup_of_an_applied_patch_is_an_offender(venv, kit):
    kit("apply", "p1")
    (venv.site / "demopkg/core.py.bak_p1").write_bytes(b"x\n")
    assert offenders(kit, "--expect", "p1")[0] == {"demopkg/core.py.bak_p1": "modified"}


def test_an_unreadable_file_is_not_taken_for_a_clean_one(venv, kit):
    core = venv.site / "demopkg/core.py"
    core.unlink()
    core.symlink_to(core)
    assert offenders(kit)[0] == {"demopkg/core.py": "unreadable"}


def test_an_open_transaction_is_not_clean(venv, kit):
    strace = ["strace", "-f", "-qqq", "-o", os.devnull, "-e", "trace=linkat"]
    kit.spawn("apply", "p1", prefix=[*strace, "-e", "inject=linkat:signal=SIGKILL:when=2"], code=None)
    _, target = offenders(kit)
    assert any("was interrupted (patchkit recover)" in one for one in target["complaints"])
    assert "was interrupted; 'patchkit recover'" in kit("status").out
    assert "a transaction was interrupted" in kit("apply", "p1", "--dry-run", code=5).err
    assert "undid an interrupted apply of p1" in kit("recover").out
    assert offenders(kit, code=0)[0] == {}
    assert "nothing to recover" in kit("recover").out


def test_a_plain_folder_has_only_the_pinned_files_for_a_witness(site, rooted):
    found, target = offenders(rooted, code=0)
    assert (found, target["witness"]) == ({}, "manifests")
    assert "only the files that patches are pinned to" in rooted("check").out
    (site / "demopkg/core.py").write_bytes(b"x\n")
    assert offenders(rooted)[0] == {"demopkg/core.py": "modified"}


@pytest.fixture
def checkout(site, patches):
    """``site`` as a git checkout with an ignored build product."""
    (site / ".gitignore").write_text("*.so\n__pycache__/\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "1.0"]):
        git(site, *command)
    (site / "demopkg/native.so").write_bytes(b"\x7fELF")
    return Kit(["--root", str(site), "--patches", str(patches)])


def git(folder, *arguments):
    config = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *config, *arguments], cwd=folder, check=True, env=support.bare())


def test_a_checkout_is_compared_with_its_commit(site, checkout):
    found, target = offenders(checkout, code=0)
    assert (found, target["witness"]) == ({}, "git")
    (site / "demopkg/util.py").write_bytes(b"x\n")
    (site / "demopkg/stray.py").write_bytes(b"x\n")
    (site / "demopkg/old.py").unlink()
    assert offenders(checkout)[0] == {
        "demopkg/util.py": "modified",
        "demopkg/stray.py": "unexpected",
        "demopkg/old.py": "missing",
    }


def test_a_checkout_goes_there_and_back_and_git_sees_nothing_of_ours(site, checkout):
    before = snapshot(site / "demopkg")
    checkout("apply", "p1")
    assert offenders(checkout, "--expect", "p1", code=0)[0] == {}
    checkout("restore", "--verify")
    assert snapshot(site / "demopkg") == before
    done = subprocess.run(
        ["git", "status", "--porcelain"], cwd=site, capture_output=True, check=True, env=support.bare()
    )
    assert done.stdout == b""


def test_what_git_is_told_not_to_see_is_not_clean(site, checkout):
    git(site, "update-index", "--assume-unchanged", "demopkg/util.py")
    (site / "demopkg/util.py").write_bytes(b"x\n")
    assert offenders(checkout)[0] == {"demopkg/util.py": "unreadable"}


def test_a_repository_around_a_venv_is_not_its_witness(tmp_path, venv, kit):
    git(tmp_path, "init", "-q")
    assert offenders(kit, code=0)[1]["witness"] == "RECORD"
    kit("apply", "p1")
    kit("restore", "--verify")
