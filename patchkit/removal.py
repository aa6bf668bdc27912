"""Taking a patch off: what each of its files is now, and where its pristine bytes come from.

Only bytes of the pinned digest are ever put back, and only over what the patch left there: a file that
someone edited is drifted, one that an installer replaced is not ours any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.errors import REFUSED, ManyErrors, PatchkitError
from patchkit.overlay import Entry, File, Symlink
from patchkit.state import Kept, backup_name
from patchkit.tree import Fingerprint, Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

    from patchkit.diff import Content
    from patchkit.manifest import FilePin, Pin
    from patchkit.plan import Plan
    from patchkit.selection import Reader
    from patchkit.state import Applied
    from patchkit.target import Target


class DriftedError(PatchkitError):
    """A file of an applied patch that someone changed afterwards."""

    code = "drifted"
    exit_code = REFUSED

    def __init__(self, path: str, patch: str, *, wanted: bool, there: bool) -> None:
        what = "was removed" if not there else "was changed" if wanted else "appeared"
        super().__init__(
            f"{path} {what} after '{patch}' was applied",
            path=path,
            hint="undo the edit, or 'patchkit restore --force' saves it under .patchkit/rescued first",
        )


class BackupLostError(PatchkitError):
    """A backup that is gone or changed, and the reversed diff does not give the pinned bytes either."""

    code = "backup-lost"
    exit_code = REFUSED

    def __init__(self, path: str, reason: str, distribution: str) -> None:
        super().__init__(
            f"{path} {reason}, and the pristine bytes cannot be rebuilt from the diff",
            path=path,
            hint=f"put the backup back or reinstall {distribution}",
        )


@dataclass(frozen=True)
class Side:
    """One path of a pin; a rename has two, a deletion and an addition. None: no file."""

    path: str
    before: Pin | None
    after: Pin | None
    pin: FilePin

    def as_patched(self, current: Content | None) -> bool:
        if self.after is None or current is None:
            return self.after is None and current is None
        return self.after.matches(current) and self.pin.mode_holds(current.mode)


def sides(pin: FilePin) -> tuple[Side, ...]:
    if pin.source is None:
        return (Side(pin.path, pin.before, pin.after, pin),)
    return Side(pin.source, pin.before, None, pin), Side(pin.path, None, pin.after, pin)


def all_sides(applied: Applied) -> Iterator[Side]:
    for pin in applied.manifest.files:
        yield from sides(pin)


def take_off(plan: Plan, applied: Applied) -> None:
    """Plan the files of ``applied`` as they were before it. Raises ManyErrors with every file in the way."""
    as_patched = plan.overlay.frozen()
    problems: list[PatchkitError] = []
    # What was a symlink comes last: it may lead to another file of this patch.
    for side in sorted(all_sides(applied), key=lambda side: _was_link(applied, side)):
        try:
            _take_off(plan, applied, side, as_patched)
        except (DriftedError, BackupLostError) as error:
            problems.append(error)
    if problems:
        raise ManyErrors(problems)


def _was_link(applied: Applied, side: Side) -> bool:
    original = applied.originals.get(side.path)
    return original is not None and original.link is not None


def _take_off(plan: Plan, applied: Applied, side: Side, as_patched: Reader) -> None:
    current = plan.overlay.read(side.path)
    reason = not_ours(plan.target, applied, side, current)
    if reason is not None:
        plan.notes.append(f"{side.path} {reason}; left as it is")
        _drop_backup(plan, applied, side)
        return
    drifted = not side.as_patched(current)
    if drifted:
        if not plan.force:
            wanted, there = side.after is not None, current is not None
            raise DriftedError(side.path, applied.patch, wanted=wanted, there=there)
        if current is not None:
            plan.rescues[side.path] = current.data
    plan.overlay.entries[side.path] = _pristine(plan, applied, side, None if drifted else as_patched)
    _drop_backup(plan, applied, side)


def not_ours(target: Target, applied: Applied, side: Side, current: Content | None) -> str | None:
    """Why the file belongs to an installer now, and not to ``applied`` any more; None if it is ours."""
    recorded = target.recorded.get(side.path)
    other = target.release != applied.release
    as_patched = side.as_patched(current)
    if current is None:
        if side.before is None:
            return "is gone already"
        if not target.is_installed:
            return f"is gone with {applied.distribution} {applied.release or ''}".rstrip()
        if side.after is None:
            fits = not target.record or (side.before is not None and recorded == side.before.sha256)
            return None if fits or not other else f"is not in {target.label}"
        return f"is gone from {target.label}" if other or (target.record and recorded is None) else None
    digest = Fingerprint.of_data(current.data).sha256
    if side.before is not None and side.before.sha256 == digest:
        # A patch that changes no more than the mode leaves these bytes, too.
        if as_patched:
            return None
        again = recorded == digest
        return f"is the file of {target.label} again" if again else "has its pristine bytes again"
    if recorded == digest:
        return f"is the file of {target.label}, installed after '{applied.patch}'"
    if other and side.before is not None and not (as_patched and recorded in (None, side.before.sha256)):
        return f"is not the file that '{applied.patch}' was applied to, now that {target.label} is installed"
    return None


def _pristine(plan: Plan, applied: Applied, side: Side, as_patched: Reader | None) -> Entry:
    """The entry from before the patch: the link, the backup, else the reversed diff; digest-checked."""
    if side.before is None:
        return None
    overlay = plan.overlay
    backup = backup_name(side.path, applied.patch)
    original = applied.originals.get(side.path)
    if original is not None and original.link is not None:
        linked = overlay.linked(side.path, original.link)
        if linked is not None and side.before.matches(linked):
            return Symlink(original.link, original.link_mtime_ns or original.mtime_ns)
        plan.notes.append(
            f"{side.path} was a symlink to {original.link}, which no longer holds the pristine bytes; "
            "it becomes a real file"
        )
    saved = overlay.read(backup)
    if saved is not None and side.before.matches(saved):
        entry = overlay.entries.get(backup)
        meta = entry.meta if isinstance(entry, File) else Meta.of(overlay.tree.path(backup))
        if original is not None:
            meta = replace(meta, mode=original.mode, mtime_ns=original.mtime_ns)
        return File(saved.data, meta)
    reason = "is missing" if saved is None else "does not hold the pinned bytes"
    found = rebuilt(plan, applied, as_patched).get(side.path) if as_patched is not None else None
    if found is None or not side.before.matches(found):
        raise BackupLostError(backup, reason, applied.distribution)
    plan.notes.append(
        f"{backup} {reason}; the pristine bytes were rebuilt from the diff and match the pinned sha256"
    )
    meta = overlay.meta(side.path, original.mode if original else found.mode)
    if original is not None:
        meta = replace(meta, mtime_ns=original.mtime_ns)
    return File(found.data, meta)


def rebuilt(plan: Plan, applied: Applied, as_patched: Reader | None = None) -> dict[str, Content | None]:
    """What the reversed diff of ``applied`` makes of its files; empty if it does not fit them."""
    data = _diff_of(plan, applied)
    if data is None:
        return {}
    try:
        return diff.apply(diff.reverse(diff.parse(data, name=applied.diff_path)), as_patched or plan.read)
    except diff.DiffError:
        return {}  # another of its files drifted


def _diff_of(plan: Plan, applied: Applied) -> bytes | None:
    """The very diff that was applied: its copy beside the state, or one of the folders of patches."""
    wanted = applied.manifest.diff_sha256
    saved = plan.overlay.disk(applied.diff_path)
    if saved is not None and Fingerprint.of_data(saved.data).sha256 == wanted:
        return saved.data
    return plan.catalog.diff(applied.patch, wanted)


def _drop_backup(plan: Plan, applied: Applied, side: Side) -> None:
    backup = backup_name(side.path, applied.patch)
    saved = plan.overlay.read(backup) if side.before is not None else None
    if saved is None or side.before is None:
        return
    if not side.before.matches(saved):
        plan.rescues[backup] = saved.data
    elif plan.keep_backup:
        plan.keep(Kept(backup, applied.patch, side.before.sha256))
        return
    plan.overlay.entries[backup] = None
