from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open

from patchkit.hidden_states.errors import BadSampleError
from patchkit.hidden_states.files import durable_and_large
from patchkit.hidden_states.formats import FORMATS
from patchkit.hidden_states.formats.speculators import BLOCK_BYTES
from patchkit.hidden_states.sample import Sample


def made(tokens: int, count: int, hidden: int, *, normed: bool) -> Sample:
    generator = torch.Generator().manual_seed(tokens)
    states = [torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16) for _ in range(count)]
    ids = torch.arange(tokens, dtype=torch.int64)
    return Sample(ids, (ids % 2), states, tuple(range(1, count + 1)), normed)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(1, 70), count=st.integers(2, 5), hidden=st.sampled_from([1, 7, 64]))
def test_what_is_written_is_read_again(tmp_path_factory, name, tokens, count, hidden):
    one = FORMATS[name]
    sample = made(tokens, count, hidden, normed=one.normed)
    path = tmp_path_factory.mktemp("sample") / "sample"
    with durable_and_large(str(path)) as file:
        one.write(file, sample)
    back = one.read(str(path), sample.layers, (sample.input_ids, sample.loss_mask))
    assert torch.equal(back.input_ids, sample.input_ids)
    assert torch.equal(back.loss_mask, sample.loss_mask)
    assert back.normed == sample.normed
    assert all(torch.equal(a, b) for a, b in zip(back.states, sample.states, strict=True))
    assert path.stat().st_size >= one.size(tokens, count, hidden)


def test_blocks_smaller_than_a_sample_leave_no_seam(tmp_path):
    hidden = 4096
    tokens = BLOCK_BYTES // (4 * hidden * 2) * 2 + 3
    sample = made(tokens, 4, hidden, normed=False)
    path = tmp_path / "hs_0.safetensors"
    with durable_and_large(str(path)) as file:
        FORMATS["speculators"].write(file, sample)
    with safe_open(path, framework="pt") as file:
        assert torch.equal(file.get_tensor("hidden_states"), torch.stack(sample.states, 1))


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_sample_gives_the_same_bytes(tmp_path, name):
    one = FORMATS[name]
    first, second = tmp_path / "first", tmp_path / "second"
    with durable_and_large(str(first)) as file:
        one.write(file, made(9, 4, 8, normed=one.normed))
    sample = made(9, 4, 8, normed=one.normed)
    # Views into larger memory, as a joined or mapped dump gives them.
    sample.states = [torch.cat([state, state])[: len(state)] for state in sample.states]
    with durable_and_large(str(second)) as file:
        one.write(file, sample)
    assert first.read_bytes() == second.read_bytes()


def test_specforge_refuses_a_last_state_that_was_not_normed(tmp_path):
    sample = made(3, 4, 8, normed=False)
    with pytest.raises(ValueError, match="final norm"), durable_and_large(str(tmp_path / "f")) as file:
        FORMATS["specforge"].write(file, sample)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("damage", [b"", b"garbage" * 30])
def test_a_file_that_is_none_is_named(tmp_path, name, damage):
    path = tmp_path / "broken"
    path.write_bytes(damage)
    with pytest.raises(BadSampleError) as caught:
        FORMATS[name].read(str(path), (1, 2), None)
    assert caught.value.kind == "unreadable"
    assert "\n" not in str(caught.value)


def test_no_other_name_of_the_older_format_ends_in_pt(packing):
    dataset = packing.pack("speculators-v1")
    folder = packing.folder / "ds"
    names = {path.name for path in folder.rglob("*") if path.name.endswith("pt")}
    assert names == {f"data_{row}.pt" for row in range(dataset.samples)}
    lengths = json.loads((folder / "sample_lengths.json").read_text())
    assert lengths == {str(row): len(one["input_ids"]) for row, one in enumerate(packing.rows)}


def test_specforge_groups_rows_by_two_thousand():
    assert FORMATS["specforge"].path(1999) == "rows_0-2000/data_1999.ckpt"
    assert FORMATS["specforge"].path(2000) == "rows_2000-4000/data_2000.ckpt"
