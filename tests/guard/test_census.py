from __future__ import annotations

import os
import time

import pytest

from patchkit.guard import Verdict, census
from patchkit.guard.census import OLDER, PRISTINE, version
from tests.guard.processes import IMPORT, NOTHING, VICTIM, Engine


@pytest.mark.parametrize(
    ("started", "changes", "answer"),
    [
        (50, (), PRISTINE),
        (50, ((40, "hsdump"),), "hsdump"),
        (50, ((60, "hsdump"),), OLDER),
        (50, ((40, "hsdump"), (60, PRISTINE)), OLDER),
        (70, ((40, "hsdump"), (60, PRISTINE)), PRISTINE),
        (50, ((30, "a"), (40, "a+b")), "a+b"),
        (50 - 0.5 / os.sysconf("SC_CLK_TCK"), ((50, "hsdump"),), "hsdump"),
    ],
)
def test_a_process_runs_what_was_there_when_it_started(started, changes, answer):
    assert version(started, changes) == answer


def test_processes_from_before_and_after_a_change(engine: Engine):
    old = engine.start(IMPORT)
    time.sleep(0.1)
    changed = time.time()
    new = engine.start(IMPORT)
    quiet = engine.start(NOTHING)
    found = census(engine.root, engine.files, changes={VICTIM: [(changed, "hsdump")]})
    rows = {row.holder.pid: row for row in found.rows}
    assert rows[old.pid].versions == {VICTIM: OLDER}
    assert rows[old.pid].outdated
    assert rows[new.pid].versions == {VICTIM: "hsdump"}
    assert not rows[new.pid].outdated
    assert rows[quiet.pid].versions == {}
    assert rows[quiet.pid].holder.verdict is Verdict.NOT_LOADED
    entry = rows[old.pid].to_json()
    assert (entry["versions"], entry["outdated"]) == ({VICTIM: OLDER}, True)
