"""docs/sessions.md: its Python runs as it is written, and a program that does the same passes mypy --strict."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import DEMO, P1, bare, snapshot, write_patch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "sessions.md"


@pytest.fixture
def example():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return code


def test_the_example_runs(example, venv, patches, tmp_path):
    # A small server and extraction by the names of the page; patches are found in ./patches.
    write_patch(patches, "hsdump", DEMO["1.0"], P1)
    before = snapshot(venv.site)
    (tmp_path / "data").mkdir()
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import time, demopkg.core\nassert demopkg.core.answer() == 'BBB'\n"
        "open('served', 'w').close()\ntime.sleep(600)\n"
    )
    (tmp_path / "extract.py").write_text(
        "import os, time\nwhile not os.path.exists('served'): time.sleep(0.05)\n"
        "open('data/sample', 'w').write(os.environ['PORT'])\n"
    )
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env={**bare(), "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    predicate = json.loads(Path(done.stdout.strip()).read_text())["predicate"]
    assert list(predicate["outputs"][0]["files"]) == ["sample"]
    assert predicate["restored"]
    assert predicate["exit_code"] == 0
    assert snapshot(venv.site) == before


def test_the_interface_is_typed(example, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        f"import pathlib\n{example}\n"
        "pid: int = server.pid\n"
        "exit_code: int = code\n"
        "path: str | None = session.record_path\n"
        "def wrong() -> None:\n"
        "    patchkit.session(7)  # type: ignore[arg-type]\n"
        "    session.run([pathlib.Path('/bin/true'), '-v'])\n"
        "    session.run([1])  # type: ignore[list-item]\n"
        "    patchkit.session('hsdump', grace='30s')  # type: ignore[arg-type]\n"
        "    patchkit.session('hsdump', speed=1)  # type: ignore[call-arg]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", program],
        cwd=tmp_path,
        env=bare(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
