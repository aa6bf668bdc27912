"""Bring an interrupted transaction to an end: undo it before its commit mark, finish it after.

Everything is decided by what lies on the disk, never by how far the journal's writer says that it came, and
every step may be repeated, so that a recovery which dies itself is recovered too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit import bytecode
from patchkit.durable import fsync_folder, own_like_root, unlink_if_there, write_new
from patchkit.errors import INTERRUPTED, PatchkitError
from patchkit.history import History
from patchkit.journal import COMMITTED, FILE_VERBS, Journal, Step
from patchkit.state import BACKUP, FOLDER, RESCUED
from patchkit.tree import (
    Meta,
    Tree,
    fingerprint,
    innermost_first,
    is_folder,
    is_link,
    is_there,
    parents,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class RecoveryFailedError(PatchkitError):
    """An interrupted transaction that cannot be undone or finished yet."""

    code = "recovery-failed"
    exit_code = INTERRUPTED

    def __init__(self, cause: OSError, doing: str) -> None:
        where = os.fsdecode(cause.filename) if isinstance(cause.filename, (str, bytes)) else None
        super().__init__(
            f"{f'{where}: ' if where else ''}{cause.strerror or cause}; a transaction could not be {doing}",
            path=where,
            hint="free the disk or mend its permissions, then run 'patchkit recover'",
        )


@dataclass(frozen=True)
class Recovery:
    """What recovery did: ``undid`` or ``finished`` the action; ``left`` names files that others changed, and
    ``stale`` bytecode (absolute) that could not be removed; ``over`` says what took the place of the release
    that was being changed.
    """

    outcome: str
    action: str
    patches: tuple[str, ...]
    left: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    over: str | None = None

    def sentence(self) -> str:
        text = f"{self.outcome} an interrupted {self.action} of {', '.join(self.patches) or 'nothing'}"
        if self.over:
            text += f"; {self.over}"
        if self.left:
            text += f"; left alone, because something else changed them: {', '.join(self.left)}"
        return f"{text}; {self.stale_advice()}" if self.stale else text

    def stale_advice(self) -> str:
        return f"remove this bytecode, which may be of the other version: {', '.join(self.stale)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "action": self.action,
            "patches": list(self.patches),
            "left": list(self.left),
            "stale": list(self.stale),
            "over": self.over,
        }


def recover(
    root: str,
    *,
    before_change: Callable[[Sequence[str]], None] = lambda _: None,
    installed: Mapping[str, str | None] | None = None,
) -> Recovery | None:
    """Undo or finish what a journal says is open; None when there is none. The caller holds the lock.

    ``before_change`` gets the distribution's files that will change, and may raise to refuse.
    ``installed`` is given when another release than the journal's is installed by now, or none: path ->
    sha256 of its files. No byte of the old release may land on it.
    """
    tree = Tree(root)
    journal = Journal.load(root)
    if journal is None:
        _sweep(tree)
        return None
    committed = journal.phase == COMMITTED
    left: list[str] = []
    try:
        if committed:
            refused = finish(tree, journal)
        else:
            left, refused = _undo(tree, journal, before_change, installed)
        _sweep(tree)
    except OSError as error:
        raise RecoveryFailedError(error, "finished" if committed else "undone") from error
    patches = dict.fromkeys(str(patch.get("name")) for patch in journal.history.get("patches", ()))
    action = str(journal.history.get("action", "change"))
    return Recovery(
        "finished" if committed else "undid", action, tuple(patches), tuple(left), _names(refused)
    )


def finish(tree: Tree, journal: Journal) -> list[OSError]:
    """After the commit mark: all is in place; write it down and clean up. Returns as ``purge_bytecode``."""
    refused = purge_bytecode(tree, journal.steps)
    History(tree.root).append(journal.history)
    _clean(tree, journal)
    return refused


def kept_path(tree: Tree, journal: Journal, step: Step) -> str:
    """The second name of what ``step`` replaces."""
    return os.path.join(tree.root, journal.undo, str(step.number))


def purge_bytecode(tree: Tree, steps: Sequence[Step]) -> list[OSError]:
    """Remove the bytecode of every module of ``steps``; returns what the system refused. It is raised before
    the commit mark, but neither an undo nor the rest of a finished change may be stopped by a mere cache.
    """
    files = [step for step in steps if step.verb in (*FILE_VERBS, "refresh")]
    return bytecode.purge(
        tree,
        [step.path for step in files],
        going=[step.path for step in files if step.after is None],
        keep=[step.path for step in files if step.path.endswith((".pyc", ".pyo"))],
    )


def _names(refused: Sequence[OSError]) -> tuple[str, ...]:
    return tuple(sorted({os.fsdecode(error.filename) for error in refused if error.filename is not None}))


def remove_empty(path: str) -> None:
    """Remove a folder that holds nothing; one that others still use stays."""
    with contextlib.suppress(OSError):
        # Only what a purge left: a cache with bytecode of files that are not ours is not empty.
        os.rmdir(os.path.join(path, "__pycache__"))
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise


def _undo(
    tree: Tree,
    journal: Journal,
    before_change: Callable[[Sequence[str]], None],
    installed: Mapping[str, str | None] | None,
) -> tuple[list[str], list[OSError]]:
    """Put every path back; returns those that hold neither our bytes nor the old ones, left alone, and the
    same as ``purge_bytecode``.
    """
    # First the folders, for the files that lay in them.
    for step in reversed(journal.steps):
        if step.verb == "rmdir" and (installed is None or _is_ours(step.path)):
            _make_folder_again(step, tree.path(step.path))
    verdicts = {
        step: _judge(tree, journal, step, installed) for step in journal.steps if step.verb in FILE_VERBS
    }
    changes = [step.path for step, verdict in verdicts.items() if verdict in (_BACK, _GONE)]
    before_change(sorted(path for path in changes if not _is_ours(path)))
    purge_bytecode(tree, journal.steps)
    for step, verdict in verdicts.items():
        _settle(tree, journal, step, verdict)
        unlink_if_there(tree.path(step.temp or ""))
    refused = purge_bytecode(tree, journal.steps)
    for step in reversed(journal.steps):
        if step.verb == "mkdir" and step.before is None:
            remove_empty(tree.path(step.path))
    if installed is not None:
        # The installer of the other release left these folders only because our files were in them.
        files = [step.path for step in journal.steps if step.verb in FILE_VERBS]
        for folder in innermost_first(name for path in files for name in parents(path) if name != FOLDER):
            remove_empty(tree.path(folder))
    for folder in sorted({os.path.dirname(tree.path(step.path)) for step in journal.steps}):
        fsync_folder(folder)
    _clean(tree, journal)
    return [step.path for step, verdict in verdicts.items() if verdict in (_FOREIGN, _RESCUE)], refused


# What is to be done about one path: nothing of ours is there any more; drop the second name; rename it back;
# remove what we added; leave what someone else put there, and what is to be saved of the old.
_NOTHING, _DROP, _BACK, _GONE, _FOREIGN, _RESCUE = range(6)


def _judge(tree: Tree, journal: Journal, step: Step, installed: Mapping[str, str | None] | None) -> int:
    path, kept = tree.path(step.path), kept_path(tree, journal, step)
    now = fingerprint(path)
    foreign = None if _is_ours(step.path) else installed
    if step.before is None:
        if now is None or now != step.after:
            return _NOTHING if now is None else _FOREIGN
        return _FOREIGN if foreign is not None and foreign.get(step.path) == now.sha256 else _GONE
    saved = fingerprint(kept)
    if saved is None:
        return _NOTHING  # not reached, or put back by an earlier recovery
    if _same_inode(path, kept):
        return _DROP  # not replaced yet, or put back already
    if foreign is not None and saved == step.before and foreign.get(step.path) != saved.sha256:
        return _DROP  # of a release that is not there any more
    if now == step.after and is_folder(os.path.dirname(path)):
        # Even if its bytes are not those of before: then someone wrote to it through an open descriptor.
        return _BACK
    if installed is not None and saved == step.before and not is_folder(os.path.dirname(path)):
        return _DROP  # a backup whose file's folder went with its release
    return _DROP if now == step.before else _RESCUE


def _is_ours(path: str) -> bool:
    """Whether patchkit keeps it for itself, rather than a file of the distribution."""
    return path.startswith(f"{FOLDER}/") or BACKUP.search(path) is not None


def _same_inode(path: str, other: str) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.lstat(other))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _settle(tree: Tree, journal: Journal, step: Step, verdict: int) -> None:
    path, kept = tree.path(step.path), kept_path(tree, journal, step)
    temp = tree.path(step.temp or "")
    if verdict == _GONE:
        os.unlink(path)
    elif verdict == _DROP:
        os.unlink(kept)
    elif verdict == _BACK:
        _move(kept, path, temp)
    elif verdict == _RESCUE:
        folder = os.path.join(tree.root, RESCUED)
        os.makedirs(folder, exist_ok=True)
        own_like_root(tree.root, folder)
        _move(kept, os.path.join(tree.root, rescue_name(step.path, uuid.uuid4().hex[:8])), temp)
        fsync_folder(folder)


def rescue_name(path: str, tag: str) -> str:
    """Where (relative) the bytes of ``path`` are saved; the file's name may already be as long as allowed."""
    flat = os.fsencode(path.replace("/", "__"))[-180:]
    return f"{RESCUED}/{os.fsdecode(flat)}.{tag}"


def _move(source: str, destination: str, temp: str) -> None:
    """Rename, or copy and rename where ``.patchkit`` is another file system than the tree."""
    try:
        os.rename(source, destination)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        unlink_if_there(temp)
        copy(source, temp)
        os.rename(temp, destination)
        os.unlink(source)


def copy(source: str, destination: str) -> None:
    """A full copy of a file or link, durable."""
    if is_link(source):
        os.symlink(os.readlink(source), destination)
        info = os.lstat(source)
        os.utime(destination, ns=(info.st_mtime_ns, info.st_mtime_ns), follow_symlinks=False)
        return
    meta = Meta.of(source)
    with open(source, "rb") as file:
        write_new(destination, file.read(), meta)


def _make_folder_again(step: Step, path: str) -> None:
    if step.folder is None or not is_folder(os.path.dirname(path)):
        return
    mode, uid, gid = step.folder
    if not is_there(path):
        os.mkdir(path, 0o700)
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        return  # someone else's by now
    if (info.st_uid, info.st_gid) != (uid, gid):
        with contextlib.suppress(PermissionError):
            os.chown(path, uid, gid)
    if stat.S_IMODE(info.st_mode) != mode:
        os.chmod(path, mode)


def _clean(tree: Tree, journal: Journal) -> None:
    for step in journal.steps:
        if step.temp is not None:
            unlink_if_there(tree.path(step.temp))
    undo = os.path.join(tree.root, journal.undo)
    if is_folder(undo):
        # Not rmtree: what lies there is known, and anything else must not vanish.
        for step in journal.steps:
            for name in (str(step.number), f"{step.number}.tmp"):
                unlink_if_there(os.path.join(undo, name))
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(undo)
    Journal.remove(tree.root)


def _sweep(tree: Tree) -> None:
    """Nothing is open; what a crash left of a file of ``.patchkit`` is litter."""
    folder = os.path.join(tree.root, FOLDER)
    try:
        names = os.listdir(folder)
    except OSError:
        return  # litter may lie
    for name in names:
        path = os.path.join(folder, name)
        if name.endswith(".tmp"):
            with contextlib.suppress(OSError):
                os.unlink(path)
