"""``patchkit ps``, and apply and restore under it, with real processes of a real environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from patchkit.commands.ps import _runs, timelines
from patchkit.guard import Holder, Row, Verdict
from patchkit.guard.census import OLDER
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
    assert "it started before the file was changed" in text
    assert "python -c" in text


def test_a_process_of_the_patched_tree_is_named_by_the_patch(guarded: Kit, start):
    guarded("apply", "p1")
    process = start(IMPORT)
    assert rows(guarded, "p1")[process.pid]["versions"] == {"demopkg/core.py": "p1"}
    text = guarded("ps", "p1", "-v").out
    assert "core.py: p1" in text
    assert "sys.modules has" in text


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
    guarded("apply", "p1", "--override-guard", "--reason", "I know what I do")
    assert "I know what I do" in guarded("status").out
    assert "I know what I do" in guarded("log").out


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
