"""A packer that is killed, or whose disk is full, and goes on: the data set is the undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit.hidden_states.dataset import Dataset
from patchkit.hidden_states.formats import FORMATS
from tests.hidden_states.conftest import REPOSITORY, content, make_rows, patchkit, wait_for, write_rows
from tests.hidden_states.engine import Dumper, write_model

ROWS = make_rows(60, seed=11)
SHORT = make_rows(60, seed=12, longest=9)  # whose lines in .growing take more room than a sample's file
LIMITED = (
    "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY)); "
    "from patchkit.cli.main import main; main()"
)
OWN_MOUNTS = ("unshare", "--mount", "--map-root-user")
# Pack on a disk of $1 bytes, make room, and go on; the data set is copied to $2 from $3 before the disk is gone.
SMALL_DISK = """
set -u
mount -t tmpfs -o size="$1" none "$3"
out="$2" disk="$3"
shift 3
"$@" --out "$disk/ds"
echo "$?" > "$out.code"
find "$disk" -name '*.tmp' > "$out.left"
mount -o remount,size=64m "$disk"
"$@" --out "$disk/ds" --resume || exit 9
cp -r "$disk/ds" "$out"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("verifier") / "model")


def arguments(folder: Path, rows: list[dict], model: str, name: str) -> list[str]:
    """Dump ``rows``, and the command that packs them; its --out is still to come."""
    dumper = Dumper(folder / "dumps", chunk=32)
    for row in rows:
        dumper.dump(row["input_ids"])
    data = write_rows(folder / "in.jsonl", rows)
    return ["pack", str(folder / "dumps"), "--data", data, "--model", model, "--format", name]


def undisturbed(folder: Path, command: list[str]) -> dict[str, bytes]:
    done = patchkit(*command, "--out", folder / "undisturbed")
    assert done.returncode == 0, done.stderr
    return content(folder / "undisturbed")


def packed(out: Path) -> int:
    path = out / ".growing/samples.jsonl"
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def die(command: list[str], out: Path, rng: random.Random) -> bool:
    """Kill ``command`` at a random moment; False when it was too quick for us."""
    at = packed(out) + rng.randrange(0, 25)
    process = subprocess.Popen(
        [sys.executable, "-m", "patchkit", *command, "--out", str(out), "--resume"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    wait_for(lambda: (packed(out) >= at and out.exists()) or process.poll() is not None)
    time.sleep(rng.uniform(0, 0.02))
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_packer_goes_on_to_the_undisturbed_bytes(tmp_path, model, name, seed):
    rng = random.Random(f"{name}{seed}")
    command = arguments(tmp_path, ROWS, model, name)
    expected = undisturbed(tmp_path, command)
    out = tmp_path / "killed"
    if seed:
        command.append("--delete-dumps")
    deaths = sum(die(command, out, rng) for _ in range(3))
    assert deaths
    done = patchkit(*command, "--out", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert content(out) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_killed_conversion_goes_on_to_the_undisturbed_bytes(tmp_path, model, name):
    rng = random.Random(name)
    source = tmp_path / "source"
    done = patchkit(*arguments(tmp_path, ROWS, model, "speculators"), "--out", source)
    assert done.returncode == 0, done.stderr
    command = ["pack", str(source), "--format", name]
    expected = undisturbed(tmp_path, command)
    deaths = sum(die(command, tmp_path / "killed", rng) for _ in range(2))
    assert deaths
    done = patchkit(*command, "--out", tmp_path / "killed", "--resume")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "killed") == expected


def test_what_a_death_after_the_last_step_left_is_cleared_away(packing):
    dataset = packing.pack()
    expected = content(dataset.folder)
    growing = Path(dataset.folder, ".growing")
    growing.mkdir()
    (growing / "samples.jsonl").write_bytes(b"{}\n")
    done = patchkit("pack", packing.folder / "dumps-ds", "--out", dataset.folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert content(dataset.folder) == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", ["60k", "256k"])
def test_a_full_disk_ends_in_one_line_and_with_room_it_goes_on(tmp_path, model, name, size):
    """A file system of its own that is too small for the plan, or for the samples."""
    if subprocess.run([*OWN_MOUNTS, "true"], check=False).returncode:
        pytest.skip("this kernel gives nobody a file system of his own")
    command = arguments(tmp_path, ROWS, model, name)
    expected = undisturbed(tmp_path, command)
    copy, disk = tmp_path / "copy", tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        [
            *OWN_MOUNTS,
            "sh",
            "-c",
            SMALL_DISK,
            "sh",
            size,
            copy,
            disk,
            sys.executable,
            "-m",
            "patchkit",
            *command,
        ],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copy.code").read_text() == "6\n", done.stderr
    assert (tmp_path / "copy.left").read_text() == ""
    told = [line for line in done.stderr.splitlines() if not line.startswith("pack: ")]
    assert len(told) == 1, done.stderr
    assert "No space left on device" in told[0]
    assert f"{disk}/ds/" in told[0]
    assert content(copy) == expected


@pytest.mark.parametrize("limit", [12_000, 20_001])
def test_a_line_that_only_partly_fits_is_not_taken_for_a_sample(tmp_path, limit):
    """Here the list of packed rows is what grows too large: the kernel takes a part of its last line."""
    command = arguments(tmp_path, SHORT, "", "speculators")
    command = [one for one in command if one not in ("--model", "")]
    expected = undisturbed(tmp_path, command)
    full = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *command, "--out", tmp_path / "full"],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )
    assert full.returncode == 6, full.stderr
    lines = (tmp_path / "full/.growing/samples.jsonl").read_bytes().splitlines()
    assert all(json.loads(line)["row"] >= 0 for line in lines[:-1])
    done = patchkit(*command, "--out", tmp_path / "full", "--resume")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "full") == expected
    assert Dataset(str(tmp_path / "full")).samples == len(SHORT)
