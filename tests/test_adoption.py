"""A tree that someone patched by hand is recognised, and adopted only if its pristine bytes can be proven."""

from __future__ import annotations

import os
import subprocess

import pytest

from patchkit.diff import Content
from tests import support
from tests.support import DEMO, P1, files, patched, snapshot

CORE = "demopkg/core.py"


def by_hand(site, patches, name="p1"):
    """What the shell scripts of the field do."""
    diff = patches / name / "demopkg-1.0.patch"
    subprocess.run(["git", "apply", "--unsafe-paths", str(diff)], cwd=site, check=True, env=_no_repository())


def _no_repository():
    return {**os.environ, "GIT_CEILING_DIRECTORIES": "/"}


def test_a_hand_made_patch_is_recognised_by_status_and_check(venv, kit, patches):
    by_hand(venv.site, patches)
    assert "p1: applied by hand; 'patchkit apply p1' adopts it" in kit("status").out
    assert "equals p1, applied by hand" in kit("check", code=1).out


def test_apply_adopts_it_and_restore_gives_the_wheel_back(venv, kit, patches):
    by_hand(venv.site, patches)
    done = kit("apply", "p1")
    assert "was already applied by hand; adopted" in done.out
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    kit("check", "--expect", "p1")
    kit("restore", "--verify")
    assert files(venv.site) == DEMO["1.0"]
    assert not (venv.site / "demopkg/extra").exists()


def test_restore_takes_a_hand_made_patch_off_without_apply(site, rooted, patches):
    by_hand(site, patches)
    rooted("restore", "p1", "--verify")
    assert files(site) == DEMO["1.0"]


def test_a_backup_of_the_right_digest_proves_what_a_diff_cannot(site, rooted, patches):
    """A binary patch without its reverse half."""
    blob = "demopkg/data/blob.bin"
    support.write_patch(patches, "bin", DEMO["1.0"], {blob: Content(b"\0new", 0o644)})
    diff = patches / "bin/demopkg-1.0.patch"
    data = diff.read_bytes()
    one_way = data[: data.rindex(b"literal 256")]
    support.replace_diff(patches / "bin", one_way)
    pristine = snapshot(site)
    os.rename(site / blob, site / f"{blob}.bak_bin")
    (site / blob).write_bytes(b"\0new")
    rooted("apply", "bin")
    rooted("restore", "--verify")
    assert snapshot(site) == pristine


def test_without_proof_it_is_refused_with_what_to_do(site, rooted, patches):
    blob = "demopkg/data/blob.bin"
    support.write_patch(patches, "bin", DEMO["1.0"], {blob: Content(b"\0new", 0o644)})
    diff = patches / "bin/demopkg-1.0.patch"
    data = diff.read_bytes()
    support.replace_diff(patches / "bin", data[: data.rindex(b"literal 256")])
    (site / blob).write_bytes(b"\0new")
    before = snapshot(site)
    refused = rooted("apply", "bin", code=4)
    assert "patched by hand with 'bin'" in refused.err
    assert "reinstall demopkg and apply again" in refused.err
    assert snapshot(site) == before


def test_half_a_hand_made_patch_is_refused_with_the_file_that_is_wrong(site, rooted):
    (site / CORE).write_bytes(P1[CORE])
    before = snapshot(site)
    assert CORE in rooted("apply", "p1", code=4).err
    assert snapshot(site) == before


def test_adopting_drops_the_bytecode_of_the_time_before(venv, kit, patches):
    """patch(1) within the second of the installation, same size: CPython would run the old code for ever."""
    assert venv.run("import demopkg.core as c; print(c.answer())") == "AAA"
    stamp = (venv.site / CORE).stat().st_mtime_ns
    by_hand(venv.site, patches)
    os.utime(venv.site / CORE, ns=(stamp, stamp))
    assert venv.run("import demopkg.core as c; print(c.answer())") == "AAA"
    kit("apply", "p1")
    assert venv.run("import demopkg.core as c; print(c.answer())") == "BBB"
    kit("restore")
    assert venv.run("import demopkg.core as c; print(c.answer())") == "AAA"


def test_a_restored_adoption_never_has_the_second_of_the_patched_file(site, rooted, patches):
    by_hand(site, patches)
    patched_second = (site / CORE).stat().st_mtime_ns // 10**9
    rooted("apply", "p1")
    rooted("restore")
    assert (site / CORE).stat().st_mtime_ns // 10**9 != patched_second


def test_applying_twice_is_a_no_op(site, rooted):
    rooted("apply", "p1")
    before = snapshot(site)
    history = (site / ".patchkit/history.jsonl").read_bytes()
    done = rooted("apply", "p1")
    assert "'p1' is already applied" in done.out
    assert snapshot(site) == before
    assert (site / ".patchkit/history.jsonl").read_bytes() == history


NEW = {CORE: b"newer = 1\n", "demopkg/extra/other.py": b"y = 1\n", "demopkg/util.py": None}


def test_an_updated_patch_replaces_the_old_one_as_one_transaction(site, rooted, patches):
    pristine = snapshot(site)
    rooted("apply", "p1")
    support.write_patch(patches, "p1", DEMO["1.0"], NEW)
    done = rooted("apply", "p1")
    assert "was applied in an earlier version, which it replaces" in done.out
    assert files(site) == patched(DEMO["1.0"], NEW, "p1")
    assert len((site / ".patchkit/history.jsonl").read_text().splitlines()) == 2
    rooted("restore", "--verify")
    assert snapshot(site) == pristine


def stacked(patches, one, two):
    """p1 makes ``one`` of the module, p2 on it ``two``, p3 on that adds a line and a file."""
    support.write_patch(patches, "p1", DEMO["1.0"], {CORE: one, "demopkg/made/one.py": one})
    support.write_patch(patches, "p2", {**DEMO["1.0"], CORE: one}, {CORE: two}, on=("p1",))
    three = {CORE: two + b"three = 3\n", "demopkg/made/three.py": b""}
    support.write_patch(patches, "p3", {**DEMO["1.0"], CORE: two}, three, on=("p1", "p2"))
    return three[CORE]


def test_an_updated_stack_is_replaced_as_one_transaction(site, rooted, patches):
    pristine = snapshot(site)
    stacked(patches, b"one = 1\n", b"one = 1\ntwo = 2\n")
    rooted("apply", "p1", "p2", "p3")
    before = snapshot(site)
    top = stacked(patches, b"one = 11\n", b"one = 11\ntwo = 22\n")
    for names in (["p1"], ["p1", "p2"], ["p1", "p3"], ["p3", "p1", "p2"]):
        rooted("apply", *names, code=4)
        assert snapshot(site) == before
    assert "restore p2 p3 first, or name them after it" in rooted("apply", "p1", code=4).err
    done = rooted("apply", "p1", "p2", "p3")
    assert [line.split()[:2] for line in done.out.splitlines() if line.startswith(("rest", "appl"))] == [
        *(["restored", name] for name in ("p3", "p2", "p1")),
        *(["applied", name] for name in ("p1", "p2", "p3")),
    ]
    assert (site / CORE).read_bytes() == top
    assert len((site / ".patchkit/history.jsonl").read_text().splitlines()) == 2
    rooted("verify", "p1", "p2", "p3")
    rooted("restore", "--verify")
    assert snapshot(site) == pristine


def test_an_updated_stack_whose_top_does_not_fit_any_more_stays_as_it_was(site, rooted, patches):
    stacked(patches, b"one = 1\n", b"one = 1\ntwo = 2\n")
    rooted("apply", "p1", "p2")
    before = snapshot(site)
    support.write_patch(patches, "p1", DEMO["1.0"], {CORE: b"one = 11\n"})
    rooted("apply", "p1", "p2", code=4)
    assert snapshot(site) == before


def test_an_update_that_does_not_fit_leaves_the_old_one_applied(site, rooted, patches):
    rooted("apply", "p1")
    before = snapshot(site)
    support.write_patch(patches, "p1", {**DEMO["1.0"], CORE: b"another base\n"}, {CORE: b"newer\n"})
    rooted("apply", "p1", code=4)
    assert snapshot(site) == before
    rooted("verify")


def test_an_update_over_an_edit_is_refused(site, rooted, patches):
    rooted("apply", "p1")
    (site / CORE).write_bytes(b"edited\n")
    support.write_patch(patches, "p1", DEMO["1.0"], NEW)
    assert "was changed after 'p1'" in rooted("apply", "p1", code=4).err


def test_an_update_works_without_its_backups(site, rooted, patches):
    pristine = snapshot(site)
    rooted("apply", "p1")
    for backup in site.rglob("*.bak_p1"):
        backup.unlink()
    support.write_patch(patches, "p1", DEMO["1.0"], NEW)
    rooted("apply", "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == pristine


@pytest.mark.parametrize("target", ["inside", "outside"])
def test_an_update_of_a_symlinked_file_still_restores_the_link(site, rooted, patches, tmp_path, target):
    real = site / "demopkg/real.py" if target == "inside" else tmp_path / "real.py"
    os.rename(site / CORE, real)
    (site / CORE).symlink_to(real)
    pristine = snapshot(site)
    rooted("apply", "p1")
    support.write_patch(patches, "p1", DEMO["1.0"], NEW)
    rooted("apply", "p1")
    rooted("restore")
    assert snapshot(site) == pristine
