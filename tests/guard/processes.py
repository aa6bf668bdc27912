"""Real interpreters, a real tree, and real processes that import from it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field

import pytest

from patchkit.guard import Holder, inspect

VICTIM = "engine/models/victim.py"
VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")


def find_interpreters() -> list[str]:
    """Every CPython 3.9 to 3.13 that this machine has, one for each real path."""
    root = pathlib.Path(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")))
    places = [str(path / "bin") for path in sorted(root.glob("versions/*"))]
    places += [*os.environ["PATH"].split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    found: dict[str, str] = {}
    for place in places:
        for version in VERSIONS:
            path = os.path.join(place, f"python{version}")
            if os.access(path, os.X_OK) and "shims" not in path:
                found.setdefault(os.path.realpath(path), path)
    for path in filter(None, os.environ.get("PATCHKIT_TEST_PYTHONS", "").split(os.pathsep)):
        found.setdefault(os.path.realpath(path), path)
    return list(found.values())


INTERPRETERS = find_interpreters()


@dataclass
class Engine:
    """A tree with an import package, and the processes that were started from it."""

    root: str
    files: tuple[str, ...] = (VICTIM,)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def victim(self) -> str:
        return f"{self.root}/{VICTIM}"

    def start(
        self,
        code: str,
        *,
        python: str = sys.executable,
        before: tuple[str, ...] = (),
        root: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        arguments: tuple[str, ...] | None = (),
        **more: object,
    ) -> subprocess.Popen[bytes]:
        """Run ``code`` with the tree on its path; returns when the code has printed a line."""
        command = [*before, python, *(("-c", textwrap.dedent(code)) if arguments == () else arguments or ())]
        process = subprocess.Popen(
            command,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": self.root if root is None else root,
                **(env or {}),
            },
            cwd=cwd,
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **more},  # type: ignore[call-overload]
        )
        self.processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"{command} ended at once"
        process.said = line.decode().split()  # type: ignore[attr-defined]
        return process

    def look(self, pid: int | None = None, **options: object) -> Holder | None:
        """The holder with ``pid`` (default: the last process started), if the guard names one."""
        pid = self.processes[-1].pid if pid is None else pid
        findings = inspect(self.root, self.files, **options)  # type: ignore[arg-type]
        return next((holder for holder in findings.holders if holder.pid == pid), None)

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        self.processes.clear()


WAIT = "print('ready', flush=True); __import__('sys').stdin.read()"
IMPORT = f"import engine.models.victim; {WAIT}"
NOTHING = f"import engine.models; {WAIT}"
DROPPED = f"""
    import sys, engine.models
    from engine.models.victim import work
    del sys.modules["engine.models.victim"], engine.models.victim
    {WAIT}
"""


def write_engine(root: pathlib.Path) -> None:
    (root / "engine/models").mkdir(parents=True)
    (root / "engine/__init__.py").write_text("")
    (root / "engine/models/__init__.py").write_text("")
    (root / VICTIM).write_text('"""The file that will change."""\n\ndef work():\n    return 1\n')


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users, namespaces, device nodes")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
