"""The models whose forward an hsdump patch edits."""

from __future__ import annotations

from dataclasses import dataclass

from tools.hsdump.edit import EditError, defines_forward, with_dump

FOLDER = "sglang/srt/models"


@dataclass(frozen=True)
class Model:
    """``classes`` are (file, class), a class before its base: the first with a forward is edited."""

    patch: str
    title: str
    classes: tuple[tuple[str, str], ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file that may be edited, relative to the root."""
        return tuple(f"{FOLDER}/{file}.py" for file, _ in self.classes)

    def edit(self, sources: dict[str, bytes]) -> tuple[str, bytes]:
        """The path and the new bytes of the file to edit, of ``sources`` by path. Raises EditError."""
        for path, (_, class_name) in zip(self.paths, self.classes, strict=True):
            text = sources[path].decode()
            if defines_forward(text, class_name):
                return path, with_dump(text, class_name).encode()
        raise EditError(f"no class of {self.patch} has a forward")


MODELS = (
    Model("hsdump", "DeepSeek and Kimi", (("deepseek_v2", "DeepseekV2Model"),)),
    Model("hsdump-llama", "Llama", (("llama", "LlamaModel"),)),
    Model("hsdump-qwen2", "Qwen2", (("qwen2", "Qwen2Model"),)),
    Model("hsdump-qwen3", "Qwen3", (("qwen3", "Qwen3Model"), ("qwen2", "Qwen2Model"))),
    Model("hsdump-qwen3-moe", "Qwen3 MoE", (("qwen3_moe", "Qwen3MoeModel"), ("qwen2_moe", "Qwen2MoeModel"))),
)
