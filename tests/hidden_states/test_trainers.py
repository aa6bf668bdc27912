"""The trainers' own readers as judges of what we write."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from examples.trainers import venv
from patchkit.hidden_states.model import FinalNorm, ModelConfig
from tests.hidden_states.conftest import REPOSITORY, Packing, make_rows, patchkit
from tests.hidden_states.verifier import ATTENTION, write_verifier

pytestmark = pytest.mark.trainer

READERS = {
    "speculators-0.9.0": """
import json, sys
from speculators.train.data import ArrowDataset
data = ArrowDataset(4096, sys.argv[1], on_missing="raise", model="none")
samples = [data[i] for i in range(len(data))]
print(json.dumps([[s["input_ids"].tolist(), s["loss_mask"].tolist(), list(s["hidden_states"].shape),
    list(s["verifier_last_hidden_states"].shape)] for s in samples]))
""",
    "speculators-0.7.0.2": """
import json, sys, torch
from speculators.train.data import list_files, standardize_data_v1
files = sorted(list_files(sys.argv[1]), key=lambda path: int(path.stem.rpartition("_")[2]))
samples = [standardize_data_v1(torch.load(f, mmap=True, weights_only=True, map_location="cpu")) for f in files]
print(json.dumps([[s["input_ids"].tolist(), s["loss_mask"].tolist(), list(s["hidden_states"].shape),
    list(s["verifier_last_hidden_states"].shape)] for s in samples]))
""",
    "specforge-0.2.0": """
import json, sys
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
from specforge.runtime.data_plane.feature_store import load_feature_file
refs = list(OfflineManifestReader(sys.argv[1], validate_files=True))
samples = [load_feature_file(ref.feature_store_uri.removeprefix("file://")) for ref in refs]
print(json.dumps([[s["input_ids"].tolist(), s["loss_mask"].tolist(), list(s["aux_hidden_state"][0].shape),
    list(s["hidden_state"][0].shape)] for s in samples]))
""",
}
FORMATS = {
    "speculators-0.9.0": "speculators",
    "speculators-0.7.0.2": "speculators-v1",
    "specforge-0.2.0": "specforge",
}


@pytest.mark.parametrize("trainer", READERS)
def test_the_trainers_own_reader_gets_every_sample(packing, trainer):
    dataset = packing.pack(FORMATS[trainer])
    done = subprocess.run(
        [str(venv.ensure(trainer)), "-c", READERS[trainer], dataset.folder],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    hidden = dataset.hidden_size
    expected = [
        [
            row["input_ids"],
            row["loss_mask"],
            [len(row["input_ids"]), 3 * hidden],
            [len(row["input_ids"]), hidden],
        ]
        for row in packing.rows
    ]
    assert sorted(found) == sorted(expected)
    if trainer != "specforge-0.2.0":  # whose reader sorts by name
        assert found == expected


@pytest.fixture
def training(tmp_path, kit):
    """A verifier that trainers can load, and a clean tree."""
    model = write_verifier(tmp_path / "verifier")
    packing = Packing(tmp_path, make_rows(17)[:16], model, FinalNorm.read(ModelConfig.read(model)))

    def train(dataset, trainer, *more):
        return patchkit(
            *(*kit.where, "train", "--dataset", dataset.folder, "--verifier", model),
            *("--save-path", tmp_path / "save", "--trainer-python", venv.ensure(trainer), *more),
            timeout=300,
        )

    return packing, train


def test_speculators_trains_a_drafter_that_knows_its_layers_and_is_named_for_sglang(training, tmp_path):
    packing, train = training
    dataset = packing.pack()
    assert patchkit("vocab", "build", dataset.folder, "--draft-size", "128").returncode == 0
    done = train(
        dataset,
        "speculators-0.9.0",
        *("--trainer-entry", REPOSITORY / "examples/trainers/cpu_speculators.py", "--"),
        *("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0"),
        *("--mask-token-id", "0", "--epochs", "1", "--total-seq-len", "512"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    drafter = tmp_path / "save/checkpoint_best"
    config = json.loads((drafter / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 5, 6]
    assert config["draft_vocab_size"] == 128
    assert (drafter / "model.safetensors").stat().st_size > 0
    named = patchkit("drafter", "config", drafter, "--serve", "sglang==0.5.9")
    assert named.returncode == 0, named.stderr
    written = json.loads((drafter / "config.json").read_text())
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert {**written, "eagle_config": None} == {**config, "eagle_config": None}


# What ``--legacy-data`` of 0.7's scripts/train.py does, with the wheel's own code: that script is in no wheel.
LEGACY = """
import json, sys, warnings, torch
warnings.simplefilter("ignore")
from speculators.train.dataloader import create_train_val_loaders
loaders = create_train_val_loaders(
    data_path=sys.argv[1], total_seq_len=256, hidden_states_dtype=torch.float32, noise_std=0.0,
    legacy_data=True, vllm_endpoint="", on_missing="raise", on_generate="delete",
    verifier_name_or_path=sys.argv[2], request_timeout=None, max_retries=0, hidden_size=64,
    num_target_layers=3, num_workers=0, prefetch_factor=0, preprocess=None, train_data_ratio=0.75)
batches = [batch for loader in loaders for batch in loader]
print(json.dumps({"files": [len(one.dataset) for one in loaders],
    "loss": sum(int(b["loss_mask"].sum()) for b in batches),
    "finite": all(bool(torch.isfinite(b["hidden_states"]).all()) for b in batches),
    "widths": sorted({b["hidden_states"].shape[-1] for b in batches})}))
"""


def test_the_older_speculators_makes_its_batches_of_legacy_data(training):
    packing, _ = training
    dataset = packing.pack("speculators-v1")
    done = subprocess.run(
        [str(venv.ensure("speculators-0.7.0.2")), "-c", LEGACY, dataset.folder, packing.model],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["files"] == [12, 4]
    assert found["finite"]
    assert found["widths"] == [3 * dataset.hidden_size]
    assert found["loss"] == dataset.record["loss_tokens"]


def test_specforge_takes_the_exact_command_that_is_run(training, tmp_path):
    packing, train = training
    dataset = packing.pack("specforge")
    assert patchkit("vocab", "build", dataset.folder, "--draft-size", "128").returncode == 0
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **ATTENTION}
    draft |= {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 512, "draft_vocab_size": 128}
    Path(tmp_path, "draft.json").write_text(json.dumps(draft))
    run = {
        "model": {"target_model_path": "set by patchkit", "draft_model_config": str(tmp_path / "draft.json")},
        "data": {"hidden_states_path": "set by patchkit", "max_length": 128},
        "training": {"strategy": "eagle3", "attention_backend": "sdpa", "fsdp_sharding": "NO_SHARD"},
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    # --plan: parsed, validated and planned by SpecForge, but not started. Its loss needs Triton.
    arguments = ("training.max_steps=2", "--config", tmp_path / "run.json", "--plan")
    done = train(dataset, "specforge-0.2.0", "--trainer", "specforge", "--", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"kind": "worker"' in done.stderr
    done = train(dataset, "specforge-0.2.0", "--trainer", "specforge", "--", *arguments, "training.no_such=1")
    assert done.returncode != 0
    assert "no_such" in done.stderr
