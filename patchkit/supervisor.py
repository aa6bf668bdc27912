"""Run a command as a shell runs a job: own process group, terminal, job control, signals passed on.

Whatever happens to the command or to us, everything that it started is ended before ``close`` returns.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any

from patchkit import processes
from patchkit.errors import PatchkitError
from patchkit.processes import Ending, Family
from patchkit.signals import ENDING, Common
from patchkit.terminal import Terminal, stop_own_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_STOPS = (
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)  # job control; SIGSTOP may be anybody's, for a moment
_TICK_S = 0.1
_LOOK_S = 5.0  # between looks at all processes, to reap adopted ones and to know them later
_LAUNCH = os.path.join(os.path.dirname(__file__), "launch.py")
_Stream = int | IO[Any] | None
_common = Common()


class CommandNotFoundError(PatchkitError):
    """The command to be wrapped does not exist."""

    code = "command-not-found"
    exit_code = 127  # as a shell, env(1) and timeout(1)

    def __init__(self, command: str) -> None:
        super().__init__(f"{command}: no such command", hint="check its name and PATH")


class CommandNotStartedError(PatchkitError):
    """The command to be wrapped cannot be executed."""

    code = "command-not-started"
    exit_code = 126

    def __init__(self, command: str, number: int) -> None:
        reason, hint = os.strerror(number), None
        if number == errno.ENOENT:
            reason = "the interpreter that its first line names does not exist"
        elif number == errno.ENOEXEC:
            hint = "a script needs a first line like #!/bin/sh"
        super().__init__(f"{command}: {reason}", path=command, hint=hint)


def is_there(command: str, path: str | None, cwd: str | None = None) -> bool:
    """Whether ``command`` names a file, as execvp(3) looks for it: a name without a slash in PATH only."""
    if "/" in command:
        return os.path.exists(os.path.join(cwd or ".", command))
    return shutil.which(command, path=os.defpath if path is None else path) is not None


class Supervisor:
    """Starts commands of one session and looks after them. One at a time is waited for.

    ``exclusive``: all children of this process belong to the session. Signals are handled only in the main
    thread. ``tick`` is called some times a second while waiting; ``on_stop`` before this process is stopped.
    ``raising``: while no command is waited for, a signal that ends the session raises KeyboardInterrupt or
    SystemExit in the program, as it would expect.
    """

    def __init__(
        self,
        session: str,
        *,
        grace_s: float,
        exclusive: bool,
        raising: bool = False,
        say: Callable[[str], None] = lambda _: None,
        tick: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = session
        self.grace_s = grace_s
        self.say = say
        self.tick = tick
        self.on_stop = on_stop
        self.received: list[int] = []  # signals that end the session, in order
        self.answered = 0  # how many of them the session or the program has acted upon
        self._raising = raising
        self._child: subprocess.Popen[Any] | None = None
        self._looked = 0.0
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.family = Family(session, exclusive=exclusive)
        self.terminal = Terminal()
        _common.enter(self)

    # -- signals ------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        if number in ENDING:
            self.received.append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")
        if self._child is not None:
            self._pass_on(self._child.pid, number)
            if number in ENDING:
                self._pass_on(self._child.pid, signal.SIGCONT)  # a stopped command does not hear it
        elif number == signal.SIGTSTP:
            self._stop()
        elif self._raising and number in ENDING:
            self.answered = len(self.received)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a command at this moment."""
        return self._child is not None

    def _pass_on(self, group: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)

    def quiet(self) -> None:
        """From now on signals are only noted: what is being put back must not be interrupted."""
        self._raising = False

    # -- commands -----------------------------------------------------------------------------------

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: _Stream = None,
        stdout: _Stream = None,
        stderr: _Stream = None,
        foreground: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` in a process group of its own; ``foreground``: with the terminal, if it is ours.

        Raises CommandNotStartedError.
        """
        terminal = self.terminal.descriptor if foreground and self.terminal.is_ours() else -1
        # The kernel tells of the end of the thread that forks, not of the process: another one may end early.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        report_r, report_w = os.pipe2(os.O_CLOEXEC)
        with open(report_r, "rb", closefd=True) as report:
            try:
                child = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", _LAUNCH, str(report_w), str(terminal)),
                        *(str(parent), ",".join(map(str, map(int, _common.ignored)))),
                        *(str(processes.mark(self.session)), "--", *command),
                    ],
                    env=env,
                    cwd=cwd,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=[report_w] if terminal < 0 else [report_w, terminal],
                )
            finally:
                os.close(report_w)
            self.family.add(child)
            trouble = report.read()  # until the command runs, or cannot
            self.family.add(child)  # again, for only now it has the group that all below it inherit
        if trouble:
            child.wait()
            self.terminal.take_back(child.pid)
            number = int(trouble)
            there = is_there(command[0], (os.environ if env is None else env).get("PATH"), cwd)
            if number in (errno.ENOENT, errno.ENOTDIR) and not there:
                raise CommandNotFoundError(command[0])
            raise CommandNotStartedError(command[0], number)
        return child

    def wait(self, child: subprocess.Popen[Any]) -> int:
        """Wait for ``child``, passing signals on, stopping and continuing with it.

        Returns its exit code, 128+n if signal n ended it. After a signal that ends the session, it is killed
        once the grace period is over.
        """
        self._child = child
        ending_since: float | None = None
        killed = False
        for number in self.received[self.answered :]:
            self._pass_on(child.pid, number)  # came while it was being started
        pidfd = _pidfd(child.pid)
        try:
            while self._poll(child) is None:
                ready = [self._wake_r] if pidfd is None else [self._wake_r, pidfd]
                select.select(ready, [], [], _TICK_S if pidfd is not None else _TICK_S / 4)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 512)
                self._tick()
                if len(self.received) > self.answered and ending_since is None:
                    ending_since = time.monotonic()
                if ending_since is None or killed or time.monotonic() - ending_since < self.grace_s:
                    continue
                processes.end(self.family, 0.0, self.say, self.tick)
                killed = True
        finally:
            self._child = None
            if pidfd is not None:
                os.close(pidfd)
            self.terminal.take_back(child.pid)
        if child.returncode < 0:
            self.terminal.restore_modes()
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _poll(self, child: subprocess.Popen[Any]) -> int | None:
        if child.returncode is not None:
            return child.returncode
        try:
            pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return child.poll()
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            if os.WSTOPSIG(status) in _STOPS:
                self._stopped(child, os.WSTOPSIG(status))
            return None
        child.returncode = os.waitstatus_to_exitcode(status)
        return child.returncode

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self.family.reap()
        self.tick()

    # -- job control --------------------------------------------------------------------------------

    def _stopped(self, child: subprocess.Popen[Any], number: int) -> None:
        """The command was stopped (^Z, or it used the terminal from the background): so are we."""
        if number == signal.SIGTSTP or not self.terminal.is_ours():
            self.terminal.take_back(child.pid)
            self._stop()
        # Otherwise it lacked only the terminal, which a shell's `fg` has meanwhile given to us.
        if self.terminal.is_ours():
            self.terminal.give(child.pid)
        self._pass_on(child.pid, signal.SIGCONT)

    def _stop(self) -> None:
        self.on_stop()
        stop_own_group()
        self.tick()

    # -- the end ------------------------------------------------------------------------------------

    def end(self) -> Ending:
        """End whatever is left of the session's processes."""
        return processes.end(self.family, self.grace_s, self.say, self.tick)

    def close(self) -> None:
        """Give signals, terminal and orphans back."""
        self.terminal.close()
        _common.leave(self)
        os.close(self._wake_r)
        os.close(self._wake_w)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # an old kernel: polling does
