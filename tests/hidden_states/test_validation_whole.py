"""What ``validate`` says of the files beside the samples."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from patchkit.hidden_states.dataset import Dataset
from patchkit.hidden_states.errors import DatasetError
from patchkit.hidden_states.model import ModelConfig
from patchkit.hidden_states.validation import validate
from patchkit.hidden_states.vocabulary import Mapping
from tests.hidden_states.conftest import patchkit
from tests.hidden_states.engine import LAYERS, VOCAB

ARROW = "data-00000-of-00001.arrow"
GONE = object()


def messages(dataset: Dataset, config: ModelConfig | None = None) -> list[str]:
    return [str(error) for error in validate(Dataset(dataset.folder), None, config, workers=2).errors]


def edit(path: Path, **values) -> None:
    """Set these keys of a JSON file; GONE removes one."""
    loaded = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in loaded.items() if value is not GONE}))


def rewrite_arrow(dataset: Dataset, change) -> None:
    path = Path(dataset.folder, ARROW)
    table = change(pa.ipc.open_stream(path.read_bytes()).read_all())
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def test_lengths_in_the_arrow_file_are_those_of_the_samples(packing):
    dataset = packing.pack()
    place = pa.ipc.open_stream(Path(dataset.folder, ARROW).read_bytes()).schema.get_field_index("seq_len")
    rewrite_arrow(
        dataset,
        lambda table: table.set_column(
            place, table.schema.field(place), pa.array([3] * len(table), pa.int64())
        ),
    )
    wrong = next(row for row, one in enumerate(packing.rows) if len(one["input_ids"]) != 3)
    tokens = len(packing.rows[wrong]["input_ids"])
    assert any(
        f"{ARROW}: says seq_len 3 for row {wrong}, its sample has {tokens} tokens" in one
        for one in messages(dataset)
    )


def test_an_arrow_file_with_fewer_rows_is_named(packing):
    dataset = packing.pack()
    rewrite_arrow(dataset, lambda table: table.slice(0, 5))
    assert any(f"has 5 rows of tokens for {len(packing.rows)} samples" in one for one in messages(dataset))


def test_a_missing_arrow_file_is_one_error(packing):
    dataset = packing.pack()
    Path(dataset.folder, ARROW).unlink()
    (message,) = messages(dataset)
    assert message.endswith(f"{ARROW}: no such file")


@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        ("speculators", "state.json"),
        ("speculators", "dataset_info.json"),
        ("speculators-v1", "sample_lengths.json"),
    ],
)
@pytest.mark.parametrize(
    ("content", "reason"), [(None, "no such file"), ("{oops", "not JSON"), ("[]", "no JSON object")]
)
def test_a_file_that_a_reader_needs_is_whole(packing, format_name, name, content, reason):
    dataset = packing.pack(format_name)
    path = Path(dataset.folder, name)
    path.unlink() if content is None else path.write_text(content)
    (message,) = messages(dataset)
    assert f"{name}: {reason}" in message


@pytest.mark.parametrize(
    ("format_name", "name", "change", "reason"),
    [
        ("speculators", "state.json", {"_data_files": [{"filename": "x.arrow"}]}, "for _data_files"),
        ("speculators", "state.json", {"_fingerprint": "0" * 16}, "says '0000000000000000' for _fingerprint"),
        ("speculators", "state.json", {"_format_type": GONE}, "says None for _format_type"),
        ("speculators-v1", "sample_lengths.json", {"4": 1}, "says 1 for row 4, its sample has"),
        ("speculators-v1", "sample_lengths.json", {"4": GONE}, "has 11 lengths for 12 samples"),
        ("speculators-v1", "sample_lengths.json", {"99": 7}, "has 13 lengths for 12 samples"),
    ],
)
def test_a_file_that_a_reader_needs_says_what_the_samples_are(packing, format_name, name, change, reason):
    dataset = packing.pack(format_name)
    edit(Path(dataset.folder, name), **change)
    found = messages(dataset)
    assert found
    assert f"{name}: " in found[0]
    assert reason in found[0]


def garbage(path: Path) -> None:
    path.write_bytes(b"x" * 50)


def stale(path: Path) -> None:
    loaded = torch.load(path)
    torch.save({**loaded, "t2d": ~loaded["t2d"]}, path)


def no_tensor(path: Path) -> None:
    torch.save({"d2t": [0], "t2d": [True]}, path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Path.unlink, "no such file"),
        (garbage, "cannot be loaded"),
        (stale, "its t2d is not that of t2d.npy"),
        (no_tensor, "its d2t is not that of d2t.npy"),
    ],
)
def test_the_vocabulary_that_specforge_reads_is_the_checked_one(packing, change, reason):
    dataset = packing.pack("specforge")
    Mapping.build(Counter({5: 2, 9: 1}), 8, VOCAB).save(dataset)
    assert messages(dataset) == []
    change(Path(dataset.folder, "vocab_mapping/vocab_mapping.pt"))
    (message,) = messages(dataset)
    assert f"vocab_mapping.pt: {reason}" in message
    done = patchkit("vocab", "check", dataset.folder)
    assert done.returncode == 1
    assert reason in done.stderr


def test_a_vocabulary_for_specforge_alone_is_not_enough(packing):
    dataset = packing.pack("specforge")
    Mapping.build(Counter(), 8, VOCAB).save(dataset)
    for name in ("d2t.npy", "t2d.npy"):
        Path(dataset.folder, name).unlink()
    (message,) = messages(dataset)
    assert "d2t.npy: no such file" in message


def test_a_vocabulary_is_for_the_verifier(packing):
    dataset = packing.pack()
    Mapping.build(Counter(), 8, 1000).save(dataset)
    (message,) = messages(dataset, ModelConfig.read(packing.model))
    assert f"t2d.npy: is for 1000 tokens, the target has {VOCAB}" in message
    done = patchkit("validate", dataset.folder)
    assert done.returncode == 1
    assert f"the target has {VOCAB}" in done.stdout


def test_a_vocabulary_in_a_file_that_the_older_reader_takes_for_a_sample_is_named(packing):
    dataset = packing.pack("speculators-v1")
    Path(dataset.folder, "vocab_mapping.pt").write_bytes(b"x")
    (message,) = messages(dataset)
    assert "vocab_mapping.pt: is no sample" in message


@pytest.mark.parametrize("also_origin", [False, True])
def test_layers_with_another_name_are_noticed(packing, also_origin):
    dataset = packing.pack()
    path = Path(dataset.folder, "dataset.json")
    origin = {**dataset.record["origin"], "layers": [1, 2, 4, 8]}
    edit(path, layers=[1, 2, 4, 8], **({"origin": origin} if also_origin else {}))
    found = messages(dataset)
    assert found[-1].endswith(
        "samples.jsonl:1: the states of [3, 5, 6, 8] were packed, dataset.json says [1, 2, 4, 8]"
    )
    assert any("its origin layers [3, 5, 6, 8]" in one for one in found) is not also_origin
    done = patchkit("pack", dataset.folder, "--out", packing.folder / "again")
    assert done.returncode == 4
    assert "the states of [3, 5, 6, 8] were packed" in done.stderr


def test_the_side_of_the_norm_is_that_of_the_format(packing):
    dataset = packing.pack()
    edit(Path(dataset.folder, "dataset.json"), last_state="after the final norm")
    (message,) = messages(dataset)
    assert "says that the last state is after the final norm, in its format it is before" in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 32}, "its states are 64 wide, those of"),
        ({"layers": LAYERS + 1}, f"its last state is R({LAYERS}), that of"),
    ],
)
def test_another_model_is_not_taken_for_the_verifier(packing, change, reason):
    dataset = packing.pack()
    config = replace(ModelConfig.read(packing.model), **change)
    (message,) = messages(dataset, config)
    assert reason in message


def test_lines_and_samples_are_as_many(packing):
    dataset = packing.pack()
    path = Path(dataset.folder, "samples.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong, reason in (
        (lines[:-1], f"has {len(lines) - 1} lines, dataset.json says {len(lines)} samples"),
        ([*lines, lines[-1]], f"is over the {len(lines)} samples"),
        ([*lines[:3], lines[4], lines[3], *lines[5:]], "is row 4, row 3 should be there"),
    ):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(DatasetError) as caught:
            list(dataset.entries())
        assert reason in str(caught.value)
        assert any(reason in one for one in messages(dataset))


def test_a_mapping_that_is_good_and_a_data_set_that_is_good_have_no_error(packing):
    for name in ("speculators", "speculators-v1", "specforge"):
        dataset = packing.pack(name, name)
        Mapping.build(Counter({3: 1}), 8, VOCAB).save(dataset)
        assert messages(dataset, ModelConfig.read(packing.model)) == []
        assert np.load(Path(dataset.folder, "d2t.npy")).shape == (8,)
