"""The write-ahead record of a running transaction: on disk before the first change, gone after the last."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from patchkit.state import FOLDER, JOURNAL, SCHEMA, StateFileError, dump_json, load_json, own_like_root
from patchkit.tree import Fingerprint

OPEN = "open"  # a crash now is undone
COMMITTED = "committed"  # a crash now is finished


@dataclass(frozen=True)
class Step:
    """One change of one path. ``verb``: put, link, remove, mkdir, rmdir; ``number`` names its undo file."""

    number: int
    verb: str
    path: str
    before: Fingerprint | None
    after: Fingerprint | None
    temp: str | None = None


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
        path = os.path.join(root, JOURNAL)
        data = load_json(path)
        if data is None:
            return None
        try:
            steps = tuple(_step_from_json(step) for step in data["steps"])
            return cls(data["id"], data["pid"], data["host"], data["phase"], steps, data["history"])
        except (KeyError, TypeError) as error:
            raise StateFileError(path, f"damaged ({type(error).__name__}: {error})") from None

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
    return Step(**{**data, **sides})


def write_durably(root: str, relative: str, data: bytes) -> None:
    """Replace a file of ``.patchkit``: temporary file, fsync, rename, fsync of the folder."""
    path = os.path.join(root, relative)
    temp = path + ".tmp"
    try:
        descriptor = os.open(
            temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
        )
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        own_like_root(root, temp)
        os.rename(temp, path)
    except BaseException:
        unlink_if_there(temp)
        raise
    fsync_folder(os.path.dirname(path))


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
