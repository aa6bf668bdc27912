"""Sessions around the real SGLang server on a CPU: the main deaths, with hsdump applied."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.cpu_engine import server, tiny_model, venv as engines
from patchkit import processes
from tests.support import Kit, Venv, files

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
RELEASE = "0.5.9"
PATCHES = Path(__file__).resolve().parents[2] / "patches"
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@dataclass
class Engine:
    """An environment of its own: the cached one's packages by link, sglang itself as a copy."""

    venv: Venv
    kit: Kit
    model: Path
    before: dict


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    cached = engines.ensure(RELEASE)
    model = tiny_model.ensure(cached, engines.cache_root(), tiny_model.Shape())
    made = Venv.create(tmp_path_factory.mktemp("engine") / "venv", base=os.path.realpath(cached))
    site = next((cached.parents[1] / "lib").glob("python3*")) / "site-packages"
    for entry in site.iterdir():
        if entry.name == "sglang" or entry.name.startswith("sglang-"):
            shutil.copytree(entry, made.site / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not (made.site / entry.name).exists() and entry.name != ".patchkit":
            (made.site / entry.name).symlink_to(entry)
    for script in cached.parent.glob("*sglang*"):
        shutil.copy(script, made.prefix / "bin")
    kit = Kit(["--python", str(made.python), "--patches", str(PATCHES)])
    kit.spawn("check")
    return Engine(made, kit, model, files(made.site / "sglang"))


@dataclass
class Running:
    """``patchkit run hsdump -- python -m sglang.launch_server ...`` that answers."""

    patchkit: subprocess.Popen
    port: int
    folder: Path

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    def family(self):
        """Every living process of the session: the server, its scheduler, its detokenizer."""
        below = {self.patchkit.pid}
        found = []
        table = processes.table()
        for _ in range(4):
            for process in table.values():
                if process.parent in below and process.pid not in below and not process.ended:
                    below.add(process.pid)
                    found.append(process)
        return found

    def titled(self, name: str) -> int:
        return next(process.pid for process in self.family() if name in process.title())

    def generate(self):
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.loads(reply.read())


@pytest.fixture
def running(copied, tmp_path):
    port = server.free_port()
    dump = tmp_path / "dump"
    dump.mkdir()
    command = [copied.venv.python, "-B", "-m", "sglang.launch_server", f"--model-path={copied.model}"]
    command += [f"--port={port}", *server.ARGUMENTS, *server.PLAIN]
    options = ["--env", f"SGLANG_HS_DUMP_DIR={dump}", "--grace", "30s", "--output", dump]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        patchkit = subprocess.Popen(
            [
                *(sys.executable, "-m", "patchkit", *copied.kit.where, "run", "hsdump"),
                *map(str, [*options, "--", *command]),
            ],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **server.ENVIRONMENT},
            start_new_session=True,
        )
    made = Running(patchkit, port, tmp_path)
    family = []
    try:
        deadline = time.monotonic() + 400
        while True:
            assert patchkit.poll() is None, made.err[-4000:]
            assert time.monotonic() < deadline, made.err[-4000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.5)
        family = made.family()
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            patchkit.kill()
        patchkit.wait()
        for process in family:
            processes.send(process, signal.SIGKILL)


def _all_gone(family):
    return [
        process for process in family if (now := processes.look(process.pid)) == process and not now.ended
    ]


def test_a_server_that_is_asked_to_end_leaves_a_pristine_tree_and_a_record(running, copied):
    running.generate()
    family = running.family()
    assert len(family) >= 3
    assert "in use by session" in copied.kit.spawn("restore", code=3).err
    running.patchkit.send_signal(signal.SIGTERM)
    running.patchkit.wait(300)
    assert "restored  hsdump" in running.err
    assert not _all_gone(family)
    assert files(copied.venv.site / "sglang") == copied.before
    (path,) = running.folder.glob("patchkit-run-*.json")
    predicate = json.loads(path.read_text())["predicate"]
    assert predicate["statement"] == f"this run used sglang {RELEASE} with hsdump, restored afterwards"
    assert any(name.endswith(".pt") for name in predicate["outputs"][0]["files"])
    copied.kit.spawn("attest", "verify", path)


@pytest.mark.parametrize("victim", ["launch_server", "sglang::scheduler", "sglang::detokenizer"])
def test_a_server_of_which_one_process_is_killed_is_ended_whole(running, copied, victim):
    family = running.family()
    os.kill(running.titled(victim), signal.SIGKILL)
    if victim != "launch_server":
        # SGLang does not notice a child's death by SIGKILL and stays; so does the session, until it is asked.
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.patchkit.wait(5)
        running.patchkit.send_signal(signal.SIGTERM)
    code = running.patchkit.wait(300)
    assert 0 < code < 125 or code > 128, running.err[-4000:]
    assert not _all_gone(family)
    assert files(copied.venv.site / "sglang") == copied.before


def test_a_killed_patchkit_leaves_a_mark_and_recover_ends_the_session(running, copied):
    family = running.family()
    running.patchkit.kill()
    running.patchkit.wait()
    assert "abandoned session" in copied.kit.spawn("check", code=1).out
    copied.kit.spawn("recover", "--wait", "120s")
    assert not _all_gone(family)
    assert files(copied.venv.site / "sglang") == copied.before
