"""Whether a change can be made at all, asked before anything is begun: what forbids it is said by its name.

The system decides in the end, and whatever it refuses later is undone; nothing here is needed for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from typing import TYPE_CHECKING

from patchkit import bytecode
from patchkit.errors import IO_FAILED, PatchkitError
from patchkit.history_head import HEAD
from patchkit.state import FOLDER, HISTORY
from patchkit.tree import Tree, info

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from patchkit.tree import Meta

_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS of linux/fs.h, with its attributes as chattr names them
_ATTRIBUTES = ((0x10, "is immutable", "-i"), (0x20, "is append-only", "-a"))


class NotWritableError(PatchkitError):
    """A file or folder that would have to be changed cannot be, or not as it must be."""

    code = "not-writable"
    exit_code = IO_FAILED

    def __init__(self, path: str, reason: str, hint: str) -> None:
        super().__init__(f"{path} {reason}", path=path, hint=f"nothing was changed; {hint}")


def check(
    root: str,
    paths: Sequence[str],
    *,
    metas: Iterable[tuple[str, Meta]] = (),
    going: Sequence[str] = (),
) -> None:
    """Raise NotWritableError if this user plainly cannot change ``paths`` (relative to the root), or cannot
    remove their bytecode; UnsafePathError if that lies behind a link out of the root.

    ``metas`` are files to be written with the owner that each must keep; ``going`` are to be removed.
    """
    changed = [os.path.join(root, path) for path in paths]
    own = os.path.join(root, FOLDER)
    folders = {own if os.path.isdir(own) else root, *(os.path.dirname(path) for path in changed)}
    for path in sorted({*folders, *changed, *(os.path.join(root, name) for name in (HISTORY, HEAD))}):
        _check_attributes(path)
    for folder in sorted(folders):
        _check_folder(folder)
    for path, meta in sorted(metas, key=lambda one: one[0]):  # a file before its backup
        _check_owner(os.path.join(root, path), meta)
    _check_bytecode(Tree(root), paths, going)


def _check_attributes(path: str) -> None:
    found = info(path, follow=False)
    if found is None or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return
    flags = 0
    with contextlib.suppress(OSError):  # not every file system has them
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            (flags,) = struct.unpack_from("i", fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8)))
        finally:
            os.close(descriptor)
    for bit, reason, option in _ATTRIBUTES:
        if flags & bit:
            raise NotWritableError(path, reason, f"'chattr {option}' it first")


def _check_bytecode(tree: Tree, paths: Sequence[str], going: Sequence[str]) -> None:
    """What stays behind could run as the other version (a server started by root leaves such a cache)."""
    advice = ", or have it removed: it holds mere bytecode"
    bytecode.check_inside(tree, paths)
    found, closed = bytecode.find(tree, paths, going)
    for error in closed:
        path = os.fsdecode(error.filename)
        _check_folder(path, advice, os.R_OK | os.W_OK | os.X_OK)
        raise NotWritableError(path, f"cannot be searched for bytecode: {error.strerror}", "mend that first")
    folders = sorted({os.path.dirname(path) for path in found})
    for path in (*folders, *found):
        _check_attributes(path)
    for folder in folders:
        _check_folder(folder, advice)


def _check_folder(folder: str, advice: str = "", access: int = os.W_OK | os.X_OK) -> None:
    if not os.path.isdir(folder) or os.access(folder, access):
        return
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise NotWritableError(folder, "is on a read-only file system", "remount it for writing")
    reason = f"belongs to user id {os.stat(folder).st_uid} and is closed to user id {os.geteuid()}"
    raise NotWritableError(folder, reason, f"run as its owner{advice}")


def _check_owner(path: str, meta: Meta) -> None:
    """Only root can write a file that belongs to somebody else: ours would be another's, for good."""
    user = os.geteuid()
    if user == 0:
        return
    if meta.uid != user:
        reason = f"belongs to user id {meta.uid}, which user id {user} could not keep"
    elif meta.gid != os.getegid() and meta.gid not in os.getgroups():
        reason = f"belongs to group id {meta.gid}, which user id {user} is not in and could not keep"
    else:
        return
    raise NotWritableError(path, reason, "run as its owner or as root")
