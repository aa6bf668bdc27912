"""The exclusive lock of a tree: one change at a time, and the refusal names who holds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from typing import TYPE_CHECKING

from patchkit.durable import own_like_root
from patchkit.errors import HELD, PatchkitError
from patchkit.foreign import ForeignStateError, open_own, read_own
from patchkit.state import FOLDER, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK = f"{FOLDER}/lock"
_POLL_S = 0.05
_PATIENCE_S = 0.2  # even without --wait: `status` holds the lock for a moment to see whether it is free
# ENOLCK: an NFS server without a lock manager; the others: file systems that never could.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


class LockedError(PatchkitError):
    """Another patchkit is changing the tree."""

    code = "locked"
    exit_code = HELD

    def __init__(self, root: str, by: str) -> None:
        super().__init__(f"{root} is being changed by {by}", path=root, hint="try again, or use --wait 10m")


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
def tree_lock(root: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of ``root``; wait ``wait_s`` seconds for it at most.

    It is flock(2)'s and dies with its process, so a stale one cannot exist. The library takes it and waits;
    but a file system that cannot lock looks busy to some of its versions, so that is asked first.
    """
    from filelock import FileLock, Timeout

    prepare(root)
    path = os.path.join(root, LOCK)
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        _require_flock(root, descriptor)
        lock = FileLock(path, timeout=max(wait_s, _PATIENCE_S), mode=0o644, thread_local=False)
        try:
            lock.acquire(poll_interval=_POLL_S)
        except Timeout:
            raise LockedError(root, holder(root)) from None
        try:
            own_like_root(root, path)
            who = {"pid": os.getpid(), "host": socket.gethostname(), "command": shlex.join(sys.argv)}
            _sign(descriptor, who)
            yield
        finally:
            _sign(descriptor, None)
            with contextlib.suppress(OSError):  # what was done under it stands; it dies with us at the latest
                lock.release()
    finally:
        os.close(descriptor)


def _require_flock(root: str, descriptor: int) -> None:
    """Raise unless flock(2) works here; that another process holds the lock means that it does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise LockUnsupportedError(root, error.strerror or str(error)) from None
        if error.errno != errno.EWOULDBLOCK:
            raise


def is_locked(root: str) -> bool:
    """Whether a process is changing ``root`` at this moment; a journal without one was interrupted."""
    try:
        descriptor = open_own(os.path.join(root, LOCK), os.O_RDONLY)
    except (OSError, ForeignStateError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(descriptor)
    return False


def _sign(descriptor: int, who: dict[str, object] | None) -> None:
    """Write who holds the lock, for the others' message. That is a courtesy: a full disk does not stop us."""
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_nlink > 1:
            return  # of a copy made by hard links, or planted: what else has these bytes is not ours
        os.ftruncate(descriptor, 0)
        if who is not None:
            os.pwrite(descriptor, json.dumps(who).encode("ascii"), 0)


def holder(root: str) -> str:
    """Who holds the lock, in words."""
    for _ in range(10):
        try:
            who = json.loads(read_own(os.path.join(root, LOCK)) or b"")
            return f"process {who['pid']} on {who['host']} ({who['command'][:120]})"
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ForeignStateError):
            time.sleep(0.01)  # it has the lock, and signs in this moment
    return "another patchkit process"
