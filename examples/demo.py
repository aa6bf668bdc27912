"""The main job, start to end, on the real SGLang: `make demo`.

check, apply, check again, serve and dump hidden states, be refused while the server runs, stop, restore with
proof, check. Prints an account and ends non-zero at the first step that is not as it should be.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.cpu_engine import tiny_model, venv
from examples.cpu_engine.server import ENVIRONMENT, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

RELEASE = "0.5.9"
PROMPTS = [list(range(5, 105)), list(range(200, 263)), [7, 11, 13, 17, 19]]


class StepFailedError(Exception):
    """A step of the demo that is not as it should be."""


class Demo:
    def __init__(self, python: Path) -> None:
        self.python = python
        self.step = 0

    def title(self, text: str) -> None:
        self.step += 1
        print(f"\n{self.step}. {text}", flush=True)

    def patchkit(self, *arguments: str, expect: int) -> str:
        """Run a patchkit command as a user would and require its exit code."""
        print(f"   $ patchkit {' '.join(arguments)}", flush=True)
        command = [sys.executable, "-m", "patchkit", "--python", str(self.python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = (done.stdout + done.stderr).rstrip()
        print("\n".join(f"     {line[:220]}" for line in output.splitlines()), flush=True)
        if done.returncode != expect:
            raise StepFailedError(
                f"'patchkit {' '.join(arguments)}' ended with {done.returncode}, not {expect}"
            )
        print(f"     (exit {done.returncode}, as it should be)", flush=True)
        return output


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise StepFailedError(otherwise)


def main() -> int:
    started = time.monotonic()
    print(f"patchkit demo: hsdump on the real SGLang {RELEASE}, on this machine's CPU")
    print(
        "   building the engine's environment if it is not there (1.4 GB, one to two minutes) …", flush=True
    )
    python = venv.ensure(RELEASE)
    model = tiny_model.ensure(python, venv.cache_root())
    print(f"   engine {python}\n   model  {model}")
    work = Path(tempfile.mkdtemp(prefix="patchkit-demo-"))
    try:
        with venv.locked(venv.cache_root() / "in-use.lock"):
            try:
                run(Demo(python), python, model, work)
            finally:
                put_back(python)
    except StepFailedError as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\nAll as it should be, in {time.monotonic() - started:.0f} s.")
    return 0


def put_back(python: Path) -> None:
    """Whatever happened, the shared engine is left pristine."""
    command = [sys.executable, "-m", "patchkit", "--python", str(python), "-q", "restore"]
    subprocess.run(command, check=False)


def run(demo: Demo, python: Path, model: Path, work: Path) -> None:
    put_back(python)  # an earlier demo may have been killed
    demo.title("The installed tree is clean")
    demo.patchkit("check", expect=0)

    demo.title("Apply hsdump")
    demo.patchkit("apply", "hsdump", expect=0)
    output = demo.patchkit("check", expect=1)
    require("deepseek_v2.py" in output, "check does not name the patched file")
    demo.patchkit("status", expect=0)

    demo.title("Serve, and dump hidden states during prefill")
    dumps = work / "dump"
    dumps.mkdir()
    began = time.monotonic()
    with Server(python, model, work / "server.log", env={"SGLANG_HS_DUMP_DIR": str(dumps)}) as server:
        print(f"   server {server.pid} is healthy after {time.monotonic() - began:.0f} s", flush=True)
        for prompt in PROMPTS:
            server.generate(prompt)
        records = wait_for(dumps, {len(prompt) for prompt in PROMPTS})
        for record in records:
            print(f"     {record['tokens']} tokens, layers {record['layers']}, {record['size']:,} bytes")
        demo.title("Nothing may change while the server runs")
        refused = demo.patchkit("restore", expect=3)
        require("deepseek_v2" in refused or "loaded" in refused, "the refusal gives no evidence")
        demo.patchkit(
            "apply", "hsdump", expect=0
        )  # it is applied already: a no-op, which needs no permission
        print("   stopping the server …", flush=True)

    demo.title("Restore, and prove it")
    output = demo.patchkit("restore", "--verify", expect=0)
    require("RECORD" in output, "the restore was not proven against RECORD")
    demo.patchkit("check", expect=0)

    demo.title("A process that has loaded the clean file keeps it clean")
    with importer(python, "sglang.srt.models.deepseek_v2") as pid:
        print(f"   process {pid} has imported deepseek_v2", flush=True)
        demo.patchkit("apply", "hsdump", expect=3)
    demo.patchkit("check", expect=0)


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


if __name__ == "__main__":
    os.environ.pop("VIRTUAL_ENV", None)
    sys.exit(main())
