"""What the guard answers: one verdict per process, with the evidence that it rests on."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Verdict(enum.Enum):
    """Whether a process has loaded one of the asked files."""

    LOADED = "loaded"
    NOT_LOADED = "not-loaded"
    CANNOT_TELL = "cannot-tell"


@dataclass(frozen=True)
class Gpu:
    """One accelerator that a process holds.

    ``name`` is what a person recognises: ``GPU 0`` from a vendor's list, or a device node
    (``/dev/nvidia0``). ``kind`` is ``compute``, ``graphics``, ``mps`` or ``node``. ``memory`` is in
    bytes, or None where the source does not say.
    """

    name: str
    kind: str
    uuid: str | None = None
    memory: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "uuid": self.uuid, "memory": self.memory}


@dataclass(frozen=True)
class Holder:
    """A process that has loaded a file of the tree, or that may have.

    ``pid`` is 0 for a process that this PID namespace cannot see (a GPU's list shows that it exists).
    ``started`` is in seconds since the epoch. ``files`` are the root-relative paths of the asked files
    that it has loaded. ``blocks`` says that the change must not go ahead while it lives.
    """

    pid: int
    user: str
    command: str
    started: float
    verdict: Verdict
    evidence: str
    files: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    blocks: bool = False
    hint: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "user": self.user,
            "command": self.command,
            "started": self.started,
            "verdict": self.verdict.value,
            "evidence": self.evidence,
            "files": list(self.files),
            "gpus": [gpu.to_json() for gpu in self.gpus],
            "blocks": self.blocks,
            "hint": self.hint,
        }


@dataclass(frozen=True)
class Findings:
    """The relevant processes, those that block first, and what could not be looked at."""

    holders: tuple[Holder, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def blockers(self) -> tuple[Holder, ...]:
        return tuple(holder for holder in self.holders if holder.blocks)

    def to_json(self) -> dict[str, Any]:
        return {"holders": [holder.to_json() for holder in self.holders], "notes": list(self.notes)}
