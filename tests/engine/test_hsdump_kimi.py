"""Kimi-K2.5: a vision model whose language model is the class that hsdump patches."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.engine.conftest import MAIN
from tests.engine.harness import Engine
from tests.engine.test_hsdump_models import assert_states_agree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.engine

# The vision tower has no weights here: no prompt has a picture.
VISION = {
    "model_type": "kimi_k25",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "mm_hidden_size": 32,
    "vt_hidden_size": 32,  # 0.5.9 reads the name that the checkpoint's own configuration has
}
# The weights under the names that they have inside the vision model, and a tokenizer, without which none starts.
COMPLETE = """
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
text, model, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
weights = {f"language_model.{name}": value for name, value in load_file(text / "model.safetensors").items()}
save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
words = {f"t{number}": number for number in range(size - 1)} | {"<|media_pad|>": size - 1}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(model)
"""


def test_states_of_kimi_k25_agree(
    thorough_engine: Engine, apply_hsdump: Callable[[Engine], Path], tmp_path: Path
) -> None:
    engine = thorough_engine
    if engine.release != MAIN:
        pytest.skip("not in it, or with Transformers 5, which wants the checkpoint's settings for pictures")
    text = json.loads((engine.model / "config.json").read_text())
    model = tmp_path / "kimi"
    model.mkdir()
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {**VISION, "text_hidden_size": text["hidden_size"]},
        "torch_dtype": "bfloat16",
        "media_placeholder_token_id": text["vocab_size"] - 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (model / "config.json").write_text(json.dumps(config))
    subprocess.run(
        [str(engine.python), "-c", COMPLETE, str(engine.model), str(model), str(text["vocab_size"])],
        check=True,
    )
    assert_states_agree(
        replace(engine, model=model),
        apply_hsdump(engine),
        tmp_path,
        "KimiK25ForConditionalGeneration",
        text_model=engine.model,
    )
