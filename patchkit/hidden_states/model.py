"""What we need of the verifier's checkpoint folder: its sizes and its final norm."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

from patchkit.hidden_states.errors import ModelError, need

_FINAL_NORM = re.compile(r"(?:^|\.)(?:model|language_model|transformer|backbone)\.norm(?:_f)?\.weight$")
_NOT_TEXT = re.compile(r"vision|visual|image|audio|mtp|encoder")


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
        except ValueError as error:
            raise ModelError(name, f"not JSON ({error})") from None
        text = config.get("text_config") or config.get("llm_config") or config
        try:
            return cls(
                path=path,
                hidden_size=int(text["hidden_size"]),
                layers=int(text["num_hidden_layers"]),
                vocab_size=int(text["vocab_size"]),
                max_length=text.get("max_position_embeddings"),
                norm_epsilon=float(text.get("rms_norm_eps", 1e-6)),
                model_type=str(text.get("model_type", config.get("model_type", ""))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(name, f"has no usable {error}") from None

    def default_layers(self) -> tuple[int, ...]:
        """The k that hsdump chooses by itself: 3, n//2+1, n-2 and n."""
        n = self.layers
        return tuple(sorted({3, n // 2 + 1, n - 2, n}))


@dataclass(frozen=True)
class FinalNorm:
    """The RMS norm between the last layer and the output head; ``weight`` is float32 [H]."""

    weight: Any
    epsilon: float

    @classmethod
    def read(cls, config: ModelConfig) -> FinalNorm:
        """From the safetensors of the checkpoint. Raises ModelError."""
        safetensors, torch = need("safetensors"), need("torch")
        file, name = _find_norm(config.path)
        with safetensors.safe_open(os.path.join(config.path, file), framework="pt") as tensors:
            weight = tensors.get_tensor(name).to(torch.float32)
            if name.removesuffix("weight") + "bias" in tensors.keys():  # noqa: SIM118 (no mapping)
                raise ModelError(config.path, f"its final norm {name} has a bias: no RMS norm")
        if weight.shape != (config.hidden_size,):
            raise ModelError(config.path, f"{name} is {list(weight.shape)}, not [{config.hidden_size}]")
        if config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5")):
            weight = weight + 1  # these store the weight less one
        return cls(weight, config.norm_epsilon)

    def __call__(self, state: Any) -> Any:
        """The normed state, in the state's dtype; [T, H] in, [T, H] out."""
        torch = need("torch")
        wide = state.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide.to(state.dtype).to(torch.float32) * self.weight).to(state.dtype)

    def made(self, state: Any) -> bool:
        """Whether ``state`` came out of this norm: every row over the weight has mean square one."""
        torch = need("torch")
        usable = self.weight.abs() > 1e-3
        if not bool(usable.any()):
            return False
        rows = state[:: max(1, state.shape[0] // 64)].to(torch.float32)[:, usable] / self.weight[usable]
        squares = rows.square().mean(-1)
        # bf16 keeps 8 bits; over many elements the error of the mean is far below this.
        return bool(((squares - 1).abs() < 0.02).all())


def _find_norm(path: str) -> tuple[str, str]:
    safetensors = need("safetensors")
    index = os.path.join(path, "model.safetensors.index.json")
    found: dict[str, str] = {}
    if os.path.exists(index):
        with open(index, "rb") as file:
            found = dict(json.loads(file.read())["weight_map"])
    else:
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
            if name.endswith(".safetensors"):
                with safetensors.safe_open(os.path.join(path, name), framework="pt") as tensors:
                    found.update(dict.fromkeys(tensors.keys(), name))
    names = [name for name in found if _FINAL_NORM.search(name) and not _NOT_TEXT.search(name)]
    if len(names) != 1:
        raise ModelError(path, f"its safetensors have {len(names)} final norms {names or ''}".rstrip())
    return found[names[0]], names[0]
