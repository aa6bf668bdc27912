from __future__ import annotations

import json

import pytest

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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no config.json"),
        ("{oops", "not JSON"),
        ("[]", "no JSON object"),
        ("{}", "does not say which states"),
        ('{"eagle_aux_hidden_state_layer_ids": ["3"]}', "does not say which states"),
        ('{"eagle_aux_hidden_state_layer_ids": [3]}', "verifier's architecture"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(TrainerError, match=reason):
        rewrite(str(tmp_path), "sglang==0.5.9", (), None)
