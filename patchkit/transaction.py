"""Several file changes as one: all of them, or none, whatever happens in between.

This module knows files, not patches; a backup or ``state.json`` is one more file of the transaction. The
order is: journal; temporary files beside their destinations; a second name (hard link) in ``.patchkit/undo``
for everything that will be replaced; the caller's last check; renames; bytecode away; read back; commit mark;
history; clean-up. Undoing is renaming the second names back, which restores the very inodes: bytes, mode,
owner, times, attributes and hard links, and it needs no disk space.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit import bytecode
from patchkit.errors import INTERRUPTED, IO_FAILED, REFUSED, PatchkitError
from patchkit.history import History
from patchkit.journal import COMMITTED, OPEN, Journal, Step, fsync_folder, unlink_if_there, write_all
from patchkit.state import FOLDER, RESCUED, UNDO, own_like_root
from patchkit.tree import Fingerprint, Meta, Tree, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


class RollbackFailedError(PatchkitError):
    """A change failed and could not be undone."""

    code = "rollback-failed"
    exit_code = INTERRUPTED

    def __init__(self, cause: OSError) -> None:
        where = cause.filename if isinstance(cause.filename, str) else None
        super().__init__(
            f"the transaction could not be undone: {where or ''}: {cause.strerror}",
            path=where,
            hint="free the disk or mend its permissions, then run 'patchkit recover'",
        )


@dataclass(frozen=True)
class Put:
    """Write ``data`` at ``path`` (relative to the root) with ``meta``; a link there becomes a file."""

    path: str
    data: bytes
    meta: Meta


@dataclass(frozen=True)
class Link:
    """Make ``path`` a symlink to ``target``."""

    path: str
    target: str


@dataclass(frozen=True)
class Remove:
    path: str


@dataclass(frozen=True)
class MakeFolder:
    path: str


@dataclass(frozen=True)
class RemoveFolder:
    """Remove the folder ``path`` if it is empty."""

    path: str


Operation = Put | Link | Remove | MakeFolder | RemoveFolder


@dataclass(frozen=True)
class Recovery:
    """What recovery did: ``undone`` or ``finished`` the action; ``left`` names files that others changed."""

    outcome: str
    action: str
    patches: tuple[str, ...]
    left: tuple[str, ...] = ()

    def sentence(self) -> str:
        text = f"{self.outcome} an interrupted {self.action} of {', '.join(self.patches) or 'nothing'}"
        if self.left:
            text += f"; left alone, because something else changed them: {', '.join(self.left)}"
        return text

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "action": self.action,
            "patches": list(self.patches),
            "left": list(self.left),
        }


def run(
    root: str,
    operations: Sequence[Operation],
    history: dict[str, Any],
    before_change: Callable[[], None] = lambda: None,
    expected: dict[str, Fingerprint | None] | None = None,
) -> None:
    """Do all ``operations`` or none. The caller holds the lock and has seen that no journal is there.

    ``history`` is the record to append. ``before_change`` is called last before the first rename and may
    raise to refuse. ``expected`` maps paths to what the plan was made from.
    """
    tree = Tree(root)
    steps = _steps(tree, operations)
    identifier = uuid.uuid4().hex
    journal = Journal(
        identifier, os.getpid(), socket.gethostname(), OPEN, steps, {**history, "id": identifier}
    )
    try:
        for step in steps:
            if expected is not None and step.path in expected and step.before != expected[step.path]:
                raise ChangedMeanwhileError(step.path)
        journal.write(root)
        _stage(tree, steps, operations)
        _keep(tree, steps)
        before_change()
        _swap(tree, steps)
        _purge_bytecode(tree, steps)
        _read_back(tree, steps)
        journal = journal.committed(root)
    except BaseException as error:
        # Also on ^C. A commit mark that reached the disk stands, whatever the exception said.
        _settle(tree, error)
        if isinstance(error, OSError):
            raise TransactionFailedError(error, _relative(root, error.filename)) from error
        raise
    _finish(tree, journal)


def _settle(tree: Tree, error: BaseException) -> None:
    try:
        journal = Journal.load(tree.root)
        if journal is not None:
            recover(tree.root)
    except OSError as cause:
        raise RollbackFailedError(cause) from error


def recover(root: str) -> Recovery | None:
    """Undo or finish what a journal says is open; None when there is none. The caller holds the lock."""
    journal = Journal.load(root)
    if journal is None:
        _sweep(Tree(root))
        return None
    tree = Tree(root)
    left: list[str] = []
    if journal.phase == COMMITTED:
        _finish(tree, journal)
        outcome = "finished"
    else:
        left = _undo(tree, journal)
        outcome = "undid"
    patches = tuple(str(patch.get("name")) for patch in journal.history.get("patches", ()))
    return Recovery(outcome, str(journal.history.get("action", "change")), patches, tuple(left))


def _steps(tree: Tree, operations: Sequence[Operation]) -> tuple[Step, ...]:
    tag = uuid.uuid4().hex[:8]
    steps = []
    for number, operation in enumerate(operations):
        path = tree.path(operation.path)
        before = fingerprint(path)
        folder, name = os.path.split(operation.path)
        # Short and not derived from the name alone, since a name may already be as long as the system allows.
        temp = os.path.join(folder, f".{name[:40]}.{tag}.{number}.tmp")
        if isinstance(operation, Put):
            steps.append(
                Step(number, "put", operation.path, before, Fingerprint.of_data(operation.data), temp)
            )
        elif isinstance(operation, Link):
            steps.append(
                Step(
                    number, "link", operation.path, before, Fingerprint("link", target=operation.target), temp
                )
            )
        elif isinstance(operation, Remove):
            steps.append(Step(number, "remove", operation.path, before, None))
        elif isinstance(operation, MakeFolder):
            steps.append(Step(number, "mkdir", operation.path, before, Fingerprint("dir")))
        else:
            steps.append(Step(number, "rmdir", operation.path, before, None))
    return tuple(steps)


def _stage(tree: Tree, steps: Sequence[Step], operations: Sequence[Operation]) -> None:
    """Make folders and write every new file under a temporary name in its own folder."""
    for step, operation in zip(steps, operations, strict=True):
        if isinstance(operation, MakeFolder):
            if step.before is None:
                os.mkdir(tree.path(step.path), 0o755)
                own_like_root(tree.root, tree.path(step.path))
        elif isinstance(operation, Put):
            write_new(tree.path(step.temp or ""), operation.data, operation.meta)
        elif isinstance(operation, Link):
            os.symlink(operation.target, tree.path(step.temp or ""))


def write_new(path: str, data: bytes, meta: Meta) -> None:
    """Create ``path``, which must not exist, with ``data`` and ``meta``, durably."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(descriptor, data)
        info = os.fstat(descriptor)
        if (info.st_uid, info.st_gid) != (meta.uid, meta.gid):
            _chown(descriptor, meta)
        os.fchmod(descriptor, meta.mode)
        for name, value in meta.xattrs:
            _set_xattr(descriptor, name, value)
        os.utime(descriptor, ns=(meta.mtime_ns, meta.mtime_ns))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _chown(descriptor: int, meta: Meta) -> None:
    try:
        os.fchown(descriptor, meta.uid, meta.gid)
    except PermissionError:
        # Not root: the owner cannot be given away, but a group that we are in can be kept.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, -1, meta.gid)


def _set_xattr(descriptor: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(descriptor, name, value)
    except OSError as error:
        # security.* and trusted.* belong to the system or to root; the system sets its own on a new file.
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EINVAL):
            raise


def _undo_path(tree: Tree, step: Step) -> str:
    return os.path.join(tree.root, UNDO, str(step.number))


def _keep(tree: Tree, steps: Sequence[Step]) -> None:
    """Give everything that will be replaced a second name, durable before the first rename."""
    folder = os.path.join(tree.root, UNDO)
    os.mkdir(folder, 0o700)
    for step in steps:
        if step.before is None or step.before.kind == "dir":
            continue
        source, kept = tree.path(step.path), _undo_path(tree, step)
        try:
            os.link(source, kept, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            _copy(source, kept)
        # The second name is what would come back: it must be what the plan saw.
        if fingerprint(kept) != step.before:
            raise ChangedMeanwhileError(step.path)
    fsync_folder(folder)


def _copy(source: str, destination: str) -> None:
    """A file system without hard links: a full copy, visible only when complete."""
    temp = destination + ".tmp"
    if os.path.islink(source):
        os.symlink(os.readlink(source), temp)
    else:
        meta = Meta.of(source)
        with open(source, "rb") as file:
            write_new(temp, file.read(), meta)
    os.rename(temp, destination)


def _swap(tree: Tree, steps: Sequence[Step]) -> None:
    folders = set()
    for step in steps:
        path = tree.path(step.path)
        if step.verb in ("put", "link"):
            os.rename(tree.path(step.temp or ""), path)
        elif step.verb == "remove" and step.before is not None:
            os.unlink(path)
            bytecode.purge(path)  # now, so that a folder that held nothing else is empty for its rmdir
        elif step.verb == "rmdir":
            _remove_empty(path)
        folders.add(os.path.dirname(path))
    for folder in sorted(folders):
        fsync_folder(folder)


def _remove_empty(path: str) -> None:
    cache = os.path.join(path, "__pycache__")
    with contextlib.suppress(OSError):
        # Only what a purge left: a cache with bytecode of files that are not ours is not empty.
        os.rmdir(cache)
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise


def _purge_bytecode(tree: Tree, steps: Sequence[Step]) -> None:
    for step in steps:
        if step.verb in ("put", "link", "remove"):
            bytecode.purge(tree.path(step.path))


def _read_back(tree: Tree, steps: Sequence[Step]) -> None:
    for step in steps:
        if step.verb in ("put", "link", "remove") and fingerprint(tree.path(step.path)) != step.after:
            raise ReadBackError(step.path)


def _finish(tree: Tree, journal: Journal) -> None:
    """After the commit mark: all is in place; write it down and clean up."""
    _purge_bytecode(tree, journal.steps)
    History(tree.root).append(journal.history)
    _clean(tree, journal)


def _undo(tree: Tree, journal: Journal) -> list[str]:
    """Put every path back; returns those that hold neither our bytes nor the old ones, left alone."""
    left = []
    folders = set()
    _purge_bytecode(tree, journal.steps)
    for step in reversed(journal.steps):
        path = tree.path(step.path)
        folders.add(os.path.dirname(path))
        if step.verb == "mkdir":
            if step.before is None:
                _remove_empty(path)
        elif step.verb == "rmdir":
            if step.before is not None and not os.path.isdir(path) and os.path.isdir(os.path.dirname(path)):
                os.mkdir(path, 0o755)
        elif not _undo_file(tree, step, path):
            left.append(step.path)
    for folder in sorted(folders):
        fsync_folder(folder)
    _purge_bytecode(tree, journal.steps)
    _clean(tree, journal)
    return left


def _undo_file(tree: Tree, step: Step, path: str) -> bool:
    now = fingerprint(path)
    kept = _undo_path(tree, step)
    if step.before is None:
        if now is not None and now == step.after:
            os.unlink(path)
            return True
        return now is None
    if not os.path.lexists(kept):
        return True  # not reached yet, or put back by an earlier recovery
    if now in (step.before, step.after) and os.path.isdir(os.path.dirname(path)):
        os.rename(kept, path)
        unlink_if_there(kept)  # rename(2) does nothing when both names are one inode
        return True
    _rescue(tree, step, kept)
    return False


def _rescue(tree: Tree, step: Step, kept: str) -> None:
    folder = os.path.join(tree.root, RESCUED)
    os.makedirs(folder, exist_ok=True)
    own_like_root(tree.root, folder)
    os.rename(kept, os.path.join(folder, f"{step.path.replace('/', '__')[-200:]}.{uuid.uuid4().hex[:8]}"))


def _clean(tree: Tree, journal: Journal) -> None:
    for step in journal.steps:
        if step.temp is not None:
            unlink_if_there(os.path.join(tree.root, step.temp))
    undo = os.path.join(tree.root, UNDO)
    if os.path.isdir(undo):
        shutil.rmtree(undo)
    Journal.remove(tree.root)


def _sweep(tree: Tree) -> None:
    """Without a journal nothing is open; what a crash while writing the journal itself left is litter."""
    unlink_if_there(os.path.join(tree.root, FOLDER, "journal.json.tmp"))


def _relative(root: str, name: object) -> str | None:
    if not isinstance(name, str):
        return None
    return os.path.relpath(name, root) if name.startswith(root + "/") else name
