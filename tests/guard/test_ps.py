"""``patchkit ps``, and apply and restore under it, with real processes of a real environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator

import pytest

from patchkit.commands.ps import _runs, timelines
from patchkit.guard import Holder, Row, Verdict
from patchkit.guard.census import OLDER, UNKNOWN
from tests.support import Kit, Venv

IMPORT = "import demopkg.core; print(demopkg.core.answer(), flush=True); input()"


@pytest.fixture
def start(venv: Venv) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Runs code in the environment; returns when it has printed a line."""
    running: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([venv.python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        assert process.stdout is not None
        process.said = process.stdout.readline().decode().strip()  # type: ignore[attr-defined]
        return process

    yield run
    for process in running:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


def rows(guarded: Kit, *arguments: str) -> dict[int, dict]:
    (target,) = json.loads(guarded("ps", *arguments, "--json").out)["data"]["targets"]
    return {row["pid"]: row for row in target["processes"]}


def test_nobody_uses_the_tree(guarded: Kit):
    done = guarded("ps")
    assert "no process uses it" in done.out


def test_each_process_with_the_version_that_it_runs(guarded: Kit, start):
    before = start(IMPORT)
    guarded("apply", "p1", "--override-guard", "--reason", "test")
    patched = start(IMPORT)
    guarded("restore", "p1", "--override-guard", "--reason", "test")
    after = start(IMPORT)
    assert [process.said for process in (before, patched, after)] == ["AAA", "BBB", "AAA"]
    found = rows(guarded)
    versions = {pid: row["versions"].get("demopkg/core.py") for pid, row in found.items()}
    assert versions == {
        before.pid: "older than the last change",
        patched.pid: "older than the last change",
        after.pid: "pristine",
    }
    text = guarded("ps").out
    assert "core.py: OLD" in text
    assert "started before the file was changed, and runs what was there then" in text
    assert "python -c" in text


def test_a_process_of_the_patched_tree_is_named_by_the_patch(guarded: Kit, start):
    guarded("apply", "p1")
    process = start(IMPORT)
    assert rows(guarded, "p1")[process.pid]["versions"] == {"demopkg/core.py": "p1"}
    text = guarded("ps", "p1", "-v").out
    assert "core.py: p1" in text
    assert "sys.modules has" in text


# Forks after a line of input; what it prints then is the child's pid and what the child runs.
FORK = """
    import os, sys, demopkg.core
    print(demopkg.core.answer(), flush=True)
    sys.stdin.readline()
    if os.fork() == 0:
        {child}
        print(os.getpid(), demopkg.core.answer(), flush=True)
        sys.stdin.read()
    {parent}
"""
AGAIN = (
    "import os, sys, demopkg.core; print(os.getpid(), demopkg.core.answer(), flush=True); sys.stdin.read()"
)


def forked(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    pid, said = process.stdout.readline().decode().split()
    return int(pid), said


@pytest.mark.parametrize(
    ("child", "parent", "said", "version"),
    [
        ("pass", "os.wait()", "AAA", OLDER),
        ("if os.fork(): os.wait()", "os.wait()", "AAA", OLDER),
        (f"os.execv(sys.executable, [sys.executable, '-c', {AGAIN!r}])", "os.wait()", "BBB", "p1"),
        # Who has only the orphan cannot know how long ago its parent imported the file.
        ("if os.fork(): os._exit(0)", "os.wait(); sys.stdin.read()", "AAA", UNKNOWN),
    ],
    ids=["fork", "fork of a fork", "fork and exec", "fork of one that ended"],
)
def test_a_fork_runs_what_its_parent_had_imported(
    guarded: Kit, start, child: str, parent: str, said: str, version: str
):
    process = start(textwrap.dedent(FORK.format(child=child, parent=parent)))
    guarded("apply", "p1", "--override-guard", "--reason", "test")
    pid, answer = forked(process)
    assert answer == said
    found = rows(guarded)
    assert {one: found[one]["versions"]["demopkg/core.py"] for one in (process.pid, pid)} == {
        process.pid: OLDER,
        pid: version,
    }
    assert found[pid]["outdated"] is (version == OLDER)
    text = guarded("ps").out
    assert ("its parent, which may have loaded the file long before, has ended" in text) is (
        version == UNKNOWN
    )


def test_a_process_that_loads_the_old_file_while_the_change_is_made_is_old(guarded: Kit, start, monkeypatch):
    """The time of a change is that of its end: until the renames, whoever comes loads the old text."""
    from patchkit import transaction

    meanwhile = []
    swap = transaction._swap

    def late(*arguments):
        meanwhile.append(start(IMPORT))
        swap(*arguments)

    monkeypatch.setattr(transaction, "_swap", late)
    guarded("apply", "p1")
    (process,) = meanwhile
    assert process.said == "AAA"
    assert rows(guarded)[process.pid]["versions"] == {"demopkg/core.py": OLDER}


def test_a_process_of_the_environment_that_loaded_nothing(guarded: Kit, start):
    process = start("print(1, flush=True); input()")
    assert rows(guarded)[process.pid]["verdict"] == "not-loaded"
    assert "not loaded" in guarded("ps").out
    guarded("apply", "p1")


def test_an_unknown_patch_is_one_line(guarded: Kit):
    done = guarded("ps", "nothing", code=None)
    assert done.code not in {0, 70}
    assert "nothing" in done.err


def test_apply_and_restore_refuse_while_the_file_is_loaded(guarded: Kit, start):
    process = start(IMPORT)
    done = guarded("apply", "p1", code=3)
    assert str(process.pid) in done.err
    guarded("apply", "p1", "--dry-run", code=3)
    process.kill()
    process.wait()
    guarded("apply", "p1", "--thorough", "--stop-to-read")
    process = start(IMPORT)
    guarded("restore", "p1", code=3)


def test_wait_goes_on_as_soon_as_the_process_has_ended(guarded: Kit, start):
    process = start(IMPORT)

    with guarded.popen("apply", "p1", "--wait", "60s") as waiting:
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert waiting.wait(60) == 0
    assert "waiting" in said
    assert str(process.pid) in said


def test_an_override_needs_a_reason_and_is_remembered(guarded: Kit, start):
    start(IMPORT)
    guarded("apply", "p1", "--override-guard", code=2)
    for command in (("apply", "p1"), ("restore",), ("recover",)):
        done = guarded(*command, "--reason", "I know", code=2)
        assert "give --override-guard too" in done.err
        assert done.err.count("\n") == 1
    guarded("apply", "p1", "--override-guard", "--reason", "I know what I do")
    assert guarded("status").out.count("I know what I do") == 1
    assert "I know what I do" in guarded("log").out
    guarded("restore", "--override-guard", "--reason", "it is\nmine")
    (line,) = (line for line in guarded("status").out.splitlines() if "guard overridden" in line)
    assert re.fullmatch(
        r"  guard overridden [\d-]+ [\d:]+ by \S+@\S+ \(restore p1\): it is\\nmine; "
        r"2 overrides in all, see 'patchkit log'",
        line,
    )
    (target,) = guarded("status", "--json").json["data"]["targets"]
    assert [(one["change"], one["override"]) for one in target["overrides"]] == [
        ("apply p1", "I know what I do"),
        ("restore p1", "it is\nmine"),
    ]


@pytest.mark.parametrize(
    ("versions", "cell"),
    [
        ({}, "not loaded"),
        ({"a/m.py": "pristine"}, "m.py: pristine"),
        ({"a/m.py": "p1"}, "m.py: p1"),
        ({"m.py": "p1", "n.py": "p1", "o.py": "p1", "p.py": "p1"}, "m.py n.py +2: p1"),
        ({"m.py": "p1", "n.py": "pristine", "o.py": "pristine"}, "m.py: p1, 2 pristine"),
        ({"m.py": OLDER, "n.py": "p1", "o.py": "pristine"}, "m.py: OLD, n.py: p1, 1 pristine"),
        ({"m.py": "pristine", "n.py": "pristine", "o.py": "pristine"}, "m.py n.py +1: pristine"),
    ],
)
def test_what_a_process_runs_fits_into_a_cell(versions: dict[str, str], cell: str):
    holder = Holder(1, "me", "python", 1.0, Verdict.LOADED, "")
    assert _runs(Row(holder, versions)) == cell


def test_history_becomes_versions():
    def record(when: float, action: str, name: str) -> dict:
        return {"time": when, "patches": [{"name": name, "action": action, "files": [{"path": "m.py"}]}]}

    records = [
        record(1, "apply", "a"),
        record(2, "apply", "b"),
        {"damaged": "x", "schema": None},
        record(3, "restore", "b"),
        record(4, "restore", "a"),
        record(5, "adopt", "c"),
        record(6, "restore", "c"),
    ]
    assert timelines(records) == {
        "m.py": [(1, "a"), (2, "a+b"), (3, "a"), (4, "pristine"), (6, "pristine")],
    }
