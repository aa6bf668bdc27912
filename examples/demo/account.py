"""The account that the demo prints, and the patchkit commands in it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WIDTH = 220


class StepFailedError(Exception):
    """A step of the demo that is not as it should be."""


class Account:
    """Numbered steps on the engine of the interpreter ``python``."""

    def __init__(self, python: Path) -> None:
        self.python = python
        self.step = 0

    def title(self, text: str) -> None:
        self.step += 1
        print(f"\n{self.step}. {text}", flush=True)

    def say(self, text: str) -> None:
        print(f"   {text}", flush=True)

    def patchkit(
        self,
        *arguments: str | Path,
        expect: int,
        env: Mapping[str, str] | None = None,
        last: int | None = None,
    ) -> str:
        """Run a patchkit command as a user would and require its exit code; returns its output.

        ``env`` is laid over this process's environment. Of a long output only the ``last`` lines are
        shown; all of it where the exit code is another one.
        """
        shown = " ".join(map(str, arguments))
        self.say(f"$ patchkit {shown}")
        command = [sys.executable, "-m", "patchkit", "--python", str(self.python), *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
        )
        as_it_should_be = done.returncode == expect
        # What a command answers is on stdout; it comes last, as on a terminal.
        lines = (done.stderr + done.stdout).rstrip().splitlines()
        if as_it_should_be and last is not None and len(lines) > last:
            self.say(f"  … {len(lines) - last} lines")
            lines = lines[-last:]
        for line in lines:
            self.say(f"  {line[:WIDTH]}")
        if not as_it_should_be:
            raise StepFailedError(f"'patchkit {shown}' ended with {done.returncode}, not {expect}")
        self.say(f"  (exit {done.returncode}, as it should be)")
        return "\n".join(lines)


def require(condition: bool, otherwise: str) -> None:
    """Raise StepFailedError with the text ``otherwise`` unless ``condition`` holds."""
    if not condition:
        raise StepFailedError(otherwise)
