"""The trainers' own readers as judges of what we write."""

from __future__ import annotations

import json
import subprocess

import pytest

from examples.trainers import venv

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
