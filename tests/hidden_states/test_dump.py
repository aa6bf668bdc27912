from __future__ import annotations

import json

import pytest
import torch

from patchkit.hidden_states.dump import Record, Spool
from patchkit.hidden_states.errors import BadDumpError
from tests.hidden_states.engine import CHOSEN, Dumper, states

IDS = [5, 9, 300, 9, 2, 77, 1, 0, 4, 8]


def test_a_prompt_cut_into_chunks_is_joined_to_the_whole(tmp_path):
    Dumper(tmp_path, chunk=3).dump(IDS)
    (prompt,) = Spool(str(tmp_path)).prompts()
    sample = prompt.load()
    assert len(prompt.records) == 4
    assert sample.input_ids.tolist() == IDS
    assert sample.layers == tuple(CHOSEN)
    for found, expected in zip(sample.states, states(IDS), strict=True):
        assert torch.equal(found, expected)


def test_chunks_join_in_whatever_order_their_json_comes(tmp_path):
    names = Dumper(tmp_path, chunk=3).dump(IDS)
    hidden = {name: (tmp_path / f"{name}.json").read_bytes() for name in names}
    for name in names:
        (tmp_path / f"{name}.json").unlink()
    spool = Spool(str(tmp_path))
    found = []
    for name in (names[2], names[0], names[3], names[1]):
        (tmp_path / f"{name}.json").write_bytes(hidden[name])
        found += spool.prompts()
    assert [prompt.load().input_ids.tolist() for prompt in found] == [IDS]
    assert spool.unfinished() == []


def test_a_pt_without_its_json_does_not_exist(tmp_path):
    (name,) = Dumper(tmp_path).dump(IDS)
    (tmp_path / f"{name}.json").unlink()
    assert list(Spool(str(tmp_path)).prompts()) == []


def test_a_chain_whose_end_never_came_is_named(tmp_path):
    names = Dumper(tmp_path, chunk=3).dump(IDS)
    (tmp_path / f"{names[-1]}.json").unlink()
    spool = Spool(str(tmp_path))
    assert list(spool.prompts()) == []
    assert [chain[-1].name for chain in spool.unfinished()] == [names[2]]


def test_rows_from_the_radix_cache_are_an_error_and_never_padded(tmp_path):
    Dumper(tmp_path).dump(IDS, missing=4)
    (prompt,) = Spool(str(tmp_path)).prompts()
    with pytest.raises(BadDumpError, match=r"first 4 rows.*--disable-radix-cache"):
        prompt.load()


def test_a_flipped_byte_in_the_states_is_seen(tmp_path):
    (name,) = Dumper(tmp_path).dump(IDS)
    path = tmp_path / f"{name}.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (prompt,) = Spool(str(tmp_path)).prompts()
    with pytest.raises(BadDumpError, match="sha256"):
        prompt.load()


def test_a_short_pt_is_seen_without_reading_it(tmp_path):
    (name,) = Dumper(tmp_path).dump(IDS)
    path = tmp_path / f"{name}.pt"
    path.write_bytes(path.read_bytes()[:-1])
    (prompt,) = Spool(str(tmp_path)).prompts()
    with pytest.raises(BadDumpError, match=r"bytes, its \.json says"):
        prompt.load(digest=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema 2"),
        ({"tokens": "10"}, "'tokens' is missing or no int"),
        ({"name": "other"}, "says that it is 'other'"),
    ],
)
def test_a_json_that_we_do_not_understand_is_refused(tmp_path, change, reason):
    (name,) = Dumper(tmp_path).dump(IDS)
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadDumpError, match=reason):
        Record.read(str(tmp_path), name)


def test_states_that_do_not_fit_the_json_are_refused(tmp_path):
    (name,) = Dumper(tmp_path).dump(IDS)
    path = tmp_path / f"{name}.json"
    entry = json.loads(path.read_text())
    entry["shapes"][1] = [9, 64]
    path.write_text(json.dumps(entry))
    (prompt,) = Spool(str(tmp_path)).prompts()
    with pytest.raises(BadDumpError, match=r"says otherwise"):
        prompt.load()


def test_a_prompt_of_an_old_release_ends_where_its_tokens_are_wanted(tmp_path):
    """Before 0.5.10 a dump cannot say which piece is the last."""
    names = Dumper(tmp_path, chunk=3).dump(IDS)
    whole = json.loads((tmp_path / f"{names[-1]}.json").read_text())["sequence_sha256"]
    for name in names:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "final": None}))
    found = list(Spool(str(tmp_path)).prompts(lambda key: key == whole))
    assert [prompt.tokens for prompt in found] == [len(IDS)]


def test_a_server_that_ended_its_dump_says_why(tmp_path):
    status = tmp_path / "status"
    status.mkdir()
    (status / "a.json").write_text(json.dumps({"state": "failed", "error": "OSError: no space"}) + " " * 99)
    (status / "b.json").write_text(json.dumps({"state": "running"}))
    spool = Spool(str(tmp_path))
    assert spool.failures() == ["OSError: no space"]
    assert spool.failures(since=2**40) == []
