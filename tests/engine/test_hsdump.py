"""The dumped states are the model's: each against Hugging Face Transformers on the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from examples.cpu_engine.server import PLAIN
from patchkit.catalog import release_key
from tests.engine.harness import (
    ALL_STATES,
    FLOAT32,
    Engine,
    compare,
    mismatches,
    prompt,
    wait_for_rows,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

FIRST_WITH_IDS = release_key("0.5.10rc0")


def test_states_of_single_batched_long_and_concurrent_prompts_agree(
    engine: Engine, patched: Path, tmp_path: Path
) -> None:
    single, batch, long = prompt(100), [prompt(n, seed=n) for n in (7, 64, 33)], prompt(2000, seed=9)
    clients = [prompt(40 + 11 * i, seed=100 + i) for i in range(10)]
    prompts = [single, *batch, long, *clients]
    folder = tmp_path / "dump"
    with engine.server(
        patched,
        tmp_path / "server.log",
        *PLAIN,
        FLOAT32,
        SGLANG_HS_DUMP_DIR=str(folder),
        SGLANG_HS_DUMP_LAYERS=ALL_STATES,
    ) as server:
        server.generate(single, max_new_tokens=4, rid="named-by-the-client")
        server.generate(batch, max_new_tokens=4)
        server.generate(long)
        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(server.generate, clients))
        entries = wait_for_rows(folder, sum(map(len, prompts)))
    assert {entry["release"] for entry in entries} == {engine.release}
    (named,) = [entry["request_id"] for entry in entries if entry["tokens"] == len(single)]
    assert named == ("named-by-the-client" if release_key(engine.release) >= FIRST_WITH_IDS else None)
    assert {tuple(entry["layers"]) for entry in entries} == {(0, 1, 2, 3, 4)}
    report = compare(engine, folder, prompts)
    assert [len(chains) for chains in report] == [1] * len(prompts)
    assert mismatches(report) == []


@pytest.mark.parametrize(
    "cache", ["--disable-radix-cache", "--page-size=1"], ids=["chunks alone", "radix cache"]
)
def test_chunks_of_a_prompt_join_to_its_states(
    engine: Engine, patched: Path, tmp_path: Path, cache: str
) -> None:
    """As SGLang runs when it is asked for nothing: in chunks, and with the radix cache."""
    radix = cache != "--disable-radix-cache"
    prompts = [prompt(length, seed=length) for length in (100, 300, 64, 130, 129, 200)]
    longer = [*prompts[0], *prompt(50, seed=5)]
    folder = tmp_path / "dump"
    with engine.server(
        patched,
        tmp_path / "server.log",
        cache,
        "--chunked-prefill-size=64",
        FLOAT32,
        SGLANG_HS_DUMP_DIR=str(folder),
        SGLANG_HS_DUMP_LAYERS=ALL_STATES,
    ) as server:
        server.generate(prompts[0])
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(server.generate, prompts[1:]))
        rows = sum(map(len, prompts))
        if radix:
            wait_for_rows(folder, rows)
            server.generate(prompts[0])
            server.generate(longer)
            rows += 1 + 50
        entries = wait_for_rows(folder, rows)
    assert max(entry["tokens"] for entry in entries) == 64
    hits = [(e["tokens"], e["prefix_length"], e["missing_rows"]) for e in entries if e["missing_rows"]]
    assert hits == ([(1, 99, 99), (50, 100, 100)] if radix else [])
    report = compare(engine, folder, [*prompts, longer] if radix else prompts)
    assert [[chain["missing"] for chain in chains] for chains in report] == (
        [[0, 99], *[[0]] * 5, [100]] if radix else [[0]] * 6
    )
    assert len(report[0][0]["names"]) == 2
    assert mismatches(report) == []


def test_both_ranks_of_tensor_parallelism_give_one_dump(
    engine: Engine, patched: Path, tmp_path: Path
) -> None:
    prompts = [prompt(100), prompt(37, seed=3)]
    folder = tmp_path / "dump"
    with engine.server(
        patched,
        tmp_path / "server.log",
        *PLAIN,
        FLOAT32,
        "--tp=2",
        SGLANG_HS_DUMP_DIR=str(folder),
        SGLANG_HS_DUMP_LAYERS=ALL_STATES,
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
    ) as server:
        server.generate(prompts)
        entries = wait_for_rows(folder, sum(map(len, prompts)))
    assert {entry["tp_size"] for entry in entries} == {2}
    report = compare(engine, folder, prompts)
    assert [len(chains) for chains in report] == [1, 1]
    assert mismatches(report) == []
