"""Becomes the command of a session. Run as a script in the new process; imports nothing of patchkit.

``python -I -S launch.py REPORT TERMINAL PARENT IGNORED -- COMMAND...``: makes a process group of its own,
takes the terminal (a descriptor, -1 for none), asks to be told (SIGTERM) when PARENT dies, and executes
COMMAND. What prevents that is written to the descriptor REPORT, as an errno. IGNORED are signals that stay
ignored.
"""

from __future__ import annotations

import os
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


def main() -> None:
    report, terminal, parent, ignored = (sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4])
    command = sys.argv[6:]
    os.set_inheritable(int(report), False)
    os.setpgid(0, 0)
    if int(terminal) >= 0:
        os.set_inheritable(int(terminal), False)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            os.tcsetpgrp(int(terminal), os.getpgrp())
        except OSError:
            pass  # the terminal is gone; the command will notice
    die_with(int(parent))
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
