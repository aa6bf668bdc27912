"""The tree as it will be: the disk, overlaid with the changes planned so far. Reads only."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from patchkit.diff import Content
from patchkit.state import Original
from patchkit.transaction import Link, Operation, Put, Remove
from patchkit.tree import Fingerprint, Meta, NotAFileError, Tree, fingerprint, info, is_file, is_link

if TYPE_CHECKING:
    from patchkit.selection import Reader

_SECOND = 1_000_000_000


@dataclass(frozen=True)
class File:
    data: bytes
    meta: Meta


@dataclass(frozen=True)
class Symlink:
    target: str
    mtime_ns: int


Entry = File | Symlink | None


class Overlay:
    """``entries`` maps changed paths to what they will hold (None: nothing); ``seen`` is what the plan was
    made from; ``mtime_ns`` is the least modification time of a new file and ``latest_ns`` the newest given.
    """

    def __init__(self, root: str, mtime_ns: int) -> None:
        self.root = root
        self.tree = Tree(root)
        self.mtime_ns = self.latest_ns = mtime_ns
        self.entries: dict[str, Entry] = {}
        self.seen: dict[str, Fingerprint | None] = {}

    # what will be there ------------------------------------------------------------------------

    def read(self, path: str) -> Content | None:
        return self._read(path, self.entries)

    def frozen(self) -> Reader:
        """A reader of the overlay as it is now, whatever is planned later."""
        entries = dict(self.entries)
        return lambda path: self._read(path, entries)

    def _read(self, path: str, entries: dict[str, Entry]) -> Content | None:
        if path not in entries:
            return self.disk(path)
        entry = entries[path]
        if isinstance(entry, Symlink):
            return self._linked(path, entry.target, entries)
        return None if entry is None else Content(entry.data, entry.meta.mode)

    def disk(self, path: str) -> Content | None:
        """What is there now, through a symlink; it is remembered as what the plan was made from."""
        data = self.tree.read(path)
        absolute = self.tree.path(path)
        if path not in self.seen:
            through = data is None or is_link(absolute)
            self.seen[path] = fingerprint(absolute) if through else Fingerprint.of_data(data or b"")
        return None if data is None else Content(data, stat.S_IMODE(os.stat(absolute).st_mode))

    def linked(self, path: str, target: str) -> Content | None:
        """What a symlink at ``path`` to ``target`` will lead to, if that is a file."""
        return self._linked(path, target, self.entries)

    def _linked(self, path: str, target: str, entries: dict[str, Entry]) -> Content | None:
        absolute = os.path.normpath(os.path.join(os.path.dirname(self.tree.path(path)), target))
        inside = os.path.relpath(absolute, self.root)
        if inside != path and isinstance(entry := entries.get(inside), File):
            return Content(entry.data, entry.meta.mode)
        try:
            found = os.stat(absolute)
            if not stat.S_ISREG(found.st_mode):
                return None
            with open(absolute, "rb") as file:
                return Content(file.read(), stat.S_IMODE(found.st_mode))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def original(self, path: str, mode: int) -> Original:
        """What the file at ``path`` has beside its bytes, for the restore."""
        entry = self.entries.get(path)
        absolute = self.tree.path(path)
        if isinstance(entry, File):
            return Original(mode, entry.meta.mtime_ns)
        if isinstance(entry, Symlink):
            through = os.stat(os.path.join(os.path.dirname(absolute), entry.target))
            return Original(mode, through.st_mtime_ns, entry.target, entry.mtime_ns)
        link = os.readlink(absolute) if is_link(absolute) else None
        own = os.lstat(absolute).st_mtime_ns if link is not None else None
        return Original(mode, os.stat(absolute).st_mtime_ns, link, own)

    def meta(self, path: str, mode: int) -> Meta:
        """The metadata of a new file in the place of the one at ``path``: its owner and attributes, and a new
        time; without one there, those of the root's owner.
        """
        entry = self.entries.get(path)
        if isinstance(entry, File):
            known = entry.meta
        elif is_file(self.tree.path(path)):
            known = Meta.of(self.tree.path(path))
        else:
            root = os.stat(self.root)
            owner = (root.st_uid, root.st_gid) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
            known = Meta(mode, *owner, 0, None)
        return replace(known, mode=mode, mtime_ns=self.fresh_ns(path, known.mtime_ns))

    def fresh_ns(self, path: str, known_ns: int = 0) -> int:
        """A time in a later second than any that a version of ``path`` has had, as far as we know."""
        if (now := info(self.tree.path(path))) is not None:
            known_ns = max(known_ns, now.st_mtime_ns)
        fresh = max(self.mtime_ns, _next_second(known_ns))
        self.latest_ns = max(self.latest_ns, fresh)
        return fresh

    # the outcome -------------------------------------------------------------------------------

    def operation(self, path: str) -> Operation | None:
        """What makes the disk as planned at ``path``; None if it is."""
        entry = self.entries[path]
        absolute = self.tree.path(path)
        now = self.seen[path] if path in self.seen else fingerprint(absolute)
        if entry is not None and now is not None and now.kind in ("dir", "other"):
            raise NotAFileError(path, "a folder" if now.kind == "dir" else "a device, pipe or socket")
        if entry is None:
            return None if now is None else Remove(path)
        if isinstance(entry, Symlink):
            same = now == Fingerprint("link", target=entry.target)
            return None if same else Link(path, entry.target, entry.mtime_ns)
        same = (
            now == Fingerprint.of_data(entry.data)
            and stat.S_IMODE(os.lstat(absolute).st_mode) == entry.meta.mode
        )
        return None if same else Put(path, entry.data, entry.meta)


def _next_second(ns: int) -> int:
    return (ns // _SECOND + 1) * _SECOND


def fresh_mtime_ns(last_ns: int) -> int:
    """A modification time (ns) whose second no earlier change of this tree used.

    Bytecode records the source's mtime in whole seconds, and bytecode may also lie where we cannot see it
    (another ``PYTHONPYCACHEPREFIX``); so two versions of a file must never share a second.
    """
    return max(time.time_ns(), _next_second(last_ns))
