from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patchkit.hidden_states.errors import BadInputError
from patchkit.hidden_states.source import Source
from tests.hidden_states.conftest import REPOSITORY, make_rows, write_rows

ROWS = make_rows(6)
EXPECTED = [(row["input_ids"], row["loss_mask"], line) for line, row in enumerate(ROWS, 1)]


def test_json_lines_are_read_in_order_with_their_line_numbers(tmp_path):
    path = write_rows(tmp_path / "in.jsonl", ROWS)
    assert list(Source(path).rows(skip_bad=False)) == EXPECTED


def test_parquet_gives_the_same_rows(tmp_path):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert list(Source(str(path)).rows(skip_bad=False)) == EXPECTED


def test_an_arrow_folder_gives_the_same_rows(packing):
    packing.pack()
    expected = [(row["input_ids"], row["loss_mask"], line) for line, row in enumerate(packing.rows, 1)]
    assert list(Source(str(packing.folder / "ds")).rows(skip_bad=False)) == expected


GOOD = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
BAD = [
    ("{oops", "not JSON"),
    ("[" * 100000, "not JSON"),
    ("3", "no object"),
    ("{}", "neither input_ids nor messages"),
    ('{"messages": []}', "its conversation has no messages"),
    ('{"input_ids": []}', "input_ids is empty"),
    ('{"input_ids": [1]}', "no loss_mask"),
    ('{"input_ids": [1, -1], "loss_mask": [1, 1]}', "no token id"),
    ('{"input_ids": [1, true], "loss_mask": [1, 1]}', "no token id"),
    ('{"input_ids": [1, 2.0], "loss_mask": [1, 1]}', "no token id"),
    ('{"input_ids": [1, 2], "loss_mask": [1]}', "1 values in loss_mask for 2"),
    ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "other than 0 and 1"),
    ('{"input_ids": [1, 2], "loss_mask": [0, 0]}', "no token counts"),
    ('{"input_ids": [1, 512], "loss_mask": [0, 1]}', "token id 512 is not in the vocabulary of 512"),
    (json.dumps({"input_ids": [1] * 64, "loss_mask": [1] * 64}), "the model's context is 64"),
]


@pytest.mark.parametrize(("text", "reason"), BAD)
def test_a_bad_row_is_named_with_its_line(tmp_path, text, reason):
    path = tmp_path / "in.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{text}\n")
    source = Source(str(path), vocab_size=512, context=64)
    with pytest.raises(BadInputError) as caught:
        list(source.rows(skip_bad=False))
    assert "line 3: " in str(caught.value)
    assert reason in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    again = Source(str(path), vocab_size=512, context=64)
    assert list(again.rows(skip_bad=True)) == [([1, 2, 3], [0, 1, 1], 1)]
    assert [one.line for one in again.bad] == [3]


@pytest.mark.parametrize("command", ["pack", "extract"])
def test_rows_from_a_pipe_are_refused_not_lost(packing, command):
    rows = write_rows(packing.folder / "in.jsonl", packing.rows)
    out = packing.folder / "out"
    (packing.folder / "dumps").mkdir()
    source = ("pack", packing.folder / "dumps", "--model", packing.model)
    if command == "extract":
        source = ("extract", "--model", packing.model)
    with Path(rows).open("rb") as file:
        feeder = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        done = subprocess.run(
            [sys.executable, "-m", "patchkit", *source, "--data", "/dev/stdin", "--out", out],
            stdin=feeder.stdout,
            capture_output=True,
            text=True,
            check=False,
            cwd=REPOSITORY,
        )
        feeder.stdout.close()
        feeder.wait()
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1].endswith(
        "/dev/stdin: is not a regular file; write the rows to a file first"
    )
    assert not (out / "dataset.json").exists()


def test_long_rows_are_cut_and_counted(tmp_path):
    source = Source(write_rows(tmp_path / "in.jsonl", [GOOD]), max_length=2)
    assert list(source.rows(skip_bad=False)) == [([1, 2], [0, 1], 1)]
    assert source.record()["cut"] == 1


def test_so_many_good_rows_are_taken_and_no_more_looked_at(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n{oops\n")
    assert len(list(Source(str(path), samples=2).rows(skip_bad=False))) == 2


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "no such file"), (b"", "no usable row"), (b"PAR1junk", "as Parquet")]
)
def test_an_input_without_rows_is_refused(tmp_path, content, reason):
    path = tmp_path / "in"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInputError, match=reason):
        list(Source(str(path)).rows(skip_bad=True))
