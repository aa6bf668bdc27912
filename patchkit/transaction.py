"""Several file changes as one: all of them, or none, whatever happens in between.

This module knows files, not patches; a backup or ``state.json`` is one more file of the transaction. The
order is: journal; folders and temporary files beside their destinations; a second name (hard link) in
``.patchkit/undo.<id>`` for everything that will be replaced; bytecode away; the caller's last check; renames;
bytecode away again; read back; commit mark; history; clean-up. Undoing (``recovery``) is renaming the second
names back, which restores the very inodes: bytes, mode, owner, times, attributes and hard links, and it needs
no disk space.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import threading
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from patchkit import writable
from patchkit.durable import fsync_folder, own_like, own_like_root, write_new
from patchkit.errors import INTERRUPTED, IO_FAILED, REFUSED, PatchkitError
from patchkit.history import History
from patchkit.journal import FILE_VERBS, OPEN, Journal, Step
from patchkit.recovery import (
    RecoveryFailedError,
    copy,
    finish,
    kept_path,
    purge_bytecode,
    recover,
    remove_empty,
)
from patchkit.tree import Fingerprint, Meta, Tree, fingerprint, is_there

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from patchkit.recovery import Recovery


class TransactionFailedError(PatchkitError):
    """The operating system refused in the middle of a change; undone."""

    code = "io-error"
    exit_code = IO_FAILED

    def __init__(self, cause: OSError, path: str | None) -> None:
        reason = cause.strerror or str(cause)
        super().__init__(
            f"{path}: {reason}" if path else reason,
            path=path,
            hint="nothing was changed; every file is as it was before",
        )


class ChangedMeanwhileError(PatchkitError):
    """A file changed between planning and writing; nothing was changed."""

    code = "changed-meanwhile"
    exit_code = REFUSED

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} changed while it was being patched", path=path, hint="nothing was changed; run again"
        )


class ReadBackError(PatchkitError):
    """A file reads back other bytes than were written; undone."""

    code = "read-back"
    exit_code = IO_FAILED

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path}: reads back other bytes than were written",
            path=path,
            hint="nothing was changed; check the disk",
        )


class UnfinishedError(PatchkitError):
    """The change is made, but it could not be written down."""

    code = "unfinished"
    exit_code = INTERRUPTED

    def __init__(self, cause: OSError, path: str | None) -> None:
        reason = cause.strerror or str(cause)
        super().__init__(
            f"{path}: {reason}" if path else reason,
            path=path,
            hint="the change is made and whole; free the disk, and 'patchkit recover' finishes the rest",
        )


@dataclass(frozen=True)
class Put:
    """Write ``data`` at ``path`` (relative to the root) with ``meta``; a link there becomes a file."""

    path: str
    data: bytes
    meta: Meta


@dataclass(frozen=True)
class Link:
    """Make ``path`` a symlink to ``target`` with its own modification time."""

    path: str
    target: str
    mtime_ns: int


@dataclass(frozen=True)
class Remove:
    path: str


@dataclass(frozen=True)
class Refresh:
    """Leave the file at ``path`` as it is, but drop its bytecode."""

    path: str


@dataclass(frozen=True)
class MakeFolder:
    path: str


@dataclass(frozen=True)
class RemoveFolder:
    """Remove the folder ``path`` if it is empty."""

    path: str


Operation = Put | Link | Remove | Refresh | MakeFolder | RemoveFolder


def check_writable(root: str, operations: Sequence[Operation] = ()) -> None:
    """Raise NotWritableError if ``operations`` plainly cannot be made, UnsafePathError if the bytecode of a
    module of theirs lies behind a link out of the root; a dry run asks this, too.
    """
    writable.check(
        root,
        [operation.path for operation in operations],
        metas=[(one.path, one.meta) for one in operations if isinstance(one, Put)],
        going=[one.path for one in operations if isinstance(one, Remove)],
    )


def run(
    root: str,
    operations: Sequence[Operation],
    history: dict[str, Any],
    before_change: Callable[[], None] = lambda: None,
    expected: dict[str, Fingerprint | None] | None = None,
) -> None:
    """Do all ``operations`` or none. The caller holds the lock and has seen that no journal is there.

    ``history`` is the record to append. ``before_change`` is called last before the first rename and may
    raise to refuse. ``expected`` maps paths to what the plan was made from. SIGTERM, SIGHUP and ^C undo the
    transaction and are then passed on.
    """
    tree = Tree(root)
    steps = _steps(tree, operations)
    identifier = uuid.uuid4().hex
    entry = {**history, "id": identifier}
    journal = Journal(identifier, os.getpid(), socket.gethostname(), OPEN, steps, entry)
    for step in steps:
        if expected is not None and step.path in expected and step.before != expected[step.path]:
            raise ChangedMeanwhileError(step.path)
    swapping = False
    with _interruptible():
        try:
            journal.write(root)
            _stage(tree, steps, operations)
            _keep(tree, journal)
            _purge(tree, steps)  # bytecode that cannot be removed is found while nothing is changed
            before_change()
            swapping = True
            _swap(tree, journal)
            _purge(tree, steps)  # what was compiled meanwhile
            _read_back(tree, journal)
            # From now on whoever loads a file gets the new one; before, it may have been either.
            entry = {**entry, "time": time.time()}
            journal = replace(journal, history=entry)
            History(root).announce(entry)
            journal = journal.committed(root)
        except BaseException as error:
            with _held_signals():
                recovery = _settle(root)
            # A commit mark that reached the disk stands, whatever the call that wrote it said.
            if recovery is not None and recovery.outcome == "finished" and isinstance(error, OSError):
                return
            told = error
            if isinstance(error, OSError):
                told = TransactionFailedError(error, _relative(root, error.filename))
            if swapping and recovery is not None and recovery.stale and isinstance(told, PatchkitError):
                told.hint = "; ".join(filter(None, (told.hint, recovery.stale_advice())))
            if told is not error:
                raise told from error
            raise
    with _held_signals():
        try:
            finish(tree, journal)
        except OSError as error:
            raise UnfinishedError(error, _relative(root, error.filename)) from error


def _settle(root: str) -> Recovery | None:
    """Undo, or finish what is committed; None where nothing was begun."""
    try:
        if Journal.load(root) is None:
            return None
    except OSError as error:
        raise RecoveryFailedError(error, "undone") from error
    return recover(root)


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM or SIGHUP, on its way through the transaction."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP undo the transaction at once, as ^C does, and then have their usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise _TerminatedError

    signals = (signal.SIGTERM, signal.SIGHUP)
    # One that is ignored (nohup) or handled by our caller stays so.
    before = {one: signal.signal(one, note) for one in signals if signal.getsignal(one) == signal.SIG_DFL}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        if received:
            signal.raise_signal(received[0])


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Signals wait until the block is done: an undo, or what follows the commit mark, takes milliseconds."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _steps(tree: Tree, operations: Sequence[Operation]) -> tuple[Step, ...]:
    tag = uuid.uuid4().hex[:8]
    return tuple(_step(tree, number, one, tag) for number, one in enumerate(operations))


def _step(tree: Tree, number: int, operation: Operation, tag: str) -> Step:
    path = tree.path(operation.path)
    before = fingerprint(path)
    folder, name = os.path.split(operation.path)
    # Short and not derived from the name alone, since a name may already be as long as the system allows.
    temp = os.path.join(folder, f".{name[:40]}.{tag}.{number}.tmp")
    if isinstance(operation, Put):
        return Step(number, "put", operation.path, before, Fingerprint.of_data(operation.data), temp)
    if isinstance(operation, Link):
        after = Fingerprint("link", target=operation.target)
        return Step(number, "link", operation.path, before, after, temp)
    if isinstance(operation, Remove):
        return Step(number, "remove", operation.path, before, None, temp)
    if isinstance(operation, Refresh):
        return Step(number, "refresh", operation.path, before, before)
    if isinstance(operation, MakeFolder):
        return Step(number, "mkdir", operation.path, before, Fingerprint("dir"))
    if before != Fingerprint("dir"):
        return Step(number, "rmdir", operation.path, before, before)
    info = os.lstat(path)
    return Step(
        number,
        "rmdir",
        operation.path,
        before,
        None,
        folder=(stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid),
    )


def _stage(tree: Tree, steps: Sequence[Step], operations: Sequence[Operation]) -> None:
    """Make folders and write every new file under a temporary name in its own folder."""
    for step, operation in zip(steps, operations, strict=True):
        if isinstance(operation, MakeFolder):
            if step.before is None:
                _make_folder(tree, tree.path(step.path))
        elif isinstance(operation, Put):
            write_new(tree.path(step.temp or ""), operation.data, operation.meta)
        elif isinstance(operation, Link):
            temp = tree.path(step.temp or "")
            os.symlink(operation.target, temp)
            os.utime(temp, ns=(operation.mtime_ns, operation.mtime_ns), follow_symlinks=False)
            if os.geteuid() == 0:
                own_like(tree.path(step.path) if step.before is not None else tree.root, temp)


def _make_folder(tree: Tree, path: str) -> None:
    """As open to others as the folder around it, like an installer under the same umask made it."""
    os.mkdir(path, 0o755)
    own_like_root(tree.root, path)
    mode = stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)
    if mode != stat.S_IMODE(os.stat(path).st_mode):
        os.chmod(path, mode)


def _keep(tree: Tree, journal: Journal) -> None:
    """Give everything that will be replaced a second name, durable before the first rename."""
    folder = os.path.join(tree.root, journal.undo)
    os.mkdir(folder, 0o700)
    for step in journal.steps:
        if step.before is None or step.verb not in FILE_VERBS:
            continue
        source, kept = tree.path(step.path), kept_path(tree, journal, step)
        try:
            os.link(source, kept, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
                raise
            # A file system without hard links: a full copy, under its name only when complete.
            copy(source, f"{kept}.tmp")
            os.rename(f"{kept}.tmp", kept)
        # The second name is what would come back: it must be what the plan saw.
        if fingerprint(kept) != step.before:
            raise ChangedMeanwhileError(step.path)
    fsync_folder(folder)
    fsync_folder(os.path.dirname(folder))


def _swap(tree: Tree, journal: Journal) -> None:
    folders = set()
    removed: list[Step] = []
    for step in journal.steps:
        if step.verb == "refresh":
            continue
        # Once more, against a folder that became a symlink out of the root since.
        path = Tree(tree.root).path(step.path)
        folders.add(os.path.dirname(path))
        if step.verb in ("put", "link"):
            _replace(tree, journal, step, path)
        elif step.verb == "remove" and step.before is not None:
            _check_untouched(tree, journal, step, path)
            os.unlink(path)
            removed.append(step)
        elif step.verb == "rmdir" and step.folder is not None:
            if removed:
                _purge(tree, journal.steps)  # now, so that a folder that held nothing else is empty
                removed.clear()
            remove_empty(path)
    for folder in sorted(folders):
        fsync_folder(folder)


def _purge(tree: Tree, steps: Sequence[Step]) -> None:
    for error in purge_bytecode(tree, steps):
        raise error


def _replace(tree: Tree, journal: Journal, step: Step, path: str) -> None:
    temp = tree.path(step.temp or "")
    if step.before is not None:
        _check_untouched(tree, journal, step, path)
        os.rename(temp, path)
        return
    try:
        # Unlike a rename, a link never replaces what someone else put there in this moment.
        os.link(temp, path, follow_symlinks=False)
        os.unlink(temp)
    except FileExistsError:
        raise ChangedMeanwhileError(step.path) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        if is_there(path):
            raise ChangedMeanwhileError(step.path) from None
        os.rename(temp, path)


def _check_untouched(tree: Tree, journal: Journal, step: Step, path: str) -> None:
    """What stands at ``path`` must be the very file that has a second name, or equal to the copy of it."""
    try:
        now, kept = os.lstat(path), os.lstat(kept_path(tree, journal, step))
    except (FileNotFoundError, NotADirectoryError):
        raise ChangedMeanwhileError(step.path) from None
    if not os.path.samestat(now, kept) and fingerprint(path) != step.before:
        raise ChangedMeanwhileError(step.path)


def _read_back(tree: Tree, journal: Journal) -> None:
    for step in journal.steps:
        if step.verb not in FILE_VERBS:
            continue
        if fingerprint(tree.path(step.path)) != step.after:
            raise ReadBackError(step.path)
        # Whoever had the old file open may have written to it until now; that must not be lost.
        if step.before is not None and fingerprint(kept_path(tree, journal, step)) != step.before:
            raise ChangedMeanwhileError(step.path)


def _relative(root: str, name: object) -> str | None:
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    if not isinstance(name, str):
        return None
    return os.path.relpath(name, root) if name.startswith(root + "/") else name
