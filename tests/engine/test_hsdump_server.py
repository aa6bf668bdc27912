"""What the dump does to the server that it runs in: nothing to its answers, and never its end."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from examples.cpu_engine.server import PLAIN, Server, ServerError
from tests.engine.harness import Engine, patchkit, prompt, status, wait_for_rows

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def patched_0_5_9(engine_0_5_9: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = engine_0_5_9.copy_tree(tmp_path_factory.mktemp("patched") / "root")
    patchkit("--root", root, "apply", "hsdump")
    return root


def answers(server: Server) -> list[Any]:
    """Greedy tokens and all log-probabilities of a few requests, one after the other."""
    found = []
    for ids in (prompt(5), prompt(100, seed=1), [prompt(20, seed=2), prompt(31, seed=3)]):
        got = server.generate(ids, max_new_tokens=8, return_logprob=True, logprob_start_len=0)
        for answer in got if isinstance(got, list) else [got]:
            meta = answer["meta_info"]
            found.append((answer["output_ids"], meta["input_token_logprobs"], meta["output_token_logprobs"]))
    return found


def test_answers_are_the_same_bits_without_with_and_with_an_active_patch(
    engine: Engine, patched: Path, tmp_path: Path
) -> None:
    pristine = engine.copy_tree(tmp_path / "root")
    folder = tmp_path / "dump"
    with engine.server(pristine, tmp_path / "pristine.log", *PLAIN) as server:
        without = answers(server)
    with engine.server(patched, tmp_path / "inactive.log", *PLAIN) as server:
        inactive = answers(server)
    with engine.server(patched, tmp_path / "active.log", *PLAIN, SGLANG_HS_DUMP_DIR=str(folder)) as server:
        active = answers(server)
        entries = wait_for_rows(folder, 5 + 100 + 20 + 31)
    assert inactive == without
    assert active == without
    for entry in entries:
        assert entry["layers"] == [2, 3, 4]  # R(3), R(n//2+1), R(n-2) and R(n) for n = 4
        assert entry["dtypes"] == ["bfloat16"] * 3
        assert entry["shapes"] == [[entry["tokens"], 128]] * 3
    assert (status(folder)["state"], status(folder)["unfinished_count"]) == ("stopped", 0)
    assert "hs_dump" not in (tmp_path / "inactive.log").read_text()


def test_an_inert_module_imports_nothing_but_os(patched_0_5_9: Path) -> None:
    code = (
        "import __future__, sys, os; before = set(sys.modules)\n"
        "import importlib.util as util; before |= set(sys.modules)\n"
        f"spec = util.spec_from_file_location('hs_dump', {str(patched_0_5_9)!r} + '/sglang/srt/hs_dump.py')\n"
        "module = util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "assert module.attach(None, '') is None\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("args", "env", "reason"),
    [
        (["--enable-mixed-chunk", "--chunked-prefill-size=64"], {}, "enable_mixed_chunk=True: decode rows"),
        (
            ["--tp=2", "--dp=2", "--enable-dp-attention"],
            TWO_RANKS,
            "enable_dp_attention=True: rank 0 then sees",
        ),
        (["--pp-size=2"], {}, "pp_size=2: layers then live in other processes"),
        (["--moe-dense-tp-size=1"], {}, "moe_dense_tp_size=1: each rank then has some"),
        (PLAIN, {"SGLANG_HS_DUMP_LAYERS": "0,5"}, "no R(5) in a model of 4 layers"),
        (PLAIN, {"SGLANG_HS_DUMP_LAYERS": "all"}, "SGLANG_HS_DUMP_LAYERS='all' is not a list of numbers"),
        (PLAIN, {"SGLANG_HS_DUMP_FSYNC": "yes"}, "SGLANG_HS_DUMP_FSYNC='yes' is not"),
        (PLAIN, {"SGLANG_HS_DUMP_DIR": "/proc/no/such"}, "cannot write to SGLANG_HS_DUMP_DIR"),
    ],
)
def test_a_configuration_with_wrong_states_stops_the_server_at_start_up(
    engine_0_5_9: Engine,
    patched_0_5_9: Path,
    tmp_path: Path,
    args: list[str],
    env: dict[str, str],
    reason: str,
) -> None:
    log = tmp_path / "server.log"
    env = {"SGLANG_HS_DUMP_DIR": str(tmp_path / "dump"), **env}
    with pytest.raises(ServerError), engine_0_5_9.server(patched_0_5_9, log, *args, **env):
        pass
    lines = [line for line in log.read_text().splitlines() if "DumpRefusedError: hs_dump: " in line]
    assert lines
    assert all(reason in line for line in lines)
    assert not list((tmp_path / "dump").glob("*.json")) if (tmp_path / "dump").exists() else True


def test_a_failed_write_ends_the_dump_and_never_the_server(
    engine_0_5_9: Engine, patched_0_5_9: Path, tmp_path: Path
) -> None:
    """No file of this server may grow past 200 kB: what a full disk does, without one."""
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/bash\nulimit -f 200\nexec "{engine_0_5_9.python}" "$@"\n')
    limited.chmod(0o755)
    folder = tmp_path / "dump"
    env = {"PYTHONPATH": str(patched_0_5_9), "SGLANG_HS_DUMP_DIR": str(folder)}
    with Server(limited, engine_0_5_9.model, tmp_path / "server.log", args=PLAIN, env=env) as server:
        server.generate(prompt(50))
        wait_for_rows(folder, 50)
        first = server.generate(prompt(1000, seed=1))
        again = server.generate(prompt(1000, seed=1))
        small = server.generate(prompt(50, seed=2))
    assert first["output_ids"] == again["output_ids"]
    assert len(small["output_ids"]) == 1
    report = status(folder)
    assert report["state"] == "failed"
    assert "File too large" in report["error"], "the system's own words, not those of torch's archive writer"
    assert report["unfinished_tokens"] >= 1000
    assert "the dump has ended, the server goes on" in (tmp_path / "server.log").read_text()
    wait_for_rows(folder, 50)
    names = sorted(path.suffix for path in folder.iterdir() if path.is_file())
    assert names.count(".pt") == names.count(".json") == len(names) // 2


def test_shutdown_writes_what_was_captured(engine_0_5_9: Engine, patched_0_5_9: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    with engine_0_5_9.server(
        patched_0_5_9,
        tmp_path / "server.log",
        *PLAIN,
        SGLANG_HS_DUMP_DIR=str(folder),
        SGLANG_HS_DUMP_FSYNC="file",
        SGLANG_HS_DUMP_WRITERS="1",
    ) as server:
        server.generate([prompt(50, seed=seed) for seed in range(8)])
    report = status(folder)
    assert report["state"] == "stopped"
    assert report["unfinished_count"] == 0
    assert sum(entry["tokens"] for entry in wait_for_rows(folder, 400)) == 400
    assert not list(folder.glob(".*.tmp"))
