"""A seeded part of ``make faults``: kill patchkit, or fail one of its system calls, and repair with one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SAMPLE = 80


def test_after_a_fault_at_any_step_one_command_brings_a_tree_that_is_pristine_or_patched() -> None:
    command = [sys.executable, "-m", "tests.faults", "--sample", str(SAMPLE), "--seed", "1", "--jobs", "1"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"faults injected: {SAMPLE}\nbad trees: 0\n" in done.stdout
