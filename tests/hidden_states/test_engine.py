"""The whole way on the real engine: patched while it serves, then a valid data set, then a trained drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.cpu_engine import server, tiny_model, venv as engines
from examples.trainers import venv as trainers
from tests.hidden_states.conftest import REPOSITORY, make_rows, patchkit, write_rows

pytestmark = [pytest.mark.engine, pytest.mark.trainer]

ON_CPU = ["--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0"]


def test_extract_validate_and_train_with_a_clean_tree_before_and_after(tmp_path):
    python = engines.ensure("0.5.9")
    own = ["--python", python, "--patches", REPOSITORY / "patches"]
    model = tiny_model.ensure(python, tmp_path)
    data = write_rows(tmp_path / "in.jsonl", make_rows(64))
    settings = [*server.ARGUMENTS, "--chunked-prefill-size=64"]
    done = patchkit(
        *(*own, "extract", "--model", model, "--data", data, "--out", tmp_path / "ds"),
        *(part for one in settings if not one.startswith("--host") for part in ("--server-arg", one)),
        env=server.ENVIRONMENT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert patchkit(*own, "check").returncode == 0
    checked = patchkit("validate", tmp_path / "ds", "--recompute", "8")
    assert checked.returncode == 0, checked.stdout
    assert patchkit("vocab", "build", tmp_path / "ds", "--draft-size", "128").returncode == 0
    trained = patchkit(
        *(*own, "train", "--dataset", tmp_path / "ds", "--verifier", model, "--save-path", tmp_path / "save"),
        *("--trainer-python", trainers.ensure("speculators-0.9.0")),
        *("--trainer-entry", REPOSITORY / "examples/trainers/cpu_speculators.py", "--", *ON_CPU),
        *("--mask-token-id", "0", "--epochs", "1", "--total-seq-len", "512"),
        timeout=600,
    )
    assert trained.returncode == 0, trained.stderr[-2000:]
    config = json.loads((tmp_path / "save/0/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3]
    (run,) = Path(tmp_path / "save/provenance").glob("train-*.json")
    assert json.loads(run.read_text())["dataset"]["layers"] == [2, 3, 4]
    assert patchkit(*own, "check").returncode == 0
