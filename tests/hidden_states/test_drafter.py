from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from patchkit.drafter import CannotSayError, ServeError, naming, rewrite
from patchkit.training import TrainerError

DEEPSEEK, KIMI, LLAMA = "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "release", "ids"),
    [
        (DEEPSEEK, "0.5.4.post2", (2, 30, 58)),
        (DEEPSEEK, "0.5.9", (2, 30, 58)),
        (DEEPSEEK, "0.5.12.post1", (2, 30, 58)),
        (DEEPSEEK, "0.5.13", (3, 31, 59)),
        (DEEPSEEK, "0.5.23", (3, 31, 59)),
        (KIMI, "0.5.12", (2, 30, 58)),
        (KIMI, "0.5.14", (3, 31, 59)),
        (LLAMA, "0.4.9", (2, 30, 58)),
        (LLAMA, "0.5.23", (2, 30, 58)),
    ],
)
def test_each_release_is_told_in_its_own_words(architecture, release, ids):
    named = naming((3, 31, 59), architecture, release)
    assert named.ids == ids
    assert named.checked


@pytest.mark.parametrize(
    ("architecture", "release"),
    [(DEEPSEEK, "0.5.4.post1"), (KIMI, "0.5.9"), (LLAMA, "0.4.8.post1"), ("GemmaForCausalLM", "0.5.9")],
)
def test_a_release_that_takes_no_ids_is_refused(architecture, release):
    with pytest.raises(CannotSayError):
        naming((3, 31, 59), architecture, release)


def test_a_list_that_would_be_read_one_layer_later_is_refused():
    with pytest.raises(CannotSayError, match=r"R\(1\) cannot be named"):
        naming((1, 31, 59), DEEPSEEK, "0.5.13")
    assert naming((1, 31, 59), DEEPSEEK, "0.5.9").ids == (0, 30, 58)
    with pytest.raises(CannotSayError, match=r"R\(0\) cannot be named"):
        naming((0, 31, 59), DEEPSEEK, "0.5.9")


def test_a_release_that_nobody_looked_at_is_said_to_be_one():
    assert not naming((3, 31, 59), DEEPSEEK, "0.6.0").checked


@pytest.mark.parametrize("serve", ["0.5.9", "sglang", "sglang==", "sglang==x", "vllm==0.11.0"])
def test_what_is_no_release_of_sglang_is_refused(tmp_path, serve):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ServeError):
        rewrite(str(tmp_path), serve, (3, 31, 59), DEEPSEEK)


def test_the_config_is_written_once_and_keeps_the_rest(tmp_path):
    config = {
        "hidden_size": 7,
        "eagle_aux_hidden_state_layer_ids": [3, 31, 59],
        "eagle_config": {"other": 1},
        "speculators_config": {"verifier": {"architectures": [DEEPSEEK]}},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    _, changed = rewrite(str(tmp_path), "sglang==0.5.9", (), None)
    assert changed
    expected = {"other": 1, "eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True}
    assert json.loads(path.read_text()) == {**config, "eagle_config": expected}
    before = path.stat().st_mtime_ns
    assert rewrite(str(tmp_path), "sglang==0.5.9", (), None)[1] is False
    assert path.stat().st_mtime_ns == before
    rewrite(str(tmp_path), "sglang==0.5.13", (), None)
    assert json.loads(path.read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]


@pytest.mark.parametrize("layers", [(3, 0, 59), (-5, 3), (59, 3, 3), (3, 3, 59), ()])
@pytest.mark.parametrize("release", ["0.5.9", "0.5.13"])
def test_layers_that_no_release_captures_so_are_refused(layers, release):
    with pytest.raises(ServeError, match="they must ascend, each named once, from 0 on"):
        naming(layers, DEEPSEEK, release)


def write_drafter(folder, config: dict, joined: int | None) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    if joined is not None:
        save_file({"fc.weight": torch.zeros(8, joined)}, folder / "model.safetensors")
    return str(folder)


SPECULATORS = {"eagle_aux_hidden_state_layer_ids": [3, 31, 59], "speculators_config": {}}


@pytest.mark.parametrize(
    ("config", "joined", "reason"),
    [
        (SPECULATORS, None, "was trained on the layers 3, 31, 59, not 3, 31, 59, 61; leave --layers out"),
        ({"hidden_size": 8}, 24, "takes 3 states, and --layers names 4; name those that it was trained on"),
        ({"hidden_size": 8, "target_hidden_size": 4}, 12, "takes 3 states, and --layers names 4"),
        ({"hidden_size": 8}, None, "does not say how many states it takes, drafters of EAGLE-3 take 3"),
        ({"hidden_size": 7}, 24, "does not say how many states it takes, drafters of EAGLE-3 take 3"),
    ],
)
def test_the_last_state_of_the_data_set_is_not_one_that_a_drafter_takes(tmp_path, config, joined, reason):
    folder = write_drafter(tmp_path, config, joined)
    with pytest.raises(ServeError) as caught:
        rewrite(folder, "sglang==0.5.9", (3, 31, 59, 61), DEEPSEEK)
    assert reason in str(caught.value)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    assert rewrite(folder, "sglang==0.5.9", (3, 31, 59), DEEPSEEK)[0].ids == (2, 30, 58)


def test_a_drafter_of_more_states_is_told_all_of_them(tmp_path):
    folder = write_drafter(tmp_path, {"hidden_size": 8}, 32)
    assert rewrite(folder, "sglang==0.5.9", (3, 31, 45, 59), DEEPSEEK)[0].ids == (2, 30, 44, 58)


def test_weights_that_cannot_be_read_say_nothing(tmp_path):
    folder = write_drafter(tmp_path, {"hidden_size": 8}, None)
    for content in (b"", b"x" * 20, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ServeError, match="does not say how many"):
            rewrite(folder, "sglang==0.5.9", (3, 31, 59, 61), DEEPSEEK)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no config.json"),
        ("{oops", "not JSON"),
        ("[]", "no JSON object"),
        ("{}", "does not say which states"),
        ('{"eagle_aux_hidden_state_layer_ids": ["3"]}', "does not say which states"),
        ('{"eagle_aux_hidden_state_layer_ids": [3]}', "verifier's architecture"),
        ('{"eagle_aux_hidden_state_layer_ids": [3], "speculators_config": []}', "verifier's architecture"),
        ('{"eagle_aux_hidden_state_layer_ids": [3], "speculators_config": "x"}', "verifier's architecture"),
        (
            '{"eagle_aux_hidden_state_layer_ids": [3], "speculators_config": {"verifier": "x"}}',
            "verifier's architecture",
        ),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(TrainerError, match=reason):
        rewrite(str(tmp_path), "sglang==0.5.9", (), None)
