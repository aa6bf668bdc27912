"""The patches of the other families dump their models' states, by the same module."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from examples.cpu_engine.server import PLAIN
from tests.engine.harness import (
    ALL_STATES,
    FLOAT32,
    Engine,
    compare,
    mismatches,
    patchkit,
    prompt,
    wait_for_rows,
)

pytestmark = pytest.mark.engine

SERVED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
}


@pytest.mark.parametrize("family", sorted(SERVED))
def test_states_of_the_family_agree(engine: Engine, tmp_path: Path, family: str) -> None:
    model = tmp_path / "model"
    subprocess.run(
        [str(engine.python), str(Path(__file__).with_name("random_model.py")), family, str(model)],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    engine = replace(engine, model=model)
    root = engine.copy_tree(tmp_path / "root")
    patchkit("--root", root, "apply", f"hsdump-{family}")
    prompts = [prompt(100), prompt(37, seed=3)]
    folder = tmp_path / "dump"
    env = {"SGLANG_HS_DUMP_DIR": str(folder), "SGLANG_HS_DUMP_LAYERS": ALL_STATES}
    server = engine.server(root, tmp_path / "server.log", *PLAIN, FLOAT32, **env)
    server.served = SERVED[family]
    with server:
        server.generate(prompts)
        wait_for_rows(folder, sum(map(len, prompts)))
    report = compare(engine, folder, prompts)
    assert [len(chains) for chains in report] == [1, 1]
    assert mismatches(report) == []
