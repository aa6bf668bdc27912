"""Packing against ``cp`` on the same files, and the memory that it takes.

python bench/bench_pack.py [--samples 16] [--tokens 2048] [--hidden 7168] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


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


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of ``command``, its data on the disk at the end."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    subprocess.run(["sync"], check=True)
    if status:
        raise SystemExit(f"{command} ended with {status}")
    return time.monotonic() - began, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_dumps(options.make, options.samples, options.tokens, options.hidden)
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-pack-", dir=options.folder))
    try:
        # In a process of its own: a child's peak memory begins with that of its parent.
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--make", str(folder)], check=True)
        size = sum(path.stat().st_size for path in (folder / "dumps").iterdir())
        subprocess.run(["sync"], check=True)
        copy, _ = timed(["cp", "-r", str(folder / "dumps"), str(folder / "copy")])
        shutil.rmtree(folder / "copy")
        pack, memory = timed(
            [
                *(sys.executable, "-m", "patchkit", "pack", str(folder / "dumps"), "--quiet"),
                *("--data", str(folder / "in.jsonl"), "--out", str(folder / "ds")),
                *(["--workers", str(options.workers)] if options.workers else []),
            ]
        )
        start, base = timed([sys.executable, "-c", "import torch, pyarrow"])
        rate, pure = size / copy / 1e9, size / (pack - start) / 1e9
        print(f"{options.samples} samples, {size / 1e9:.2f} GB of dumps")
        print(f"cp    {copy:6.1f} s  {rate:.2f} GB/s")
        print(
            f"pack  {pack:6.1f} s  {pure:.2f} GB/s without {start:.1f} s of imports: {pure / rate:.0%} of cp"
        )
        print(f"pack  {memory / 1e6:6.0f} MB at most, of which {base / 1e6:.0f} MB are torch and pyarrow")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
