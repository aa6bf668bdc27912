"""The first part: patch the engine, serve, be refused, put it back with proof."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

from examples.cpu_engine.server import ENVIRONMENT, Server
from examples.demo.account import require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from examples.demo.account import Account

PROMPTS = [list(range(5, 105)), list(range(200, 263)), [7, 11, 13, 17, 19]]


def show(account: Account, model: Path, work: Path) -> None:
    account.title("The installed tree is clean")
    account.patchkit("check", expect=0)

    account.title("Apply hsdump")
    account.patchkit("apply", "hsdump", expect=0)
    output = account.patchkit("check", expect=1)
    require("deepseek_v2.py" in output, "check does not name the patched file")
    account.patchkit("status", expect=0)

    account.title("Serve, and dump hidden states during prefill")
    dumps = work / "dump"
    dumps.mkdir()
    began = time.monotonic()
    with Server(account.python, model, work / "server.log", env={"SGLANG_HS_DUMP_DIR": str(dumps)}) as server:
        account.say(f"server {server.pid} is healthy after {time.monotonic() - began:.0f} s")
        for prompt in PROMPTS:
            server.generate(prompt)
        for record in wait_for(dumps, {len(prompt) for prompt in PROMPTS}):
            account.say(f"  {record['tokens']} tokens, layers {record['layers']}, {record['size']:,} bytes")
        account.title("Nothing may change while the server runs")
        refused = account.patchkit("restore", expect=3)
        require("deepseek_v2" in refused or "loaded" in refused, "the refusal gives no evidence")
        account.patchkit("apply", "hsdump", expect=0)  # applied already: a no-op, which needs no permission
        account.say("stopping the server …")

    account.title("Restore, and prove it")
    output = account.patchkit("restore", "--verify", expect=0)
    require("RECORD" in output, "the restore was not proven against RECORD")
    account.patchkit("check", expect=0)

    account.title("A process that has loaded the clean file keeps it clean")
    with importer(account.python, "sglang.srt.models.deepseek_v2") as pid:
        account.say(f"process {pid} has imported deepseek_v2")
        account.patchkit("apply", "hsdump", expect=3)
    account.patchkit("check", expect=0)


@contextlib.contextmanager
def importer(python: Path, module: str) -> Iterator[int]:
    """A process of the engine's environment that has imported ``module`` and waits."""
    code = f"import {module}; print('ready', flush=True); input()"
    process = subprocess.Popen(
        [python, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **ENVIRONMENT},
    )
    with process:
        try:
            assert process.stdout is not None
            require(b"ready" in process.stdout.read(6), f"cannot import {module}")
            yield process.pid
        finally:
            process.kill()


def wait_for(folder: Path, lengths: set[int], seconds: float = 30.0) -> list[dict[str, Any]]:
    """The records of prompts of these ``lengths`` (tokens); writers finish them after the answer."""
    deadline = time.monotonic() + seconds
    while True:
        paths = sorted(folder.glob("*.json"))
        records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if lengths <= {record["tokens"] for record in records}:
            break
        require(time.monotonic() < deadline, f"not every prompt was dumped to {folder}")
        time.sleep(0.1)
    require(all(path.with_suffix(".pt").stat().st_size > 0 for path in paths), "a dump lacks its .pt")
    return [record for record in records if record["tokens"] in lengths]
