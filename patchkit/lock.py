"""The exclusive lock of a tree: one change at a time, and the refusal names who holds it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
import time
from typing import TYPE_CHECKING

from patchkit.errors import HELD, PatchkitError
from patchkit.state import FOLDER, own_like_root, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator


class LockedError(PatchkitError):
    """Another patchkit is changing the tree."""

    code = "locked"
    exit_code = HELD

    def __init__(self, root: str, holder: str) -> None:
        super().__init__(
            f"{root} is being changed by {holder}", path=root, hint="try again, or use --wait 10m"
        )


class LockUnsupportedError(PatchkitError):
    """The file system cannot lock files."""

    code = "lock-unsupported"
    exit_code = HELD

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(
            f"{root}: its file system cannot lock files ({reason})",
            path=root,
            hint="patch a copy on a local file system; without a lock two changes could mix",
        )


@contextlib.contextmanager
def tree_lock(root: str, deadline: float | None = None) -> Iterator[None]:
    """Hold the lock of ``root``; wait until ``deadline`` (``time.monotonic()``), by default not at all.

    The lock dies with its process, so a stale one cannot exist.
    """
    from filelock import FileLock, Timeout

    prepare(root)
    path = os.path.join(root, FOLDER, "lock")
    wait = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=wait, poll_interval=0.1)
    except Timeout:
        raise LockedError(root, _holder(path)) from None
    except NotImplementedError as error:
        raise LockUnsupportedError(root, str(error)) from None
    try:
        own_like_root(root, path)
        _sign(path)
        yield
    finally:
        lock.release()


def _sign(path: str) -> None:
    who = {"pid": os.getpid(), "host": socket.gethostname(), "command": shlex.join(sys.argv)}
    with open(path, "r+b") as file:
        file.truncate()
        file.write(json.dumps(who).encode("ascii"))


def _holder(path: str) -> str:
    try:
        with open(path, "rb") as file:
            who = json.loads(file.read())
        return f"process {who['pid']} on {who['host']} ({who['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another patchkit process"
