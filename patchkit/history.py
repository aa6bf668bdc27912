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

from patchkit import values
from patchkit.durable import fsync_folder, own_like_root, write_all, write_durably
from patchkit.foreign import open_own, read_own
from patchkit.state import HISTORY, check_ours

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


def check(entry: Any, where: str) -> dict[str, Any]:
    """Whether a record has what readers of it rely on. Raises ValueError."""
    values.keys(entry, where, {"schema", "time", "user", "host", "action", "patches"})
    if entry["schema"] != SCHEMA:
        raise values.bad(f"{where}.schema", entry["schema"], str(SCHEMA))
    values.seconds(entry["time"], f"{where}.time")
    for key in ("user", "host", "action"):
        values.text(entry[key], f"{where}.{key}")
    for key in ("id", "distribution", "release", "override", "previous"):
        values.optional(values.text, entry.get(key), f"{where}.{key}")
    values.optional(values.nanoseconds, entry.get("mtime_ns"), f"{where}.mtime_ns")
    for index, patch in enumerate(values.sequence(entry["patches"], f"{where}.patches")):
        _check_patch(patch, f"{where}.patches[{index}]")
    return values.mapping(entry, where)


def _check_patch(patch: Any, where: str) -> None:
    values.keys(patch, where, {"name", "action", "files"})
    values.name(patch["name"], f"{where}.name")
    values.text(patch["action"], f"{where}.action")
    for index, file in enumerate(values.sequence(patch["files"], f"{where}.files")):
        place = f"{where}.files[{index}]"
        values.path(values.mapping(file, place).get("path"), f"{place}.path")
        for side in ("before", "after"):
            values.optional(values.sha256, file.get(side), f"{place}.{side}")


def _read(line: bytes) -> dict[str, Any]:
    """The record that a line holds. Raises ValueError."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    try:
        return check(entry, "it")
    except ValueError as error:
        raise ValueError(f"not a history record ({error})") from None


class History:
    def __init__(self, root: str) -> None:
        self.root = root
        self.path = os.path.join(root, HISTORY)

    def lines(self) -> list[bytes]:
        """Complete lines; a torn last one (a crash while appending) is not there."""
        check_ours(self.root)
        data = read_own(self.path)
        return data.split(b"\n")[:-1] if data is not None else []

    def records(self) -> list[dict[str, Any]]:
        """Every record, oldest first; a line that is none gives one with ``damaged``, the line's text."""
        found = []
        for line in self.lines():
            try:
                found.append(_read(line))
            except ValueError:
                found.append({"schema": None, "damaged": line.decode("utf-8", "replace")})
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
        descriptor = open_own(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_nlink > 1:
                # Of a copy made by hard links (`cp -al`), where another tree's history would grow with ours.
                write_durably(self.root, HISTORY, b"".join(line + b"\n" for line in lines) + data)
                return
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
        return max((_field(line, "mtime_ns") or 0 for line in self.lines()), default=0)

    def verify(self) -> Break | None:
        previous: str | None = None
        for number, line in enumerate(self.lines(), 1):
            try:
                entry = _read(line)
            except ValueError as error:
                return Break(number, str(error))
            if entry.get("previous") != previous:
                return Break(number, "does not follow the line before: a line was changed, added or removed")
            previous = hashlib.sha256(line).hexdigest()
        return None


def _field(line: bytes, name: str) -> Any:
    try:
        return _read(line).get(name)
    except ValueError:
        return None
