"""``recover --force``: the way out when a file of ``.patchkit`` cannot be read."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit import lease, salvage
from patchkit.errors import NO
from patchkit.history import History, record
from patchkit.journal import Journal
from patchkit.lock import tree_lock
from patchkit.plan import Plan, fresh_mtime_ns
from patchkit.recovery import RecoveryFailedError
from patchkit.state import FOLDER, JOURNAL, State, StateFileError
from patchkit.target import NotInstalledError

if TYPE_CHECKING:
    from patchkit.commands.holding import Holding
    from patchkit.target import Target
    from patchkit.workspace import Workspace

_ACTION = "salvage"  # in the history


@dataclass
class Salvage:
    """What was done in one root."""

    root: str
    aside: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    exit_code: int = 0
    lines: list[str | tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"root": self.root, "aside": self.aside, "applied": self.stack, "notes": self.notes}


def salvage_all(workspace: Workspace, holding: Holding) -> list[Salvage]:
    """Set aside what cannot be read in any root of the environment, and prove or mend the rest."""
    roots = sorted({os.path.realpath(path) for path in workspace.environment.paths})
    found = []
    for root in roots:
        if os.path.isdir(os.path.join(root, FOLDER)) and _is_wanted(root):
            one = holding.retrying(lambda root=root: _salvage(workspace, root, holding))  # type: ignore[misc]
            _prove(workspace, one)
            found.append(one)
    return found


def _is_wanted(root: str) -> bool:
    if salvage.unreadable(root) or salvage.second_names(root) or salvage.lost_stack(root):
        return True
    # One that died: when it is undone, what it was begun for is there again.
    journal = Journal.load(root)
    return journal is not None and journal.history.get("action") == _ACTION


def _salvage(workspace: Workspace, root: str, holding: Holding) -> Salvage:
    from patchkit.commands import change

    done = Salvage(root)
    with tree_lock(root):
        try:
            journal = Journal.load(root)
        except StateFileError:
            journal = None
        if journal is not None:
            target = workspace.target_in(root, str(journal.history["distribution"]))
            recovery = change.recover_target(workspace, target, holding)
            done.notes += [recovery.sentence()] if recovery is not None else []
        errors = salvage.unreadable(root)
        for error in errors:
            if os.path.dirname(error.path or "") == os.path.join(root, lease.LEASES):
                lease.require_dead(error.path or "")
        try:
            # The journal goes last: until then this is begun again.
            for error in sorted(errors, key=lambda one: one.path == os.path.join(root, JOURNAL)):
                path = os.path.relpath(error.path or "", root)
                done.aside[path] = salvage.set_aside(root, path)
                done.notes.append(f"{error.message}; set aside as {done.aside[path]}")
            _put_right(workspace, root, holding, done)
            for path in salvage.second_names(root):
                done.aside[path] = salvage.set_aside(root, path)
                done.notes.append(f"the second names in {path} were set aside as {done.aside[path]}")
            entry = record(_ACTION, [], aside=done.aside, id=uuid.uuid4().hex)
            History(root).append(entry)
        except OSError as error:
            raise RecoveryFailedError(error, "cleared up") from error
    return done


def _put_right(workspace: Workspace, root: str, holding: Holding, done: Salvage) -> None:
    from patchkit.commands import change

    folders = salvage.second_names(root)
    state = State.load(root)
    candidates = [state]
    if salvage.lost_stack(root):
        releases = {target.distribution: target.release for target in _targets(workspace, root)}
        state, unknown = salvage.rebuilt(root, workspace.catalog, releases)
        candidates = [state, State()] if folders else [state]
        for name in unknown:
            done.notes.append(
                f"'{name}' was applied in a version that is not here; name its --patches folder"
            )
    for target in _targets(workspace, root, candidates[0]):
        plans = []
        for candidate in candidates:
            plan = _plan(workspace, target, candidate)
            expected = salvage.Expectation(target, workspace.catalog, candidate)
            if folders:
                salvage.mend(plan, expected, folders)
            plans.append((len(expected.unmet(plan)), plan))
        plan = min(plans, key=lambda one: one[0])[1]
        for path in salvage.temporary_files(target) if folders else ():
            done.aside[path] = salvage.set_aside(root, path)
            done.notes.append(f"{path}, which was not finished, was set aside as {done.aside[path]}")
        changed = [*plan.files]
        change.write(target, plan, holding, action=_ACTION)
        done.notes += [*plan.notes, *(f"{path} was put right" for path in changed)]
        candidates = [plan.state]
    done.stack = [applied.patch for applied in candidates[0].stack]


def _plan(workspace: Workspace, target: Target, state: State) -> Plan:
    known = (History(target.root).last_mtime_ns(), *(applied.mtime_ns for applied in state.stack))
    plan = Plan(target, workspace.catalog, State.load(target.root), fresh_mtime_ns(max(known)))
    plan.state = state
    return plan


def _targets(workspace: Workspace, root: str, state: State | None = None) -> list[Target]:
    """The distributions in ``root`` that patches are for, or that have been patched."""
    try:
        found = {one.distribution: one for one in workspace.targets() if one.root == root}
    except NotInstalledError:
        found = {}
    for applied in state.stack if state is not None else ():
        if applied.distribution not in found:
            found[applied.distribution] = workspace.target_in(root, applied.distribution)
    return list(found.values())


def _prove(workspace: Workspace, done: Salvage) -> None:
    """Compare each target with its witness; whatever is applied is expected."""
    from patchkit.commands.check import judge

    done.lines += [("warn", f"{done.root}: {note}") for note in done.notes]
    applied = set(done.stack)
    if applied:
        done.lines.append(("good", f"{done.root}: applied, as far as is known: {', '.join(done.stack)}"))
    for target in _targets(workspace, done.root):
        verdict = judge(target, workspace.catalog, expect=applied)
        done.lines += verdict.lines(label="verified")
        if not verdict.clean:
            done.exit_code = NO
