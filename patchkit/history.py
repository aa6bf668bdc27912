"""``history.jsonl``: what was done to the tree, by whom, in a chain of hashes that shows a missing or
changed line; ``history.head`` says where it ends.
"""

from __future__ import annotations

import contextlib
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
from patchkit.history_head import HEAD, UNPROVEN, Head
from patchkit.state import HISTORY, StateFileError, check_ours

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
    values.optional(values.sha256, patch.get("diff_sha256"), f"{where}.diff_sha256")
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

    def announce(self, entry: dict[str, Any]) -> None:
        """Make ``append(entry)`` need no more than a line's room: what can fail for want of it fails now."""
        self._announced(entry, self._last())

    def append(self, entry: dict[str, Any]) -> None:
        """Append ``entry`` (with an ``id``) once: a second call with the last line's id changes nothing.

        A history that does not end as its head says is gone on with, but the new line shows it for good: it
        follows the line that should be there.
        """
        last = self._last()
        if not last or _field(last, "id") != entry["id"]:
            last = self._announced(entry, last)
            self._write(last)
        head, _ = self._head(last)
        if head is not None and head.next == _digest(last):
            # A full disk is no failure: until the next line, the line before may be the last one, too.
            with contextlib.suppress(OSError):
                Head(head.next).write(self.root)

    def _last(self) -> bytes:
        lines = self.lines()
        return lines[-1] if lines else b""

    def _announced(self, entry: dict[str, Any], last: bytes) -> bytes:
        """The line of ``entry`` after the line ``last``, with its coming written in the head."""
        head, doubt = self._head(last)
        if head is not None and head.next is not None:
            line = _line(entry, head.sha256)
            if _digest(line) == head.next:
                return line
        if doubt is not None:
            previous: str | None = UNPROVEN
        else:
            previous = _digest(last) if head is None or head.allows(_digest(last)) else head.sha256
        line = _line(entry, previous)
        Head(previous, _digest(line)).write(self.root)
        return line

    def _head(self, last: bytes) -> tuple[Head | None, str | None]:
        """The recorded head, or None and, where there should be one, what is wrong with it."""
        try:
            head = Head.load(self.root)
        except StateFileError as error:
            return None, error.message
        missing = head is None and bool(_field(last, "head"))
        return head, f"{os.path.join(self.root, HEAD)} is missing" if missing else None

    def _write(self, line: bytes) -> None:
        lines = self.lines()
        new = not os.path.exists(self.path)
        descriptor = open_own(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_nlink > 1:
                # Of a copy made by hard links (`cp -al`), where another tree's history would grow with ours.
                write_durably(self.root, HISTORY, b"".join(one + b"\n" for one in [*lines, line]))
                return
            # Over a torn last line, if there is one: it was never a record.
            position = sum(len(one) + 1 for one in lines)
            os.ftruncate(descriptor, position)
            os.lseek(descriptor, position, os.SEEK_SET)
            write_all(descriptor, line + b"\n")
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
        """The first line that is not as it was written; None if all are, and none is missing at the end."""
        while True:
            before = self._head(b"")
            lines = self.lines()
            if self._head(b"") == before:  # or else another process has just appended
                break
        previous: str | None = None
        digests: list[str | None] = [None]
        for number, line in enumerate(lines, 1):
            try:
                entry = _read(line)
            except ValueError as error:
                return Break(number, str(error))
            if "previous" not in entry:
                return Break(number, "not a history record (it lacks 'previous')")
            if entry["previous"] == UNPROVEN:
                return Break(
                    number, "history.head was lost or damaged before it: the line before is not proven"
                )
            if entry["previous"] != previous:
                return Break(number, "does not follow the line before: a line was changed, added or removed")
            previous = _digest(line)
            digests.append(previous)
        head, doubt = self._head(lines[-1] if lines else b"")
        if doubt is not None:
            return Break(max(len(lines), 1), f"it may be changed, or not the last: {doubt}")
        if head is None or head.allows(previous):
            return None
        for known in (head.next or UNPROVEN, head.sha256):
            if known in digests:
                return Break(digests.index(known) + 1, "was added after the last line that patchkit wrote")
        return Break(max(len(lines), 1), "is not the last line: it was changed, or others after it removed")


def _line(entry: dict[str, Any], previous: str | None) -> bytes:
    return json.dumps({**entry, "previous": previous, "head": True}, sort_keys=True).encode("ascii")


def _digest(line: bytes) -> str | None:
    return hashlib.sha256(line).hexdigest() if line else None


def _field(line: bytes, name: str) -> Any:
    try:
        return _read(line).get(name)
    except ValueError:
        return None
