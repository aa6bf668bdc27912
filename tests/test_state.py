"""The stack on disk: written and read back as it was, other schemas refused, the folder made for its owner."""

from __future__ import annotations

import json
import os

import pytest

from patchkit.foreign import ForeignStateError
from patchkit.state import (
    Applied,
    Kept,
    Original,
    State,
    UnknownSchemaError,
    backup_name,
    prepare,
)
from tests import support
from tests.support import DEMO, P1


@pytest.fixture
def two(site, rooted, patches):
    """p1, and p2 on top of it in one file."""
    p2 = {"demopkg/core.py": P1["demopkg/core.py"] + b"more = 1\n"}
    support.write_patch(patches, "p2", {**DEMO["1.0"], **P1}, p2, on=("p1",))
    rooted("apply", "p1", "p2")
    return State.load(str(site))


def test_it_reads_back_what_it_wrote(site, two):
    again = State.load(str(site))
    assert again == two
    assert [applied.patch for applied in two.stack] == ["p1", "p2"]
    assert isinstance(two.stack[0].originals["demopkg/core.py"], Original)
    assert two.dump() == (site / ".patchkit/state.json").read_bytes()


def test_an_empty_stack_needs_no_file(site, rooted, two):
    assert State().dump() is None
    rooted("restore")
    assert not (site / ".patchkit/state.json").exists()
    assert not (site / ".patchkit/applied").exists()


def test_keys_are_sorted_so_that_a_diff_of_it_reads_well(site, two):
    data = json.loads((site / ".patchkit/state.json").read_bytes())
    assert list(data) == sorted(data)
    assert data["schema"] == 1


def test_another_schema_is_never_guessed_at(site):
    prepare(str(site))
    (site / ".patchkit/state.json").write_text('{"schema": 2, "stack": [], "kept": []}')
    with pytest.raises(UnknownSchemaError, match="schema is 2; this patchkit reads schema 1"):
        State.load(str(site))


def test_who_lies_above_and_who_is_on_top_of_a_file(two):
    p1, p2 = two.stack
    assert two.above(p1) == [p2]
    assert two.above(p2) == []
    assert two.top("demopkg/core.py")[0] is p2
    assert two.top("demopkg/old.py")[0] is p1
    assert two.top("demopkg/util.py") is None


def test_dropping_and_finding_go_by_name(two):
    p1, p2 = two.stack
    assert two.drop(p1).stack == (p2,)
    assert two.find("p2") is p2
    assert two.find("p3") is None


def test_backups_stand_beside_what_they_replace(two):
    p1, _ = two.stack
    assert backup_name("demopkg/core.py", "p1") == "demopkg/core.py.bak_p1"
    assert sorted(p1.backups()) == ["demopkg/core.py.bak_p1", "demopkg/old.py.bak_p1"]


def test_kept_backups_are_state_too():
    state = State((), (Kept("a.bak_p", "p", "0" * 64),))
    assert b"a.bak_p" in (state.dump() or b"")


def test_the_folder_keeps_itself_out_of_git(site):
    prepare(str(site))
    prepare(str(site))
    assert (site / ".patchkit/.gitignore").read_bytes() == b"*\n"


def test_a_half_made_folder_is_completed(site):
    """A crash between the creation of the file and its first byte."""
    (site / ".patchkit").mkdir()
    (site / ".patchkit/.gitignore").write_bytes(b"")
    prepare(str(site))
    assert (site / ".patchkit/.gitignore").read_bytes() == b"*\n"


def test_a_file_in_its_place_is_named(site):
    (site / ".patchkit").write_bytes(b"")
    with pytest.raises(ForeignStateError, match="is not a folder"):
        prepare(str(site))


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_what_sudo_makes_belongs_to_the_root_s_owner_who_can_restore(tmp_path, site, rooted):
    for path in (site, *site.rglob("*")):
        os.chown(path, 65534, 65534)
    for top in (site, *site.parents):
        top.chmod(top.stat().st_mode | 0o055)
        if top.name.startswith("pytest-of"):
            break
    rooted("apply", "p1")
    owners = {path.stat().st_uid for path in (site / ".patchkit").rglob("*")}
    assert owners == {65534}
    assert support.as_user(65534, lambda: rooted("restore", "--verify", code=None)).code == 0


def test_what_is_applied_can_be_restored_without_its_patches_folder(site, rooted, two):
    kit = support.Kit(["--root", str(site)])
    kit("restore", "--all")
    assert support.files(site) == DEMO["1.0"]
    assert isinstance(two.stack[0], Applied)
