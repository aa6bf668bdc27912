"""ps: who uses the tree, on which GPU, and which version of its files each process runs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from patchkit.errors import short
from patchkit.guard import Verdict, census
from patchkit.guard.census import OLDER, PRISTINE, UNKNOWN
from patchkit.history import History
from patchkit.report import Result
from patchkit.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from patchkit.guard import Row
    from patchkit.target import Target
    from patchkit.workspace import Workspace

_OLD = "OLD"
_WHY_OLD = "it, or what it was forked from, started before the file was changed, and runs what was there then"
_WHY_UNKNOWN = "its parent, which may have loaded the file long before, has ended"
_MOST = 2  # file names in one cell
_WIDTH = 90  # of a command; --json has more of it
_HEADER = ("PID", "USER", "STARTED", "GPU", "MEMORY", "RUNS", "COMMAND")


def ps(workspace: Workspace, name: str | None = None, *, thorough: bool = False) -> Result:
    """One row a process of the environment, or that holds files of the patch ``name``."""
    patches = workspace.catalog.expand([name]) if name is not None else None
    targets = [workspace.target_of(patches)] if patches else workspace.targets()
    names = {patch.name for patch in patches} if patches else None
    lines: list[str | tuple[str, str]] = []
    details: list[str] = []
    data = []
    for target in targets:
        changes = timelines(History(target.root).records())
        files = _files(workspace, target, names)
        found = census(target.root, files, prefix=target.prefix, changes=changes, thorough=thorough)
        data.append(
            {"distribution": target.distribution, "release": target.release, "root": target.root}
            | found.to_json()
        )
        lines.append(("title", f"{target.label} in {target.root}"))
        lines += _table(found.rows, target.prefix) if found.rows else ["  no process uses it"]
        if any(row.outdated for row in found.rows):
            lines.append(("warn", f"  {_OLD}: {_WHY_OLD}"))
        if any(UNKNOWN in row.versions.values() for row in found.rows):
            lines.append(("warn", f"  {UNKNOWN}: {_WHY_UNKNOWN}"))
        lines += [("dim", f"  note: {note}") for note in found.notes]
        details += [f"  {row.holder.pid}: {row.holder.evidence}" for row in found.rows]
    return Result({"targets": data}, lines, details)


def timelines(records: Iterable[dict[str, Any]]) -> dict[str, list[tuple[float, str]]]:
    """From the history: for each path, when it became which version, oldest first.

    A version is named by the patches on the file, bottom first (``a+b``), or ``pristine``.
    """
    stacks: dict[str, list[str]] = {}
    changes: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        when = record.get("time")
        if not isinstance(when, (int, float)):
            continue  # a damaged line
        for patch in record.get("patches", ()):
            for file in patch.get("files", ()):
                stack = stacks.setdefault(file["path"], [])
                if patch["name"] in stack:
                    stack.remove(patch["name"])
                if patch["action"] != "restore":
                    stack.append(patch["name"])
                if patch["action"] != "adopt":  # that writes down what somebody else did, some time ago
                    changes.setdefault(file["path"], []).append((when, "+".join(stack) or PRISTINE))
    return changes


def _files(workspace: Workspace, target: Target, names: set[str] | None) -> list[str]:
    """Every file of ``target`` that a patch (of those ``names``) changes, or has changed."""
    files: set[str] = set()
    for applied in State.load(target.root).stack:
        if applied.distribution == target.distribution and (names is None or applied.patch in names):
            files |= applied.touched()
    for name in workspace.catalog.names() if names is None else sorted(names):
        files |= _files_of(workspace, target, name)
    for path in timelines(History(target.root).records()) if names is None else ():
        if target.owns(path):
            files.add(path)
    return sorted(files)


def _files_of(workspace: Workspace, target: Target, name: str) -> set[str]:
    from patchkit.errors import PatchkitError
    from patchkit.state import touched

    try:
        patch = workspace.catalog[name]
        if patch.distribution != target.distribution:
            return set()
        return {path for variant in patch.variants for path in touched(variant.manifest.files)}
    except PatchkitError:
        return set()  # a broken patch elsewhere does not stop this command


def _table(rows: Sequence[Row], prefix: str | None) -> list[str | tuple[str, str]]:
    cells = [_HEADER, *(_cells(row, prefix) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER) - 1)]
    texts = [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
        for line in cells
    ]
    return [("dim", texts[0]), *((_style(row), text) for row, text in zip(rows, texts[1:], strict=True))]


def _style(row: Row) -> str:
    if row.outdated or row.holder.verdict is Verdict.CANNOT_TELL:
        return "warn"
    return "title" if row.holder.blocks else ""


def _cells(row: Row, prefix: str | None) -> tuple[str, ...]:
    holder = row.holder
    memory = sum(gpu.memory or 0 for gpu in holder.gpus)
    return (
        str(holder.pid or "?"),
        holder.user,
        time.strftime("%m-%d %H:%M:%S", time.localtime(holder.started)) if holder.started else "?",
        ",".join(gpu.name.removeprefix("GPU ").removeprefix("/dev/") for gpu in holder.gpus) or "-",
        f"{memory >> 20} MiB" if memory else "-",
        _runs(row),
        short(holder.command.removeprefix(f"{prefix}/bin/") if prefix else holder.command, _WIDTH),
    )


def _runs(row: Row) -> str:
    if row.holder.verdict is Verdict.CANNOT_TELL:
        return "cannot tell"
    if not row.versions:
        return "not loaded"
    named: dict[str, list[str]] = {}
    for path, version in row.versions.items():
        named.setdefault(_OLD if version == OLDER else version, []).append(os.path.basename(path))
    # Untouched files of other patches are only counted where another version is what matters.
    pristine = named.pop(PRISTINE, [])
    texts = [f"{_list(names)}: {version}" for version, names in named.items()]
    if pristine:
        texts.append(f"{len(pristine)} {PRISTINE}" if texts else f"{_list(pristine)}: {PRISTINE}")
    return ", ".join(texts)


def _list(names: list[str]) -> str:
    more = f" +{len(names) - _MOST}" if len(names) > _MOST else ""
    return " ".join(names[:_MOST]) + more
