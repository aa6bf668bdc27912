"""Records of runs: layout, digests that other tools compute too, no secrets, and clear errors."""

from __future__ import annotations

import json
import subprocess

import pytest

from patchkit import provenance
from patchkit.provenance import Record, RecordError, TreeState
from patchkit.target import Target


@pytest.fixture
def target(site):
    return Target("demopkg", "1.0", str(site), ("demopkg",), None, None)


@pytest.fixture
def record(target, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.bin").write_bytes(b"\0\1")
    made = Record("abc", command=[["true"]], outputs=[str(out)], env_set={"HS": "1"})
    digest = provenance.tree_digest(target)
    made.trees.append(TreeState(target, digest, None, digest, clean=True, witness="RECORD"))
    return made


def test_a_trees_digest_is_the_dirhash_that_coreutils_compute(target, site):
    line = "find demopkg -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1"
    done = subprocess.run(line, shell=True, cwd=site, capture_output=True, text=True, check=True)
    assert provenance.tree_digest(target) == done.stdout.strip()


def test_bytecode_and_backups_do_not_count(target, site):
    before = provenance.tree_digest(target)
    (site / "demopkg" / "__pycache__").mkdir()
    (site / "demopkg" / "__pycache__" / "core.cpython-311.pyc").write_bytes(b"x")
    (site / "demopkg" / "core.py.bak_p1").write_bytes(b"x")
    assert provenance.tree_digest(target) == before
    (site / "demopkg" / "core.py").write_bytes(b"x")
    assert provenance.tree_digest(target) != before


def test_it_is_an_in_toto_statement(record, tmp_path):
    data = json.loads((tmp_path / record.write(str(tmp_path))).read_text())
    assert set(data) == {"_type", "subject", "predicateType", "predicate"}
    assert data["_type"] == "https://in-toto.io/Statement/v1"
    assert data["predicate"]["schema"] == 1
    for subject in data["subject"]:
        assert set(subject) == {"name", "digest"}
        assert all(len(value) == 64 for value in subject["digest"].values())
    assert provenance.load(record.write(str(tmp_path))) == data["predicate"]


def test_values_of_the_environment_are_not_written_down(record, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    text = (tmp_path / record.write(str(tmp_path))).read_text()
    assert "HF_TOKEN" in text
    assert "very-secret" not in text
    assert json.loads(text)["predicate"]["environment"]["set"] == {"HS": "1"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: "{", "not JSON"),
        (lambda _: "[]", "not an in-toto Statement"),
        (lambda data: {**data, "_type": "https://in-toto.io/Statement/v0.1"}, "not an in-toto Statement"),
        (lambda data: {**data, "predicateType": "https://slsa.dev/provenance/v1"}, "another kind"),
        (lambda data: {**data, "predicate": {**data["predicate"], "schema": 2}}, "schema is 2"),
        (lambda data: {**data, "predicate": {"schema": 1}}, "damaged"),
        (lambda data: {**data, "subject": []}, "disagree"),
        (lambda data: {**data, "predicate": {**data["predicate"], "trees": []}}, "names no tree"),
        (lambda data: {**data, "predicate": {**data["predicate"], "session": 7}}, "no session"),
        (lambda data: {**data, "predicate": {**data["predicate"], "trees": [{}]}}, "damaged"),
        (lambda data: {**data, "predicate": {**data["predicate"], "outputs": [1]}}, "damaged"),
    ],
)
def test_what_is_no_record_is_refused_with_a_reason(record, tmp_path, change, says):
    data = json.loads((tmp_path / record.write(str(tmp_path))).read_text())
    changed = change(data)
    path = tmp_path / "changed.json"
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(RecordError, match=says):
        provenance.load(str(path))


def test_an_output_that_changed_is_named(record, tmp_path):
    predicate = provenance.load(record.write(str(tmp_path)))
    (output,) = predicate["outputs"]
    out = tmp_path / "out"
    assert provenance.differences(output, str(out)) == []
    (out / "a.bin").write_bytes(b"\0\2")
    (out / "b.bin").write_bytes(b"")
    assert provenance.differences(output, str(out)) == [
        (str(out / "a.bin"), "modified"),
        (str(out / "b.bin"), "unexpected"),
    ]
