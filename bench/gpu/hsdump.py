"""What hsdump costs a real SGLang server on a GPU, and whether its states are right there.

Run by ``hsdump.sh``, in the environment that it made, from the checkout's root. Prints as it goes: whatever
ends it, what was measured is on the screen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from bench.gpu.load import drive
from examples.cpu_engine import tiny_model
from examples.cpu_engine.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SITE = Path(sysconfig.get_path("purelib"))
DUMP_MODULE = SITE / "sglang" / "srt" / "hs_dump.py"
MEMORY = Path("/dev/shm/hsdump-bench")
WORK = Path(tempfile.gettempdir()) / "hsdump-bench"  # models, and the dump to a disk
LENGTH, CONCURRENCY = 2048, 16
START_SECONDS = 200.0
DUMMY_WEIGHTS = "--load-format=dummy"
BYTES_PER_TOKEN = 4 * 7168 * 2
# Small, but with the ranks and heads that the kernels of latent attention are made for.
RANDOM = tiny_model.Shape(
    dense_layers=4, hidden=1024, heads=16, kv_rank=512, nope=128, rope=64, value=128, yarn=False
)

PROMPTS = (100, 2000, 37)  # tokens
# What SGLang logs when it does not fuse although it was to.
GIVEN_UP = ("Skipping allreduce fusion", "allreduce_fusion API is not available")


class GpuServer(Server):
    arguments: ClassVar[tuple[str, ...]] = (
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--attention-backend=triton",
        "--sampling-backend=pytorch",
        "--grammar-backend=none",
        "--disable-radix-cache",
        "--mem-fraction-static=0.7",
        "--max-running-requests=64",
        "--cuda-graph-backend-decode=disabled",  # capturing takes 72 s, and prefill needs none
        "--host=127.0.0.1",
    )
    environment: ClassVar[dict[str, str]] = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Bench:
    def __init__(self, out: Path, deadline: float) -> None:
        self.out = out
        self.deadline = deadline
        self.rates: dict[str, float] = {}

    # -- building blocks -----------------------------------------------------------------------

    def serve(self, name: str, model: Path, *args: str, **env: str) -> GpuServer:
        print(f"-- {name}: starting, {self.left():.0f} s left", flush=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        (architecture,) = json.loads((model / "config.json").read_text())["architectures"]
        return GpuServer(
            Path(sys.executable),
            model,
            self.out / f"{name}.log",
            args=args,
            env={"PATH": path, **env},
            served=architecture,
            start_seconds=min(START_SECONDS, max(self.left(), 1.0)),
        )

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def measure(self, name: str, server: Server, seconds: float) -> float:
        drive(server.url, seconds=4, length=LENGTH, concurrency=CONCURRENCY)  # warm
        seconds = min(seconds, max(self.left() - 15, 5))
        rate, windows = drive(server.url, seconds=seconds, length=LENGTH, concurrency=CONCURRENCY)
        each = " ".join(f"{window:,.0f}" for window in windows)
        print(f"{name}: {rate:,.0f} tok/s over {seconds:.0f} s; each 10 s: {each}", flush=True)
        self.rates[name] = rate
        return rate

    def dummy_weights(self) -> Path:
        """A dense model of Kimi-K2.5's widths, 8 layers; its weights are made by the server."""
        shape = tiny_model.Shape(
            layers=8,
            dense_layers=8,
            hidden=7168,
            heads=64,
            vocab=32768,
            q_rank=1536,
            kv_rank=512,
            nope=128,
            rope=64,
            value=128,
            context=8192,
            yarn=False,
        )
        folder = fresh(WORK / "wide-model")
        config = {**tiny_model.config(shape), "intermediate_size": 18432}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        return folder

    # -- parts ---------------------------------------------------------------------------------

    def correct(self) -> None:
        self.compare("correct", RANDOM, PROMPTS)

    def sparse(self) -> None:
        """DeepSeek-V3.2: its indexer chooses 2,048 tokens for each query, not all of those of the third prompt."""
        # Decoding, and dense attention for short prompts, are FlashAttention-3's here, which the kit leaves out.
        env = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
        args = [f"--dsa-{phase}-backend=flashmla_sparse" for phase in ("prefill", "decode")]
        shape = replace(RANDOM, q_rank=256, index_topk=2048)
        self.compare("sparse", shape, (100, 2000, 3000), "--attention-backend=dsa", *args, **env)

    def tensor(self) -> None:
        """Two ranks, with the all-reduce fused into the next layer's norm (the default here) and without.

        On one GPU there is one rank, which tries this script and proves nothing of tensor parallelism.
        """
        ranks = min(2, torch.cuda.device_count())
        print(f"tensor: {ranks} ranks", flush=True)
        one = self.compare("one-rank", RANDOM, PROMPTS)
        for name, args in (("fused", ()), ("plain", ("--enforce-disable-flashinfer-allreduce-fusion",))):
            folder = self.compare(name, RANDOM, PROMPTS, f"--tp-size={ranks}", *args)
            log = (self.out / f"{name}.log").read_text(errors="replace")
            fused = "Auto-enabling FlashInfer AllReduce Fusion" in log
            fused &= not any(words in log for words in GIVEN_UP)
            for line in log.splitlines():
                if "llreduce" in line and "server_args=" not in line:
                    print(f"{name}: log: {line[:200]}")
            apart = difference(one, folder)
            print(f"{name}: to the states of one rank: {apart:.1e}", flush=True)
            assert apart < 0.02, "not within bf16 noise of one rank"
            assert fused == (name == "fused" and ranks == 2), "SGLang did not do what this part is about"

    def compare(
        self, name: str, shape: tiny_model.Shape, lengths: tuple[int, int, int], *args: str, **env: str
    ) -> Path:
        """States of real random weights, in bf16, against Transformers in fp32; the folder of the dump."""
        model = fresh(WORK / f"{name}-model")
        tiny_model.write(model, shape)
        prompts = [[2 + (i * 7919 + i * i) % 509 for i in range(n)] for n in lengths]
        folder = fresh(MEMORY / name)
        env |= {"SGLANG_HS_DUMP_DIR": str(folder), "SGLANG_HS_DUMP_LAYERS": "0,1,2,3,4"}
        with patched(), self.serve(name, model, *args, **env) as server:
            for ids in prompts[:2]:
                server.generate(ids)
            server.generate([*prompts])
            wait_for(lambda: rows(folder) >= 2 * sum(map(len, prompts)) - len(prompts[2]), 60)
        task = {"model": str(model), "folder": str(folder), "prompts": prompts}
        done = subprocess.run(
            [sys.executable, "tests/engine/reference.py"],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            check=True,
            timeout=max(self.left(), 10),
        )
        for ids, chains in zip(prompts, json.loads(done.stdout.splitlines()[-1]), strict=True):
            for chain in chains:
                pairs = [
                    f"R({k}) {chain['errors'][k]:.1e} ({chain['next_best'][k]:.1e})" for k in chain["errors"]
                ]
                print(f"{name}: {len(ids)} tokens: error (nearest wrong state): {', '.join(pairs)}")
            assert chains, "a prompt has no records"
        worst = max(
            error / chain["next_best"][k]
            for chains in json.loads(done.stdout.splitlines()[-1])
            for chain in chains
            for k, error in chain["errors"].items()
        )
        print(f"{name}: the worst error is {worst:.3f} of the way to a wrong state", flush=True)
        assert worst < 0.25
        return folder

    def disk(self) -> None:
        """Dump to a file system on a disk, with fsync, beside what the disk itself writes, before and after."""
        folder = fresh(WORK / "disk")
        before = disk_bandwidth(folder, "before")
        env = {"SGLANG_HS_DUMP_DIR": str(folder), "SGLANG_HS_DUMP_FSYNC": "file"}
        with (
            patched(),
            self.serve("disk", self.dummy_weights(), DUMMY_WEIGHTS, **env) as server,
            reading(folder),
            memory_of(server, "disk"),
            device_of(folder),
        ):
            rate = self.measure("disk", server, 60) * BYTES_PER_TOKEN
        print(f"disk: {rate / 1e9:.2f} GB/s of states; status {status(folder)}", flush=True)
        after = disk_bandwidth(fresh(folder), "after")
        for kind, least, most in ((kind, *sorted((before[kind], after[kind]))) for kind in before):
            print(f"disk: {rate / most:.2f} to {rate / least:.2f} of {kind}", flush=True)

    def active(self) -> None:
        """Dump to memory for a minute, while a reader keeps up."""
        folder = fresh(MEMORY / "active")
        with (
            patched(),
            self.serve(
                "active", self.dummy_weights(), DUMMY_WEIGHTS, SGLANG_HS_DUMP_DIR=str(folder)
            ) as server,
            reading(folder),
            memory_of(server, "active"),
        ):
            self.measure("active", server, 65)
        print(f"active: status {status(folder)}", flush=True)

    def ratios(self) -> None:
        """The same load: unpatched, the patch inactive and active, and the two ways in use today."""
        model = self.dummy_weights()
        with self.serve("unpatched", model, DUMMY_WEIGHTS) as server:
            self.measure("unpatched", server, 45)
        with patched(), self.serve("inactive", model, DUMMY_WEIGHTS) as server:
            self.measure("inactive", server, 45)
        self.active()
        folder = fresh(MEMORY / "naive")
        with (
            patched(),
            naive_module(),
            self.serve("naive", model, DUMMY_WEIGHTS, SGLANG_HS_DUMP_DIR=str(folder)) as server,
        ):
            self.measure("naive", server, 12)  # 14 GB of files, which memory holds
        self.print_ratios()
        name = "return_hidden_states"
        with self.serve(name, model, DUMMY_WEIGHTS, "--enable-return-hidden-states") as server:
            rate, _ = drive(
                server.url, seconds=60, length=LENGTH, concurrency=4, count=8, return_hidden_states=True
            )
            print(f"{name}: {rate:,.0f} tok/s over 8 prompts", flush=True)
            self.rates[name] = rate
        self.print_ratios()

    def print_ratios(self) -> None:
        base = self.rates["unpatched"]
        for name, rate in self.rates.items():
            print(f"ratio {name:22s} {rate:10,.0f} tok/s  {rate / base:.4f} of unpatched", flush=True)


# -- the tree ------------------------------------------------------------------------------------


def patchkit(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchkit", "--root", str(SITE), "--patches", "patches", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextmanager
def patched() -> Iterator[None]:
    """The tree with hsdump, put back with proof at the end."""
    done = patchkit("apply", "hsdump")
    print(done.stdout + done.stderr, end="", flush=True)
    done.check_returncode()
    try:
        yield
    finally:
        wait_for(lambda: patchkit("restore", "--dry-run").returncode == 0, 90)
        done = patchkit("restore")
        print(done.stdout + done.stderr, end="", flush=True)


@contextmanager
def naive_module() -> Iterator[None]:
    """The patched tree with the naive dump in the place of hsdump's module."""
    kept = DUMP_MODULE.read_bytes()
    DUMP_MODULE.write_bytes(Path("bench/gpu/naive_dump.py").read_bytes())
    try:
        yield
    finally:
        DUMP_MODULE.write_bytes(kept)


# -- what happens beside the server ---------------------------------------------------------------


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """A process that takes and deletes records all the while."""
    reader = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu.reader", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield
    finally:
        output, _ = reader.communicate("stop\n", timeout=120)
        print(f"reader: {output.strip()}", flush=True)


@contextmanager
def memory_of(server: Server, name: str) -> Iterator[None]:
    """The resident memory of the server's processes, sampled each second."""
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(1.0):
            samples.append(resident_bytes(server.pid))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        stop.set()
        sampler.join()
        third = max(len(samples) // 3, 1)
        early, late = max(samples[:third]), max(samples[-third:])
        print(f"{name}: resident memory {early / 1e9:.2f} GB early, {late / 1e9:.2f} GB late", flush=True)


def resident_bytes(group: int) -> int:
    total = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getpgid(int(entry)) == group:
                    with open(f"/proc/{entry}/statm", encoding="ascii") as statm:
                        total += int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except OSError:
                continue
    return total


@contextmanager
def device_of(folder: Path) -> Iterator[None]:
    """What the kernel says that the disk under ``folder`` did meanwhile."""
    number = folder.stat().st_dev
    counters = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    if not counters.exists():
        print(f"disk: no counters of device {os.major(number)}:{os.minor(number)}", flush=True)
        yield
        return
    before, began = [int(n) for n in counters.read_text().split()], time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    did = [int(n) - b for n, b in zip(counters.read_text().split(), before, strict=True)]
    print(
        f"disk: in {seconds:.0f} s the device read {did[2] * 512 / 1e9:.1f} GB, wrote {did[6] * 512 / 1e9:.1f} GB "
        f"and was busy {did[9] / 1000 / seconds:.0%} of the time",
        flush=True,
    )


def disk_bandwidth(folder: Path, when: str) -> dict[str, float]:
    """Bytes a second of one large sequential write, and of writers of files like the dump's; both with fsync."""
    block, count = os.urandom(16 << 20), 512
    found = {}
    began = time.perf_counter()
    write_file(folder / "dd", block, count)
    found["one sequential write"] = len(block) * count / (time.perf_counter() - began)
    (folder / "dd").unlink()

    def write_files(writer: int) -> None:
        for number in range(12):  # each is deleted when the next one is written, as the reader does
            write_file(folder / f"{writer}-{number}", block, 7)
            if number:
                (folder / f"{writer}-{number - 1}").unlink()

    began = time.perf_counter()
    writers = [threading.Thread(target=write_files, args=(writer,)) for writer in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found["six writers of such files"] = len(writers) * 12 * 7 * len(block) / (time.perf_counter() - began)
    for kind, rate in found.items():
        print(f"disk {when}: {kind}: {rate / 1e9:.2f} GB/s", flush=True)
    return found


def write_file(path: Path, block: bytes, count: int) -> None:
    with path.open("wb", buffering=0) as out:
        for _ in range(count):
            out.write(block)
        os.fsync(out.fileno())


def status(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "status").glob("*.json")
    report: dict[str, Any] = json.loads(path.read_text())
    return {key: report[key] for key in ("state", "error", "written", "unfinished_count")}


def rows(folder: Path) -> int:
    return sum(json.loads(path.read_text())["tokens"] for path in folder.glob("*.json"))


def difference(one: Path, other: Path) -> float:
    """The largest |a - b| / |a| over the rows of the states that two dumps have of the same prompts."""
    dumps: list[dict[str, Any]] = [{}, {}]
    for folder, found in zip((one, other), dumps, strict=True):
        for path in folder.glob("*.json"):
            entry = json.loads(path.read_text())
            found[entry["sequence_sha256"]] = torch.load(path.with_suffix(".pt"))["hidden_states"]
    shared = dumps[0].keys() & dumps[1].keys()
    assert len(shared) >= 3, "the dumps are not of the same prompts"
    return max(
        float(((a.float() - b.float()).norm(dim=1) / a.float().norm(dim=1)).max())
        for key in shared
        for a, b in zip(dumps[0][key], dumps[1][key], strict=True)
    )


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.5)


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="+", choices=["correct", "sparse", "tensor", "disk", "active", "ratios"]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--began", type=float, required=True)
    options = parser.parse_args()
    bench = Bench(options.out, time.monotonic() + options.limit - (time.time() - options.began))
    failed = 0
    for part in options.parts:
        try:
            if bench.left() < 90:
                print(f"== {part}: left out, {bench.left():.0f} s are not enough", flush=True)
                continue
            print(f"== {part}", flush=True)
            getattr(bench, part)()
        except Exception as error:  # noqa: BLE001 (the other parts still count)
            print(f"== {part} FAILED: {type(error).__name__}: {error}", flush=True)
            failed = 1
    for folder in (MEMORY, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
