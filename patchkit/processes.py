"""The processes of a session: the command, its descendants, and those that left them to hide.

The kernel gives an orphan to the nearest ancestor that asked for it (``PR_SET_CHILD_SUBREAPER``), so that a
daemon which forks twice and starts its own session is still found below us.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit.guard import procfs

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Collection

MARKER = "PATCHKIT_SESSION"  # ids of the sessions that a process runs in, outermost first, ':' between them
_SUBREAPER_SET, _SUBREAPER_GET = 36, 37  # prctl: PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER
_PDEATHSIG_SET = 1  # prctl: PR_SET_PDEATHSIG
_POLL_S = 0.05
_LOOKS = 3
_UNKILLABLE_S = 30.0  # a process in the kernel (a dead disk, a driver) does not end before that ends


@dataclass(frozen=True)
class Process:
    """One process, told from a later one with the same pid by its start (clock ticks since boot)."""

    pid: int
    started: int
    parent: int = field(compare=False)
    group: int = field(compare=False)
    session: int = field(compare=False)
    state: str = field(compare=False)
    threads: int = field(default=1, compare=False)

    @property
    def ended(self) -> bool:
        """Also False when only its main thread has ended: the process lives on in the others."""
        return self.state in "ZXx" and self.threads < 2

    def title(self) -> str:
        known = procfs.stat(self.pid)
        return procfs.title(procfs.arguments(self.pid), known.command if known else "?")


def ends_with_us() -> Callable[[], None]:
    """A ``preexec_fn``: the child gets SIGTERM when the thread that starts it ends."""
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec little is safe

    def ask() -> None:
        libc.prctl(_PDEATHSIG_SET, int(signal.SIGTERM), 0, 0, 0)

    return ask


def table() -> dict[int, Process]:
    """Every process that can be seen, by pid."""
    found = {}
    for pid in procfs.pids():
        process = look(pid)
        if process is not None:
            found[pid] = process
    return found


def look(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name stands in parentheses and may hold any byte.
    fields = text.rpartition(b")")[2].split()
    return Process(
        pid,
        int(fields[19]),
        int(fields[1]),
        int(fields[2]),
        int(fields[3]),
        fields[0].decode("ascii"),
        int(fields[17]),
    )


def become_subreaper(on: bool = True) -> bool:
    """Be given the orphans among our descendants; returns whether we were before."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_SUBREAPER_GET, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_SUBREAPER_SET, int(on), 0, 0, 0)
    return bool(before.value)


def mark(session: str) -> int:
    """A limit on real-time CPU (RLIMIT_RTTIME, microseconds) that says who runs in ``session``.

    Environment, process group, session and parent all go when a daemon makes itself one; limits are
    inherited by whatever it does, stay readable for everybody, and 146,000 years limit nobody.
    """
    return 1 << 62 | int(session, 16)


def runs_in(pid: int, session: str) -> bool:
    """Whether process ``pid`` carries the mark of ``session``, in its limits or its environment.

    A session within another one leaves the outer one's limit in place.
    """
    return procfs.limit(pid, "Max realtime timeout") == mark(session) or session in procfs.environment(
        pid
    ).get(MARKER, "").split(":")


def marked(session: str) -> list[Process]:
    """Living processes that run in ``session``."""
    return [
        process
        for pid, process in table().items()
        if not process.ended and pid != os.getpid() and runs_in(pid, session)
    ]


class Family:
    """Keeps track of a session's processes below this one.

    ``exclusive``: every child of this process is the session's (the command line). Otherwise the program has
    children of its own, and a child is the session's only if it was started for it, was seen below one that
    was, shares a process group or session with one, or carries the session's mark.
    """

    def __init__(self, session: str, *, exclusive: bool) -> None:
        self.session = session
        self.exclusive = exclusive
        self.known: set[Process] = set()
        self._started: dict[int, subprocess.Popen[Any]] = {}
        self._strangers = {process for process in table().values() if process.parent == os.getpid()}

    def add(self, child: subprocess.Popen[Any]) -> None:
        self._started[child.pid] = child
        process = look(child.pid)
        if process is not None:
            self._know([process])

    def members(self) -> list[Process]:
        """Living and dead (not reaped) members, parents before children."""
        processes = table()
        children: dict[int, list[Process]] = {}
        for process in processes.values():
            children.setdefault(process.parent, []).append(process)
        groups = {known.group for known in self.known} | {known.session for known in self.known}
        groups -= {os.getpgrp(), os.getsid(0)}
        pending = [one for one in children.get(os.getpid(), ()) if self._is_ours(one, groups)]
        found = []
        while pending:
            process = pending.pop(0)
            found.append(process)
            pending += children.get(process.pid, ())
        self._know(found)
        return found

    def _know(self, found: Collection[Process]) -> None:
        self.known.difference_update(found)  # what is equal may be in another group since
        self.known.update(found)

    def _is_ours(self, child: Process, groups: set[int]) -> bool:
        if child in self._strangers:
            return False
        if self.exclusive or child in self.known or child.group in groups or child.session in groups:
            return True
        return runs_in(child.pid, self.session)

    def reap(self) -> None:
        """Collect dead members that are our children; one that was started here keeps its exit code."""
        for process in self.members():
            if not process.ended or process.parent != os.getpid():
                continue
            child = self._started.get(process.pid)
            if child is None or child.poll() is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)

    def living(self) -> list[Process]:
        return [process for process in self.members() if not process.ended]

    def is_gone(self) -> bool:
        """Whether nothing is left. A look at ``/proc`` that finds nothing proves little: processes that fork
        and exit all the time come and go between two of its entries.
        """
        if not self.exclusive:
            for _ in range(_LOOKS):
                if self.living():
                    return False
                time.sleep(_POLL_S / _LOOKS)
            return True
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True  # no child, and orphans become children
        return False

    def own_groups(self) -> set[int]:
        """The process groups of members in which nobody else is."""
        found = {process.group for process in self.known} - {os.getpgrp()}
        others = {
            process.group
            for process in table().values()
            if process.group in found
            and process not in self.known
            and not runs_in(process.pid, self.session)
            and look(process.pid) == process  # else it is gone, and does not count
        }
        return found - others


@dataclass
class Ending:
    """How the rest of a family was ended: how many were there, were killed, and could not be."""

    found: int = 0
    killed: int = 0
    left: list[Process] = field(default_factory=list)


def end(family: Family, grace_s: float, say: Callable[[str], None], tick: Callable[[], None]) -> Ending:
    """SIGTERM to every member, SIGKILL after ``grace_s``; returns when none is left, or cannot be ended.

    ``tick`` is called some times a second.
    """
    done = Ending()
    told: set[Process] = set()
    killed: set[Process] = set()
    begun = time.monotonic()
    while True:
        family.reap()
        living = family.living()
        if not living and family.is_gone():
            break
        late = time.monotonic() - begun
        if late > grace_s + _UNKILLABLE_S:
            done.left = living
            break
        if late >= grace_s:
            # At once, since a process that forks may be another one before it is reached.
            for group in family.own_groups():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
        for process in living:
            if process not in told:
                told.add(process)
                send(process, signal.SIGTERM)
                send(process, signal.SIGCONT)  # a stopped process does not hear the first
            if late >= grace_s:
                if process not in killed:
                    say(f"killing process {process.pid} ({process.title()})")
                killed.add(process)
                send(process, signal.SIGKILL)
        tick()
        time.sleep(_POLL_S)
    done.found, done.killed = len(told), len(killed)
    return done


def send(process: Process, number: int) -> None:
    """Signal ``process``, unless its pid has passed to another one."""
    if look(process.pid) == process:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
