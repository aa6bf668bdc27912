"""The patches of the other families dump their models' states, by the same module."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.cpu_engine import tiny_model, venv
from examples.cpu_engine.server import PLAIN
from tests.engine.conftest import OLD_ROPE
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

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.engine

SERVED = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
}


def test_states_of_deepseek_v2_agree(
    thorough_engine: Engine, apply_hsdump: Callable[[Engine], Path], tmp_path: Path
) -> None:
    """The same class serves it; there is no query rank, and the experts are chosen otherwise."""
    engine, patched = thorough_engine, apply_hsdump(thorough_engine)
    shape = tiny_model.Shape(v2=True, yarn=not engine.release.startswith(OLD_ROPE))
    model = tiny_model.ensure(engine.python, venv.cache_root(), shape)
    assert_states_agree(replace(engine, model=model), patched, tmp_path, "DeepseekV2ForCausalLM")


@pytest.mark.parametrize("family", sorted(SERVED))
def test_states_of_the_family_agree(thorough_engine: Engine, tmp_path: Path, family: str) -> None:
    model = tmp_path / "model"
    subprocess.run(
        [str(thorough_engine.python), str(Path(__file__).with_name("random_model.py")), family, str(model)],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
    )
    engine = replace(thorough_engine, model=model)
    root = engine.copy_tree(tmp_path / "root")
    patchkit("--root", root, "apply", f"hsdump-{family}")
    assert_states_agree(engine, root, tmp_path, SERVED[family])


def assert_states_agree(
    engine: Engine, root: Path, scratch: Path, served: str, text_model: Path | None = None
) -> None:
    prompts = [prompt(100), prompt(37, seed=3)]
    folder = scratch / "dump"
    env = {"SGLANG_HS_DUMP_DIR": str(folder), "SGLANG_HS_DUMP_LAYERS": ALL_STATES}
    server = engine.server(root, scratch / "server.log", *PLAIN, FLOAT32, **env)
    server.served = served
    with server:
        server.generate(prompts)
        wait_for_rows(folder, sum(map(len, prompts)))
    report = compare(replace(engine, model=text_model or engine.model), folder, prompts)
    assert [len(chains) for chains in report] == [1, 1]
    assert mismatches(report) == []
