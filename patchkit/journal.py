"""The write-ahead record of a running transaction: on disk before the first change, gone after the last."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from patchkit import history, values
from patchkit.durable import fsync_folder, write_durably
from patchkit.state import FOLDER, JOURNAL, SCHEMA, UNDO, StateFileError, check_ours, dump_json, load_json
from patchkit.tree import Fingerprint

OPEN = "open"  # a crash now is undone
COMMITTED = "committed"  # a crash now is finished
FILE_VERBS = ("put", "link", "remove")
_VERBS = (*FILE_VERBS, "mkdir", "rmdir", "refresh")


@dataclass(frozen=True)
class Step:
    """One change of one path. ``verb``: put, link, remove, mkdir, rmdir, refresh (its bytecode goes);
    ``number`` names its second name in the undo folder, ``temp`` is where new content waits, ``folder`` the
    mode, uid and gid of a folder to remove.
    """

    number: int
    verb: str
    path: str
    before: Fingerprint | None
    after: Fingerprint | None
    temp: str | None = None
    folder: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Journal:
    id: str
    pid: int
    host: str
    phase: str
    steps: tuple[Step, ...]
    history: dict[str, Any] = field(default_factory=dict)

    def write(self, root: str) -> None:
        """Write atomically and durably."""
        data = {**asdict(self), "schema": SCHEMA, "steps": [_step_to_json(step) for step in self.steps]}
        write_durably(root, JOURNAL, dump_json(data))

    def committed(self, root: str) -> Journal:
        """The commit point: once this is on disk the transaction is finished, never undone."""
        done = replace(self, phase=COMMITTED)
        done.write(root)
        return done

    @classmethod
    def load(cls, root: str) -> Journal | None:
        check_ours(root)
        path = os.path.join(root, JOURNAL)
        data = load_json(path)
        if data is None:
            return None
        try:
            return cls._from_json(data)
        except (ValueError, RecursionError) as error:
            raise StateFileError(path, f"damaged ({error})") from None

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> Journal:
        """Refuses what no writer of ours writes, since all of it is done again or undone by these words."""
        values.keys(data, "it", {"id", "pid", "host", "phase", "steps", "history"})
        if not isinstance(data["id"], str) or re.fullmatch(r"[0-9a-f]{32}", data["id"]) is None:
            raise values.bad("id", data["id"], "32 hex digits")
        if data["phase"] not in (OPEN, COMMITTED):
            raise values.bad("phase", data["phase"], "a phase")
        listed = values.sequence(data["steps"], "steps")
        steps = tuple(_step_from_json(step, f"steps[{index}]") for index, step in enumerate(listed))
        if len({step.number for step in steps}) != len(steps):
            raise ValueError("steps has a number twice")
        history.check(data["history"], "history")
        values.name(data["history"].get("distribution"), "history.distribution")
        if data["history"].get("id") != data["id"]:
            raise ValueError("history.id is not that of the transaction")
        pid, host = values.process(data["pid"], "pid"), values.text(data["host"], "host")
        return cls(data["id"], pid, host, data["phase"], steps, data["history"])

    @property
    def undo(self) -> str:
        """The folder (relative) of second names. It bears the id, so that an older one is never ours."""
        return f"{UNDO}.{self.id}"

    @staticmethod
    def remove(root: str) -> None:
        os.unlink(os.path.join(root, JOURNAL))
        fsync_folder(os.path.join(root, FOLDER))


def _step_to_json(step: Step) -> dict[str, Any]:
    return {
        **asdict(step),
        "before": step.before.to_json() if step.before else None,
        "after": step.after.to_json() if step.after else None,
    }


def _step_from_json(data: Any, where: str) -> Step:
    keys = {"number", "verb", "path", "before", "after", "temp", "folder"}
    values.keys(data, where, keys, set())
    if data["verb"] not in _VERBS:
        raise values.bad(f"{where}.verb", data["verb"], "a verb")
    path = values.path(data["path"], f"{where}.path")
    temp = values.optional(values.path, data["temp"], f"{where}.temp")
    if data["verb"] in FILE_VERBS and (temp is None or not _is_temporary(temp, path)):
        raise values.bad(f"{where}.temp", temp, "a temporary name beside its path")
    return Step(
        values.whole(data["number"], f"{where}.number"),
        data["verb"],
        path,
        values.optional(_fingerprint, data["before"], f"{where}.before"),
        values.optional(_fingerprint, data["after"], f"{where}.after"),
        temp if data["verb"] in FILE_VERBS else None,
        values.optional(_folder, data["folder"], f"{where}.folder"),
    )


def _is_temporary(temp: str, path: str) -> bool:
    """Whether it is a name that a transaction gives, for what has it is deleted."""
    folder, name = os.path.split(temp)
    return folder == os.path.dirname(path) and name.startswith(".") and name.endswith(".tmp")


def _fingerprint(data: Any, where: str) -> Fingerprint:
    entry = values.mapping(data, where)
    kind = entry.get("kind")
    if kind == "file":
        values.keys(entry, where, {"kind", "sha256", "size"}, set())
        digest, size = values.sha256(entry["sha256"], where), values.whole(entry["size"], f"{where}.size")
        return Fingerprint("file", digest, size)
    if kind == "link":
        values.keys(entry, where, {"kind", "target"}, set())
        return Fingerprint("link", target=values.link(entry["target"], f"{where}.target"))
    if kind not in ("dir", "other"):
        raise values.bad(f"{where}.kind", kind, "a kind of file")
    values.keys(entry, where, {"kind"}, set())
    return Fingerprint(kind)


def _folder(data: Any, where: str) -> tuple[int, int, int]:
    listed = values.sequence(data, where)
    if len(listed) != 3:
        raise values.bad(where, data, "a mode and two owners")
    return values.mode(listed[0], where), values.owner(listed[1], where), values.owner(listed[2], where)
