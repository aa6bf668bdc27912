"""Packing against ``cp`` on the same files, what a conversion costs, and the memory that packing takes.

python bench/bench_pack.py [--samples 24] [--tokens 2048] [--hidden 7168] [--rounds 5] [--folder DIR]

Both sides begin with an empty write queue and end with their data on the disk; rounds alternate, and who
begins changes. Python's imports are not in it: packing runs in a fork of a process that has made them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parents[1]))
IMPORTS = ("torch", "numpy", "pyarrow", "xxhash", "safetensors", "patchkit.commands.data")


def make_dumps(folder: Path, samples: int, tokens: int, hidden: int) -> None:
    """Write dumps and their input."""
    import torch

    from tests.hidden_states.engine import CHOSEN, Dumper

    dumper = Dumper(folder / "dumps", hidden=hidden)
    states = [torch.randn(tokens, hidden).to(torch.bfloat16) for _ in CHOSEN]
    with (folder / "in.jsonl").open("w", encoding="utf-8") as file:
        for sample in range(samples):
            ids = [(sample * 7 + token) % 512 for token in range(tokens)]
            ids[0], ids[1] = sample // 512, sample % 512
            dumper.dump(ids, values=states)
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * tokens}) + "\n")


def dumps_in_a_child(folder: Path, samples: int, tokens: int, hidden: int) -> int:
    """Made in a process of its own, since a child's peak memory begins with that of its parent; their bytes."""
    sizes = [f"--samples={samples}", f"--tokens={tokens}", f"--hidden={hidden}"]
    subprocess.run([sys.executable, __file__, *sizes, "--make", str(folder)], check=True)
    return sum(path.stat().st_size for path in (folder / "dumps").iterdir())


@dataclass(frozen=True)
class Cost:
    """Of a command, from an empty write queue to its data on the disk; ``cpu`` is without the kernel's writing."""

    seconds: float
    cpu: float
    peak: int


def timed(start: Callable[[], int], label: str) -> Cost:
    """Of the process whose pid ``start`` returns."""
    subprocess.run(["sync"], check=True)
    began = time.monotonic()
    _, status, usage = os.wait4(start(), 0)
    subprocess.run(["sync"], check=True)
    if status:
        raise SystemExit(f"{label} ended with {status}")
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(time.monotonic() - began, cpu, usage.ru_maxrss * 1024)


def run(*command: str | Path) -> Cost:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return timed(lambda: subprocess.Popen([*map(str, command)], **quiet).pid, str(command[0]))


def patchkit(*arguments: str | Path) -> Cost:
    return run(sys.executable, "-m", "patchkit", *arguments)


def patchkit_in_a_fork(*arguments: str | Path) -> Cost:
    def start() -> int:
        if pid := os.fork():
            return pid
        status = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            command_line([*map(str, arguments)])
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            os._exit(status)

    for module in IMPORTS:
        importlib.import_module(module)
    from patchkit.cli.main import main as command_line

    return timed(start, "patchkit " + str(arguments[0]))


def pack(folder: Path, workers: int | None = None) -> list[str | Path]:
    return [
        *("pack", folder / "dumps", "--quiet", "--data", folder / "in.jsonl", "--out", folder / "ds"),
        *([f"--workers={workers}"] if workers else []),
    ]


def spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):6.2f} {unit} ({min(values):.2f} to {max(values):.2f})"


def speed(folder: Path, size: int, rounds: int, workers: int | None) -> None:
    sides = {
        "cp": lambda: run("cp", "-r", folder / "dumps", folder / "copy"),
        "pack": lambda: patchkit_in_a_fork(*pack(folder, workers)),
    }
    seconds: dict[str, list[float]] = {"cp": [], "pack": []}
    cpu: dict[str, list[float]] = {"cp": [], "pack": []}
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            for made in ("copy", "ds"):
                shutil.rmtree(folder / made, ignore_errors=True)
            cost = sides[name]()
            seconds[name].append(cost.seconds)
            cpu[name].append(cost.cpu)
    for name, values in seconds.items():
        rate = size / statistics.median(values) / 1e9
        print(f"{name:5} {spread(values, 's')}, {rate:.2f} GB/s; CPU {spread(cpu[name], 's')}")
    ratios = [copy / packed for copy, packed in zip(seconds["cp"], seconds["pack"], strict=True)]
    print(
        f"ratio {spread([100 * ratio for ratio in ratios], '% of the speed of cp')}, {rounds} rounds; ",
        end="",
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


def conversion(folder: Path) -> None:
    """To the same format: links, whose bytes are only read and compared."""
    if not (folder / "ds").exists():
        patchkit(*pack(folder))
    out = folder / "again"
    taken = patchkit_in_a_fork("pack", folder / "ds", "--out", out).seconds
    files = list((out / "hidden_states").iterdir())
    linked = sum(path.stat().st_nlink > 1 for path in files)
    print(f"links {taken:6.2f} s, {linked} of {len(files)} files of the same format are links")


def memory(parent: Path, samples: int, hidden: int) -> None:
    """The peak for ``samples`` small ones and for ten times as many."""
    base = run(sys.executable, "-c", "import " + ", ".join(IMPORTS)).peak
    for count in (samples, 10 * samples):
        folder = parent / f"memory-{count}"
        size = dumps_in_a_child(folder, count, 512, hidden)
        most = patchkit(*pack(folder)).peak
        shutil.rmtree(folder)
        print(f"peak  {most / 1e6:6.0f} MB for {count} samples of 512 tokens, {size / 1e9:.2f} GB; ", end="")
        print(f"{base / 1e6:.0f} MB of it are imports")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_dumps(options.make, options.samples, options.tokens, options.hidden)
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-pack-", dir=options.folder))
    try:
        memory(folder, 20, 1024)  # before this process imports torch: a child's peak begins with its parent's
        size = dumps_in_a_child(folder, options.samples, options.tokens, options.hidden)
        print(f"{options.samples} samples of {options.tokens} tokens, {size / 1e9:.2f} GB of dumps")
        speed(folder, size, options.rounds, options.workers)
        conversion(folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
