"""A patched file that someone edited is named and never lost; a backup is believed only by its digest."""

from __future__ import annotations

import os

import pytest

from tests import support
from tests.support import DEMO, P1, files, patched, snapshot

CORE = "demopkg/core.py"
EDIT = b"edited = True\n"


@pytest.fixture
def drifted(site, rooted):
    rooted("apply", "p1")
    (site / CORE).write_bytes(EDIT)
    return site


def rescued(site):
    folder = site / ".patchkit/rescued"
    return {file.name: file.read_bytes() for file in folder.iterdir()} if folder.is_dir() else {}


def test_an_edit_is_named_by_status_verify_check_and_restore(drifted, rooted):
    before = snapshot(drifted)
    assert f"drifted {CORE}" in rooted("status").out
    assert f"modified {CORE}" in rooted("verify", code=1).out
    assert f"modified {CORE}" in rooted("check", "--expect", "p1", code=1).out
    refused = rooted("restore", code=4)
    assert f"{CORE} was changed after 'p1' was applied" in refused.err
    assert refused.err.count("\n") == 1
    assert CORE in rooted("apply", "p1", code=4).err
    assert snapshot(drifted) == before


def test_force_saves_the_edit_says_where_and_restores(drifted, rooted):
    done = rooted("restore", "--force", "--verify")
    (name, data), *others = rescued(drifted).items()
    assert (data, others) == (EDIT, [])
    assert f".patchkit/rescued/{name}" in done.out
    assert files(drifted) == DEMO["1.0"]


def test_a_rescue_belongs_to_the_root_s_owner_and_is_written_to_the_history(drifted, rooted):
    os.chown(drifted, 1234, 1235)
    os.chown(drifted / ".patchkit", 1234, 1235)
    rooted("restore", "--force")
    (saved,) = (drifted / ".patchkit/rescued").iterdir()
    assert (saved.stat().st_uid, saved.stat().st_gid) == (1234, 1235)
    assert saved.name in (drifted / ".patchkit/history.jsonl").read_text()


def test_a_rescue_keeps_a_name_that_is_as_long_as_the_file_system_allows(site, patches, rooted):
    path = "demopkg/" + "é" * 120 + ".txt"
    support.write_patch(patches, "long", {**DEMO["1.0"], path: b"1\n"}, {path: b"2\n"})
    (site / path).write_bytes(b"1\n")
    rooted("apply", "long")
    (site / path).write_bytes(EDIT)
    rooted("restore", "--force")
    assert list(rescued(site).values()) == [EDIT]
    assert (site / path).read_bytes() == b"1\n"


def test_a_file_that_came_back_where_the_patch_deleted_one_is_not_overwritten(site, rooted):
    rooted("apply", "p1")
    (site / "demopkg/old.py").write_bytes(EDIT)
    assert "demopkg/old.py appeared after" in rooted("restore", code=4).err
    rooted("restore", "--force", "--verify")
    assert list(rescued(site).values()) == [EDIT]
    assert files(site) == DEMO["1.0"]


def test_a_removed_file_is_missing_until_force_puts_it_back(site, rooted):
    rooted("apply", "p1")
    (site / CORE).unlink()
    assert f"missing {CORE}" in rooted("status").out
    assert "was removed after" in rooted("restore", code=4).err
    rooted("restore", "--force", "--verify")
    assert files(site) == DEMO["1.0"]


def test_a_removed_addition_needs_no_force(site, rooted):
    rooted("apply", "p1")
    (site / "demopkg/extra/dump.py").unlink()
    rooted("restore", "--verify")
    assert files(site) == DEMO["1.0"]


def test_a_folder_in_the_place_of_a_file_is_named(site, rooted):
    rooted("apply", "p1")
    (site / CORE).unlink()
    (site / CORE).mkdir()
    assert CORE in rooted("restore", "--force", code=4).err


@pytest.mark.parametrize("change", [None, b"not the backup\n"])
def test_a_lost_or_changed_backup_is_rebuilt_from_the_diff(site, rooted, change):
    before = snapshot(site)
    rooted("apply", "p1")
    backup = site / f"{CORE}.bak_p1"
    backup.unlink()
    if change is not None:
        backup.write_bytes(change)
    assert "backup" in rooted("status").out
    rooted("verify", code=1)
    done = rooted("restore", "--verify")
    assert "rebuilt from the diff and match the pinned sha256" in done.out
    assert snapshot(site) == before
    assert list(rescued(site).values()) == ([change] if change else [])


def test_a_lost_backup_of_a_deleted_file_is_rebuilt_too(site, rooted):
    before = snapshot(site)
    rooted("apply", "p1")
    (site / "demopkg/old.py.bak_p1").unlink()
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_without_backup_and_with_an_edit_nothing_can_be_proven(drifted, rooted):
    (drifted / f"{CORE}.bak_p1").unlink()
    before = snapshot(drifted)
    done = rooted("restore", "--force", code=4)
    assert "the pristine bytes cannot be rebuilt from the diff" in done.err
    assert snapshot(drifted) == before


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_or_tampered_diff_is_not_used_to_rebuild_but_that_of_the_folder_is(
    site, rooted, patches, lost
):
    before = snapshot(site)
    rooted("apply", "p1")
    (site / f"{CORE}.bak_p1").unlink()
    stored = site / ".patchkit/applied/p1.patch"
    if lost:
        stored.unlink()
    else:
        stored.write_bytes(stored.read_bytes().replace(b"AAA", b"EEE"))
    (patches / "p1").rename(patches / "elsewhere")
    assert "cannot be rebuilt" in rooted("restore", code=4).err
    (patches / "elsewhere").rename(patches / "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_a_mode_that_was_undone_is_not_taken_for_the_patched_file(site, rooted, patches):
    core = site / CORE
    support.write_patch(patches, "exec", DEMO["1.0"], {CORE: support.Content(DEMO["1.0"][CORE], 0o755)})
    rooted("apply", "exec")
    core.chmod(0o644)
    assert f"{CORE} has its pristine bytes again" in rooted("status").out
    assert "is not executable, unlike what 'exec' makes it" in rooted("verify", code=1).out
    assert "is not executable" in rooted("check", "--expect", "exec", code=1).out
    rooted("apply", "exec")
    assert core.stat().st_mode & 0o777 == 0o755
    rooted("verify")
    core.chmod(0o644)
    rooted("restore", "--verify")
    assert core.stat().st_mode & 0o777 == 0o644


def test_a_mode_that_was_undone_on_a_changed_file_is_drift(site, rooted, patches):
    support.write_patch(patches, "both", DEMO["1.0"], {CORE: support.Content(P1[CORE], 0o755)})
    before = snapshot(site)
    rooted("apply", "both")
    (site / CORE).chmod(0o644)
    assert f"drifted {CORE}" in rooted("status").out
    assert f"{CORE} was changed after" in rooted("restore", code=4).err
    (site / CORE).chmod(0o700)  # whose executable it is does not matter
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_the_source_of_a_rename_that_came_back_is_named(site, rooted, patches):
    new = {"demopkg/new.py": DEMO["1.0"]["demopkg/old.py"] + b"more = 1\n"}
    support.write_patch(patches, "move", DEMO["1.0"], new, renames={"demopkg/new.py": "demopkg/old.py"})
    rooted("apply", "move")
    (site / "demopkg/old.py").write_bytes(b"edited = 1\n")
    assert "drifted demopkg/new.py" in rooted("status").out


def test_lost_backups_in_a_stack_are_rebuilt_from_the_top_down(site, patches, rooted):
    p2 = {CORE: P1[CORE] + b"\n\nmore = 1\n"}
    support.write_patch(patches, "p2", {**DEMO["1.0"], **P1}, p2, on=("p1",))
    before = snapshot(site)
    rooted("apply", "p1", "p2")
    for backup in site.rglob("*.bak_*"):
        backup.unlink()
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_a_kept_backup_is_accepted_until_its_bytes_change(venv, kit):
    kit("apply", "p1")
    kit("restore", "--keep-backup", "--verify")
    backup = venv.site / f"{CORE}.bak_p1"
    assert backup.read_bytes() == DEMO["1.0"][CORE]
    kit("check")
    kit("apply", "p1")
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    kit("restore", "--keep-backup")
    backup.write_bytes(b"changed\n")
    assert "a backup whose bytes changed" in kit("check", code=1).out


def test_a_kept_backup_may_be_deleted(venv, kit):
    kit("apply", "p1")
    kit("restore", "--keep-backup")
    for backup in venv.site.rglob("*.bak_p1"):
        backup.unlink()
    kit("check")


def test_a_foreign_file_with_the_name_of_the_backup_is_not_overwritten(site, rooted):
    (site / f"{CORE}.bak_p1").write_bytes(b"mine\n")
    before = snapshot(site)
    assert "exists and does not hold the pristine bytes" in rooted("apply", "p1", code=4).err
    assert snapshot(site) == before
