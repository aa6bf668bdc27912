"""Write a small random checkpoint of one family. Run by the engine's interpreter: ``random_model.py FAMILY FOLDER``.

The norm weights are random too, so that a state after a norm cannot pass for the one before it.
"""

from __future__ import annotations

import sys

import torch
import transformers

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 32}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "decoder_sparse_step": 1, **EXPERTS},
    ),
}


def main() -> None:
    family, folder = sys.argv[1:]
    name, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**COMMON, **own)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if "norm" in parameter_name:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
            elif "embed" in parameter_name:
                weight.copy_(torch.randn_like(weight))
            else:
                weight.copy_(0.05 * torch.randn_like(weight))
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
