"""Hashing with a stat cache, so that checking an unchanged tree costs one ``stat`` a file."""

from __future__ import annotations

import json
import os
import stat
import time
from typing import Any

from patchkit.durable import write_durably
from patchkit.errors import PatchkitError
from patchkit.foreign import read_own
from patchkit.state import FOLDER, SCHEMA, prepare
from patchkit.tree import sha256_file

# A file changed within the clock's granularity after it was hashed would keep its stamp (the "racy" problem
# of git's index); so a digest is only remembered once the stamp is this old.
_RACY_NS = 2_000_000_000


class StatCache:
    """sha256 by path, trusted while size, inode, mtime and ctime stand. ctime cannot be set by a program."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.path = os.path.join(root, FOLDER, "statcache.json")
        self.entries = self._load()
        self.changed = False

    def _load(self) -> dict[str, list[Any]]:
        try:
            data = json.loads(read_own(self.path) or b"")
        except (OSError, ValueError, RecursionError, PatchkitError):
            return {}
        if (
            not isinstance(data, dict)
            or data.get("schema") != SCHEMA
            or not isinstance(data.get("files"), dict)
        ):
            return {}  # a cache may always be thrown away
        return {path: entry for path, entry in data["files"].items() if _is_entry(entry)}

    def sha256(self, relative: str) -> str | None:
        """The digest (hex) of ``relative``, through a symlink; None if no regular file. Raises OSError."""
        path = os.path.join(self.root, relative)
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return None
        stamp = [info.st_size, info.st_ino, info.st_mtime_ns, info.st_ctime_ns]
        known = self.entries.get(relative)
        if known is not None and known[:-1] == stamp:
            return str(known[-1])
        found, _ = sha256_file(path)
        if time.time_ns() - max(info.st_mtime_ns, info.st_ctime_ns) > _RACY_NS:
            self.entries[relative] = [*stamp, found]
            self.changed = True
        return found

    def save(self) -> None:
        """Write the cache if ``.patchkit`` can be written; a check must also work on a read-only tree."""
        if not self.changed:
            return
        data = json.dumps({"schema": SCHEMA, "files": self.entries}).encode("ascii")
        try:
            prepare(self.root)
            write_durably(self.root, f"{FOLDER}/statcache.json", data)
        except (OSError, PatchkitError):
            return


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 5
        and all(type(one) is int for one in entry[:-1])
        and isinstance(entry[-1], str)
    )
