"""Decide, in memory, what an apply or restore would write. Nothing here touches the disk but to read.

Patches are put on and taken off an overlay of the tree one after the other, so that several patches, or an
old patch and its update, become one transaction.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from patchkit import adoption, diff, removal, selection
from patchkit.errors import REFUSED, ManyErrors, PatchkitError
from patchkit.overlay import File, Overlay, fresh_mtime_ns
from patchkit.removal import DriftedError
from patchkit.state import APPLIED, STATE, Applied, Kept, Original, State, backup_name, touched
from patchkit.takeover import Takeover, find_takeover
from patchkit.transaction import MakeFolder, Operation, Put, Refresh, Remove, RemoveFolder
from patchkit.tree import innermost_first, parents

if TYPE_CHECKING:
    from collections.abc import Collection

    from patchkit.catalog import Catalog, Patch, Variant
    from patchkit.diff import Content, Diff
    from patchkit.target import Target

__all__ = ["Plan", "expectations", "fresh_mtime_ns"]


class BackupInTheWayError(PatchkitError):
    """The name of the backup is taken by something else."""

    code = "backup-in-the-way"
    exit_code = REFUSED

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} exists and does not hold the pristine bytes",
            path=path,
            hint="move it away; it would be overwritten",
        )


class CoveredError(PatchkitError):
    """A patch that lies below another one which changes the same files."""

    code = "covered"
    exit_code = REFUSED

    def __init__(self, patch: str, above: list[str]) -> None:
        super().__init__(
            f"'{patch}' lies below {', '.join(repr(name) for name in above)}, which changes the same files",
            hint=f"restore {' '.join(above)} first, or name them after it",
        )


class InstalledOverError(PatchkitError):
    """A patched distribution that was upgraded or reinstalled, and cannot be patched again."""

    code = "installed-over"
    exit_code = REFUSED

    def __init__(self, takeover: Takeover) -> None:
        self.takeover = takeover
        super().__init__(
            takeover.sentence(), hint=f"'patchkit restore {takeover.applied.patch}' clears what is left of it"
        )


@dataclass
class Plan:
    """The changes so far. ``done`` lists (action, patch) pairs; ``notes`` are sentences for the user;
    ``rescues`` are bytes that ``force`` would lose; ``takeovers`` say, by the name of a restored patch, what
    had happened to its files.
    """

    target: Target
    catalog: Catalog
    state: State
    mtime_ns: int
    force: bool = False
    keep_backup: bool = False
    rescues: dict[str, bytes] = field(default_factory=dict)
    done: list[tuple[str, Applied]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    takeovers: dict[str, Takeover] = field(default_factory=dict)
    override: str | None = None

    def __post_init__(self) -> None:
        self.overlay = Overlay(self.target.root, self.mtime_ns)
        self.started = self.state
        self._new_folders: list[str] = []
        self._old_folders: list[str] = []
        self._refreshed: list[str] = []

    def read(self, path: str) -> Content | None:
        """The content at ``path`` as it will be."""
        return self.overlay.read(path)

    def keep(self, kept: Kept) -> None:
        others = tuple(one for one in self.state.kept if one.path != kept.path)
        self.state = replace(self.state, kept=(*others, kept))

    # applying --------------------------------------------------------------------------------

    def apply(self, patch: Patch, later: Collection[str] = ()) -> None:
        """Put ``patch`` on top; a no-op when it is there already, an update when its diff changed.

        ``later`` names the patches that the caller applies after it: those may come off for an update.
        """
        old = self.state.find(patch.name)
        if old is None:
            self._put_on(patch)
        elif (takeover := self._installed_over(old)) is not None:
            self._apply_again(patch, old, takeover)
        else:
            self._update(patch, old, later)

    def takeover(self, applied: Applied) -> Takeover | None:
        """What an installer, or someone by hand, did to the files of ``applied`` since."""
        return find_takeover(self.target, self.state, applied, self.read)

    def _installed_over(self, applied: Applied) -> Takeover | None:
        """The takeover of files of ``applied``, if nothing else happened to them."""
        found = self.takeover(applied)
        if found is None or self.target.release != applied.release:
            return found
        for path in applied.touched() - set(found.files):
            top = self.state.top(path)
            if top is not None:
                side = next(one for one in removal.sides(top[1]) if one.path == path)
                if not side.as_patched(self.read(path)):
                    return None
        return found

    def _apply_again(self, patch: Patch, old: Applied, takeover: Takeover) -> None:
        """An installer replaced the files: what is left of the old patch goes, and it is put on anew."""
        for applied in [*self.state.above(old)[::-1], old]:
            self.restore(applied)
        try:
            self._put_on(patch)
        except PatchkitError as error:
            raise ManyErrors([InstalledOverError(takeover), error]) from error

    def _update(self, patch: Patch, old: Applied, later: Collection[str]) -> None:
        below = list(self.state.stack[: self.state.stack.index(old)])
        variant = selection.choose(patch, self.target, below, self._before(old))
        if variant.manifest.diff_sha256 != old.manifest.diff_sha256:
            lying = self._lying_on(old)
            above = [other.patch for other in lying if other.patch not in later]
            if above:
                raise CoveredError(old.patch, above)
            for other in [*lying[::-1], old]:
                self.restore(other)
            self._put_on(patch)
            self.notes.append(f"'{patch.name}' was applied in an earlier version, which it replaces")
            return
        drifted = [
            DriftedError(path, patch.name, wanted=sha256 is not None, there=found is not None)
            for path, sha256 in expectations(old, self.state).items()
            if (found := self._digest(path)) != sha256
        ]
        if drifted:
            raise ManyErrors(drifted)
        self.notes.append(f"'{patch.name}' is already applied")

    def _lying_on(self, applied: Applied) -> list[Applied]:
        """The patches that must come off before ``applied``: those on it, and those on them; bottom first."""
        found = [applied]
        for other in self.state.stack[self.state.stack.index(applied) + 1 :]:
            if any(other in self.state.above(one) for one in found):
                found.append(other)
        return found[1:]

    def _digest(self, path: str) -> str | None:
        found = self.overlay.tree.digest(path)
        return found[0] if found else None

    def _before(self, applied: Applied) -> selection.Reader:
        """A reader of the tree as it was before ``applied``, for choosing a variant."""
        before: dict[str, Content | None] = {}
        for side in removal.all_sides(applied):
            if side.before is None:
                before[side.path] = None
                continue
            backup = self.overlay.disk(backup_name(side.path, applied.patch))
            if backup is not None and side.before.matches(backup):
                before[side.path] = backup
        if any(side.path not in before for side in removal.all_sides(applied)):
            # A backup is lost: the diff may say what was there; if not, `choose` names the file.
            before.update(removal.rebuilt(self, applied))
        return lambda path: before[path] if path in before else self.read(path)

    def _put_on(self, patch: Patch) -> None:
        selection.check_order(patch, [applied.patch for applied in self.state.stack], self.catalog)
        variant = selection.choose(patch, self.target, list(self.state.stack), self.read)
        data = variant.diff_bytes()
        parsed = diff.parse(data, name=variant.diff_path)
        selection.check_inside(parsed, self.target)
        if adoption.is_by_hand(self.overlay, variant.manifest.files):
            originals, folders = self._adopt(variant, parsed)
            action = "adopt"
        else:
            originals, folders = self._patch(variant, parsed)
            action = "apply"
        applied = Applied(
            variant.manifest,
            self.target.release,
            time.time(),
            self.overlay.latest_ns,
            originals,
            tuple(folders),
            self.override,
        )
        self.overlay.entries[applied.diff_path] = File(data, self.overlay.meta(applied.diff_path, 0o644))
        backups = set(applied.backups())
        kept = tuple(one for one in self.state.kept if one.path not in backups)
        self.state = replace(self.state.push(applied), kept=kept)
        self.done.append((action, applied))

    def _patch(self, variant: Variant, parsed: Diff) -> tuple[dict[str, Original], list[str]]:
        manifest, overlay = variant.manifest, self.overlay
        result = manifest.apply(parsed, self.read)
        originals: dict[str, Original] = {}
        for pin in manifest.files:
            path = pin.source or pin.path
            content = self.read(path)
            if pin.before is not None and content is not None:
                originals[path] = overlay.original(path, content.mode)
                self._put_backup(path, manifest.patch, content, originals[path].mtime_ns)
        sources = {pin.path: pin.source for pin in manifest.files if pin.source}
        metas = {
            path: overlay.meta(sources.get(path) or path, content.mode)
            for path, content in result.items()
            if content is not None
        }
        folders: set[str] = set()
        for path, content in result.items():
            if path not in overlay.entries:
                overlay.disk(path)  # for the record of what this plan is made from
            overlay.entries[path] = None if content is None else File(content.data, metas[path])
            if content is not None:
                folders.update(self._claim_folders(path))
        return originals, sorted(folders)

    def _claim_folders(self, path: str) -> list[str]:
        """The folders of ``path`` that this patch makes, or takes over from one that would remove them."""
        inherited = [name for name in parents(path) if name in self._old_folders]
        self._old_folders = [name for name in self._old_folders if name not in inherited]
        missing = [name for name in self.overlay.tree.missing_folders(path) if name not in self._new_folders]
        self._new_folders += missing
        return inherited + missing

    def _adopt(self, variant: Variant, parsed: Diff) -> tuple[dict[str, Original], list[str]]:
        manifest, overlay = variant.manifest, self.overlay
        behind = adoption.pristine_behind(overlay, parsed, manifest, self.target.distribution)
        manifest.apply(parsed, lambda path: behind[path].content if path in behind else self.read(path))
        originals: dict[str, Original] = {}
        for path, pristine in behind.items():
            if pristine.content is None:
                continue
            # The old time is only known from a backup, and never that of the patched file.
            mtime_ns = pristine.mtime_ns or overlay.fresh_ns(path)
            mode = overlay.disk(path) or pristine.content
            originals[path] = Original(mode.mode, mtime_ns)
            self._put_backup(path, manifest.patch, pristine.content, mtime_ns)
        self._refreshed += sorted(touched(manifest.files))
        self.notes.append(f"'{manifest.patch}' was already applied by hand; adopted")
        return originals, adoption.own_folders(overlay, manifest.files)

    def _put_backup(self, path: str, patch: str, content: Content, mtime_ns: int) -> None:
        backup = backup_name(path, patch)
        if backup not in self.overlay.entries and (present := self.overlay.disk(backup)) is not None:
            if present.data != content.data:
                raise BackupInTheWayError(backup)
            return
        meta = replace(self.overlay.meta(path, content.mode), mtime_ns=mtime_ns)
        self.overlay.entries[backup] = File(content.data, meta)

    # restoring -------------------------------------------------------------------------------

    def restore(self, applied: Applied) -> None:
        """Take ``applied`` off. Files that were installed over since are left alone."""
        applied = self.state.find(applied.patch) or applied
        above = [other.patch for other in self.state.above(applied)]
        if above:
            raise CoveredError(applied.patch, above)
        takeover = self.takeover(applied)
        if takeover is not None:
            self.takeovers[applied.patch] = takeover
        removal.take_off(self, applied)
        self.overlay.entries[applied.diff_path] = None
        self.state = self.state.drop(applied)
        self._pass_on_folders(applied)
        if self._is_gone(applied):
            # An installer may have left these folders only because our files were in them.
            installed = {name for path in self.target.recorded for name in parents(path)}
            folders = {name for path in applied.touched() for name in parents(path)}
            self._old_folders += sorted(folders - installed)
        self.done.append(("restore", applied))

    def _is_gone(self, applied: Applied) -> bool:
        """Whether the release that ``applied`` was put on is not there any more, or not all of it."""
        return (
            not self.target.is_installed
            or self.target.release != applied.release
            or any(side.before and self.read(side.path) is None for side in removal.all_sides(applied))
        )

    def _pass_on_folders(self, applied: Applied) -> None:
        """Folders that ``applied`` made go, or belong to the next patch that has files in them."""
        for folder in applied.folders:
            heir = next(
                (
                    other
                    for other in self.state.stack
                    if any(path.startswith(f"{folder}/") for path in other.touched())
                ),
                None,
            )
            if heir is None:
                self._old_folders.append(folder)
            else:
                richer = replace(heir, folders=(*heir.folders, folder))
                stack = tuple(richer if other is heir else other for other in self.state.stack)
                self.state = replace(self.state, stack=stack)

    def clear(self, path: str) -> None:
        """Remove what an interrupted change left at ``path``, and the folders that this empties."""
        self.overlay.entries[path] = None
        self._old_folders += parents(path)

    # the outcome -----------------------------------------------------------------------------

    @property
    def files(self) -> list[str]:
        """The distribution's files that will change, sorted."""
        own = {path for path in self.overlay.entries if not path.startswith(f"{APPLIED}/")}
        backups = {name for _, applied in self.done for name in applied.backups()}
        return sorted(path for path in own - backups if self.overlay.operation(path) is not None)

    def operations(self) -> list[Operation]:
        """The transaction: folders, backups, files, removals, old folders, and the state last."""
        entries, tree = self.overlay.entries, self.overlay.tree
        found = [one for path in entries if (one := self.overlay.operation(path)) is not None]
        if not found and self.state == self.started:
            return []
        folders = set(self._new_folders)
        for path, entry in entries.items():
            folders.update(tree.missing_folders(path) if entry is not None else ())
        backups = {name for _, applied in self.done for name in applied.backups()}
        puts = [one for one in found if not isinstance(one, Remove)]
        puts.sort(key=lambda one: one.path not in backups)
        return [
            *(MakeFolder(name) for name in sorted(folders)),
            *puts,
            *(one for one in found if isinstance(one, Remove)),
            *(Refresh(path) for path in self._refreshed if path not in entries),
            *(RemoveFolder(name) for name in innermost_first([*self._old_folders, APPLIED])),
            self._state_operation(),
        ]

    def _state_operation(self) -> Operation:
        data = self.state.dump()
        if data is None:
            return Remove(STATE)
        return Put(STATE, data, replace(self.overlay.meta(STATE, 0o644), mtime_ns=time.time_ns()))


def expectations(applied: Applied, state: State) -> dict[str, str | None]:
    """Path -> sha256 that it must have while ``applied`` is in ``state`` (None: must not exist).

    Only the paths whose topmost patch is ``applied``.
    """
    expected: dict[str, str | None] = {}
    for path in applied.touched():
        top = state.top(path)
        if top is None or top[0] is not applied:
            continue
        pin = top[1]
        expected[path] = pin.after.sha256 if pin.after is not None and path == pin.path else None
    return expected
