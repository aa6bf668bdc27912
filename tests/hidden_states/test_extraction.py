from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.hidden_states.dataset import Dataset
from tests.hidden_states.conftest import (
    REPOSITORY,
    EngineProcess,
    content,
    make_rows,
    patchkit,
    wait_for,
    write_rows,
)
from tests.hidden_states.engine import CHOSEN, HIDDEN, Dumper, states, write_model

ROWS = make_rows(40, seed=5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The model, and the files that an extraction gives when nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole")
    model = write_model(folder / "model")
    write_rows(folder / "in.jsonl", ROWS)
    engine = EngineProcess(folder / "spool")
    done = patchkit(*arguments(folder, model, "undisturbed", "--url", engine.url))
    engine.kill()
    assert done.returncode == 0, done.stderr
    assert list((folder / "spool").iterdir()) == []
    return model, folder / "undisturbed"


def arguments(folder: Path, model: str, out: str, *more: str) -> list[str]:
    return [
        *("extract", "--model", model, "--data", str(folder / "in.jsonl"), "--out", str(folder / out)),
        *("--spool", str(folder / "spool"), *more),
    ]


@pytest.fixture
def undisturbed(whole):
    return content(whole[1])


@pytest.fixture
def setting(tmp_path, whole):
    """The arguments of an extraction, but for its server."""
    write_rows(tmp_path / "in.jsonl", ROWS)
    return lambda out, *more: arguments(tmp_path, whole[0], out, *more)


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "patchkit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
    )


def packed(folder: Path) -> int:
    """How many samples a growing data set has."""
    path = folder / ".growing/samples.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_every_sample_is_extracted_and_the_run_is_on_record(whole):
    dataset = Dataset(str(whole[1]))
    assert [dataset.read(row).input_ids.tolist() for row in range(dataset.samples)] == [
        row["input_ids"] for row in ROWS
    ]
    assert dataset.layers == tuple(CHOSEN)
    (run,) = (whole[1] / "provenance").glob("extract-*.json")
    record = json.loads(run.read_text())
    assert record["outcome"] == "finished"
    assert record["totals"]["samples"] == len(ROWS)
    assert record["marks"][-1][1] == len(ROWS)


def test_a_second_resume_says_that_nothing_is_left(whole):
    before = content(whole[1])
    again = arguments(whole[1].parent, whole[0], "undisturbed", "--resume", "--url", "http://127.0.0.1:9")
    done = patchkit(*again)
    assert done.returncode == 0
    assert "was complete already" in done.stdout
    assert content(whole[1]) == before


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("victim", ["patchkit", "server", "both"])
def test_what_is_killed_and_resumed_is_byte_for_byte_the_undisturbed(
    setting, engines, tmp_path, undisturbed, victim, seed
):
    rng = random.Random(f"{victim}{seed}")
    out = tmp_path / "killed"
    deaths = 0
    while deaths < 2:
        engine = engines(tmp_path / "spool", delay=0.05)
        at = packed(out) + rng.randrange(1, 10)
        process = start(setting("killed", "--resume", "--concurrency", "4", "--url", engine.url))
        wait_for(lambda at=at, process=process: packed(out) >= at or process.poll() is not None)
        if process.poll() is not None:
            break
        if victim in ("server", "both"):
            engine.kill()
        if victim in ("patchkit", "both"):
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        engine.kill()
        deaths += 1
        if victim == "server":
            assert process.returncode == 6, errors
            assert "Traceback" not in errors
    assert deaths
    engine = engines(tmp_path / "spool")
    done = patchkit(*setting("killed", "--resume", "--url", engine.url))
    assert done.returncode == 0, done.stderr
    assert content(out) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_or_a_lost_terminal_ends_in_order_and_can_be_resumed(
    setting, engines, tmp_path, undisturbed, number
):
    engine = engines(tmp_path / "spool", delay=0.05)
    process = start(setting("stopped", "--url", engine.url))
    wait_for(lambda: packed(tmp_path / "stopped") >= 5)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    (run,) = (tmp_path / "stopped/provenance").glob("extract-*.json")
    assert json.loads(run.read_text())["outcome"] == "failed"
    done = patchkit(*setting("stopped", "--resume", "--url", engine.url))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "stopped") == undisturbed


def test_a_full_disk_loses_nothing(setting, engines, tmp_path, undisturbed):
    """A file-size limit stands in for the disk: writing ends in the middle of a sample."""
    engine = engines(tmp_path / "spool")
    limit = 12_000
    code = (
        f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY)); "
        "from patchkit.cli.main import main; main()"
    )
    full = subprocess.run(
        [sys.executable, "-c", code, *setting("full", "--url", engine.url)],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )
    assert full.returncode == 6, full.stderr
    assert "Traceback" not in full.stderr
    assert not list((tmp_path / "full").rglob("*.tmp"))
    done = patchkit(*setting("full", "--resume", "--url", engine.url))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "full") == undisturbed


def test_the_spool_never_holds_more_than_its_limit(setting, engines, tmp_path, undisturbed):
    longest = max(len(row["input_ids"]) for row in ROWS)
    limit = longest * HIDDEN * len(CHOSEN) * 2 + 40_000
    engine = engines(tmp_path / "spool", delay=0.01)
    process = start(setting("small", "--url", engine.url, "--spool-limit", str(limit)))
    most = 0
    while process.poll() is None:
        try:
            most = max(most, sum(path.stat().st_size for path in (tmp_path / "spool").iterdir()))
        except FileNotFoundError:
            continue
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert 0 < most <= limit
    assert content(tmp_path / "small") == undisturbed


def test_a_sample_over_the_limit_is_refused_before_anything_is_sent(setting, engines, tmp_path):
    engine = engines(tmp_path / "spool")
    done = patchkit(*setting("tiny", "--url", engine.url, "--spool-limit", "9kB"))
    assert done.returncode == 4
    assert "--spool-limit" in done.stderr


def test_two_servers_share_the_work(setting, engines, tmp_path, undisturbed):
    urls = [engines(tmp_path / "spool", delay=0.01).url for _ in range(2)]
    done = patchkit(*setting("two", "--url", urls[0], "--url", urls[1]))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "two") == undisturbed


def test_a_server_that_does_not_dump_is_noticed(setting, engines, tmp_path):
    engine = engines(tmp_path / "elsewhere")
    done = patchkit(*setting("none", "--url", engine.url, "--stall", "1s"))
    assert done.returncode == 6
    assert "answered and not dumped" in done.stderr


def test_no_server_is_an_error_in_one_line(setting):
    done = patchkit(*setting("none", "--url", "http://127.0.0.1:9"))
    assert done.returncode == 6
    assert done.stderr.count("\n") == 1


def test_a_run_is_not_resumed_with_other_settings(setting, engines, tmp_path):
    engine = engines(tmp_path / "spool", delay=0.05)
    process = start(setting("other", "--url", engine.url))
    wait_for(lambda: packed(tmp_path / "other") >= 2)
    process.kill()
    process.communicate()
    other = patchkit(*setting("other", "--resume", "--url", engine.url, "--format", "speculators-v1"))
    assert other.returncode == 4
    assert "was begun with format speculators" in other.stderr
    other = patchkit(*setting("other", "--resume", "--url", engine.url, "--samples", "5"))
    assert other.returncode == 4
    assert "was begun with samples none, not 5" in other.stderr
    write_rows(tmp_path / "in.jsonl", ROWS[:-1])
    other = patchkit(*setting("other", "--resume", "--url", engine.url))
    assert other.returncode == 4
    assert "was begun with another" in other.stderr


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (["--format", "speculators-v1"], "with format speculators, not speculators-v1"),
        (["--layers", "3,8"], "with layers [3, 5, 6, 8], not [3, 8]"),
        (["--max-length", "50"], "with max_length none, not 50"),
        (["--data", os.devnull], "with another"),
    ],
)
def test_a_finished_run_is_not_called_complete_with_other_settings(whole, option, reason):
    again = arguments(whole[1].parent, whole[0], "undisturbed", "--resume", "--url", "http://127.0.0.1:9")
    done = patchkit(*again, *option)
    assert done.returncode == 4
    assert f"was begun {reason}" in done.stderr


def test_a_wrong_dump_is_reported_and_asked_for_again(setting, engines, tmp_path, undisturbed):
    """The states of one prompt are spoilt on their way; the others are packed all the same."""
    late = ROWS[30]["input_ids"]
    bad = states(late)
    bad[1][0, 0] = float("nan")
    begun(setting, engines, tmp_path, "bad")
    Dumper(tmp_path / "spool").dump(late, values=bad)
    engine = engines(tmp_path / "spool")
    first = patchkit(*setting("bad", "--resume", "--url", engine.url))
    assert first.returncode == 1
    assert "not-finite: R(5)" in first.stderr
    again = patchkit(*setting("bad", "--resume", "--url", engine.url))
    assert again.returncode == 0, again.stderr
    assert content(tmp_path / "bad") == undisturbed


def begun(setting, engines, tmp_path, out: str) -> None:
    """An extraction that was killed when it had some of its samples."""
    engine = engines(tmp_path / "spool", delay=0.05)
    process = start(setting(out, "--url", engine.url, "--concurrency", "1"))
    wait_for(lambda: packed(tmp_path / out) >= 2)
    process.kill()
    process.communicate()
    engine.kill()
    assert packed(tmp_path / out) < 25


def dump_foreign(folder: Path, **facts: str) -> dict[str, bytes]:
    """Dumps of the same prompts by another server; returns their files."""
    dumper = Dumper(folder)
    for row in ROWS:
        (name,) = dumper.dump(row["input_ids"], values=[3 * one for one in states(row["input_ids"])])
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return {name: data for name, data in content(folder).items() if name.startswith(dumper.prefix)}


def still_there(files: dict[str, bytes], folder: Path) -> bool:
    now = content(folder)
    return all(now.get(path) == data for path, data in files.items())


@pytest.mark.parametrize("facts", [{}, {"model_path": "/models/other"}, {"release": "0.5.10"}])
def test_dumps_that_lay_in_the_spool_before_are_neither_taken_nor_deleted(
    setting, engines, tmp_path, undisturbed, facts
):
    foreign = dump_foreign(tmp_path / "spool", **facts)
    engine = engines(tmp_path / "spool")
    done = patchkit(*setting("fresh", "--url", engine.url))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "fresh") == undisturbed
    assert content(tmp_path / "spool") == foreign


@pytest.mark.parametrize("facts", [{"model_path": "/models/other"}, {"patch_digest": "e" * 64}])
def test_a_resumed_run_takes_only_dumps_of_its_own_server(setting, engines, tmp_path, undisturbed, facts):
    begun(setting, engines, tmp_path, "resumed")
    foreign = dump_foreign(tmp_path / "spool", **facts)
    engine = engines(tmp_path / "spool")
    done = patchkit(*setting("resumed", "--resume", "--url", engine.url))
    assert done.returncode == 0, done.stderr
    assert "dumps of another server lie in" in done.stderr
    assert content(tmp_path / "resumed") == undisturbed
    assert still_there(foreign, tmp_path / "spool")


def test_dumps_of_another_server_that_come_meanwhile_end_the_run_and_stay(
    setting, engines, tmp_path, undisturbed
):
    engine = engines(tmp_path / "spool", delay=0.2)
    process = start(setting("mixed", "--url", engine.url, "--concurrency", "1"))
    wait_for(lambda: packed(tmp_path / "mixed") >= 1)
    foreign = dump_foreign(tmp_path / "spool", model_path="/models/other")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "model_path '/models/other'" in errors
    assert still_there(foreign, tmp_path / "spool")
    engine.kill()
    engine = engines(tmp_path / "spool")
    done = patchkit(*setting("mixed", "--resume", "--url", engine.url))
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "mixed") == undisturbed


def test_a_server_of_another_model_is_refused(setting, engines, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", write_model(tmp_path / "other"))
    engine = engines(tmp_path / "spool")
    done = patchkit(*setting("wrong", "--url", engine.url))
    assert done.returncode == 2
    assert f"the server serves {tmp_path / 'other'}" in done.stderr
    assert not (tmp_path / "wrong").exists()


def test_servers_of_two_models_are_refused(setting, engines, tmp_path, monkeypatch):
    urls = []
    for name in ("/models/one", "/models/two"):
        monkeypatch.setenv("MODEL_PATH", name)
        urls += ["--url", engines(tmp_path / "spool").url]
    done = patchkit(*setting("two", *urls))
    assert done.returncode == 6
    assert "serves /models/two, another server /models/one" in done.stderr
