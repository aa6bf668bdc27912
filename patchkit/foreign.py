"""Whether ``.patchkit`` holds what patchkit put there: a symlink in it could lead root's hand anywhere."""

from __future__ import annotations

import errno
import os
import stat

from patchkit.errors import REFUSED, PatchkitError

_FOLDERS = ("applied", "leases", "rescued")
_FILES = (".gitignore", "history.head", "history.jsonl", "lock", "statcache.json")
_FLAT = ("applied", "leases")  # folders whose names are opened


class ForeignStateError(PatchkitError):
    """A ``.patchkit`` that someone else may have planted: what it says must not steer root's hand."""

    code = "foreign-state"
    exit_code = REFUSED

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"{path} {reason}", path=path, hint="look into it, then remove it or give it to the root's owner"
        )


def check(folder: str, root: str) -> None:
    """Raise ForeignStateError unless ``folder``, the state of ``root``, may be believed; it may be missing.

    What lies in it is looked at, too, but for the second names in ``undo.*`` and what is in ``rescued``:
    those may be links, and nothing follows them. A folder in the place of the state, the journal or a lease
    is no lie, only damage, of which the reader speaks.
    """
    try:
        info = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(info.st_mode):
        raise ForeignStateError(folder, "is a symlink" if stat.S_ISLNK(info.st_mode) else "is not a folder")
    # Another user's folder is that user's business, unless we are root and would do as it says.
    trusted = {0, os.stat(root).st_uid} if os.geteuid() == 0 else None
    _check_owner(folder, info, trusted, root)
    for name, path in _entries(folder):
        is_folder = name in _FOLDERS or name.startswith("undo.")
        wanted = stat.S_IFDIR if is_folder else stat.S_IFREG if name in _FILES else None
        _check_entry(path, wanted, trusted, root)
        if name in _FLAT:
            for _, inner in _entries(path):
                _check_entry(inner, stat.S_IFREG if name == "applied" else None, trusted, root)


def _entries(folder: str) -> list[tuple[str, str]]:
    try:
        return [(name, os.path.join(folder, name)) for name in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []  # gone since, like any other name of a transaction that ends in this moment


def _check_entry(path: str, wanted: int | None, trusted: set[int] | None, root: str) -> None:
    """``wanted`` is the type that it must have; None for a folder or a file."""
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    kind = stat.S_IFMT(info.st_mode)
    if kind == stat.S_IFLNK:
        raise ForeignStateError(path, "is a symlink")
    if kind not in ((stat.S_IFDIR, stat.S_IFREG) if wanted is None else (wanted,)):
        raise ForeignStateError(path, "is not a folder" if wanted == stat.S_IFDIR else "is not a file")
    _check_owner(path, info, trusted, root)


def _check_owner(path: str, info: os.stat_result, trusted: set[int] | None, root: str) -> None:
    if trusted is not None and info.st_uid not in trusted:
        raise ForeignStateError(path, f"belongs to user id {info.st_uid}, who does not own {root}")


def open_own(path: str, flags: int, mode: int = 0o644) -> int:
    """A descriptor of a file of ``.patchkit``, never of what a link there leads to, nor of a pipe.

    Raises ForeignStateError, and IsADirectoryError for a folder.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            reason = "is a symlink" if error.errno == errno.ELOOP else "is not a file"
            raise ForeignStateError(path, reason) from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise ForeignStateError(path, "is not a file")
    return descriptor


def read_own(path: str) -> bytes | None:
    """The bytes of a file of ``.patchkit``; None where there is none."""
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as file:
        return file.read()
