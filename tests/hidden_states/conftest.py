from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from patchkit.hidden_states.dataset import Dataset
from patchkit.hidden_states.dump import Spool
from patchkit.hidden_states.model import FinalNorm, ModelConfig
from patchkit.hidden_states.pack import Packer, begin, pack_dumps
from patchkit.hidden_states.source import Source
from tests.hidden_states.engine import VOCAB, Dumper, write_model

REPOSITORY = Path(__file__).parents[2]
torch.set_num_threads(1)


def make_rows(count: int, seed: int = 1, longest: int = 90) -> list[dict]:
    """Rows with ``input_ids`` and ``loss_mask``; the last one repeats another's tokens with another mask."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count - 1):
        n = rng.randint(3, longest)
        ids = [rng.randrange(VOCAB) for _ in range(n)]
        rows.append({"input_ids": ids, "loss_mask": [0] * (n // 2) + [1] * (n - n // 2)})
    again = rows[len(rows) // 2]["input_ids"]
    return [*rows, {"input_ids": again, "loss_mask": [1] * len(again)}]


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "model")


@pytest.fixture
def norm(model: str) -> FinalNorm:
    return FinalNorm.read(ModelConfig.read(model))


@dataclass
class Packing:
    """One input, its dumps, and data sets made of them."""

    folder: Path
    rows: list[dict]
    model: str
    norm: FinalNorm

    def pack(self, format_name: str = "speculators", name: str = "ds", chunk: int | None = 32) -> Dataset:
        dumps = self.folder / f"dumps-{name}"
        dumper = Dumper(dumps, chunk=chunk)
        for row in self.rows:
            dumper.dump(row["input_ids"])
        source = Source(write_rows(self.folder / "in.jsonl", self.rows))
        growing = begin(str(self.folder / name), format_name, source, skip_bad=False, verifier=self.model)
        assert pack_dumps(Spool(str(dumps)), Packer(growing, self.norm, workers=2)) == []
        growing.finish()
        return Dataset(str(self.folder / name))


@pytest.fixture
def packing(tmp_path: Path, model: str, norm: FinalNorm) -> Packing:
    return Packing(tmp_path, make_rows(12), model, norm)


def content(folder: str | Path) -> dict[str, bytes]:
    """Every file of a data set but for its provenance, which alone may differ between two runs."""
    root = Path(folder)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "provenance" not in path.relative_to(root).parts
    }


def patchkit(
    *arguments: str | Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "patchkit", *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(env or {})},
    )


class EngineProcess:
    """The made-up engine as a process of its own."""

    def __init__(self, spool: Path, *, delay: float = 0.0) -> None:
        self.spool = spool
        spool.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hidden_states.engine", "0"],
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "SGLANG_HS_DUMP_DIR": str(spool),
                "DELAY": str(delay),
            },
        )
        assert self.process.stdout is not None
        port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def engines():
    """Starts engines, and ends those that are left."""
    started: list[EngineProcess] = []

    def start(spool: Path, *, delay: float = 0.0) -> EngineProcess:
        started.append(EngineProcess(spool, delay=delay))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
