"""``history.jsonl``: what was done to the tree, by whom, in a chain of hashes that shows a missing or
changed line.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from patchkit.durable import fsync_folder, own_like_root, write_all
from patchkit.state import HISTORY

SCHEMA = 1


@dataclass(frozen=True)
class Break:
    """The first line (1-based) whose chain does not hold, and why."""

    line: int
    reason: str


def record(action: str, patches: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A record without its place in the chain; ``patches`` has name and digests before and after."""
    who = {"user": user_name(), "host": socket.gethostname()}
    return {"schema": SCHEMA, "time": time.time(), **who, "action": action, "patches": patches, **more}


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a container's uid without a passwd entry


class History:
    def __init__(self, root: str) -> None:
        self.root = root
        self.path = os.path.join(root, HISTORY)

    def lines(self) -> list[bytes]:
        """Complete lines; a torn last one (a crash while appending) is not there."""
        try:
            with open(self.path, "rb") as file:
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        return data.split(b"\n")[:-1]

    def records(self) -> list[dict[str, Any]]:
        found = []
        for line in self.lines():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"schema": None, "damaged": line.decode("utf-8", "replace")}
            found.append(entry if isinstance(entry, dict) else {"schema": None, "damaged": repr(entry)})
        return found

    def append(self, entry: dict[str, Any]) -> None:
        """Append ``entry`` (with an ``id``) once: a second call with the last line's id changes nothing."""
        lines = self.lines()
        last = lines[-1] if lines else b""
        if last and _field(last, "id") == entry["id"]:
            return
        chained = {**entry, "previous": hashlib.sha256(last).hexdigest() if last else None}
        data = json.dumps(chained, sort_keys=True).encode("ascii") + b"\n"
        new = not os.path.exists(self.path)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Over a torn last line, if there is one: it was never a record.
            position = sum(len(line) + 1 for line in lines)
            os.ftruncate(descriptor, position)
            os.lseek(descriptor, position, os.SEEK_SET)
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            own_like_root(self.root, self.path)
            fsync_folder(os.path.dirname(self.path))

    def last_mtime_ns(self) -> int:
        """The newest modification time that any change gave a file, in nanoseconds; 0 if none."""
        return max((int(_field(line, "mtime_ns") or 0) for line in self.lines()), default=0)

    def verify(self) -> Break | None:
        previous: str | None = None
        for number, line in enumerate(self.lines(), 1):
            try:
                entry = json.loads(line)
            except ValueError:
                return Break(number, "not JSON")
            if not isinstance(entry, dict) or "previous" not in entry:
                return Break(number, "not a history record")
            if entry["previous"] != previous:
                return Break(number, "does not follow the line before: a line was changed, added or removed")
            previous = hashlib.sha256(line).hexdigest()
        return None


def _field(line: bytes, name: str) -> Any:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry.get(name) if isinstance(entry, dict) else None
