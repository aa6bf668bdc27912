"""Real trees, real servers and real dumps for the tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.cpu_engine.server import Server

REFERENCE = Path(__file__).with_name("reference.py")
# With fp32 weights and activations the two implementations differ in the order of sums alone: 2e-7 was
# measured. A wrong state is off by 1e-2 or more, so there is room on both sides.
TOLERANCE = 1e-5
ALL_STATES = "0,1,2,3,4"  # of the tiny model's four layers
FLOAT32 = "--dtype=float32"
WARM_UP_TOKENS = 3
COMPARED: list[float] = []  # every error that was measured; conftest.py reports the worst of a test


@dataclass(frozen=True)
class Engine:
    """An interpreter with a real SGLang, and the tiny model it serves."""

    release: str
    python: Path
    model: Path

    @property
    def site(self) -> Path:
        (folder,) = (self.python.parent.parent / "lib").glob("python3.*/site-packages")
        return folder

    def copy_tree(self, root: Path) -> Path:
        """A root of its own with SGLang's files, to patch; the shared environment stays as it is."""
        root.mkdir(parents=True)
        for source in (self.site / "sglang", *self.site.glob("sglang-*.dist-info")):
            shutil.copytree(source, root / source.name)
        return root

    def server(self, root: Path, log: Path, *args: str, **env: str) -> Server:
        return Server(self.python, self.model, log, args=args, env={"PYTHONPATH": str(root), **env})


def patchkit(*args: str | Path) -> str:
    """Run the command as a user does; its output. Fails the test when it fails."""
    command = [sys.executable, "-m", "patchkit", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for_rows(folder: Path, rows: int, seconds: float = 120) -> list[dict[str, Any]]:
    """The records of ``folder`` once they hold ``rows`` rows, without those of warm-up and health checks."""
    deadline = time.monotonic() + seconds
    while True:
        entries = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        entries = [e for e in entries if e["prefix_length"] or e["tokens"] > WARM_UP_TOKENS]
        found = sum(entry["tokens"] for entry in entries)
        if found >= rows:
            assert found == rows, f"{found} rows where {rows} were prefilled"
            return entries
        assert time.monotonic() < deadline, f"only {found} of {rows} rows; status: {status(folder)}"
        time.sleep(0.1)


def status(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "status").glob("*.json")
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def compare(engine: Engine, folder: Path, prompts: list[list[int]]) -> list[list[dict[str, Any]]]:
    """What ``reference.py`` says; keys of ``errors`` and ``next_best`` are layer ids as text."""
    done = subprocess.run(
        [str(engine.python), str(REFERENCE)],
        input=json.dumps({"model": str(engine.model), "folder": str(folder), "prompts": prompts}),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    answer: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    COMPARED.extend(error for chains in answer for chain in chains for error in chain["errors"].values())
    return answer


def mismatches(report: list[list[dict[str, Any]]]) -> list[str]:
    """What is wrong with a comparison: nothing, when every prompt has its rows and they agree."""
    wrong = []
    for place, chains in enumerate(report):
        if not chains:
            wrong.append(f"prompt {place} has no records")
        for chain in chains:
            for k, error in chain["errors"].items():
                if not error < TOLERANCE:
                    wrong.append(f"prompt {place}: R({k}) is off by {error:.2g}")
                assert chain["next_best"][k] > 100 * TOLERANCE, "the model cannot tell these states apart"
    return wrong


def prompt(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    """Token ids without pattern, the same for the same arguments; never a special token."""
    value, ids = seed * 7919 + 17, []
    for _ in range(length):
        value = (value * 1103515245 + 12345) % 2**31
        ids.append(2 + (value >> 8) % (vocab - 2))
    return ids
