"""Writing so that it is still there after a power cut: temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchkit.tree import Meta


_ACCESS = "system.posix_acl_access"


def write_durably(root: str, relative: str, data: bytes) -> None:
    """Replace the file ``relative`` of ``root``'s ``.patchkit``; old or new, never half."""
    path = os.path.join(root, relative)
    # A name of its own, since two `check`s may write the stat cache at once.
    temp = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        own_like_root(root, temp)
        os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            unlink_if_there(temp)
        raise
    fsync_folder(os.path.dirname(path))


def write_new(path: str, data: bytes, meta: Meta) -> None:
    """Create ``path``, which must not exist, with ``data`` and ``meta``, durably."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(descriptor, data)
        info = os.fstat(descriptor)
        if (info.st_uid, info.st_gid) != (meta.uid, meta.gid):
            _chown(descriptor, meta)
        _set_attributes(descriptor, meta.xattrs)
        os.fchmod(descriptor, meta.mode)
        os.utime(descriptor, ns=(meta.mtime_ns, meta.mtime_ns))
        os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _chown(descriptor: int, meta: Meta) -> None:
    try:
        os.fchown(descriptor, meta.uid, meta.gid)
    except PermissionError:
        # Not root: the owner cannot be given away, but a group that we are in can be kept.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, -1, meta.gid)


def _set_attributes(descriptor: int, xattrs: tuple[tuple[str, bytes], ...] | None) -> None:
    if xattrs is None:
        return
    for name, value in xattrs:
        _set_xattr(descriptor, name, value)
    if _ACCESS not in dict(xattrs):
        # The folder's default ACL opens a new file to others than the one that it replaces.
        try:
            os.removexattr(descriptor, _ACCESS)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.EINVAL):
                raise


def _set_xattr(descriptor: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(descriptor, name, value)
    except OSError as error:
        # security.* and trusted.* belong to the system or to root; the system sets its own on a new file.
        if name.startswith("user.") or error.errno not in (
            errno.EPERM,
            errno.EACCES,
            errno.ENOTSUP,
            errno.EINVAL,
        ):
            raise


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def fsync_folder(folder: str) -> None:
    """Make the names in ``folder`` durable; nothing to do when it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return  # removed by this very transaction
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def own_like_root(root: str, path: str) -> None:
    """As root, give a file that we just made to the owner of ``root``: sudo must not lock its user out."""
    if os.geteuid() == 0:
        own_like(root, path)


def own_like(model: str, path: str) -> None:
    """Give ``path`` to the owner of ``model``, where the system lets us; no link is followed."""
    info = os.lstat(model)
    try:
        os.chown(path, info.st_uid, info.st_gid, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EINVAL):
            raise
