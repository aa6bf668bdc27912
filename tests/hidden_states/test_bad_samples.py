"""Files of samples and records that are wrong in their kind: each is one error in one line, never a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from patchkit.hidden_states.dataset import Dataset
from patchkit.hidden_states.errors import DatasetError
from patchkit.hidden_states.page import page
from patchkit.hidden_states.validation import validate
from patchkit.hidden_states.vocabulary import count_tokens
from tests.hidden_states.conftest import patchkit

ROW = 2


def halved(state):
    return state[..., :32].contiguous()


V1 = [
    ({"hidden_states": lambda _: [1, 2, 3, 4]}, "shape", "hidden_states[0] is of the type int"),
    ({"hidden_states": lambda _: []}, "shape", "0 states for the layers"),
    ({"hidden_states": torch.stack}, "shape", "no list"),
    ({"hidden_states": lambda old: [halved(one) for one in old]}, "shape", "R(3) is ["),
    ({"hidden_states": lambda old: [one.to_sparse() for one in old]}, "shape", "torch.sparse_coo"),
    ({"hidden_states": lambda old: [one.to("meta") for one in old]}, "shape", "on meta"),
    ({"input_ids": lambda old: old.tolist()}, "shape", "input_ids is of the type list"),
    ({"input_ids": lambda _: torch.tensor(5)}, "shape", "input_ids is [], it must have 1 dim"),
    ({"input_ids": lambda old: old.unsqueeze(0)}, "shape", "it must have 1 dim"),
    ({"input_ids": lambda old: -old - 1}, "tokens", "has the token id -"),
    ({"loss_mask": lambda old: old.tolist()}, "shape", "loss_mask is of the type list"),
    ({"loss_mask": lambda _: None}, "shape", "loss_mask is of the type NoneType"),
    ({"loss_mask": lambda old: old.float()}, "dtype", "loss mask is torch.float32"),
]
SPECFORGE = [
    ({"hidden_state": lambda _: [1]}, "shape", "hidden_state is of the type list"),
    ({"aux_hidden_state": lambda old: old[:, :, :64].clone()}, "shape", "width 64"),
    ({"hidden_state": lambda old: old[:, :, :0].clone()}, "shape", "aux_hidden_state has width"),
    (dict.fromkeys(("hidden_state", "aux_hidden_state"), lambda old: old[:, :, :0].clone()), "shape", "0]"),
    ({"input_ids": lambda old: old.tolist()}, "shape", "input_ids is of the type list"),
]
SPECULATORS = [
    ({"token_ids": lambda old: old.reshape(1, -1)}, "shape", "token_ids is [1, "),
    ({"token_ids": lambda _: torch.tensor(3)}, "shape", "token_ids is []"),
    ({"hidden_states": halved}, "shape", "R(3) is ["),
    ({"hidden_states": lambda old: old[0].clone()}, "shape", "must have 3 dim"),
]
CASES = [
    (name, *case)
    for name, cases in (("speculators-v1", V1), ("specforge", SPECFORGE), ("speculators", SPECULATORS))
    for case in cases
]


@pytest.mark.parametrize(("name", "changes", "kind", "reason"), CASES)
def test_a_sample_of_another_kind_is_one_error(packing, name, changes, kind, reason):
    dataset = packing.pack(name)
    path = dataset.path(ROW)
    loaded = load_file(path) if name == "speculators" else torch.load(path)
    loaded |= {key: change(loaded[key]) for key, change in changes.items()}
    if name == "speculators":
        save_file(loaded, path)
    else:
        torch.save(loaded, path)
    norm = packing.norm
    errors = [error for error in validate(dataset, norm, workers=2).errors if hasattr(error, "kind")]
    ((found, message),) = [(error.kind, str(error)) for error in errors]
    assert found == kind
    assert reason in message
    assert path in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": None}, "'layers' is missing or not"),
        ({"layers": ["3", "8"]}, "'layers' is missing or not"),
        ({"layers": [5, 3, 6, 8]}, "'layers' is missing or not"),
        ({"layers": [8]}, "'layers' is missing or not"),
        ({"samples": "x"}, "'samples' is missing or not a positive number"),
        ({"samples": True}, "'samples' is missing or not a positive number"),
        ({"samples": 0}, "'samples' is missing or not a positive number"),
        ({"hidden_size": 64.0}, "'hidden_size' is missing or not"),
        ({"origin": []}, "'origin' is missing or not an object"),
        ({"input": None}, "'input' is missing or not an object"),
        ({"input": {"files": {}}}, "'input.skipped' is missing or not"),
        ({"verifier": 3}, "'verifier' is missing or not"),
    ],
)
def test_a_record_that_lacks_something_is_refused(packing, change, reason):
    dataset = packing.pack()
    path = Path(dataset.folder, "dataset.json")
    loaded = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in loaded.items() if value is not None}))
    with pytest.raises(DatasetError) as caught:
        Dataset(dataset.folder)
    assert str(caught.value).startswith(f"{path}: {reason}")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"row":3}', "'line' is missing or not"),
        ("7", "no JSON object"),
        ("{oops", "not JSON"),
        ("[" * 100000, "not JSON"),
    ],
)
def test_a_bad_line_of_the_samples_is_named(packing, line, reason):
    dataset = packing.pack()
    path = Path(dataset.folder, "samples.jsonl")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], line, *lines[4:]]) + "\n")
    wanted = f"{path}:4: {reason}"
    errors = [str(error) for error in validate(dataset, None, workers=2).errors]
    assert any(one.startswith(wanted) for one in errors)
    with pytest.raises(DatasetError) as caught:
        page(dataset)
    assert str(caught.value).startswith(wanted)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("statistics", {"norm": [1.0], "std": [1.0]}, "'statistics.norm' is missing or"),
        ("layers", [{"k": 3}], "'layers' is missing or not"),
        ("tokens", 0, "'tokens' is missing or not a positive number"),
        ("sequence_sha256", None, "'sequence_sha256' is missing or not a digest"),
    ],
)
def test_a_line_with_a_wrong_value_is_named(packing, key, value, reason):
    dataset = packing.pack()
    path = Path(dataset.folder, "samples.jsonl")
    lines = path.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), key: value})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DatasetError) as caught:
        list(dataset.entries())
    assert str(caught.value).startswith(f"{path}:4: {reason}")


def test_an_arrow_file_of_other_columns_or_with_too_few_rows_is_refused(packing):
    import pyarrow as pa

    dataset = packing.pack()
    path = Path(dataset.folder, "data-00000-of-00001.arrow")
    whole = pa.ipc.open_stream(path.read_bytes()).read_all()

    def counted_with(table) -> str:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        with pytest.raises(DatasetError) as caught:
            count_tokens(Dataset(dataset.folder))
        return str(caught.value)

    assert f"has 5 rows of tokens for {len(packing.rows)} samples" in counted_with(whole.slice(0, 5))
    text = pa.array(["x"] * len(whole))
    assert "its column input_ids is string" in counted_with(whole.set_column(0, "input_ids", text))
    nulls = pa.array([None] * len(whole), pa.list_(pa.int64()))
    assert "its column loss_mask has nulls" in counted_with(whole.set_column(1, "loss_mask", nulls))
    inner = pa.array([[None]] * len(whole), pa.list_(pa.int64()))
    assert "its column loss_mask has nulls" in counted_with(whole.set_column(1, "loss_mask", inner))


def test_records_of_other_tools_do_not_end_the_report(packing):
    dataset = packing.pack()
    folder = Path(dataset.folder, "provenance")
    folder.mkdir(exist_ok=True)
    good = {"command": "extract", "began": 1.0}
    for number, run in enumerate(
        (
            {**good, "began": "2026-12-02T18:00:00Z"},
            {**good, "began": 1e30},
            {**good, "ended": "later", "totals": 3, "marks": [[0, 1, "x"], [1]]},
            [good],
        )
    ):
        (folder / f"{number}.json").write_text(json.dumps(run))
    text = page(dataset)
    assert text.count("<td>extract</td>") == 1


def test_a_bad_sample_is_an_answer_of_the_command(packing):
    dataset = packing.pack("speculators-v1")
    torch.save({"hidden_states": [1], "input_ids": [1], "loss_mask": [1]}, dataset.path(ROW))
    done = patchkit("validate", dataset.folder)
    assert done.returncode == 1
    assert f"data_{ROW}.pt: shape: hidden_states[0] is of the type int, not a tensor" in done.stdout
