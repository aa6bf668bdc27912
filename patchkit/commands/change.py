"""apply, restore, recover: everything that writes to a tree."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from patchkit import lease, recovery as recoveries, selection, transaction
from patchkit.commands.check import Verdict, judge
from patchkit.durable import fsync_folder, own_like_root, write_new
from patchkit.errors import INTERRUPTED, NO, USAGE, PatchkitError
from patchkit.history import History, record
from patchkit.journal import Journal
from patchkit.lock import LockedError, holder, is_locked, tree_lock
from patchkit.plan import Plan, fresh_mtime_ns
from patchkit.recovery import rescue_name
from patchkit.report import Result
from patchkit.state import FOLDER, RESCUED, State, prepare
from patchkit.target import NotInstalledError
from patchkit.tree import Meta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from patchkit.commands.holding import Holding
    from patchkit.lease import Lease
    from patchkit.manifest import FilePin
    from patchkit.recovery import Recovery
    from patchkit.state import Applied
    from patchkit.target import Target
    from patchkit.workspace import Workspace


class OpenTransactionError(PatchkitError):
    """A transaction was interrupted, and this command may not finish it."""

    code = "open-transaction"
    exit_code = INTERRUPTED

    def __init__(self, root: str) -> None:
        super().__init__(f"{root}: a transaction was interrupted", path=root, hint="run 'patchkit recover'")


_NOTHING = "nothing to recover"


class NothingNamedError(PatchkitError):
    """No patch was named."""

    code = "usage"
    exit_code = USAGE


def apply(workspace: Workspace, names: Sequence[str], *, holding: Holding, dry_run: bool = False) -> Result:
    """Apply the named patches, in order, as one transaction."""
    patches = workspace.catalog.expand(names)
    if not patches:
        raise NothingNamedError("name at least one patch; 'patchkit list' shows what there is")
    target = workspace.target_of(patches)

    def decide(plan: Plan) -> None:
        for place, patch in enumerate(patches, start=1):
            plan.apply(patch, later=[other.name for other in patches[place:]])

    return _change(workspace, target, decide, holding=holding, dry_run=dry_run)


def restore(
    workspace: Workspace,
    names: Sequence[str],
    *,
    holding: Holding,
    dry_run: bool = False,
    verify: bool = False,
    force: bool = False,
    keep_backup: bool = False,
) -> Result:
    """Take the named patches off, by default all; with ``verify`` prove the whole tree afterwards."""
    targets = _targets_to_restore(workspace, names)
    results = []
    for target in targets:

        def decide(plan: Plan, target: Target = target) -> None:
            plan.force, plan.keep_backup = force, keep_backup
            for applied in _to_restore(plan, workspace, names, target):
                plan.restore(applied)

        results.append(_change(workspace, target, decide, holding=holding, dry_run=dry_run))
    result = results[0] if len(results) == 1 else _joined(results)
    if verify and not dry_run:
        _verify(workspace, targets, result)
    return result


def recover(workspace: Workspace, *, holding: Holding, force: bool = False) -> Result:
    """Finish or undo what a crash left open, in every root of the environment: transactions, sessions.

    With ``force`` set aside files of ``.patchkit`` that cannot be read, and prove what can be.
    """
    if not force:
        return _recover(workspace, holding)
    from patchkit.commands.salvage import salvage_all

    salvaged = salvage_all(workspace, holding)
    try:
        result = _recover(workspace, holding)
    except NotInstalledError:
        if not salvaged:
            raise
        result = Result({"recovered": [], "sessions": []})
    result.data["salvaged"] = [one.to_json() for one in salvaged]
    if salvaged:
        said = [line for line in result.lines if line != _NOTHING]
        result.lines = [*(line for one in salvaged for line in one.lines), *said]
        result.exit_code = max(one.exit_code for one in salvaged)
    return result


def _recover(workspace: Workspace, holding: Holding) -> Result:
    found: list[dict[str, Any]] = []
    lines: list[str | tuple[str, str]] = []
    for root, target in {target.root: target for target in workspace.targets()}.items():
        if Journal.load(root) is None:
            continue

        def attempt(target: Target = target) -> Recovery | None:
            with tree_lock(target.root):
                return recover_target(workspace, target, holding)

        recovery = holding.retrying(attempt)
        if recovery is not None:
            found.append({"root": root, **recovery.to_json()})
            lines.append(("good", f"{root}: {recovery.sentence()}"))
    sessions = [_finish(workspace, target, holding) for target in workspace.targets()]
    ended = [one for some in sessions for one in some]
    lines += [("good", sentence) for _, sentence in ended]
    return Result({"recovered": found, "sessions": [one.to_json() for one, _ in ended]}, lines or [_NOTHING])


def _finish(workspace: Workspace, target: Target, holding: Holding) -> list[tuple[Lease, str]]:
    """End the abandoned sessions of ``target``."""
    done = []
    for one in lease.abandoned(target.root):
        if one.distribution == target.distribution:
            from patchkit.abandonment import finish

            done.append((one, finish(workspace, one, holding)))
    if lease.leases(target.root):
        with tree_lock(target.root):
            lease.sweep(target.root)
    return done


def recover_target(workspace: Workspace, target: Target, holding: Holding) -> Recovery | None:
    """End an interrupted transaction in the root of ``target``, whichever distribution it was for."""
    journal = Journal.load(target.root)
    installed: dict[str, str | None] | None = None
    if journal is not None and (name := journal.history.get("distribution")):
        target = workspace.target_in(target.root, str(name))
        known = (
            target.record or not target.is_installed
        )  # a checkout does not say what belongs to its release
        if known and target.release != journal.history.get("release"):
            installed = target.recorded
    recovery = recoveries.recover(
        target.root, before_change=lambda files: holding.check(target, files), installed=installed
    )
    if recovery is None or installed is None or journal is None:
        return recovery
    now = f"replaced by {target.label}" if target.is_installed else "uninstalled"
    was = f"{target.distribution} {journal.history.get('release') or '(release unknown)'}"
    return replace(recovery, over=f"{was} was {now} meanwhile")


def _targets_to_restore(workspace: Workspace, names: Sequence[str]) -> list[Target]:
    targets = workspace.targets()
    if not names:
        return targets
    applied = {
        name: target
        for target in targets
        for name in names
        if any(
            one.patch == name and one.distribution == target.distribution
            for one in State.load(target.root).stack
        )
    }
    wanted: dict[str, Target] = {}
    for name in names:
        for patch in workspace.catalog.expand([name]) if name not in applied else []:
            target = workspace.target(patch.distribution)
            wanted[f"{target.root} {target.distribution}"] = target
        if name in applied:
            wanted[f"{applied[name].root} {applied[name].distribution}"] = applied[name]
    return list(wanted.values())


def _to_restore(plan: Plan, workspace: Workspace, names: Sequence[str], target: Target) -> list[Applied]:
    """The applied patches meant, top first."""
    own = [applied for applied in plan.state.stack if applied.distribution == target.distribution]
    if not names:
        return own[::-1]
    wanted: set[str] = set()
    for name in names:
        if plan.state.find(name) is not None:
            wanted.add(name)
            continue
        for patch in workspace.catalog.expand([name]):
            if plan.state.find(patch.name) is None and not _adopt(plan, workspace, patch.name):
                plan.notes.append(f"'{patch.name}' is not applied")
            wanted.add(patch.name)
    return [applied for applied in plan.state.stack[::-1] if applied.patch in wanted]


def _adopt(plan: Plan, workspace: Workspace, name: str) -> bool:
    """Take a patch that someone applied by hand into the stack, so that it can be taken off exactly."""
    try:
        variant = selection.choose(workspace.catalog[name], plan.target, plan.state.stack, plan.read)
    except PatchkitError:
        return False
    if all(selection.is_before(pin, plan.read) for pin in variant.manifest.files):
        return False
    plan.apply(workspace.catalog[name])
    return True


def _change(
    workspace: Workspace, target: Target, decide: Callable[[Plan], None], *, holding: Holding, dry_run: bool
) -> Result:
    def plan() -> Plan:
        state = State.load(target.root)
        known = (History(target.root).last_mtime_ns(), *(applied.mtime_ns for applied in state.stack))
        made = Plan(
            target,
            workspace.catalog,
            state,
            fresh_mtime_ns(max(known)),
            override=holding.overridden,
        )
        decide(made)
        return made

    if dry_run:
        if Journal.load(target.root) is not None:
            raise (
                LockedError(target.root, holder(target.root))
                if is_locked(target.root)
                else OpenTransactionError(target.root)
            )
        made = plan()
        transaction.check_writable(target.root, made.operations())
        holding.check(target, made.files)
        return _result(target, made, None, dry_run=True)

    def attempt() -> Result:
        transaction.check_writable(target.root)
        with tree_lock(target.root):
            recovery = recover_target(workspace, target, holding)
            try:
                made = plan()
                write(target, made, holding)
            except PatchkitError:
                if recovery is not None:
                    holding.say(recovery.sentence())
                raise
            with contextlib.suppress(OSError):  # the change is made; whatever lies in leases/ can wait
                if lease.leases(target.root):
                    lease.sweep(target.root)  # this may have finished what a dead session left
            return _result(target, made, recovery, dry_run=False)

    folder = os.path.join(target.root, FOLDER)
    if not os.path.isdir(folder):
        # A refusal, or nothing to do, leaves nothing behind: not even a state folder.
        try:
            made = plan()
            if not made.operations():
                return _result(target, made, None, dry_run=False)
            transaction.check_writable(target.root, made.operations())
            holding.retrying(lambda: holding.check(target, made.files))
        except PatchkitError:
            if not os.path.isdir(folder):
                raise
            # Another process has begun meanwhile; what counts is what we see under the lock.
    return holding.retrying(attempt)


def write(target: Target, plan: Plan, holding: Holding, *, action: str = "change") -> None:
    """Make the planned changes as one transaction, ``action`` in the history if no patch is put on or off."""
    operations = plan.operations()
    if not operations:
        return
    files = plan.files
    transaction.check_writable(target.root, operations)
    holding.check(target, files)
    rescued = _rescues(target, plan)
    prepare(target.root)
    entry = record(
        plan.done[0][0] if plan.done else action,
        [_patch_record(plan, action, applied) for action, applied in plan.done],
        distribution=target.distribution,
        release=target.release,
        mtime_ns=plan.overlay.latest_ns,
        **({"override": holding.overridden} if holding.overridden else {}),
        **({"rescued": rescued} if rescued else {}),
    )
    transaction.run(
        target.root,
        operations,
        entry,
        before_change=lambda: holding.check(target, files),
        expected=plan.overlay.seen,
    )


def _rescues(target: Target, plan: Plan) -> list[str]:
    """Write the bytes that ``--force`` would lose to ``.patchkit/rescued``, before anything else changes."""
    if not plan.rescues:
        return []
    prepare(target.root)
    folder = os.path.join(target.root, RESCUED)
    os.makedirs(folder, exist_ok=True)
    own_like_root(target.root, folder)
    info = os.stat(folder)
    names = []
    for path, data in plan.rescues.items():
        name = rescue_name(path, str(plan.overlay.latest_ns))
        meta = Meta(0o600, info.st_uid, info.st_gid, plan.mtime_ns)
        write_new(os.path.join(target.root, name), data, meta)
        names.append(name)
        plan.notes.append(f"the changed bytes of {path} were saved in {name}")
    fsync_folder(folder)
    return names


def _patch_record(plan: Plan, action: str, applied: Applied) -> dict[str, Any]:
    takeover = plan.takeovers.get(applied.patch) if action == "restore" else None
    return {
        "name": applied.patch,
        "action": action,
        "diff_sha256": applied.manifest.diff_sha256,
        "files": [
            {
                "path": pin.path,
                "before": pin.before.sha256 if pin.before else None,
                "after": pin.after.sha256 if pin.after else None,
            }
            for pin in applied.manifest.files
        ],
        **({"takeover": takeover.to_json()} if takeover else {}),
    }


def abandoned_lines(target: Target) -> list[str | tuple[str, str]]:
    try:
        abandoned = lease.abandoned(target.root)
    except OSError as error:
        # Not a failure: this is said after the change, which is made.
        return [("warn", f"the leases could not be read: {error.filename}: {error.strerror}")]
    return [
        ("bad", f"abandoned {one.describe()}; 'patchkit recover' finishes it")
        for one in abandoned
        if one.distribution == target.distribution
    ]


_MARK = {"modify": "M", "add": "A", "delete": "D", "rename": "R"}
_UNDONE = {"A": "D", "D": "A"}
_PAST = {"apply": "applied", "adopt": "adopted", "restore": "restored"}


def _result(target: Target, plan: Plan, recovery: Recovery | None, *, dry_run: bool) -> Result:
    lines: list[str | tuple[str, str]] = []
    if recovery is not None:
        lines.append(("warn", recovery.sentence()))
    lines += abandoned_lines(target)
    for action, applied in plan.done:
        undone = action == "restore"
        takeover = plan.takeovers.get(applied.patch) if undone else None
        if takeover is not None:
            verb = "would clean up" if dry_run else "cleaned up"
            lines.append(("good", f"{verb} after {applied.patch} in {target.root}: {takeover.sentence()}"))
        else:
            verb = f"would {action}" if dry_run else _PAST[action]
            preposition = "from" if undone else "to"
            lines.append(("good", f"{verb} {applied.patch} {preposition} {target.label} in {target.root}"))
        lines += [
            f"  {_describe(pin, undone=undone)}"
            for pin in applied.manifest.files
            if takeover is None or not takeover.files.keys() & {pin.path, pin.source}
        ]
        if action != "restore":
            lines += [f"  backup {backup}" for backup in applied.backups()]
    lines += plan.notes
    if not plan.done and not plan.notes:
        lines.append(f"{target.label}: no patch is applied; nothing to do")
    return Result(
        {
            "distribution": target.distribution,
            "release": target.release,
            "root": target.root,
            "dry_run": dry_run,
            "changed": bool(plan.done) and not dry_run,
            "done": [
                {**_patch_record(plan, action, applied), "backups": list(applied.backups())}
                for action, applied in plan.done
            ],
            "notes": list(plan.notes),
            "recovered": recovery.to_json() if recovery else None,
        },
        lines,
    )


def _describe(pin: FilePin, *, undone: bool) -> str:
    """What happens to the file in the tree: undoing an added file deletes it."""
    if pin.source:
        source, path = (pin.path, pin.source) if undone else (pin.source, pin.path)
        return f"R {path} (from {source})"
    mark = _MARK[pin.change]
    return f"{_UNDONE.get(mark, mark) if undone else mark} {pin.path}"


def _joined(results: Sequence[Result]) -> Result:
    return Result({"targets": [one.data for one in results]}, [line for one in results for line in one.lines])


def _verify(workspace: Workspace, targets: Sequence[Target], result: Result) -> None:
    """Prove each target; whatever is still applied is expected, anything else makes the answer no."""
    lines = list(result.lines)
    found = []
    for target in targets:
        still = {applied.patch for applied in State.load(target.root).stack}
        verdict: Verdict = judge(target, workspace.catalog, expect=still)
        found.append(verdict.to_json())
        lines += verdict.lines(label="verified")
        if not verdict.clean:
            result.exit_code = NO
    result.data["verified"] = found if len(found) != 1 else found[0]
    result.lines = lines
