"""status and log: what is applied, since when, and how the tree came to be as it is."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from patchkit import lease, salvage
from patchkit.errors import NO
from patchkit.history import History
from patchkit.journal import Journal
from patchkit.lock import holder, is_locked
from patchkit.overlay import Overlay
from patchkit.report import Result
from patchkit.selection import Reader, choose, is_before
from patchkit.state import State
from patchkit.takeover import find_takeover
from patchkit.tree import Tree, is_there

if TYPE_CHECKING:
    from patchkit.manifest import FilePin
    from patchkit.state import Applied
    from patchkit.takeover import Takeover
    from patchkit.target import Target
    from patchkit.workspace import Workspace

PRISTINE, PATCHED, DRIFTED, MISSING = "pristine", "patched", "drifted", "missing"


def status(workspace: Workspace) -> Result:
    """Every patch of each stack with the state of each of its files."""
    lines: list[str | tuple[str, str]] = []
    targets = []
    for target in workspace.targets():
        state = State.load(target.root)
        journal = Journal.load(target.root)
        running = journal is not None and is_locked(target.root)
        own = [applied for applied in state.stack if applied.distribution == target.distribution]
        by_hand = _by_hand(workspace, target, state)
        entry: dict[str, Any] = {
            "distribution": target.distribution,
            "release": target.release,
            "root": target.root,
            "editable": target.editable,
            "interrupted": journal is not None and not running,
            "stack": [],
            "by_hand": by_hand,
            "kept_backups": [vars(kept) for kept in state.kept],
            "sessions": [],
            "overrides": _overrides(target),
        }
        lines.append(("title", f"{target.label} in {target.root}"))
        if journal is not None:
            action = journal.history.get("action", "change")
            lines.append(
                ("warn", f"  {action} in progress, by {holder(target.root)}")
                if running
                else ("bad", f"  {action} was interrupted; 'patchkit recover' finishes or undoes it")
            )
        if journal is None and (salvage.second_names(target.root) or salvage.lost_stack(target.root)):
            lines.append(
                ("bad", "  a journal or state is lost; 'patchkit recover --force' proves what it can")
            )
        _add_sessions(target, entry, lines)
        for applied in own:
            takeover = find_takeover(target, state, applied, Overlay(target.root, 0).read)
            files = [_file(target, state, applied, pin, takeover) for pin in applied.manifest.files]
            entry["stack"].append(_applied_json(applied, files, takeover))
            lines += _applied_lines(target, applied, files, takeover)
        lines += [
            ("warn", f"  {name}: applied by hand; 'patchkit apply {name}' adopts it") for name in by_hand
        ]
        lines += [f"  kept backup {kept.path}" for kept in state.kept]
        if not own and not by_hand and journal is None:
            lines.append("  no patch is applied")
        lines += _override_lines(entry["overrides"], own)
        targets.append(entry)
    return Result({"targets": targets}, lines)


def _add_sessions(target: Target, entry: dict[str, Any], lines: list[str | tuple[str, str]]) -> None:
    for one in lease.live(target.root, target.distribution):
        entry["sessions"].append({**one.to_json(), "alive": True})
        lines.append(("warn", f"  in use by {one.describe()}"))
    for one in lease.abandoned(target.root):
        if one.distribution == target.distribution:
            entry["sessions"].append({**one.to_json(), "alive": False})
            lines.append(("bad", f"  abandoned {one.describe()}; 'patchkit recover' finishes it"))


def _overrides(target: Target) -> list[dict[str, Any]]:
    """Every change of ``target`` for which the guard was overridden, oldest first."""
    return [
        {key: record.get(key) for key in ("time", "user", "host", "override")} | {"change": _what(record)}
        for record in History(target.root).records()
        if record.get("override") and record.get("distribution") == target.distribution
    ]


def _override_lines(overrides: list[dict[str, Any]], own: list[Applied]) -> list[str | tuple[str, str]]:
    """The last override, unless an applied patch shows it."""
    shown = {(f"apply {one.patch}", one.override) for one in own}
    hidden = [
        entry
        for entry in overrides
        if not any((change, entry["override"]) in shown for change in entry["change"].split(", "))
    ]
    if not hidden:
        return []
    last = hidden[-1]
    who = f"{_when(last)} by {last['user']}@{last['host']} ({last['change']})"
    more = f"; {len(overrides)} overrides in all, see 'patchkit log'" if len(overrides) > 1 else ""
    return [("warn", f"  guard overridden {who}: {last['override']}{more}")]


def log(workspace: Workspace, *, verify: bool = False) -> Result:
    """The history of each root, newest last; with ``verify`` whether its chain of hashes holds."""
    lines: list[str | tuple[str, str]] = []
    found = []
    code = 0
    for root in dict.fromkeys(target.root for target in workspace.targets()):
        history = History(root)
        records = history.records()
        broken = history.verify() if verify else None
        found.append(
            {
                "root": root,
                "records": records,
                "broken": vars(broken) if broken else None,
                "verified": verify and not broken,
            }
        )
        lines += [_record_line(entry) for entry in records]
        if broken is not None:
            code = NO
            lines.append(("bad", f"{history.path}:{broken.line}: {broken.reason}"))
        elif verify:
            lines.append(("good", f"{history.path}: {len(records)} records, the chain holds"))
    return Result({"roots": found}, lines or ["no history"], exit_code=code)


def _record_line(entry: dict[str, Any]) -> str:
    if "damaged" in entry:
        return f"damaged line: {entry['damaged']}"
    override = f"  guard overridden: {entry['override']}" if entry.get("override") else ""
    return f"{_when(entry)}  {entry.get('user')}@{entry.get('host')}  {_what(entry)}{override}"


def _when(entry: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.get("time", 0)))


def _what(entry: dict[str, Any]) -> str:
    patches = [f"{one.get('action')} {one.get('name')}" for one in entry.get("patches", ())]
    return ", ".join(patches) or str(entry.get("action"))


def _file(
    target: Target, state: State, applied: Applied, pin: FilePin, takeover: Takeover | None
) -> dict[str, Any]:
    top = state.top(pin.path)
    covered = top[0].patch if top is not None and top[0] is not applied else None
    return {
        "path": pin.path,
        "change": pin.change,
        "state": file_state(target, pin, covered),
        "covered_by": covered,
        "now": [
            f"{path} {takeover.files[path]}"
            for path in (pin.source, pin.path)
            if takeover is not None and path in takeover.files
        ],
    }


def file_state(target: Target, pin: FilePin, covered: str | None) -> str:
    """pristine, patched, drifted or missing; a file that a higher patch changed counts as patched."""
    if covered is not None:
        return PATCHED
    tree = Tree(target.root)
    if pin.source is not None and is_there(tree.path(pin.source)):
        return DRIFTED  # what the rename took away has come back
    found = tree.digest(pin.path)
    if found is None:
        return PATCHED if pin.after is None else MISSING
    mode = os.stat(tree.path(pin.path)).st_mode
    if pin.after is not None and found[0] == pin.after.sha256 and pin.mode_holds(mode):
        return PATCHED
    return PRISTINE if pin.before is not None and found[0] == pin.before.sha256 else DRIFTED


def _applied_json(applied: Applied, files: list[dict[str, Any]], takeover: Takeover | None) -> dict[str, Any]:
    return {
        "patch": applied.patch,
        "release": applied.release,
        "applied_at": applied.applied_at,
        "diff_sha256": applied.manifest.diff_sha256,
        "override": applied.override,
        "takeover": takeover.to_json() if takeover else None,
        "files": files,
        "backups": list(applied.backups()),
    }


def _applied_lines(
    target: Target, applied: Applied, files: list[dict[str, Any]], takeover: Takeover | None
) -> list[str | tuple[str, str]]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(applied.applied_at))
    lines: list[str | tuple[str, str]] = [f"  {applied.patch}  applied {when}"]
    if applied.override:
        lines.append(("warn", f"    guard overridden: {applied.override}"))
    if takeover is not None:
        lines.append(("bad", f"    {takeover.sentence()}; {takeover.advice()}"))
    for file in files:
        if file["now"]:
            lines += [("bad", f"    {text}") for text in file["now"]]
            continue
        good = file["state"] == PATCHED and takeover is None
        text = f"    {file['state']} {file['path']}" + (
            f" (then {file['covered_by']})" if file["covered_by"] else ""
        )
        text += f" (left of {applied.patch})" if takeover is not None and file["state"] == PATCHED else ""
        lines.append(text if good else ("bad", text))
    for backup, pin in applied.backups().items():
        found = Tree(target.root).digest(backup)
        if found is None or (pin.before is not None and found[0] != pin.before.sha256):
            lines.append(("bad", f"    backup {backup} {'is missing' if found is None else 'was changed'}"))
    return lines


def _by_hand(workspace: Workspace, target: Target, state: State) -> list[str]:
    """Patches whose result is there although the stack does not say so."""
    from patchkit.errors import PatchkitError
    from patchkit.plan import Plan

    found = []
    for name in workspace.catalog.names():
        try:
            patch = workspace.catalog[name]
            if patch.distribution != target.distribution or patch.members or state.find(name) is not None:
                continue
            read: Reader = Plan(target, workspace.catalog, state, 0).read
            variant = choose(patch, target, state.stack, read)
        except (PatchkitError, OSError):
            continue
        if not all(is_before(pin, read) for pin in variant.manifest.files):
            found.append(name)
    return found
