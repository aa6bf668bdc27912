"""What ``drafter config`` writes, read by SGLang's own code: the statements of real releases, executed."""

from __future__ import annotations
import __future__

import ast
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.cpu_engine import venv
from patchkit.drafter import FIRST, CannotSayError, naming
from tests.hidden_states.conftest import REPOSITORY, patchkit
from tools.hsdump import wheels

K = (3, 31, 59)
FILES = {
    "DeepseekV3ForCausalLM": ("deepseek_v2.py", "DeepseekV2ForCausalLM"),
    "LlamaForCausalLM": ("llama.py", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2.py", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3.py", "Qwen3ForCausalLM"),
}
# The file in which a release takes the ids from the drafter's config.
READERS = {
    "0.5.9": "model_executor/model_runner.py",
    "0.5.23": "model_executor/model_runner_components/spec_aux_hidden_state.py",
}


def run(node: ast.stmt, names: dict) -> dict:
    module = ast.Module([node], type_ignores=[])
    exec(compile(module, "sglang", "exec", __future__.annotations.compiler_flag), names)
    return names


def captured(models: Path, architecture: str, ids: list[int] | None) -> list[int] | None:
    """The k that the release captures R(k) for when told ``ids``; None if it cannot be told."""
    file, name = FILES[architecture]
    tree = ast.parse((models / file).read_bytes())
    (owner,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    wanted = "set_eagle3_layers_to_capture"
    setter = [one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == wanted]
    if not setter or len(setter[0].args.args) < 2:
        return None
    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=61),
        model=SimpleNamespace(layers_to_capture=[]),
    )
    run(setter[0], names := {})
    names[wanted](model, ids)
    return model.model.layers_to_capture


def read_ids(source: Path, config: dict) -> list[int] | None:
    """What the release takes from the drafter's config."""
    place = SimpleNamespace()
    draft = SimpleNamespace(hf_config=SimpleNamespace(**config))
    (statement,) = [
        node
        for node in ast.walk(ast.parse(source.read_bytes()))
        if isinstance(node, ast.Try) and '"eagle_config"' in ast.unparse(node).replace("'", '"')
    ]
    run(statement, {"self": place, "config": place, "draft_model_config": draft})
    return place.eagle_aux_hidden_state_layer_ids


@pytest.mark.engine
@pytest.mark.parametrize("release", READERS)
def test_the_release_captures_the_states_that_the_drafter_was_trained_on(tmp_path, release):
    (srt,) = venv.ensure(release).parents[1].glob("lib/python3*/site-packages/sglang/srt")
    architecture = "DeepseekV3ForCausalLM"
    before = {
        "eagle_aux_hidden_state_layer_ids": list(K),
        "speculators_config": {"verifier": {"architectures": [architecture]}},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(before))
    reader = srt / READERS[release]
    assert read_ids(reader, before) is None, "it read what speculators writes: nothing to do"
    done = patchkit("drafter", "config", tmp_path, "--serve", f"sglang=={release}")
    assert done.returncode == 0, done.stderr
    ids = read_ids(reader, json.loads(path.read_text()))
    assert captured(srt / "models", architecture, ids) == list(K)
    assert captured(srt / "models", architecture, None) == [2, 30, 58]


@pytest.mark.releases
def test_every_release_captures_what_is_named_for_it_or_is_refused():
    releases = {
        one
        for manifest in (REPOSITORY / "patches/hsdump").glob("*.manifest.json")
        for one in json.loads(manifest.read_text())["releases"]
    }
    wrong = defaultdict(list)
    named = 0
    for release in sorted(releases):
        models = wheels.folder(release) / "sglang/srt/models"
        for architecture in FILES:
            takes = captured(models, architecture, list(K)) is not None
            try:
                ids = naming(K, architecture, release).ids
            except CannotSayError:
                if takes:
                    wrong[architecture].append(f"{release} is refused")
                continue
            named += 1
            if not takes or captured(models, architecture, list(ids)) != list(K):
                wrong[architecture].append(release)
    assert not wrong
    assert named > len(FILES)
    assert set(FILES) <= set(FIRST)
