"""``<root>/.patchkit/``: which patches are applied, in which order, and what they replaced."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from patchkit import foreign, values
from patchkit.durable import fsync_folder, own_like_root, write_all
from patchkit.errors import INTERRUPTED, REFUSED, PatchkitError
from patchkit.manifest import FilePin, Manifest, ManifestError

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA = 1
FOLDER = ".patchkit"
STATE = f"{FOLDER}/state.json"
JOURNAL = f"{FOLDER}/journal.json"
UNDO = f"{FOLDER}/undo"  # the folder name is this, a dot and the transaction's id
HISTORY = f"{FOLDER}/history.jsonl"
RESCUED = f"{FOLDER}/rescued"
APPLIED = f"{FOLDER}/applied"


class StateFileError(PatchkitError):
    """A file of ``.patchkit`` that this version cannot read: another schema, or damaged."""

    code = "bad-state"
    exit_code = INTERRUPTED
    way_out = "'patchkit recover --force' sets it aside, and proves what it can of the rest"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}", path=path, hint=self.way_out)


class UnknownSchemaError(StateFileError):
    """A state file of another schema."""

    code = "unknown-schema"
    exit_code = REFUSED
    way_out = f"use the patchkit that wrote it, or {StateFileError.way_out}"


def load_json(path: str) -> dict[str, Any] | None:
    """The object at ``path`` with its schema checked; None where there is none."""
    try:
        written = foreign.read_own(path)
        data = json.loads(written) if written is not None else None
    except IsADirectoryError:
        raise StateFileError(path, "is a folder") from None
    except (ValueError, RecursionError) as error:
        raise StateFileError(path, f"not valid JSON: {error}") from None
    if written is None:
        return None
    if not isinstance(data, dict):
        raise StateFileError(path, "not a JSON object")
    if data.get("schema") != SCHEMA:
        found = values.show(data.get("schema"))
        raise UnknownSchemaError(path, f"schema is {found}; this patchkit reads schema {SCHEMA}")
    return data


def dump_json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode("ascii")


def prepare(root: str) -> None:
    """Make ``.patchkit`` with its ``.gitignore``, owned as the root is: sudo must not lock its user out."""
    folder = os.path.join(root, FOLDER)
    try:
        os.mkdir(folder, 0o755)
    except FileExistsError:
        check_ours(root)
    else:
        own_like_root(root, folder)
        fsync_folder(root)
    ignore = os.path.join(folder, ".gitignore")
    if not os.path.exists(ignore) or os.path.getsize(ignore) == 0:
        # In place, because this comes before the lock: whoever else does it writes the same.
        descriptor = foreign.open_own(ignore, os.O_WRONLY | os.O_CREAT)
        try:
            write_all(descriptor, b"*\n")
        finally:
            os.close(descriptor)
        own_like_root(root, ignore)


def check_ours(root: str) -> None:
    """Raise ForeignStateError unless ``.patchkit`` is one that this user may believe, or none."""
    foreign.check(os.path.join(root, FOLDER), root)


def backup_name(path: str, patch: str) -> str:
    return f"{path}.bak_{patch}"


@dataclass(frozen=True)
class Original:
    """What the replaced file had beside its bytes. ``link`` is where it led if it was a symlink; then
    ``mtime_ns`` is the time of the file there, ``link_mtime_ns`` that of the link itself.
    """

    mode: int
    mtime_ns: int
    link: str | None = None
    link_mtime_ns: int | None = None

    @classmethod
    def from_json(cls, data: Any, where: str) -> Original:
        values.keys(data, where, {"mode", "mtime_ns"}, {"link", "link_mtime_ns"})
        return cls(
            values.mode(data["mode"], f"{where}.mode"),
            values.nanoseconds(data["mtime_ns"], f"{where}.mtime_ns"),
            values.optional(values.link, data.get("link"), f"{where}.link"),
            values.optional(values.nanoseconds, data.get("link_mtime_ns"), f"{where}.link_mtime_ns"),
        )


@dataclass(frozen=True)
class Applied:
    """One patch of the stack, with all that is needed to take it off without its ``patches/`` folder."""

    manifest: Manifest
    release: str | None
    applied_at: float
    mtime_ns: int
    originals: dict[str, Original] = field(default_factory=dict, hash=False)
    folders: tuple[str, ...] = ()
    override: str | None = None

    @property
    def patch(self) -> str:
        return self.manifest.patch

    @property
    def distribution(self) -> str:
        return self.manifest.distribution

    @property
    def diff_path(self) -> str:
        return f"{APPLIED}/{self.patch}.patch"

    def touched(self) -> set[str]:
        return touched(self.manifest.files)

    def backups(self) -> dict[str, FilePin]:
        """Backup path -> the pinned file whose earlier bytes it holds."""
        return {
            backup_name(pin.source or pin.path, self.patch): pin
            for pin in self.manifest.files
            if pin.before is not None
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "manifest": json.loads(self.manifest.to_json()),
            "release": self.release,
            "applied_at": self.applied_at,
            "mtime_ns": self.mtime_ns,
            "originals": {path: vars(original) for path, original in self.originals.items()},
            "folders": list(self.folders),
            "override": self.override,
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Applied:
        """Read and validate what stands at ``where`` in the file; raises ValueError or ManifestError."""
        keys = {"manifest", "release", "applied_at", "mtime_ns", "originals", "folders"}
        values.keys(data, where, keys, {"override"})
        originals = values.mapping(data["originals"], f"{where}.originals")
        folders = values.sequence(data["folders"], f"{where}.folders")
        return cls(
            manifest=Manifest.from_json(json.dumps(data["manifest"]).encode(), name=f"{where}.manifest"),
            release=values.optional(values.text, data["release"], f"{where}.release"),
            applied_at=values.seconds(data["applied_at"], f"{where}.applied_at"),
            mtime_ns=values.nanoseconds(data["mtime_ns"], f"{where}.mtime_ns"),
            originals={
                values.path(name, f"{where}.originals"): Original.from_json(one, f"{where}.originals[{name}]")
                for name, one in originals.items()
            },
            folders=tuple(values.path(name, f"{where}.folders") for name in folders),
            override=values.optional(values.text, data.get("override"), f"{where}.override"),
        )


def touched(pins: Iterable[FilePin]) -> set[str]:
    """Every root-relative path that the pins write or remove."""
    return {path for pin in pins for path in (pin.path, pin.source) if path is not None}


@dataclass(frozen=True)
class Kept:
    """A backup that ``restore --keep-backup`` left in place."""

    path: str
    patch: str
    sha256: str

    @classmethod
    def from_json(cls, data: Any, where: str) -> Kept:
        values.keys(data, where, {"path", "patch", "sha256"}, set())
        return cls(
            values.path(data["path"], f"{where}.path"),
            values.name(data["patch"], f"{where}.patch"),
            values.sha256(data["sha256"], f"{where}.sha256"),
        )


@dataclass(frozen=True)
class State:
    """The stack of one root, bottom first; ``kept`` are backups left on purpose."""

    stack: tuple[Applied, ...] = ()
    kept: tuple[Kept, ...] = ()

    @classmethod
    def load(cls, root: str) -> State:
        check_ours(root)
        path = os.path.join(root, STATE)
        data = load_json(path)
        if data is None:
            return cls()
        try:
            return cls._from_json(data)
        except (ValueError, RecursionError) as error:
            raise StateFileError(path, f"damaged ({error})") from None
        except ManifestError as error:
            raise StateFileError(path, f"damaged ({error.message})") from None

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> State:
        values.keys(data, "it", {"stack", "kept"})
        stack = values.sequence(data["stack"], "stack")
        kept = values.sequence(data["kept"], "kept")
        found = tuple(Applied.from_json(one, f"stack[{index}]") for index, one in enumerate(stack))
        if len({applied.patch for applied in found}) != len(found):
            raise ValueError("stack has a patch twice")
        return cls(found, tuple(Kept.from_json(one, f"kept[{index}]") for index, one in enumerate(kept)))

    def dump(self) -> bytes | None:
        """The bytes of ``state.json``; None when there is nothing to say and the file goes."""
        if not self.stack and not self.kept:
            return None
        return dump_json(
            {
                "schema": SCHEMA,
                "stack": [applied.to_json() for applied in self.stack],
                "kept": [vars(kept) for kept in self.kept],
            }
        )

    def find(self, patch: str) -> Applied | None:
        return next((applied for applied in self.stack if applied.patch == patch), None)

    def above(self, applied: Applied) -> list[Applied]:
        """The patches over ``applied`` that touch one of its files."""
        index = self.stack.index(applied)
        return [other for other in self.stack[index + 1 :] if other.touched() & applied.touched()]

    def top(self, path: str) -> tuple[Applied, FilePin] | None:
        """The topmost patch that touches ``path``, with its pin."""
        for applied in reversed(self.stack):
            for pin in applied.manifest.files:
                if path in (pin.path, pin.source):
                    return applied, pin
        return None

    def push(self, applied: Applied) -> State:
        return replace(self, stack=(*self.stack, applied))

    def drop(self, applied: Applied) -> State:
        return replace(self, stack=tuple(other for other in self.stack if other.patch != applied.patch))


BACKUP = re.compile(r"\.bak_[A-Za-z0-9][A-Za-z0-9._-]*$")
