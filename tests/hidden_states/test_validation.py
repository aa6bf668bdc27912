from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from patchkit.hidden_states.dataset import Dataset
from patchkit.hidden_states.files import durable_and_large
from patchkit.hidden_states.formats import FORMATS
from patchkit.hidden_states.validation import validate
from tests.hidden_states.conftest import patchkit

ROW = 4


def spoil(dataset: Dataset, change) -> None:
    """Write the sample of ROW again, changed by ``change``."""
    sample = dataset.read(ROW)
    sample = change(replace(sample, states=[state.clone() for state in sample.states]))
    data = Path(dataset.path(ROW))
    fresh = data.with_name("fresh")
    if dataset.format.name == "speculators":  # our writer does not take states of another length
        save_file(
            {"token_ids": sample.input_ids, "hidden_states": torch.stack(sample.states, 1).contiguous()},
            fresh,
        )
    else:
        with durable_and_large(str(fresh)) as file:
            dataset.format.write(file, sample)
    fresh.replace(data)


def found(dataset: Dataset, norm) -> list[tuple[str, str]]:
    """(kind, message) of every error that is about a sample."""
    errors = validate(dataset, norm, workers=2).errors
    return [(error.kind, str(error)) for error in errors if hasattr(error, "kind")]


def rows_one_short(sample):
    return replace(sample, states=[state[:-1] for state in sample.states])


def shifted_up(sample):
    return replace(sample, states=[state.roll(-1, 0) for state in sample.states])


def shifted_down(sample):
    return replace(sample, states=[state.roll(1, 0) for state in sample.states])


def swapped(sample):
    first, second, *rest = sample.states
    return replace(sample, states=[second, first, *rest])


def not_a_number(sample):
    sample.states[1][2, 3] = float("nan")
    return sample


def infinite(sample):
    sample.states[0][0, 0] = float("-inf")
    return sample


def constant(sample):
    sample.states[2][:] = 1.5
    return sample


def repeated_row(sample):
    sample.states[2][:] = sample.states[2][0].clone()
    return sample


def one_bit(sample):
    raw = sample.states[0].view(torch.int16)
    raw[3, 3] ^= 1
    return sample


def half_precision(sample):
    return replace(sample, states=[state.to(torch.float16) for state in sample.states])


def short_token_ids(sample):
    return replace(sample, input_ids=sample.input_ids.to(torch.int32))


def other_tokens(sample):
    ids = sample.input_ids.clone()
    ids[0] += 1
    return replace(sample, input_ids=ids)


WRONG = [
    (rows_one_short, "rows"),
    (shifted_up, "shifted"),
    (shifted_down, "shifted"),
    (swapped, "swapped-layers"),
    (not_a_number, "not-finite"),
    (infinite, "not-finite"),
    (constant, "constant"),
    (repeated_row, "constant"),
    (one_bit, "changed"),
    (half_precision, "dtype"),
    (short_token_ids, "dtype"),
    (other_tokens, "tokens"),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("change", "kind"), WRONG)
def test_wrong_data_is_named_for_what_it_is(packing, name, change, kind):
    dataset = packing.pack(name)
    spoil(dataset, change)
    ((kind_found, message),) = found(Dataset(dataset.folder), packing.norm)
    assert kind_found == kind, message
    assert f"_{ROW}." in message


@pytest.mark.parametrize("name", ["speculators", "speculators-v1"])
def test_a_state_after_the_norm_is_found_with_the_verifier(packing, name):
    dataset = packing.pack(name)
    spoil(dataset, lambda one: replace(one, states=[*one.states[:-1], packing.norm(one.states[-1])]))
    ((kind, _),) = found(Dataset(dataset.folder), packing.norm)
    assert kind == "post-norm"
    ((kind, _),) = found(Dataset(dataset.folder), None)
    assert kind == "changed"


def test_a_state_before_the_norm_is_found_in_specforge(packing):
    dataset = packing.pack("specforge")
    before = packing.pack("speculators-v1", "v1").read(ROW).states
    spoil(dataset, lambda one: replace(one, states=list(before)))
    ((kind, _),) = found(Dataset(dataset.folder), packing.norm)
    assert kind == "pre-norm"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("other", [3, 5])
def test_the_states_of_another_sample_are_named_with_its_row(packing, name, other):
    dataset = packing.pack(name)
    stolen = dataset.read(other).states
    spoil(dataset, lambda one: replace(one, states=stolen))
    ((kind, message),) = found(Dataset(dataset.folder), None)
    assert kind == "other-sample"
    assert f"the state of row {other}" in message


def test_a_missing_file_is_named(packing):
    dataset = packing.pack()
    Path(dataset.path(ROW)).unlink()
    assert [kind for kind, _ in found(dataset, None)] == ["missing"]


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("speculators-v1", "token_freq.pt"),
        ("specforge", "old/data_1.ckpt"),
        ("speculators", "hs_99.safetensors"),
    ],
)
def test_a_file_that_a_reader_would_take_for_a_sample_is_named(packing, name, stray):
    dataset = packing.pack(name)
    path = Path(dataset.folder, stray)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    (error,) = validate(dataset, None, workers=1).errors
    assert stray in str(error)


def test_a_changed_list_of_samples_is_noticed(packing):
    dataset = packing.pack()
    path = Path(dataset.folder, "samples.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    messages = [str(error) for error in validate(dataset, None, workers=1).errors]
    assert any("samples.jsonl is not the one" in message for message in messages)
    assert any(f"has {len(packing.rows) - 1} lines, dataset.json says" in one for one in messages)


@pytest.mark.parametrize("name", ["release", "patch_digest", "model_path"])
def test_a_data_set_must_say_where_it_comes_from(packing, name):
    dataset = packing.pack()
    dataset.record["origin"][name] = None
    (error,) = validate(dataset, None, workers=1).errors
    assert name.replace("_", " ") in str(error)


def test_the_command_prints_the_totals_and_its_exit_code_is_the_answer(packing):
    dataset = packing.pack()
    good = patchkit("validate", dataset.folder)
    tokens = sum(len(row["input_ids"]) for row in packing.rows)
    assert good.returncode == 0
    assert f"{len(packing.rows)} samples, {tokens} tokens" in good.stdout
    spoil(dataset, swapped)
    bad = patchkit("validate", dataset.folder, "--json")
    answer = json.loads(bad.stdout)
    assert bad.returncode == 1
    assert [error["code"] for error in answer["errors"]] == ["bad-sample"]
    assert "R(3) holds the state R(5)" in answer["errors"][0]["message"]


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": 9}', '{"schema": 1, "format": "x"}'])
def test_a_folder_that_is_no_data_set_is_refused_in_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "dataset.json").write_text(content)
    done = patchkit("validate", tmp_path)
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1
