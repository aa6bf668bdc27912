from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from patchkit.hidden_states.errors import UnknownNormError
from patchkit.hidden_states.model import FinalNorm, ModelConfig
from tests.hidden_states.conftest import patchkit

EPSILON = 1e-5


def set_type(model: str, model_type: str) -> None:
    path = Path(model, "config.json")
    config = {**json.loads(path.read_text()), "model_type": model_type, "rms_norm_eps": EPSILON}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("model_type", "module", "name"),
    [
        ("deepseek_v3", "deepseek_v3", "DeepseekV3RMSNorm"),
        ("llama", "llama", "LlamaRMSNorm"),
        ("qwen3_moe", "qwen3_moe", "Qwen3MoeRMSNorm"),
        ("gemma2", "gemma2", "Gemma2RMSNorm"),
        ("gemma3_text", "gemma3", "Gemma3RMSNorm"),
        ("gemma3n_text", "gemma3n", "Gemma3nRMSNorm"),
        ("qwen3_next", "qwen3_next", "Qwen3NextRMSNorm"),
    ],
)
def test_a_final_norm_is_what_transformers_computes(model, model_type, module, name):
    set_type(model, model_type)
    generator = torch.Generator().manual_seed(5)
    weight = 1 + torch.randn(64, generator=generator) * 0.3
    save_file({"model.norm.weight": weight}, Path(model, "model.safetensors"))
    theirs = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)(64, eps=EPSILON)
    state = torch.randn(7, 64, generator=generator) * 30 + 3
    with torch.no_grad():
        theirs.weight.copy_(weight)
        expected = theirs(state)
    norm = FinalNorm.read(ModelConfig.read(model))
    torch.testing.assert_close(norm(state), expected)
    assert norm.made(expected)
    assert not norm.made(state)


@pytest.mark.parametrize("model_type", ["cohere", "nemotron", "gemma9", ""])
def test_a_norm_that_is_not_known_is_not_guessed(model, model_type):
    set_type(model, model_type)
    with pytest.raises(UnknownNormError, match=f"type '{model_type}'"):
        FinalNorm.read(ModelConfig.read(model))


def test_a_norm_that_is_not_known_is_refused_where_it_is_needed_and_said_where_not(packing):
    dataset = packing.pack()
    set_type(packing.model, "cohere")
    done = patchkit("pack", dataset.folder, "--out", packing.folder / "other", "--format", "specforge")
    assert done.returncode == 2
    assert "models of the type 'cohere'" in done.stderr
    done = patchkit("validate", dataset.folder, "--verifier", packing.model)
    assert done.returncode == 0
    assert "no verifier whose norm is known" in done.stdout
