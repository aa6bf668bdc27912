"""Plans are made in memory and read only; what they say is what will be done."""

from __future__ import annotations

import os

import pytest

from patchkit.catalog import Catalog
from patchkit.overlay import fresh_mtime_ns
from patchkit.plan import CoveredError, Plan, expectations
from patchkit.state import State
from patchkit.target import environment, locate
from patchkit.transaction import MakeFolder, Put, Remove, RemoveFolder
from tests import support
from tests.support import DEMO, P1, snapshot


@pytest.fixture
def make(site, patches):
    """A plan for ``site`` as it is now."""

    def plan() -> Plan:
        target = locate("demopkg", environment(root=str(site)), lambda: ["demopkg"])
        return Plan(target, Catalog([str(patches)]), State.load(str(site)), fresh_mtime_ns(0))

    return plan


def everything(root):
    return {path: path.lstat().st_ctime_ns for path in root.rglob("*")}


def test_planning_writes_nothing(site, make):
    before = everything(site)
    plan = make()
    plan.apply(plan.catalog["p1"])
    plan.operations()
    assert everything(site) == before


def test_the_operations_put_backups_before_files_and_the_state_last(make):
    plan = make()
    plan.apply(plan.catalog["p1"])
    found = plan.operations()
    kinds = [(type(one).__name__, one.path) for one in found]
    assert found[-1].path == ".patchkit/state.json"
    backup = kinds.index(("Put", "demopkg/core.py.bak_p1"))
    assert backup < kinds.index(("Put", "demopkg/core.py")) < kinds.index(("Remove", "demopkg/old.py"))
    assert kinds.index(("MakeFolder", "demopkg/extra")) < backup
    assert {type(one) for one in found} == {MakeFolder, Put, Remove, RemoveFolder}


def test_the_guard_is_asked_about_the_distribution_s_files_only(make):
    plan = make()
    plan.apply(plan.catalog["p1"])
    assert plan.files == sorted(P1)


def test_a_dry_run_says_it_all_and_writes_nothing(site, rooted):
    before = everything(site)
    done = rooted("apply", "p1", "--dry-run")
    assert "would apply p1 to demopkg 1.0" in done.out
    assert "backup demopkg/core.py.bak_p1" in done.out
    assert everything(site) == before
    rooted("apply", "p1")
    applied = snapshot(site)
    assert "would restore p1" in rooted("restore", "-n").out
    assert snapshot(site) == applied


def test_a_patch_goes_on_and_off_within_one_plan_as_if_it_had_never_been(make):
    plan = make()
    plan.apply(plan.catalog["p1"])
    plan.restore(plan.state.stack[0])
    assert [
        one for one in plan.operations() if isinstance(one, (Put, Remove)) and "state" not in one.path
    ] == []


def test_what_a_plan_took_away_is_not_there_for_the_next_patch(make):
    plan = make()
    plan.apply(plan.catalog["p1"])
    assert plan.read("demopkg/old.py") is None
    assert plan.read("demopkg/extra/dump.py").data == P1["demopkg/extra/dump.py"]
    plan.restore(plan.state.stack[0])
    assert plan.read("demopkg/extra/dump.py") is None
    assert plan.read("demopkg/old.py").data == DEMO["1.0"]["demopkg/old.py"]


def test_the_top_of_a_stack_decides_what_a_file_must_be(site, rooted, patches):
    p2 = {"demopkg/core.py": P1["demopkg/core.py"] + b"more = 1\n"}
    support.write_patch(patches, "p2", {**DEMO["1.0"], **P1}, p2, on=("p1",))
    rooted("apply", "p1", "p2")
    state = State.load(str(site))
    below, above = (expectations(applied, state) for applied in state.stack)
    assert set(below) == set(P1) - {"demopkg/core.py"}
    assert below["demopkg/old.py"] is None
    assert set(above) == {"demopkg/core.py"}


def test_a_covered_patch_is_named_with_those_above_it(site, rooted, patches, make):
    p2 = {"demopkg/core.py": P1["demopkg/core.py"] + b"more = 1\n"}
    support.write_patch(patches, "p2", {**DEMO["1.0"], **P1}, p2, on=("p1",))
    rooted("apply", "p1", "p2")
    plan = make()
    with pytest.raises(CoveredError, match="'p1' lies below 'p2'"):
        plan.restore(plan.state.stack[0])


def test_a_series_is_one_transaction(site, rooted, patches):
    support.write_patch(patches, "p2", DEMO["1.0"], {"demopkg/util.py": b"x\n"})
    folder = patches / "both"
    folder.mkdir()
    (folder / "patch.toml").write_text(
        'schema = 1\nname = "both"\ndistribution = "demopkg"\nmembers = ["p1", "p2"]\n'
    )
    before = snapshot(site)
    rooted("apply", "both")
    assert [applied.patch for applied in State.load(str(site)).stack] == ["p1", "p2"]
    assert len((site / ".patchkit/history.jsonl").read_text().splitlines()) == 1
    rooted("restore", "both", "--verify")
    assert snapshot(site) == before


def test_new_times_never_share_a_second_with_the_last():
    last = 5_000_000_000 * 10**9 + 999_999_999
    assert fresh_mtime_ns(last) // 10**9 == last // 10**9 + 1


def test_a_symlink_read_through_the_plan_gives_what_it_leads_to(site, make):
    os.rename(site / "demopkg/core.py", site / "real.py")
    (site / "demopkg/core.py").symlink_to("../real.py")
    plan = make()
    plan.apply(plan.catalog["p1"])
    plan.restore(plan.state.stack[0])
    assert plan.read("demopkg/core.py").data == DEMO["1.0"]["demopkg/core.py"]
