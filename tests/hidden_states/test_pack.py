from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from patchkit.hidden_states.dataset import Dataset, Growing
from patchkit.hidden_states.dump import Spool
from patchkit.hidden_states.errors import BadDumpError, BadSampleError, DatasetError
from patchkit.hidden_states.formats import FORMATS
from patchkit.hidden_states.pack import Packer, begin, convert, pack_dumps
from patchkit.hidden_states.source import Source
from tests.hidden_states.conftest import REPOSITORY, content, patchkit, write_rows
from tests.hidden_states.engine import Dumper, states


@pytest.mark.parametrize("name", FORMATS)
def test_every_row_gets_the_states_of_its_tokens_and_its_own_mask(packing, name):
    dataset = packing.pack(name)
    assert dataset.samples == len(packing.rows)
    for row, one in enumerate(packing.rows):
        sample = dataset.read(row)
        expected = states(one["input_ids"])
        if dataset.format.normed:
            expected[-1] = packing.norm(expected[-1])
        assert sample.input_ids.tolist() == one["input_ids"]
        assert sample.loss_mask.tolist() == one["loss_mask"]
        assert all(torch.equal(a, b) for a, b in zip(sample.states, expected, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_do_not_depend_on_order_chunks_or_threads(packing, name):
    first = packing.pack(name, "one", chunk=7)
    packing.rows.reverse()
    dumps = packing.folder / "reversed"
    for row in packing.rows:
        Dumper(dumps).dump(row["input_ids"])
    packing.rows.reverse()
    source = Source(write_rows(packing.folder / "in.jsonl", packing.rows))
    growing = begin(str(packing.folder / "two"), name, source, skip_bad=False, verifier=packing.model)
    pack_dumps(Spool(str(dumps)), Packer(growing, packing.norm, workers=1))
    growing.finish()
    assert content(first.folder) == content(packing.folder / "two")


@pytest.mark.parametrize("source_name", FORMATS)
@pytest.mark.parametrize("target_name", FORMATS)
def test_converting_gives_what_packing_would_have_given(packing, source_name, target_name):
    source = packing.pack(source_name, "source")
    if source.format.normed and not FORMATS[target_name].normed:
        with pytest.raises(DatasetError, match="cannot be undone"):
            convert(source, str(packing.folder / "out"), target_name, packing.norm, workers=2, resume=False)
        return
    _, linked = convert(
        source, str(packing.folder / "out"), target_name, packing.norm, workers=2, resume=False
    )
    assert linked == (len(packing.rows) if source_name == target_name else 0)
    assert content(packing.folder / "out") == content(packing.pack(target_name, "direct").folder)


@pytest.mark.parametrize("target_name", ["speculators", "specforge"])
@pytest.mark.parametrize(("changed", "what"), [("hidden_states", "states"), ("token_ids", "token ids")])
def test_converting_refuses_samples_that_changed(packing, target_name, changed, what):
    source = packing.pack()
    path = packing.folder / "ds/hidden_states/hs_2.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    first = json.loads(data[8:start])[changed]["data_offsets"][0]
    data[start + first] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSampleError, match=rf"hs_2.*{what} are not those that were packed"):
        convert(source, str(packing.folder / "out"), target_name, packing.norm, workers=2, resume=False)


def test_dumps_of_two_servers_are_not_mixed(packing, tmp_path):
    dumps = tmp_path / "mixed"
    for row in packing.rows:
        names = Dumper(dumps).dump(row["input_ids"])
    path = dumps / f"{names[0]}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "release": "0.5.10"}))
    source = Source(write_rows(tmp_path / "in.jsonl", packing.rows))
    growing = begin(str(tmp_path / "ds"), "speculators", source, skip_bad=False, verifier=None)
    with pytest.raises(BadDumpError, match=r"'0\.5\.(9|10)'.*cannot be one data set"):
        pack_dumps(Spool(str(dumps)), Packer(growing, workers=1))


def test_a_last_state_after_the_norm_is_refused_when_the_norm_is_known(packing, tmp_path):
    values = states([1, 2, 3, 4])
    values[-1] = packing.norm(values[-1])
    Dumper(tmp_path / "dumps").dump([1, 2, 3, 4], values=values)
    source = Source(
        write_rows(tmp_path / "in.jsonl", [{"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1, 1]}])
    )
    growing = begin(str(tmp_path / "ds"), "speculators", source, skip_bad=False, verifier=None)
    with pytest.raises(BadSampleError, match="post-norm"):
        pack_dumps(Spool(str(tmp_path / "dumps")), Packer(growing, packing.norm, workers=1))


def test_dumps_of_equal_prompts_packed_at_once_fill_each_row_once(packing, tmp_path):
    ids = list(range(400))
    for _ in range(12):
        Dumper(tmp_path / "dumps").dump(ids)
    source = Source(write_rows(tmp_path / "in.jsonl", [{"input_ids": ids, "loss_mask": [1] * 400}] * 5))
    growing = begin(str(tmp_path / "ds"), "speculators", source, skip_bad=False, verifier=None)
    filled: list[int] = []
    pack_dumps(
        Spool(str(tmp_path / "dumps")),
        Packer(growing, delete=True, workers=6),
        progress=lambda one: filled.extend(one.rows),
    )
    assert sorted(filled) == [0, 1, 2, 3, 4]
    assert growing.finish()["samples"] == 5


def test_two_packers_do_not_write_one_data_set(packing, tmp_path):
    source = Source(write_rows(tmp_path / "in.jsonl", packing.rows))
    begin(str(tmp_path / "ds"), "speculators", source, skip_bad=False, verifier=None)
    done = patchkit("pack", tmp_path, "--out", tmp_path / "ds", "--resume")
    assert done.returncode == 4
    assert "another patchkit is writing it" in done.stderr


def command(packing, *more: str) -> list[str | Path]:
    dumps = packing.folder / "dumps"
    return ["pack", dumps, "--data", packing.folder / "in.jsonl", "--out", packing.folder / "ds", *more]


def dumped(packing, rows) -> None:
    write_rows(packing.folder / "in.jsonl", packing.rows)
    for row in rows:
        Dumper(packing.folder / "dumps").dump(row["input_ids"])


def test_too_few_open_files_are_an_error_that_says_what_to_do(packing):
    dumped(packing, packing.rows)
    packing_command = [sys.executable, "-m", "patchkit", *map(str, command(packing))]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 6; exec "$@"', "bash", *packing_command],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 6, done.stderr
    assert "Too many open files; raise the limit of open files (ulimit -n)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_packing_says_which_rows_are_missing_and_goes_on_later(packing):
    dumped(packing, packing.rows[2:])
    done = patchkit(*command(packing, "--delete-dumps"))
    assert done.returncode == 1
    assert f"2 of {len(packing.rows)} rows have no states (rows 0, 1)" in done.stderr
    assert not list((packing.folder / "dumps").iterdir())
    for row in packing.rows[:2]:
        Dumper(packing.folder / "dumps").dump(row["input_ids"])
    again = patchkit(*command(packing, "--resume"))
    assert again.returncode == 0, again.stderr
    assert content(packing.folder / "ds") == content(_packed_at_once(packing).folder)
    third = patchkit(*command(packing, "--resume", "--json"))
    assert json.loads(third.stdout)["data"]["samples"] == len(packing.rows)


def _packed_at_once(packing) -> Dataset:
    packing.model = None
    return packing.pack(name="at-once")


def test_dumps_are_not_enough_to_know_what_counts(packing):
    dumped(packing, packing.rows)
    done = patchkit("pack", packing.folder / "dumps", "--out", packing.folder / "ds")
    assert done.returncode == 4
    assert "--data" in done.stderr


def test_a_folder_with_something_in_it_is_never_overwritten(packing):
    dumped(packing, packing.rows)
    (packing.folder / "ds").mkdir()
    (packing.folder / "ds/mine").write_text("precious")
    done = patchkit(*command(packing))
    assert done.returncode == 4
    assert "is not empty (mine)" in done.stderr
    assert os.listdir(packing.folder / "ds") == ["mine"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (["--format", "speculators-v1"], "with format speculators, not speculators-v1"),
        (["--max-length", "50"], "with max_length none, not 50"),
        (["--samples", "9"], "with samples none, not 9"),
        (["--model", "model"], "with verifier none, not"),
        (["--data", "other.jsonl"], "with another"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_packing_is_resumed_with_the_same_options_only(packing, other, reason, finished):
    dumped(packing, packing.rows if finished else packing.rows[2:])
    write_rows(packing.folder / "other.jsonl", packing.rows[:-1])
    assert patchkit(*command(packing)).returncode == (0 if finished else 1)
    before = content(packing.folder / "ds")
    other = [str(packing.folder / one) if one in ("model", "other.jsonl") else one for one in other]
    done = patchkit(*command(packing, "--resume", *other))
    assert done.returncode == 4
    assert f"was begun {reason}" in done.stderr
    assert content(packing.folder / "ds") == before


def half_converted(packing, monkeypatch, source: Dataset, name: str) -> Path:
    """A conversion that ended in the middle."""
    out = packing.folder / "out"
    model = packing.model if FORMATS[name].normed else None
    with monkeypatch.context() as patch:
        patch.setattr(source, "read", lambda row, read=source.read: spoilt(row) if row == 5 else read(row))
        with pytest.raises(BadSampleError):
            convert(source, str(out), name, packing.norm, workers=1, resume=False, model=model)
    assert Growing.exists(str(out))
    return out


def spoilt(row: int):
    raise BadSampleError(f"row {row}", "unreadable", "for a test")


def other_source(packing) -> Dataset:
    """The same input, dumped by a server whose states are others."""
    dumper = Dumper(packing.folder / "dumps-other")
    for row in packing.rows:
        dumper.dump(row["input_ids"], values=[3 * one for one in states(row["input_ids"])])
    source = Source(str(packing.folder / "in.jsonl"))
    growing = begin(
        str(packing.folder / "other"), "speculators", source, skip_bad=False, verifier=packing.model
    )
    pack_dumps(Spool(str(packing.folder / "dumps-other")), Packer(growing, workers=2))
    growing.finish()
    return Dataset(str(packing.folder / "other"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversion_is_resumed_from_its_own_source_to_its_own_format_only(packing, monkeypatch, name):
    source = packing.pack("speculators", "source")
    out = half_converted(packing, monkeypatch, source, name)
    other, another = other_source(packing), next(one for one in FORMATS if one != name)
    before = content(out)
    for folder, to, reason in (
        (other.folder, name, "was begun from another source"),
        (source.folder, another, f"was begun with format {name}, not {another}"),
    ):
        done = patchkit("pack", folder, "--out", out, "--format", to, "--resume")
        assert done.returncode == 4, done.stderr
        assert reason in done.stderr
    dumps = ("pack", packing.folder / "dumps-source", "--out", out, "--format", name, "--resume")
    assert "was begun" in patchkit(*dumps, "--model", packing.model).stderr
    assert content(out) == before
    assert patchkit("pack", source.folder, "--out", out, "--format", name, "--resume").returncode == 0
    assert content(out) == content(packing.pack(name, "direct").folder)
    done = patchkit("pack", other.folder, "--out", out, "--format", name, "--resume")
    assert done.returncode == 4
    assert f"was not made of {other.folder}" in done.stderr
    done = patchkit("pack", source.folder, "--out", out, "--format", name, "--resume")
    assert "was complete already" in done.stdout


def test_specforge_without_the_norm_is_refused(packing):
    dumped(packing, packing.rows)
    done = patchkit(*command(packing, "--format", "specforge"))
    assert done.returncode == 2
    assert "--model" in done.stderr
