from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from patchkit.hidden_states.vocabulary import DraftSizeError, Mapping, TargetSizeError, VocabularyError
from patchkit.training import Training
from tests.hidden_states.conftest import patchkit
from tests.hidden_states.engine import VOCAB


@given(
    counts=st.dictionaries(st.integers(0, 49), st.integers(1, 9)),
    draft=st.integers(1, 50),
)
def test_a_mapping_says_its_tokens_in_both_directions(counts, draft):
    mapping = Mapping.build(Counter(counts), draft, 50)
    mapping.check(50)
    tokens = mapping.tokens.tolist()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == draft
    assert np.flatnonzero(mapping.t2d).tolist() == tokens
    kept = min((counts.get(token, 0) for token in tokens), default=0)
    assert all(counts.get(token, 0) <= kept for token in range(50) if token not in tokens)


def test_equally_frequent_tokens_are_taken_from_the_lower_id():
    assert Mapping.build(Counter({9: 2, 4: 1, 3: 1, 8: 1}), 3, 10).tokens.tolist() == [3, 4, 9]


@pytest.mark.parametrize("draft", [0, 11])
def test_a_drafter_knows_no_more_than_its_target(draft):
    with pytest.raises(DraftSizeError):
        Mapping.build(Counter(), draft, 10)


def test_data_of_another_target_make_no_mapping():
    with pytest.raises(TargetSizeError, match="has token 10, a target of 10 tokens ends at 9"):
        Mapping.build(Counter({3: 1, 10: 1}), 2, 10)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (np.array([{}], dtype=object), "no numpy array"),
        (np.int64(3), r"is int64 \[\], not int64 \[draft\]"),
        (np.array([2**63 - 1, 2**63 - 1]), "leads outside"),
        (np.array([0.0, 1.0]), "is float64"),
    ],
)
def test_what_is_no_list_of_offsets_is_refused(tmp_path, content, reason):
    np.save(tmp_path / "d2t.npy", content, allow_pickle=True)
    np.save(tmp_path / "t2d.npy", np.ones(50, dtype=bool))
    with pytest.raises(VocabularyError, match=reason):
        Mapping.load(str(tmp_path)).check(50)


def test_torn_files_folders_and_archives_are_no_arrays(tmp_path):
    np.save(tmp_path / "t2d.npy", np.ones(50, dtype=bool))
    path = tmp_path / "d2t.npy"
    path.write_bytes((tmp_path / "t2d.npy").read_bytes()[:40])
    with pytest.raises(VocabularyError, match="no numpy array"):
        Mapping.load(str(tmp_path))
    with path.open("wb") as file:
        np.savez(file, d2t=np.zeros(3))
    with pytest.raises(VocabularyError, match="an archive of arrays"):
        Mapping.load(str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(VocabularyError, match="no numpy array"):
        Mapping.load(str(tmp_path))


WRONG = [
    (lambda m: {"d2t": m.d2t.astype(np.int32)}, "is int32"),
    (lambda m: {"t2d": m.t2d.astype(np.int64)}, "is int64"),
    (lambda m: {"d2t": m.tokens}, "not offsets"),
    (lambda m: {"d2t": m.d2t[::-1].copy()}, "not offsets|does not mark"),
    (lambda m: {"d2t": m.d2t[:-1]}, "does not mark exactly"),
    (lambda m: {"t2d": ~m.t2d}, "does not mark exactly"),
    (lambda m: {"t2d": m.t2d[:-1]}, "is for 49 tokens, the target has 50"),
    (lambda _: {"d2t": np.zeros(0, np.int64)}, "not int64"),
    (lambda m: {"d2t": m.d2t - 100}, "leads outside"),
]


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_a_wrong_mapping_is_refused_for_its_reason(change, reason):
    mapping = Mapping.build(Counter({7: 1, 30: 5, 31: 4, 49: 3}), 4, 50)
    values = {"d2t": mapping.d2t, "t2d": mapping.t2d, **change(mapping)}
    with pytest.raises(VocabularyError, match=reason):
        Mapping("x", **values).check(50)


def test_build_check_and_copy(packing):
    first, second = packing.pack("speculators", "a"), packing.pack("specforge", "b")
    built = patchkit("vocab", "build", first.folder, "--draft-size", "64", "--json")
    assert built.returncode == 0, built.stderr
    counts = Counter(
        token
        for row in packing.rows
        for token, counts in zip(row["input_ids"], row["loss_mask"], strict=True)
        if counts
    )
    best = sum(count for _, count in counts.most_common(64))
    assert json.loads(built.stdout)["data"]["coverage"] == pytest.approx(best / counts.total())
    assert patchkit("vocab", "check", first.folder).returncode == 0
    assert patchkit("vocab", "copy", first.folder, second.folder).returncode == 0
    one = torch.load(Path(second.folder, "vocab_mapping/vocab_mapping.pt"), weights_only=True)
    assert np.array_equal(one["d2t"].numpy(), np.load(Path(first.folder, "d2t.npy")))
    assert one["t2d"].dtype == torch.bool
    assert len(one["t2d"]) == VOCAB
    assert patchkit("validate", first.folder, second.folder).returncode == 2
    assert patchkit("validate", second.folder).returncode == 0


def test_a_stale_mapping_is_found_by_check_and_by_validate(packing):
    dataset = packing.pack()
    patchkit("vocab", "build", dataset.folder, "--draft-size", "64")
    np.save(Path(dataset.folder, "t2d.npy"), np.zeros(VOCAB, dtype=bool))
    for command in (("vocab", "check"), ("validate",)):
        done = patchkit(*command, dataset.folder)
        assert done.returncode == 1
        assert "does not mark exactly the 64 tokens" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("format_name", "file", "reason"),
    [
        ("speculators", "d2t.npy", "no numpy array"),
        ("specforge", "vocab_mapping/vocab_mapping.pt", "cannot be loaded"),
    ],
)
def test_no_trainer_is_given_a_mapping_that_is_garbage(packing, format_name, file, reason):
    dataset = packing.pack(format_name)
    Mapping.build(Counter(), 8, VOCAB).save(dataset)
    training = Training(dataset, packing.model, "out", format_name, "python", None, ("--config=run.yaml",))
    assert training.command()
    Path(dataset.folder, file).write_bytes(b"x" * 30)
    with pytest.raises(VocabularyError, match=reason):
        training.command()


def test_a_mapping_for_another_target_is_not_copied(packing):
    first, second = packing.pack(name="a"), packing.pack(name="b")
    patchkit("vocab", "build", first.folder, "--draft-size", "8", "--target-size", "600")
    done = patchkit("vocab", "copy", first.folder, second.folder)
    assert done.returncode == 1
    assert "is for 600 tokens, the target has 512" in done.stderr
    assert not Path(second.folder, "d2t.npy").exists()
