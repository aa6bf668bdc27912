"""Run one patchkit command in a process of its own and make its n-th system call of a kind fail, or kill it.

The command runs in a fork of this process, so that Python's own start and imports make no system calls that
would be counted; strace attaches before it begins.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import re
import select
import signal
import subprocess
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Everything by which patchkit changes a disk, reads it, and looks at it.
CALLS = (
    "openat", "write", "pwrite64", "ftruncate", "fsync", "rename", "unlink", "rmdir", "link", "linkat",
    "symlink", "mkdir", "chmod", "fchmod", "chown", "lchown", "fchown", "fchownat", "utimensat", "fsetxattr",
    "flock", "read", "pread64", "getdents64", "newfstatat", "fstat", "lstat", "stat", "statx", "readlink",
    "faccessat", "faccessat2", "statfs",
)  # fmt: skip

KILL = "SIGKILL"


@dataclass(frozen=True)
class Fault:
    """``call`` number ``count`` (1-based) ends the process, or returns ``effect``; so do all later ones of the
    kind if ``lasting``.
    """

    call: str
    count: int
    effect: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.effect} at {self.call} number {self.count}{' and every later one' if self.lasting else ''}"

    @property
    def inject(self) -> str:
        what = f"signal={self.effect}" if self.effect == KILL else f"error={self.effect}"
        return f"inject={self.call}:{what}:when={self.count}{'+' if self.lasting else ''}"


@dataclass(frozen=True)
class Outcome:
    """``code`` is the exit code, or minus the signal; ``hit`` whether the fault happened."""

    code: int
    out: str
    err: str
    hit: bool


def warm_up(*commands: list[str]) -> None:
    """Run ``commands`` in this very process, so that its forks import nothing that would be counted."""
    from patchkit.cli.main import run as patchkit

    for arguments in commands:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            patchkit(arguments)


def run(arguments: list[str], scratch: Path) -> Outcome:
    """Run a command without any fault."""
    return _traced(arguments, scratch, None)


def run_with(fault: Fault, arguments: list[str], scratch: Path) -> Outcome:
    return _traced(arguments, scratch, ["-e", f"trace={fault.call}", "-e", fault.inject])


def count_calls(arguments: list[str], scratch: Path) -> Counter[str]:
    """How often a command without a fault makes each of ``CALLS``."""
    outcome = _traced(arguments, scratch, ["-e", f"trace={','.join(CALLS)}"])
    assert outcome.code == 0, outcome
    return Counter(re.findall(r"^(?:\d+\s+)?(\w+)\(", (scratch / "strace").read_text(), re.MULTILINE))


def _traced(arguments: list[str], scratch: Path, strace: list[str] | None) -> Outcome:
    log = scratch / "strace"
    log.write_bytes(b"")
    said = mmap.mmap(-1, 1 << 16)
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(arguments, ready, go, said)
    os.close(ready)
    tracer = None
    if strace is not None:
        command = ["strace", "-f", "-o", str(log), *strace, "-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        line = tracer.stderr.readline() if tracer.stderr else ""
        assert "attached" in line, line
    os.write(go, b"!")
    os.close(go)
    _, status = os.waitpid(pid, 0)
    if tracer is not None:
        tracer.communicate()
    code = os.waitstatus_to_exitcode(status)
    hit = code == -signal.SIGKILL or "(INJECTED)" in log.read_text()
    out, _, err = said[:].rstrip(b"\0").decode().partition("\0")
    return Outcome(code, out, err, hit)


def _child(arguments: list[str], ready: int, go: int, said: mmap.mmap) -> None:
    """Run the command; what it says goes through shared memory, which takes no system call."""
    code = 99
    out, err = io.StringIO(), io.StringIO()
    try:
        os.close(go)
        from patchkit.cli.main import run as patchkit

        select.select([ready], [], [])  # not read, which would be counted
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = patchkit(arguments)
    except BaseException:  # noqa: BLE001 (a fork must not return into its parent's code)
        err.write(traceback.format_exc())
    finally:
        data = f"{out.getvalue()}\0{err.getvalue()}".encode()[: len(said)]
        said[: len(data)] = data
        os._exit(code)
