"""Which command ``patchkit run`` starts, and how it says that it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


def _ended(process, code):
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
    return err


def test_a_file_that_is_not_in_path_is_no_command_without_a_slash(kit, venv):
    Path("foo").write_text("#!/bin/sh\nexit 5\n")
    Path("foo").chmod(0o755)
    err = _ended(kit.session("p1", command=["foo"]), 127)
    assert "foo: no such command" in err
    assert not (venv.site / ".patchkit").exists()
    _ended(kit.session("p1", command=["./foo"]), 5)


@pytest.mark.parametrize(
    ("script", "code", "number", "says"),
    [
        ("exit 200", 200, None, "it ended with 200 after"),
        ("exit 137", 137, None, "it ended with 137 after"),
        ("kill -KILL $$", 137, 9, "it was ended by signal 9 (137) after"),
    ],
)
def test_an_exit_code_is_not_taken_for_a_signal(kit, script, code, number, says):
    err = _ended(kit.session("p1", command=["sh", "-c", script]), code)
    assert says in err
    (path,) = Path().glob("patchkit-run-*.json")
    predicate = json.loads(path.read_text())["predicate"]
    assert (predicate["exit_code"], predicate["exit_signal"]) == (code, number)
