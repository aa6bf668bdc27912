from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from patchkit.hidden_states.errors import ModelError, UnknownNormError
from patchkit.hidden_states.model import FinalNorm, ModelConfig
from tests.hidden_states.conftest import patchkit
from tests.hidden_states.engine import write_model

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


def write_index(model: str, text: str) -> None:
    Path(model, "model.safetensors.index.json").write_text(text)


def pointer(model: str) -> None:
    Path(model, "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\n")


def torn(model: str) -> None:
    path = Path(model, "model.safetensors")
    path.write_bytes(path.read_bytes()[:40])


BROKEN = [
    (pointer, "model.safetensors: is a git-lfs pointer, not the weights; git lfs pull"),
    (torn, "model.safetensors: cannot be read as safetensors"),
    (lambda model: write_index(model, "{"), "model.safetensors.index.json: not JSON"),
    (lambda model: write_index(model, "{}"), "model.safetensors.index.json: has no weight_map"),
    (lambda model: write_index(model, "[]"), "model.safetensors.index.json: has no weight_map"),
    (lambda model: write_index(model, '{"weight_map": {"a": 3}}'), "json: has no weight_map"),
    (
        lambda model: write_index(model, '{"weight_map": {"model.norm.weight": "gone.safetensors"}}'),
        "gone.safetensors: is not there, and the checkpoint's index names it",
    ),
    (
        lambda model: write_index(model, '{"weight_map": {"x.model.norm.weight": "model.safetensors"}}'),
        "model.safetensors: has no x.model.norm.weight",
    ),
]


@pytest.mark.parametrize(("spoil", "reason"), BROKEN)
def test_a_checkpoint_that_is_broken_is_named_with_the_cause(model, spoil, reason):
    spoil(model)
    with pytest.raises(ModelError) as caught:
        FinalNorm.read(ModelConfig.read(model))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "no JSON object"),
        ("{", "not JSON"),
        ("{}", "has no usable 'hidden_size'"),
        ('{"text_config": "x"}', "its text_config is no JSON object"),
        ('{"hidden_size": [], "num_hidden_layers": 1, "vocab_size": 1}', "has no usable"),
        ('{"hidden_size": 0, "num_hidden_layers": 1, "vocab_size": 1}', "sizes are not positive"),
    ],
)
def test_a_config_that_does_not_say_the_sizes_is_refused(tmp_path, text, reason):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        ModelConfig.read(str(tmp_path))
    assert reason in str(caught.value)


def test_a_broken_checkpoint_that_is_not_needed_does_not_end_a_validation(packing):
    dataset = packing.pack()
    pointer(packing.model)
    done = patchkit("validate", dataset.folder)
    assert done.returncode == 0
    assert "no verifier whose norm is known" in done.stdout
    done = patchkit("validate", dataset.folder, "--verifier", packing.model)
    assert done.returncode == 2
    assert "is a git-lfs pointer" in done.stderr


def test_a_norm_of_another_width_is_refused(packing):
    dataset = packing.pack()
    other = write_model(packing.folder / "other", hidden=32)
    done = patchkit("validate", dataset.folder, "--verifier", other)
    assert done.returncode == 1
    assert "its states are 64 wide, those of" in done.stdout
    out = packing.folder / "again"
    done = patchkit("pack", dataset.folder, "--out", out, "--format", "specforge", "--model", other)
    assert done.returncode == 2
    assert "its final norm is 32 wide, the states are 64" in done.stderr
