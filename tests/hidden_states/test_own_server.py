"""``extract`` with a server of its own: what it patches, starts and stops, and whose files it may touch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from patchkit.hidden_states.dataset import Dataset
from tests.hidden_states.conftest import REPOSITORY, make_rows, patchkit, write_rows
from tests.hidden_states.engine import Dumper, states, write_model
from tests.support import Venv, build_wheel, snapshot, write_patch

# An engine that starts only where it is patched, and then is the made-up one.
LAUNCH = f"""
import os, sys
import sglang.dump
told = dict(one[2:].split("=", 1) for one in sys.argv[1:] if "=" in one)
os.environ.update(MODEL_PATH=told["model-path"], PYTHONPATH={str(REPOSITORY)!r})
os.environ.pop("http_proxy", None)
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "tests.hidden_states.engine", told["port"]])
""".encode()
ENGINE = {"sglang/__init__.py": b"", "sglang/launch_server.py": LAUNCH}
ROWS = make_rows(8)


@dataclass
class Place:
    """A model, its input, and an environment with the engine; ``extract`` runs it."""

    folder: Path
    venv: Venv

    def extract(
        self, *more: object, patch: bool = True, env: dict | None = None
    ) -> subprocess.CompletedProcess:
        own = ["--patch", "dump"] if patch else []
        return patchkit(
            *("extract", "--model", self.folder / "model", "--data", self.folder / "in.jsonl"),
            *("--out", self.folder / "ds", "--spool", self.folder / "spool", "--python", self.venv.python),
            *("--patches", self.folder / "patches", *own, *more),
            env=env,
        )


@pytest.fixture
def place(tmp_path) -> Place:
    wheel = build_wheel(tmp_path / "wheels", "0.5.9", ENGINE, name="sglang")
    venv = Venv.create(tmp_path / "venv")
    venv.uv("install", wheel)
    added = {"sglang/dump.py": b"on = True\n"}
    write_patch(tmp_path / "patches", "dump", ENGINE, added, releases=["0.5.9"], distribution="sglang")
    write_model(tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", ROWS)
    return Place(tmp_path, venv)


def extracted(place: Place) -> None:
    dataset = Dataset(str(place.folder / "ds"))
    for row, one in enumerate(ROWS):
        assert dataset.read(row).input_ids.tolist() == one["input_ids"]
        assert dataset.read(row).states[0].equal(states(one["input_ids"])[0])


def test_the_named_patch_is_applied_while_the_server_runs_and_what_else_lies_in_the_spool_stays(place):
    (place.folder / "spool/sub").mkdir(parents=True)
    (place.folder / "spool/thesis.txt").write_text("years of work")
    (place.folder / "spool/sub/more").write_text("more of it")
    Dumper(place.folder / "spool").dump(ROWS[0]["input_ids"])
    spool, tree = snapshot(place.folder / "spool"), snapshot(place.venv.site)
    done = place.extract()
    assert done.returncode == 0, done.stderr
    extracted(place)
    assert snapshot(place.folder / "spool") == spool
    after = {path: one for path, one in snapshot(place.venv.site).items() if not path.startswith(".patchkit")}
    assert {path for path in after if "__pycache__" not in path} == {
        p for p in tree if "__pycache__" not in p
    }


def test_a_proxy_in_the_environment_does_not_hide_the_server(place):
    done = place.extract(env={"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"})
    assert done.returncode == 0, done.stderr
    extracted(place)


def test_a_run_whose_server_never_started_leaves_no_folder(place):
    done = place.extract("--patch", "none-such")
    assert done.returncode != 0
    assert "none-such" in done.stderr
    assert list((place.folder / "spool").iterdir()) == []


@pytest.mark.parametrize("argument", ["--model-path=/models/other", "--model=/models/other", "--port=1"])
def test_what_is_served_and_where_is_not_said_twice(place, argument):
    done = place.extract("--server-arg", argument)
    assert done.returncode == 2
    assert f"--server-arg={argument}" in done.stderr
    assert not (place.folder / "ds").exists()


def own_folder(place: Place) -> Path:
    from patchkit.commands.extract import Request

    names = dict.fromkeys(Request.__dataclass_fields__)
    fields = {**names, "out": str(place.folder / "ds"), "spool": str(place.folder / "spool"), "urls": ()}
    return Path(Request(**fields).spool_folder())


def test_dumps_that_an_earlier_data_set_left_are_not_taken(place):
    dumper = Dumper(own_folder(place))
    os.chmod(own_folder(place), 0o700)
    for row in ROWS:
        dumper.dump(row["input_ids"], values=[3 * one for one in states(row["input_ids"])])
    done = place.extract()
    assert done.returncode == 0, done.stderr
    extracted(place)
    assert list((place.folder / "spool").iterdir()) == []


@pytest.mark.parametrize("trap", ["link", "file", "open"])
def test_a_folder_that_others_may_have_prepared_is_refused(place, trap):
    folder, precious = own_folder(place), place.folder / "precious"
    folder.parent.mkdir()
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    if trap == "link":
        folder.symlink_to(precious)
    elif trap == "file":
        folder.write_text("a file")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    done = place.extract()
    assert done.returncode == 4, done.stderr
    assert str(folder) in done.stderr
    assert "--spool" in done.stderr
    assert (precious / "thesis.txt").exists()
    assert folder.is_symlink() == (trap == "link")
    assert not (place.folder / "ds").exists()
