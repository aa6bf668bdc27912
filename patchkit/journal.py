"""The write-ahead record of a running transaction: on disk before the first change, gone after the last."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import asdict, dataclass, field, replace
from typing import Any

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
            steps = tuple(_step_from_json(step) for step in data["steps"])
            journal = cls(data["id"], data["pid"], data["host"], data["phase"], steps, data["history"])
            journal.validate()
            return journal
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateFileError(path, f"damaged ({type(error).__name__}: {error})") from None

    def validate(self) -> None:
        """Raise ValueError for what no writer of ours writes; the paths are checked where they are used."""
        if re.fullmatch(r"[0-9a-f]{32}", self.id) is None:
            raise ValueError("the id is not 32 hex digits")
        if self.phase not in (OPEN, COMMITTED):
            raise ValueError(f"no such phase: {self.phase!r}")
        str(self.history["distribution"]), int(self.pid)
        for step in self.steps:
            os.path.split(step.path), int(step.number)
            if step.verb not in _VERBS:
                raise ValueError(f"no such verb: {step.verb!r}")
            if step.verb in FILE_VERBS and not isinstance(step.temp, str):
                raise ValueError(f"no temporary name for {step.path!r}")

    @property
    def undo(self) -> str:
        """The folder (relative) of second names. It bears the id, so that an older one is never ours."""
        return f"{UNDO}.{self.id}"

    @property
    def running(self) -> bool:
        """Whether the process that wrote it seems to be still at work, rather than dead."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

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


def _step_from_json(data: dict[str, Any]) -> Step:
    sides = {key: Fingerprint(**data[key]) if data[key] else None for key in ("before", "after")}
    folder = tuple(data["folder"]) if data["folder"] else None
    return Step(**{**data, **sides, "folder": folder})
