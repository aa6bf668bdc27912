"""``patchkit train``, with a small process as the trainer that writes down what it was told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from patchkit.commands.data import vocab_build
from patchkit.errors import PatchkitError
from patchkit.hidden_states.dataset import Dataset
from patchkit.hidden_states.model import FinalNorm, ModelConfig
from patchkit.training import Training
from tests.hidden_states.conftest import Packing, make_rows, wait_for
from tests.hidden_states.engine import write_model
from tests.support import Done, Kit, Venv, build_wheel

# Writes its arguments, and whether a lease lay on the tree; then does what $TRAINER_DOES says.
TRAINER = b"""
import json, os, sys
out = sys.argv[sys.argv.index("--save-path") + 1]
leases = os.path.join(os.environ["TREE"], ".patchkit", "leases")
with open(os.path.join(out, "told.json"), "w") as file:
    json.dump({"arguments": sys.argv[1:], "leases": len(os.listdir(leases))}, file)
print("on the trainer's stdout")
exec(os.environ.get("TRAINER_DOES", ""))
"""


@dataclass
class Bench:
    """A data set, its verifier, a clean tree and an environment with a trainer."""

    folder: Path
    kit: Kit
    packing: Packing
    tree: Path
    trainer: Path

    @property
    def save(self) -> Path:
        return self.folder / "save"

    @property
    def told(self) -> list[str]:
        return json.loads((self.save / "told.json").read_text())["arguments"]

    def train(self, dataset: str, *more: object, code: int | None = 0, does: str = "") -> Done:
        """Everything before ``--`` of ``more`` is patchkit's."""
        kit, own = self._command(dataset, *more, does=does)
        return kit.spawn(*own, code=code)

    def start(self, dataset: str, *, does: str) -> subprocess.Popen[str]:
        kit, own = self._command(dataset, does=does)
        return kit.popen(*own)

    def _command(self, dataset: str, *more: object, does: str) -> tuple[Kit, list[object]]:
        at = more.index("--") if "--" in more else len(more)
        own = [*self.kit.where, *more[:at]]
        if "--trainer-python" not in own:
            own += ["--trainer-python", self.trainer]
        own += ["--dataset", dataset, "--verifier", self.packing.model, "--save-path", self.save, *more[at:]]
        env = {**self.kit.env, "TREE": str(self.tree), "TRAINER_DOES": does}
        return Kit([], env=env), ["train", *own]


@pytest.fixture
def bench(tmp_path: Path, kit: Kit, venv: Venv) -> Bench:
    wheel = build_wheel(
        tmp_path / "wheels",
        "0.9.0",
        {
            "speculators/__init__.py": b"",
            "speculators/train/__init__.py": b"",
            "speculators/train/__main__.py": TRAINER,
        },
        name="speculators",
    )
    trainer = Venv.create(tmp_path / "trainer", cache=venv.cache)
    trainer.uv("install", wheel)
    model = write_model(tmp_path / "model")
    packing = Packing(tmp_path, make_rows(5)[:4], model, FinalNorm.read(ModelConfig.read(model)))
    return Bench(tmp_path, kit, packing, venv.site, trainer.python)


def value(arguments: list[str], option: str, count: int = 1) -> list[str]:
    at = arguments.index(option)
    assert option not in arguments[at + 1 :]
    return arguments[at + 1 : at + 1 + count]


def test_layers_and_mapping_are_told_from_the_data_and_extra_arguments_are_passed_on(bench):
    dataset = bench.packing.pack()
    build_vocabulary(dataset)
    done = bench.train(dataset.folder, "--json", "--", "--epochs", "2", "--note", "a b")
    told = bench.told
    assert told[:4] == ["--epochs", "2", "--note", "a b"]
    assert value(told, "--target-layer-ids", 3) == ["3", "5", "6"]
    assert value(told, "--data-path") == [dataset.folder]
    assert value(told, "--hidden-states-path") == [f"{dataset.folder}/hidden_states"]
    assert value(told, "--on-missing") == ["raise"]
    assert value(told, "--d2t-path") == [f"{dataset.folder}/d2t.npy"]
    assert value(told, "--t2d-path") == [f"{dataset.folder}/t2d.npy"]
    assert value(told, "--draft-vocab-size") == ["32"]
    assert value(told, "--verifier-name-or-path") == [bench.packing.model]
    assert done.json["data"]["exit_code"] == 0
    assert "on the trainer's stdout" in done.err


def build_vocabulary(dataset: Dataset) -> None:
    vocab_build(dataset.folder, draft=32, target=None, verifier=None)


def test_the_run_has_a_lease_and_leaves_two_records(bench):
    dataset = bench.packing.pack()
    done = bench.train(dataset.folder)
    assert json.loads((bench.save / "told.json").read_text())["leases"] == 1
    assert "this run used pristine demopkg 1.0" in done.err
    (session,) = (bench.save / "provenance").glob("patchkit-run-*.json")
    (run,) = (bench.save / "provenance").glob("train-*.json")
    assert "speculators.train" in session.read_text()
    record = json.loads(run.read_text())
    assert record["trainer"]["release"] == "0.9.0"
    assert record["dataset"]["layers"] == [3, 5, 6, 8]
    assert record["dataset"]["samples_sha256"] == dataset.record["samples_sha256"]
    assert record["dataset"]["origin"]["patch_digest"] == "d" * 64
    assert record["exit_code"] == 0
    assert record["began"] <= record["ended"]


def test_the_trainers_exit_code_is_ours_and_is_recorded(bench):
    bench.train(bench.packing.pack().folder, code=7, does="sys.exit(7)")
    (run,) = (bench.save / "provenance").glob("train-*.json")
    assert json.loads(run.read_text())["exit_code"] == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_who_ends_the_command_ends_the_trainer_and_the_run_is_on_record(bench, number):
    """The trainer must not go on by itself, whatever ended patchkit."""
    pid = bench.folder / "pid"
    does = f"import time; open({str(pid)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
    process = bench.start(bench.packing.pack().folder, does=does)
    wait_for(lambda: pid.exists() and pid.read_text().endswith("."))
    trainer = int(pid.read_text()[:-1])
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    wait_for(lambda: not os.path.exists(f"/proc/{trainer}"))
    assert "Traceback" not in errors or number == signal.SIGINT  # then it is the trainer's own
    if number == signal.SIGKILL:
        return
    (run,) = (bench.save / "provenance").glob("train-*.json")
    assert json.loads(run.read_text())["exit_code"] == process.returncode == 128 + number


def test_a_tree_that_changed_during_the_training_is_told(bench):
    path = bench.tree / "demopkg/core.py"
    done = bench.train(bench.packing.pack().folder, code=125, does=f"open({str(path)!r}, 'a').write('#')")
    assert "demopkg 1.0" in done.err
    assert "not as it was before" in done.err


def test_a_tree_that_is_not_clean_is_refused(bench):
    dataset = bench.packing.pack()
    bench.kit("apply", "p1")
    done = bench.train(dataset.folder, code=1)
    assert "demopkg/core.py" in done.out + done.err
    assert not bench.save.exists()


def test_data_that_do_not_validate_are_refused(bench):
    dataset = bench.packing.pack()
    Path(dataset.path(2)).write_bytes(Path(dataset.path(1)).read_bytes())
    done = bench.train(dataset.folder, code=1)
    assert "does not validate" in done.err
    assert "hs_2.safetensors" in done.err
    assert not bench.save.exists()


def test_an_unfinished_data_set_and_none_at_all_are_refused(bench):
    assert "not a data set" in bench.train(str(bench.folder), code=4).err
    assert "not a data set" in bench.train(str(bench.folder / "none"), code=4).err


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--trainer-python", "/nowhere/python"], 2, "/nowhere/python: No such file"),
        (["--trainer", "specforge"], 4, "is in the format speculators"),
        (["--trainer", "other"], 2, "other"),
        (["--", "--data-path", "elsewhere"], 2, "--data-path is set from the data set"),
        (["--", "--target-layer-ids=1"], 2, "--target-layer-ids is set"),
        (["--", "--on-m", "generate"], 2, "--on-missing is set"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(bench, options, code, reason):
    done = bench.train(bench.packing.pack().folder, *options, code=None)
    assert done.code == code, str(done)
    assert reason in done.err
    assert "Traceback" not in done.err
    assert not bench.save.exists()


def test_an_environment_without_the_trainer_is_refused(bench, venv):
    done = bench.train(bench.packing.pack().folder, "--trainer-python", venv.python, code=2)
    assert "'speculators' is not installed" in done.err
    assert "--trainer-python" in done.err


def test_the_older_format_is_for_a_script_of_its_own(bench):
    dataset = bench.packing.pack("speculators-v1")
    assert "--trainer-entry" in bench.train(dataset.folder, code=2).err
    entry = bench.folder / "entry.py"
    entry.write_bytes(TRAINER)
    bench.train(dataset.folder, "--trainer-entry", entry)
    assert "--legacy-data" in bench.told
    assert "--hidden-states-path" not in bench.told


def test_states_after_the_norm_are_not_for_speculators(bench):
    done = bench.train(bench.packing.pack("specforge").folder, code=4)
    assert "after the norm" in done.err


def command(dataset: Dataset, *extra: str) -> list[str]:
    return Training(dataset, "MODEL", "out", "specforge", "python", None, extra).command()


def test_specforge_is_given_options_before_one_run_of_overrides_and_ours_last(bench):
    dataset = bench.packing.pack("specforge")
    build_vocabulary(dataset)
    found = command(dataset, "training.max_steps=2", "-c", "a=b.yaml", "--role=all", "run_id=x")
    assert found[:8] == [
        *("python", "-m", "specforge.cli", "train", "-c", "a=b.yaml", "--role=all", "training.max_steps=2")
    ]
    assert [one.split("=")[0] for one in found[8:]] == [
        *("run_id", "model.target_model_path", "model.vocab_mapping_path"),
        *("data.hidden_states_path", "output_dir"),
    ]


def test_specforge_needs_a_mapping_and_a_configuration(bench):
    dataset = bench.packing.pack("specforge")
    with pytest.raises(PatchkitError, match="has no vocabulary mapping"):
        command(dataset)
    build_vocabulary(dataset)
    with pytest.raises(PatchkitError, match="needs a run configuration"):
        command(dataset)
    with pytest.raises(PatchkitError, match="output_dir is set"):
        command(dataset, "-c", "run.yaml", "output_dir=elsewhere")
