"""What we need of the verifier's checkpoint folder: its sizes and its final norm."""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import ModelError, UnknownNormError, need

if TYPE_CHECKING:
    from collections.abc import Iterator

_FINAL_NORM = re.compile(r"(?:^|\.)(?:model|language_model|transformer|backbone)\.norm(?:_f)?\.weight$")
_LFS = b"version https://git-lfs"
_NOT_TEXT = re.compile(r"vision|visual|image|audio|mtp|encoder")

# The types whose final norm was compared with Transformers' own; of a new one nothing is assumed, since
# one that is computed wrongly cannot be seen in the data. x / rms(x) * weight:
_PLAIN = """
afmoe apertus arcee bailing_hybrid bitnet cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
diffllama doge dots1 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text exaone4 exaone_moe flex_olmo
gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_moe_dsa
gpt_oss granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
jetmoe kimi_linear llama llama4_text longcat_flash mimo_v2_flash minicpm3 minimax minimax_m2
ministral ministral3 mistral mistral4 mixtral mllama_text_model olmo2 olmo3 olmo_hybrid olmoe phi3
phi4_multimodal qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe
qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open youtu
"""
# DeepSeek's text model under names that only their own code knows:
_DEEPSEEK = ("kimi_k2", "kimi_k25")
# These store the weight less one:
_LESS_ONE = """
gemma gemma2 gemma3_text minimax_m3_vl_text qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_next step3p5 vaultgemma
"""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a checkpoint's text model."""

    path: str
    hidden_size: int
    layers: int
    vocab_size: int
    max_length: int | None
    norm_epsilon: float
    model_type: str

    @classmethod
    def read(cls, path: str) -> ModelConfig:
        """From ``config.json``; of a multimodal model, its text part. Raises ModelError."""
        name = os.path.join(path, "config.json")
        try:
            with open(name, "rb") as file:
                config = json.loads(file.read())
        except FileNotFoundError:
            raise ModelError(
                path, "no config.json there", "name the folder of a downloaded checkpoint"
            ) from None
        except NotADirectoryError:
            raise ModelError(path, "not a folder", "name the folder of a downloaded checkpoint") from None
        except (ValueError, RecursionError) as error:
            raise ModelError(name, f"not JSON ({error})") from None
        if not isinstance(config, dict):
            raise ModelError(name, "no JSON object")
        text = config.get("text_config") or config.get("llm_config") or config
        if not isinstance(text, dict):
            raise ModelError(name, "its text_config is no JSON object")
        longest = text.get("max_position_embeddings")
        try:
            read = cls(
                path=path,
                hidden_size=int(text["hidden_size"]),
                layers=int(text["num_hidden_layers"]),
                vocab_size=int(text["vocab_size"]),
                max_length=None if longest is None else int(longest),
                norm_epsilon=float(text.get("rms_norm_eps", 1e-6)),
                model_type=str(text.get("model_type", config.get("model_type", ""))),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(name, f"has no usable {error}") from None
        if min(read.hidden_size, read.layers, read.vocab_size) < 1:
            raise ModelError(name, "its sizes are not positive")
        return read

    def default_layers(self) -> tuple[int, ...]:
        """The k that hsdump chooses by itself: 3, n//2+1, n-2 and n."""
        n = self.layers
        return tuple(sorted({3, n // 2 + 1, n - 2, n}))


@dataclass(frozen=True)
class FinalNorm:
    """The RMS norm between the last layer and the output head; ``weight`` is float32 [H]."""

    weight: Any
    epsilon: float
    path: str = ""

    @classmethod
    def read(cls, config: ModelConfig) -> FinalNorm:
        """From the safetensors of the checkpoint. Raises ModelError, UnknownNormError."""
        torch = need("torch")
        if config.model_type not in (*_PLAIN.split(), *_DEEPSEEK, *_LESS_ONE.split()):
            raise UnknownNormError(config.path, config.model_type)
        file, name = _find_norm(config.path)
        with _opened(os.path.join(config.path, file)) as tensors:
            if name not in tensors.keys():  # noqa: SIM118 (no mapping)
                raise ModelError(os.path.join(config.path, file), f"has no {name}, though the index says so")
            weight = tensors.get_tensor(name).to(torch.float32)
            if name.removesuffix("weight") + "bias" in tensors.keys():  # noqa: SIM118 (no mapping)
                raise ModelError(config.path, f"its final norm {name} has a bias: no RMS norm")
        if weight.shape != (config.hidden_size,):
            raise ModelError(config.path, f"{name} is {list(weight.shape)}, not [{config.hidden_size}]")
        if config.model_type in _LESS_ONE.split():
            weight = weight + 1
        return cls(weight, config.norm_epsilon, config.path)

    def __call__(self, state: Any) -> Any:
        """The normed state, in the state's dtype; [T, H] in, [T, H] out. Raises ModelError."""
        torch = need("torch")
        self._require_width(state)
        wide = state.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide.to(state.dtype).to(torch.float32) * self.weight).to(state.dtype)

    def made(self, state: Any) -> bool:
        """Whether ``state`` came out of this norm: every row over the weight has mean square one.

        Raises ModelError when the norm is for states of another width.
        """
        torch = need("torch")
        self._require_width(state)
        usable = self.weight.abs() > 1e-3
        if not bool(usable.any()):
            return False
        rows = state[:: max(1, state.shape[0] // 64)].to(torch.float32)[:, usable] / self.weight[usable]
        squares = rows.square().mean(-1)
        # bf16 keeps 8 bits; over many elements the error of the mean is far below this.
        return bool(((squares - 1).abs() < 0.02).all())

    def _require_width(self, state: Any) -> None:
        if state.shape[1] != len(self.weight):
            raise ModelError(
                self.path,
                f"its final norm is {len(self.weight)} wide, the states are {state.shape[1]}",
                "name the model that they came from",
            )


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """The safetensors file. Raises ModelError with the cause when it is none."""
    safetensors = need("safetensors")
    hint = "download the checkpoint again"
    try:
        with open(path, "rb") as file:
            if file.read(len(_LFS)) == _LFS:
                raise ModelError(path, "is a git-lfs pointer, not the weights", "git lfs pull fetches them")
        opened = safetensors.safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(path, "is not there, and the checkpoint's index names it", hint) from None
    except safetensors.SafetensorError as error:
        raise ModelError(path, f"cannot be read as safetensors ({error})", hint) from None
    with opened as tensors:
        yield tensors


def _read_index(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read())["weight_map"]
    except (ValueError, RecursionError) as error:
        raise ModelError(path, f"not JSON ({error})", "download the checkpoint again") from None
    except (KeyError, TypeError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ModelError(path, "has no weight_map of files", "download the checkpoint again")
    return found


def _find_norm(path: str) -> tuple[str, str]:
    index = os.path.join(path, "model.safetensors.index.json")
    found: dict[str, str] = {}
    if os.path.exists(index):
        found = _read_index(index)
    else:
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
            if name.endswith(".safetensors"):
                with _opened(os.path.join(path, name)) as tensors:
                    found.update(dict.fromkeys(tensors.keys(), name))
    names = [name for name in found if _FINAL_NORM.search(name) and not _NOT_TEXT.search(name)]
    if len(names) != 1:
        raise ModelError(path, f"its safetensors have {len(names)} final norms {names or ''}".rstrip())
    return found[names[0]], names[0]
