"""Which version of a file each process runs: the one that was in place when it started, or an older one.

A process keeps what it imported. One that started before the last change of a file may run the text
from before it: the server that was never restarted, which people debug for hours. A fork keeps what its
parent imported, so it is as old as the first of its line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.guard import procfs
from patchkit.guard.inspection import inspect
from patchkit.guard.memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from patchkit.guard.findings import Holder

PRISTINE = "pristine"
OLDER = "older than the last change"
UNKNOWN = "unknown"  # a fork of a process that has ended
_AT_RANDOM = 25  # linux/auxvec.h: where the 16 random bytes lie that every exec gives a program
# Start times are cut to clock ticks: a process that was started right after a change must not look old.
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """One process and, for each asked file that it has loaded, the version that it runs."""

    holder: Holder
    versions: Mapping[str, str]

    @property
    def outdated(self) -> bool:
        return OLDER in self.versions.values()

    def to_json(self) -> dict[str, Any]:
        return {**self.holder.to_json(), "versions": dict(self.versions), "outdated": self.outdated}


@dataclass(frozen=True)
class Census:
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"processes": [row.to_json() for row in self.rows], "notes": list(self.notes)}


def census(
    root: str,
    files: Iterable[str],
    *,
    prefix: str | None = None,
    changes: Mapping[str, Sequence[tuple[float, str]]],
    thorough: bool = False,
    exclude: Iterable[int] = (),
) -> Census:
    """Look at every process and say what it runs.

    ``changes`` gives, for each root-relative path, when (seconds since the epoch) it became what (a
    label such as ``hsdump`` or ``pristine``), oldest first; a path that is not there never changed.
    """
    findings = inspect(root, files, prefix=prefix, thorough=thorough, exclude=exclude)
    return Census(
        tuple(Row(holder, _versions(holder, changes)) for holder in findings.holders),
        findings.notes,
    )


def _versions(holder: Holder, changes: Mapping[str, Sequence[tuple[float, str]]]) -> dict[str, str]:
    if not holder.files:
        return {}
    started, known = _line(holder.pid, holder.started)
    return {path: version(started, changes.get(path, ()), known=known) for path in holder.files}


def version(started: float, changes: Sequence[tuple[float, str]], *, known: bool = True) -> str:
    """What a process that started then runs of a file with these ``changes``.

    Without ``known`` its line began at an unknown time before ``started``.
    """
    if not changes:
        return PRISTINE
    last, label = changes[-1]
    if started + _TICK < last:
        return OLDER
    return label if known else UNKNOWN


def _line(pid: int, started: float) -> tuple[float, bool]:
    """When the first process of the line of forks that ``pid`` ends started, and whether that is known.

    It is not where a parent has ended: init has adopted the child.
    """
    own = procfs.stat(pid)
    image = _image(pid)
    while own is not None and own.forked:
        parent = procfs.stat(own.parent)
        if parent is None or image is None or _image(own.parent) != image:
            return started, False
        pid, own, started = own.parent, parent, min(started, parent.started)
    return started, True


def _image(pid: int) -> bytes | None:
    """What tells one exec from all others, and is the same in every fork of it."""
    try:
        address = procfs.auxiliary(pid, _AT_RANDOM)
        return ProcessMemory(pid).read(address, 16) if address else None
    except OSError:
        return None
