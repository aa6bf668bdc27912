"""The guard and the real SGLang server: setproctitle rewrites its command lines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from examples.cpu_engine import tiny_model, venv
from examples.cpu_engine.server import Server
from patchkit.guard import Verdict, inspect, procfs

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

pytestmark = pytest.mark.engine

MODEL = "sglang/srt/models/deepseek_v2.py"
SERVER = "sglang/srt/entrypoints/http_server.py"
NOBODY = "sglang/srt/models/grok.py.not-there"


@pytest.fixture(scope="module")
def python() -> pathlib.Path:
    return venv.ensure("0.5.9")


@pytest.fixture(scope="module")
def server(python: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model.ensure(python, venv.cache_root(), tiny_model.Shape())
    with Server(python, model, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def root(python: pathlib.Path) -> str:
    return str(next(python.parent.parent.glob("lib/python3*/site-packages")))


def group(leader: int) -> list[int]:
    """The living processes of a process group."""
    return [
        pid
        for pid in procfs.pids()
        if (known := procfs.stat(pid)) and not known.ended and os.getpgid(pid) == leader
    ]


def test_each_process_of_the_server_is_found_and_those_that_loaded_the_model_block(
    server: Server, python: pathlib.Path, root: str
):
    prefix = str(python.parent.parent)
    findings = inspect(root, [MODEL], prefix=prefix)
    found = {holder.pid: holder for holder in findings.holders}
    members = group(server.pid)
    assert len(members) >= 3
    assert set(members) <= set(found)
    titles = {pid: " ".join(procfs.arguments(pid)) for pid in members}
    scheduler = next(pid for pid, title in titles.items() if "scheduler" in title)
    assert "python" not in titles[scheduler], "setproctitle is what this test is about"
    assert not os.readlink(f"/proc/{scheduler}/exe").startswith(prefix), "the program is the base's"
    assert found[scheduler].verdict is Verdict.LOADED
    assert found[scheduler].files == (MODEL,)
    assert not [pid for pid in members if found[pid].verdict is Verdict.CANNOT_TELL]


def test_the_main_process_has_the_server_module_and_is_told_apart_from_the_scheduler(
    server: Server, root: str
):
    findings = inspect(root, [SERVER, MODEL])
    assert server.pid in {holder.pid for holder in findings.blockers}


def test_a_file_that_no_process_loaded_does_not_block(server: Server, root: str):
    findings = inspect(root, [NOBODY])
    members = set(group(server.pid))
    assert not members & {holder.pid for holder in findings.blockers}
    assert members <= {holder.pid for holder in findings.holders}


def test_after_the_server_has_ended_nobody_holds_the_tree(server: Server, root: str):
    members = set(group(server.pid))
    assert members & {holder.pid for holder in inspect(root, [MODEL]).blockers}
    server.stop()
    assert not members & {holder.pid for holder in inspect(root, [MODEL]).holders}
