"""Which version of a file each process runs: the one that was in place when it started, or an older one.

A process keeps what it imported. One that started before the last change of a file may run the text
from before it: the server that was never restarted, which people debug for hours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.guard.inspection import inspect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from patchkit.guard.findings import Holder

PRISTINE = "pristine"
OLDER = "older than the last change"
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
        tuple(
            Row(holder, {path: version(holder.started, changes.get(path, ())) for path in holder.files})
            for holder in findings.holders
        ),
        findings.notes,
    )


def version(started: float, changes: Sequence[tuple[float, str]]) -> str:
    """What a process that started then runs of a file with these ``changes``."""
    if not changes:
        return PRISTINE
    last, label = changes[-1]
    return label if started + _TICK >= last else OLDER
