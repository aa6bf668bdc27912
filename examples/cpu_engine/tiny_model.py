"""A tiny DeepSeek checkpoint with random weights, one that real SGLang and Transformers both load.

The norm weights are random as well. Left at one, a state taken after the final norm could not be told
from one taken before it. Run as a script by an interpreter that has torch and safetensors::

    python tiny_model.py FOLDER [--layers 4] [--hidden 128] [--no-yarn]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPERTS, EXPERT_WIDTH, MLP_WIDTH = 8, 64, 256
INDEX_HEADS, INDEX_HEAD = 64, 128  # what the kernels of V3.2's indexer are made for


@dataclass(frozen=True)
class Shape:
    """What of the model can be chosen; sizes in elements. Ranks are those of latent attention."""

    layers: int = 4
    dense_layers: int = 1  # the first ones, without experts
    hidden: int = 128
    heads: int = 4
    vocab: int = 512
    q_rank: int = 64
    kv_rank: int = 64
    nope: int = 32  # of a head's query and key, the part without rotary positions
    rope: int = 16  # and the part with them
    value: int = 32
    context: int = 4096
    seed: int = 0
    v2: bool = False  # DeepSeek-V2: no ranks for the query, other routing
    index_topk: int = 0  # DeepSeek-V3.2: tokens that an indexer chooses for each query; needs a GPU
    yarn: bool = True  # SGLang 0.5.9 needs it for this family; 0.4.6 does not know it

    @property
    def digest(self) -> str:
        text = json.dumps(asdict(self)) + Path(__file__).read_text(encoding="utf-8")
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def config(shape: Shape) -> dict[str, Any]:
    """The checkpoint's ``config.json``."""
    # Transformers' DeepSeek-V2 leaves the attention's share of yarn out: make it 1 there.
    mscale = 1e-9 if shape.v2 else 1.0
    yarn = {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": shape.context // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
    v2 = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }
    v3 = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "attention_bias": False,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": EXPERT_WIDTH,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "ep_size": 1,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "rope_scaling": yarn if shape.yarn else None,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
    }
    v32 = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": shape.index_topk,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_HEAD,
    }
    return {**v3, **v2} if shape.v2 else {**v3, **v32} if shape.index_topk else v3


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Each weight's name, size and kind, in the order in which the random numbers are drawn."""
    hidden, heads, head = shape.hidden, shape.heads, shape.nope + shape.rope
    yield "model.embed_tokens.weight", (shape.vocab, hidden), "embedding"
    yield "lm_head.weight", (shape.vocab, hidden), "matrix"
    yield "model.norm.weight", (hidden,), "norm"
    for layer in range(shape.layers):
        block = f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", (hidden,), "norm"
        yield f"{block}.post_attention_layernorm.weight", (hidden,), "norm"
        attention = f"{block}.self_attn"
        if shape.v2:
            yield f"{attention}.q_proj.weight", (heads * head, hidden), "matrix"
        else:
            yield f"{attention}.q_a_proj.weight", (shape.q_rank, hidden), "matrix"
            yield f"{attention}.q_a_layernorm.weight", (shape.q_rank,), "norm"
            yield f"{attention}.q_b_proj.weight", (heads * head, shape.q_rank), "matrix"
        yield f"{attention}.kv_a_proj_with_mqa.weight", (shape.kv_rank + shape.rope, hidden), "matrix"
        yield f"{attention}.kv_a_layernorm.weight", (shape.kv_rank,), "norm"
        yield f"{attention}.kv_b_proj.weight", (heads * (shape.nope + shape.value), shape.kv_rank), "matrix"
        yield f"{attention}.o_proj.weight", (hidden, heads * shape.value), "matrix"
        if shape.index_topk:
            indexer = f"{attention}.indexer"
            yield f"{indexer}.wq_b.weight", (INDEX_HEADS * INDEX_HEAD, shape.q_rank), "matrix"
            yield f"{indexer}.wk.weight", (INDEX_HEAD, hidden), "matrix"
            yield f"{indexer}.k_norm.weight", (INDEX_HEAD,), "norm"
            yield f"{indexer}.k_norm.bias", (INDEX_HEAD,), "bias"
            yield f"{indexer}.weights_proj.weight", (INDEX_HEADS, hidden), "matrix"
        if layer < shape.dense_layers:
            yield from gated_mlp(f"{block}.mlp", MLP_WIDTH, hidden)
            continue
        yield f"{block}.mlp.gate.weight", (EXPERTS, hidden), "router"
        if not shape.v2:
            yield f"{block}.mlp.gate.e_score_correction_bias", (EXPERTS,), "bias"
        for expert in range(EXPERTS):
            yield from gated_mlp(f"{block}.mlp.experts.{expert}", EXPERT_WIDTH, hidden)
        yield from gated_mlp(f"{block}.mlp.shared_experts", EXPERT_WIDTH, hidden)


def gated_mlp(prefix: str, width: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden), "matrix"
    yield f"{prefix}.up_proj.weight", (width, hidden), "matrix"
    yield f"{prefix}.down_proj.weight", (hidden, width), "matrix"


SCALE = {"embedding": 1.0, "matrix": 0.05, "router": 0.2, "bias": 0.01, "norm": 0.1}


def write(folder: Path, shape: Shape) -> None:
    """Write ``config.json`` and ``model.safetensors`` (bf16; the router's bias fp32) into ``folder``."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.seed)
    weights = {}
    for name, size, kind in tensors(shape):
        values = torch.randn(*size, generator=generator) * SCALE[kind]
        if kind == "norm":
            values = values + 1
        weights[name] = values if kind == "bias" else values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def ensure(python: Path, cache: Path, shape: Shape = Shape()) -> Path:
    """The folder of the model of this ``shape`` under ``cache``, written by ``python`` on first use."""
    folder = cache / f"tiny-deepseek-{shape.digest}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=cache, prefix=".tiny-"))
    options = [
        (f"--{name}" if value else f"--no-{name}") if isinstance(value, bool) else f"--{name}={value}"
        for name, value in asdict(shape).items()
    ]
    subprocess.run([str(python), __file__, str(fresh), *options], check=True)
    try:
        os.rename(fresh, folder)
    except OSError:  # another process was faster, with the same bytes
        shutil.rmtree(fresh)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, value in asdict(Shape()).items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", type=int, default=value)
    options = vars(parser.parse_args())
    write(options.pop("folder"), Shape(**options))


if __name__ == "__main__":
    main()
