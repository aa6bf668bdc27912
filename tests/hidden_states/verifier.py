"""A verifier that trainers can load: a made-up Llama with embedding, final norm and output head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.hidden_states.engine import HIDDEN, VOCAB, write_model

ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_verifier(folder: Path) -> str:
    """The model of ``write_model`` with what a trainer takes from a verifier; norm weights are not ones."""
    write_model(folder)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **ATTENTION}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
