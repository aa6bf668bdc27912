"""A root and the files below it: safe paths, fingerprints, metadata. Reads only."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.errors import REFUSED, PatchkitError

if TYPE_CHECKING:
    from collections.abc import Iterable

_CHUNK = 1 << 20


class UnsafePathError(PatchkitError):
    """A path that is absolute, holds ``..``, or leaves the root through a symlink."""

    code = "unsafe-path"
    exit_code = REFUSED

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}", path=path)


class NotAFileError(PatchkitError):
    """A folder, device or dangling link stands where a file must be."""

    code = "not-a-file"
    exit_code = REFUSED

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(f"{path}: is {kind}, not a file", path=path)


@dataclass(frozen=True)
class Fingerprint:
    """What stands at a path: ``file`` (sha256 hex, size in bytes), ``link`` (its target) or ``dir``."""

    kind: str
    sha256: str | None = None
    size: int | None = None
    target: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}

    @classmethod
    def of_data(cls, data: bytes) -> Fingerprint:
        return cls("file", hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True)
class Meta:
    """What a file has beside its bytes. ``mtime_ns`` in nanoseconds since the epoch; ``xattrs`` None for what
    its folder gives a new file (a default ACL).
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: tuple[tuple[str, bytes], ...] | None = ()

    @classmethod
    def of(cls, path: str) -> Meta:
        info = os.stat(path)
        return cls(stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns, read_xattrs(path))


def read_xattrs(path: str) -> tuple[tuple[str, bytes], ...]:
    try:
        return tuple(sorted((name, os.getxattr(path, name)) for name in os.listxattr(path)))
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENODATA):
            return ()
        raise


def sha256_file(path: str) -> tuple[str, int]:
    """sha256 (hex) and size in bytes of the file that ``path`` leads to, in bounded memory."""
    hasher = hashlib.sha256()
    size = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    return hasher.hexdigest(), size


def info(path: str, *, follow: bool = True) -> os.stat_result | None:
    """What ``stat`` says about ``path``; None only where nothing is.

    Unlike ``os.path.isfile`` and its like, which take a disk that fails for a file that is not there.
    """
    try:
        return os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_there(path: str) -> bool:
    return info(path, follow=False) is not None


def is_folder(path: str) -> bool:
    found = info(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_file(path: str) -> bool:
    found = info(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_link(path: str) -> bool:
    found = info(path, follow=False)
    return found is not None and stat.S_ISLNK(found.st_mode)


def fingerprint(path: str) -> Fingerprint | None:
    """What stands at ``path``, not following a link; None where nothing does."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return Fingerprint("link", target=os.readlink(path))
        if stat.S_ISDIR(mode):
            return Fingerprint("dir")
        if not stat.S_ISREG(mode):
            return Fingerprint("other")
        return Fingerprint("file", *sha256_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


class Tree:
    """Access below ``root`` by relative POSIX paths, never leaving it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._safe: dict[str, str] = {}

    def path(self, relative: str) -> str:
        """The absolute path of ``relative``.

        Raises UnsafePathError when it is absolute, holds ``..``, or passes a folder symlink out of the root.
        """
        parts = relative.split("/")
        if (
            not relative
            or relative.startswith("/")
            or ".." in parts
            or "\0" in relative
            or "" in parts
            or "." in parts
        ):
            raise UnsafePathError(relative, "is not a plain path below the root")
        folder = "/".join(parts[:-1])
        if folder not in self._safe:
            real = os.path.realpath(os.path.join(self.root, folder))
            if real != self.root and not real.startswith(self.root.rstrip("/") + "/"):
                raise UnsafePathError(relative, f"a folder symlink leads out of the root, to {real}")
            self._safe[folder] = os.path.join(self.root, folder)
        return os.path.join(self._safe[folder], parts[-1])

    def read(self, relative: str) -> bytes | None:
        """The bytes at ``relative`` through a file symlink; None where no file is (nothing, or a folder)."""
        path = self.path(relative)
        try:
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                return None
            if not stat.S_ISREG(mode):
                raise NotAFileError(relative, "a device, pipe or socket")
            with open(path, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            if is_link(path):
                raise NotAFileError(relative, f"a dangling symlink to {os.readlink(path)}") from None
            return None

    def digest(self, relative: str) -> tuple[str, int] | None:
        """sha256 and size at ``relative`` through a file symlink; None where no file is."""
        path = self.path(relative)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return None
            return sha256_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def missing_folders(self, relative: str) -> list[str]:
        """The folders above ``relative`` that do not exist, outermost first."""
        missing = []
        folder = os.path.dirname(relative)
        while folder and not is_folder(os.path.join(self.root, folder)):
            missing.append(folder)
            folder = os.path.dirname(folder)
        return missing[::-1]


def parents(path: str) -> list[str]:
    """The folders above the relative ``path``, innermost first."""
    found = []
    while path := os.path.dirname(path):
        found.append(path)
    return found


def innermost_first(folders: Iterable[str]) -> list[str]:
    """Each folder once, in an order in which they can be removed."""
    return sorted(set(folders), key=lambda name: (-name.count("/"), name))
