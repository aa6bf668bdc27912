"""A file of `.patchkit` that cannot be read: `recover --force` sets it aside, loses nothing, and proves the rest."""

from __future__ import annotations

import json
import os

import pytest

from patchkit import lease
from patchkit.journal import Journal
from tests import support
from tests.support import DEMO, P1, files, patched, snapshot
from tests.test_recovery import killed, swapped

CORE = "demopkg/core.py"
PATCHED = patched(DEMO["1.0"], P1, "p1")
GARBAGE = [
    b"",
    b"\x00\xff",
    b"[]",
    b'{"schema": 1}',
    b'{"schema": 99}',
    b'{"schema": 1, "stack": 7, "kept": 1}',
]


def rescued(site):
    folder = site / ".patchkit/rescued"
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file()} if folder.exists() else set()


def damage(site, name, data):
    (site / ".patchkit" / name).write_bytes(data)


@pytest.mark.parametrize("name", ["state.json", "journal.json"])
@pytest.mark.parametrize("data", GARBAGE)
def test_every_error_names_the_way_out_and_it_leads_out(site, rooted, name, data):
    pristine = snapshot(site)
    rooted("apply", "p1")
    before = (site / ".patchkit/state.json").read_bytes()
    damage(site, name, data)
    for command in (["status"], ["check"], ["verify"], ["restore"], ["apply", "p1"], ["recover"], ["log"]):
        done = rooted(*command, code=4 if b"99" in data else 5)
        assert "'patchkit recover --force'" in done.err
        assert done.err.count("\n") == 1
    done = rooted("recover", "--force")
    assert f"{name}" in done.out
    assert "applied, as far as is known: p1" in done.out
    assert data in rescued(site)
    if name == "journal.json":
        assert (site / ".patchkit/state.json").read_bytes() == before
    assert "p1  applied" in rooted("status").out
    rooted("verify", "p1")
    rooted("check", code=1)
    rooted("check", "--expect", "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == pristine
    assert "nothing to recover" in rooted("recover", "--force").out
    rooted("log", "--verify")


def test_a_pristine_tree_is_said_to_be_so(venv, kit):
    kit("apply", "p1")
    kit("restore")
    damage(venv.site, "state.json", b"{")
    done = kit("recover", "--force")
    assert "verified: demopkg 1.0" in done.out
    assert "files equal RECORD" in done.out
    assert b"{" in rescued(venv.site)
    kit("check")


def test_a_stack_of_two_is_known_again_in_its_order(site, rooted, patches):
    pristine = snapshot(site)
    p2 = {CORE: P1[CORE] + b"more = 1\n"}
    support.write_patch(patches, "a2", {**DEMO["1.0"], **P1}, p2, on=("p1",))
    rooted("apply", "p1", "a2")
    damage(site, "state.json", b"")
    (site / ".patchkit/history.jsonl").unlink()
    rooted("recover", "--force")
    names = [one["patch"] for one in rooted("status", "--json").json["data"]["targets"][0]["stack"]]
    assert names == ["p1", "a2"]
    rooted("verify")
    rooted("restore", "--verify")
    assert snapshot(site) == pristine


def test_after_a_reinstall_the_leftovers_can_be_cleared(venv, kit, wheels):
    kit("apply", "p1")
    damage(venv.site, "state.json", b"")
    venv.uv("install", "--reinstall", wheels["1.0"])
    kit("recover", "--force", code=1)
    kit("restore", "--verify")
    assert files(venv.site) == DEMO["1.0"]


def test_a_patch_that_is_not_at_hand_is_named_and_never_called_clean(site, rooted):
    rooted("apply", "p1")
    damage(site, "state.json", b"")
    bare = support.Kit(["--root", str(site)])
    done = bare("recover", "--force", code=None)
    assert "'p1' was applied in a version that is not here; name its --patches folder" in done.out
    assert files(site) == PATCHED
    assert "recover --force" in rooted("status").out
    rooted("check", code=1)
    rooted("recover", "--force")
    rooted("restore", "--verify")
    assert files(site) == DEMO["1.0"]


@pytest.mark.parametrize("also", [[], ["state.json"]])
def test_a_swapped_tree_without_its_journal_is_put_back_and_nothing_is_lost(site, rooted, also):
    swapped(site, rooted)
    held = {path.read_bytes() for path in (site / ".patchkit").glob("undo.*/*")}
    for name in ("journal.json", *also):
        damage(site, name, b"damaged " + name.encode())
    rooted("check", code=5)
    done = rooted("recover", "--force", code=None)
    assert files(site) in (DEMO["1.0"], PATCHED), done
    assert done.code == 0, done
    assert held <= rescued(site)
    assert b"damaged journal.json" in rescued(site)
    assert not list((site / ".patchkit").glob("undo.*"))
    rooted("restore", "--verify")
    assert files(site) == DEMO["1.0"]


@pytest.mark.parametrize("command", ["apply", "restore"])
def test_whenever_it_died_the_journal_is_not_needed(site, rooted, command):
    """A change killed at any rename or unlink, and its journal damaged after that."""
    seen = 0
    for call in ("rename", "unlink"):
        for count in range(1, 60, 2):
            if command == "restore":
                rooted("apply", "p1")
            if not killed(rooted, command, *(["p1"] if command == "apply" else []), call=call, count=count):
                rooted("restore")
                break
            if Journal.load(str(site)) is not None:
                seen += 1
                held = {path.read_bytes() for path in (site / ".patchkit").glob("undo.*/*")}
                damage(site, "journal.json", b"{")
                done = rooted("recover", "--force", code=None)
                assert files(site) in (DEMO["1.0"], PATCHED), (call, count, str(done))
                assert done.code == 0, (call, count, str(done))
                assert held <= rescued(site)
            rooted("restore", "--verify")
            assert files(site) == DEMO["1.0"]
    assert seen > 5


def test_a_file_that_someone_changed_meanwhile_is_left_alone(site, rooted):
    swapped(site, rooted)
    damage(site, "journal.json", b"")
    (site / CORE).write_bytes(b"someone's\n")
    done = rooted("recover", "--force", code=1)
    assert f"modified {CORE}" in done.out
    assert (site / CORE).read_bytes() == b"someone's\n"
    assert DEMO["1.0"][CORE] in rescued(site)


def test_a_folder_in_the_place_of_the_state(site, rooted):
    (site / ".patchkit").mkdir()
    (site / ".patchkit/state.json").mkdir()
    assert "is a folder" in rooted("status", code=5).err
    rooted("recover", "--force")
    rooted("check")


def test_an_unreadable_lease_is_set_aside_when_nobody_can_hold_it(site, rooted):
    rooted("apply", "p1")
    (site / ".patchkit/leases").mkdir()
    path = site / ".patchkit/leases/one.demopkg.json"
    path.write_bytes(b"{")
    rooted("check", code=5)
    assert "the session that holds it may live" in rooted("recover", "--force", code=3).err
    assert path.read_bytes() == b"{"
    os.utime(path, (1, 1))
    rooted("recover", "--force")
    assert b"{" in rescued(site)
    rooted("check", "--expect", "p1")


def _set(data, way, value):
    for key in way[:-1]:
        data = data[key]
    data[way[-1]] = value


@pytest.mark.parametrize(
    ("name", "way", "value"),
    [
        ("state.json", ("stack", 0, "manifest", "files", 0, "path"), "../victim"),
        ("state.json", ("stack", 0, "manifest", "files", 0, "before", "mode"), -1),
        ("state.json", ("stack", 0, "originals", CORE, "mtime_ns"), 10**400),
        ("state.json", ("stack", 0, "release"), ["1.0"]),
        ("state.json", ("stack", 0, "folders"), ["/tmp"]),
        ("state.json", ("kept",), [{"path": "a\0b", "patch": "p1", "sha256": "0" * 64}]),
        ("journal.json", ("steps", 0, "path"), "../victim"),
        ("journal.json", ("steps", -1, "temp"), CORE),
        ("journal.json", ("steps", 0, "number"), 2**80),
        ("journal.json", ("history", "time"), 1e308),
        ("journal.json", ("history", "patches"), [1]),
    ],
)
def test_a_value_that_patchkit_never_writes_is_damage_and_the_same_way_leads_out(
    site, rooted, name, way, value
):
    if name == "journal.json":
        swapped(site, rooted)
    else:
        rooted("apply", "p1")
    path = site / ".patchkit" / name
    data = json.loads(path.read_bytes())
    _set(data, way, value)
    path.write_text(json.dumps(data))
    for command in (["check"], ["restore", "--force"], ["apply", "p1"], ["recover"]):
        done = rooted(*command, code=5)
        assert f"{path}: damaged (" in done.err
        assert "'patchkit recover --force'" in done.err
        assert done.err.count("\n") == 1
    rooted("recover", "--force")
    assert json.dumps(data).encode() in rescued(site)
    rooted("restore", "--verify")
    assert files(site) == DEMO["1.0"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("pid", -1), ("created", 1e308), ("distribution", "../x"), ("patches", "p1"), ("more", 1)],
)
def test_a_lease_with_such_a_value_is_set_aside_too(site, rooted, key, value):
    lease.claim(str(site), "demopkg", [], "abc", "python serve.py").abandon()
    path = site / ".patchkit/leases/abc.demopkg.json"
    data = json.dumps({**json.loads(path.read_bytes()), key: value}).encode()
    path.write_bytes(data)
    assert "'patchkit recover --force'" in rooted("check", code=5).err
    os.utime(path, (1, 1))
    rooted("recover", "--force")
    assert data in rescued(site)
    rooted("check")


@pytest.mark.parametrize("name", ["journal.json", "state.json"])
def test_a_way_out_that_dies_itself_is_begun_again(site, rooted, name):
    """Killed at each rename of `recover --force`, which the next one then finishes."""
    kills = 0
    for count in range(1, 60):
        if name == "journal.json":
            swapped(site, rooted)
        else:
            rooted("apply", "p1")
        held = {path.read_bytes() for path in (site / ".patchkit").glob("undo.*/*")}
        damage(site, name, b"damaged")
        died = killed(rooted, "recover", "--force", call="rename", count=count)
        kills += died
        done = rooted("recover", "--force", code=None)
        assert files(site) in (DEMO["1.0"], PATCHED), (count, str(done))
        assert done.code == 0, (count, str(done))
        assert {b"damaged", *held} <= rescued(site)
        rooted("restore", "--verify")
        assert files(site) == DEMO["1.0"]
        if not died:
            break
    assert kills > 3
