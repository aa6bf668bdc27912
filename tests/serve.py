"""A small server for the tests of sessions: imports the patched module, says that it is ready, and serves.

``python serve.py READY [--late] [--ignore] [--daemon READY2] [--exit]``: ``--late`` says ready before the
import, ``--ignore`` ignores all signals that can be, ``--daemon`` leaves a copy that ignores them, in a
session of its own, forked twice; with ``--exit`` this process then ends.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time


def say_ready(path, text):
    with open(path + ".tmp", "w") as file:
        file.write(f"{os.getpid()} {text}")
    os.rename(path + ".tmp", path)


def ignore():
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def serve(ready, *, late):
    if late:
        say_ready(ready, "not imported")
    else:
        import demopkg.core

        say_ready(ready, demopkg.core.answer())
    while True:
        time.sleep(3600)


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    arguments = sys.argv[1:]
    if "--daemon" in arguments and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ignore()
            os.chdir("/")
            serve(arguments[arguments.index("--daemon") + 1], late=False)
        os._exit(0)
    if "--exit" in arguments:
        return
    if "--ignore" in arguments:
        ignore()
    serve(arguments[0], late="--late" in arguments)


main()
