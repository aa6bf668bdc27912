"""Becomes the command of a session. Run as a script in the new process; imports nothing of patchkit.

``python -I -S launch.py REPORT TERMINAL PARENT IGNORED MARK -- COMMAND...``: makes a process group of its
own, takes the terminal (a descriptor, -1 for none), asks to be told (SIGTERM) when PARENT dies (unless 0),
and executes COMMAND. What prevents that is written to the descriptor REPORT, as an errno. IGNORED are signals
that stay ignored. MARK is a limit by which every descendant is known (see ``processes.mark``).
"""

from __future__ import annotations

import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
# What CPython and patchkit ignore for themselves is not meant for the command.
_RESET = ("SIGPIPE", "SIGXFSZ", "SIGTTOU", "SIGTTIN", "SIGTSTP")


def die_with(parent: int) -> None:
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def set_mark(limit: int) -> None:
    try:
        if resource.getrlimit(resource.RLIMIT_RTTIME)[1] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_RTTIME, (limit, limit))
    except (OSError, ValueError, AttributeError):
        pass  # a kernel without it


def main() -> None:
    report, terminal, parent, ignored, mark = sys.argv[1:6]
    command = sys.argv[7:]
    os.set_inheritable(int(report), False)
    os.setpgid(0, 0)
    if int(terminal) >= 0:
        os.set_inheritable(int(terminal), False)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            os.tcsetpgrp(int(terminal), os.getpgrp())
        except OSError:
            pass  # the terminal is gone; the command will notice
    if int(parent):
        die_with(int(parent))
    set_mark(int(mark))
    kept = {int(number) for number in ignored.split(",") if number}
    for name in _RESET:
        number = getattr(signal, name)
        if number not in kept:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    try:
        os.execvp(command[0], command)  # noqa: S606 (no shell, on purpose)
    except OSError as error:
        os.write(int(report), str(error.errno).encode("ascii"))
        os._exit(126)


if __name__ == "__main__":
    main()
