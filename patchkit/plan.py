"""Decide, in memory, what an apply or restore would write. Nothing here touches the disk but to read.

A plan holds the tree as it will be: the disk, overlaid with the changes so far. Patches are put on and taken
off that overlay one after the other, so that several patches, or an old patch and its update, become one
transaction.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from patchkit import diff, selection
from patchkit.diff import Content
from patchkit.errors import REFUSED, ManyErrors, PatchkitError
from patchkit.state import (
    APPLIED,
    STATE,
    Applied,
    Kept,
    Original,
    State,
    backup_name,
)
from patchkit.transaction import Link, MakeFolder, Operation, Put, Remove, RemoveFolder
from patchkit.tree import Fingerprint, Meta, NotAFileError, Tree, fingerprint

if TYPE_CHECKING:
    from patchkit.catalog import Catalog, Patch, Variant
    from patchkit.manifest import FilePin
    from patchkit.target import Target


class BackupInTheWayError(PatchkitError):
    """A file with the backup's name exists and holds other bytes."""

    code = "backup-in-the-way"
    exit_code = REFUSED

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} exists and does not hold the pristine bytes",
            path=path,
            hint="move it away; it would be overwritten",
        )


class DriftedError(PatchkitError):
    """A file of an applied patch that someone changed afterwards."""

    code = "drifted"
    exit_code = REFUSED

    def __init__(self, path: str, patch: str, what: str = "was changed after") -> None:
        super().__init__(
            f"{path} {what} '{patch}' was applied",
            path=path,
            hint="undo the edit, or 'patchkit restore --force' saves it under .patchkit/rescued first",
        )


class BackupLostError(PatchkitError):
    """The backup is missing or changed, and the diff cannot give the pristine bytes either."""

    code = "backup-lost"
    exit_code = REFUSED

    def __init__(self, path: str, reason: str, distribution: str) -> None:
        super().__init__(
            f"{path} {reason}, and the pristine bytes cannot be rebuilt from the diff",
            path=path,
            hint=f"put the backup back or reinstall {distribution}",
        )


class CoveredError(PatchkitError):
    """Another patch lies on top and changes the same files."""

    code = "covered"
    exit_code = REFUSED

    def __init__(self, patch: str, above: list[str]) -> None:
        super().__init__(
            f"'{patch}' lies below {', '.join(repr(name) for name in above)}, which changes the same files",
            hint=f"restore {' '.join(above)} first or with it, or use --all",
        )


class NotAppliedError(PatchkitError):
    """The patch is not in the stack."""

    code = "not-applied"
    exit_code = REFUSED

    def __init__(self, patch: str, root: str) -> None:
        super().__init__(f"'{patch}' is not applied to {root}", hint="'patchkit status' shows what is")


@dataclass(frozen=True)
class File:
    data: bytes
    meta: Meta


@dataclass(frozen=True)
class Symlink:
    target: str


Entry = File | Symlink | None


@dataclass
class Plan:
    """The changes so far. ``done`` lists (action, patch) pairs; ``notes`` are sentences for the user."""

    target: Target
    catalog: Catalog
    state: State
    mtime_ns: int
    force: bool = False
    keep_backup: bool = False
    entries: dict[str, Entry] = field(default_factory=dict)
    seen: dict[str, Fingerprint | None] = field(default_factory=dict)
    new_folders: list[str] = field(default_factory=list)
    old_folders: list[str] = field(default_factory=list)
    rescues: dict[str, bytes] = field(default_factory=dict)
    done: list[tuple[str, Applied]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    override: str | None = None

    def __post_init__(self) -> None:
        self.tree = Tree(self.target.root)
        self.started = self.state

    # reading ---------------------------------------------------------------------------------

    def read(self, path: str) -> Content | None:
        """The content at ``path`` as it will be."""
        if path in self.entries:
            entry = self.entries[path]
            return Content(entry.data, entry.meta.mode) if isinstance(entry, File) else self._disk(path)
        return self._disk(path)

    def _disk(self, path: str) -> Content | None:
        data = self.tree.read(path)
        absolute = self.tree.path(path)
        if path not in self.seen:
            self.seen[path] = (
                fingerprint(absolute)
                if data is None or os.path.islink(absolute)
                else Fingerprint.of_data(data)
            )
        return None if data is None else Content(data, stat.S_IMODE(os.stat(absolute).st_mode))

    def _meta(self, path: str, mode: int) -> Meta:
        """The metadata that a new file at ``path`` takes: of the file there, else of the root's owner."""
        entry = self.entries.get(path)
        if isinstance(entry, File):
            return replace(entry.meta, mode=mode, mtime_ns=self.mtime_ns)
        absolute = self.tree.path(path)
        if os.path.isfile(absolute):
            return replace(Meta.of(absolute), mode=mode, mtime_ns=self.mtime_ns)
        info = os.stat(self.target.root)
        owner = (info.st_uid, info.st_gid) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        return Meta(mode, *owner, self.mtime_ns)

    # applying --------------------------------------------------------------------------------

    def apply(self, patch: Patch) -> None:
        """Put ``patch`` on top; a no-op when it is there already, an update when its diff changed."""
        old = self.state.find(patch.name)
        if old is not None:
            variant = selection.choose(patch, self.target, self._below(old), self._before(old))
            if variant.manifest.diff_sha256 == old.manifest.diff_sha256:
                drifted = [
                    path
                    for path, expected in expectations(old, self.state).items()
                    if self._differs(path, expected)
                ]
                if drifted:
                    raise ManyErrors([DriftedError(path, patch.name) for path in drifted])
                self.notes.append(f"'{patch.name}' is already applied")
                return
            self.restore(old)
            self.notes.append(f"'{patch.name}' was applied in an earlier version; it is replaced")
        selection.check_order(patch, [applied.patch for applied in self.state.stack], self.catalog)
        self._put_on(patch, selection.choose(patch, self.target, list(self.state.stack), self.read))

    def _below(self, applied: Applied) -> list[Applied]:
        return list(self.state.stack[: self.state.stack.index(applied)])

    def _before(self, applied: Applied) -> selection.Reader:
        """A reader of the tree as it was before ``applied``: digests stand for bytes where they suffice."""

        def read(path: str) -> Content | None:
            for backup, pin in applied.backups().items():
                if path == (pin.source or pin.path):
                    return self._disk(backup)
            added = any(pin.before is None and pin.path == path for pin in applied.manifest.files)
            return None if added else self.read(path)

        return read

    def _put_on(self, patch: Patch, variant: Variant) -> None:
        manifest = variant.manifest
        data = variant.diff_bytes()
        parsed = diff.parse(data, name=variant.diff_path)
        selection.check_inside(parsed, self.target)
        by_hand = self._patched_by_hand(manifest.files)
        before = self._pristine_behind(patch.name, parsed, manifest.files) if by_hand else self.read
        originals: dict[str, Original] = {}
        backups: dict[str, File] = {}
        for pin in manifest.files:
            if pin.before is None:
                continue
            path = pin.source or pin.path
            original = before(path)
            if original is None or not pin.before.matches(original):
                continue  # manifest.apply names it below
            self._check_unattended(path)
            originals[path] = self._original(path, original)
            backups[backup_name(path, patch.name)] = File(
                original.data, replace(self._meta(path, original.mode), mtime_ns=originals[path].mtime_ns)
            )
        result = manifest.apply(parsed, before)
        for path, backup in backups.items():
            self._put_backup(path, backup)
        folders: list[str] = []
        if not by_hand:
            sources = {pin.path: pin.source for pin in manifest.files if pin.source}
            metas = {
                path: self._meta(sources.get(path) or path, content.mode)
                for path, content in result.items()
                if content
            }
            for path, content in result.items():
                self._check_unattended(path)
                self.entries[path] = None if content is None else File(content.data, metas[path])
                folders += [name for name in self.tree.missing_folders(path) if content is not None]
        else:
            self.notes.append(f"'{patch.name}' was already applied by hand; adopted")
        folders = sorted(set(folders) - set(self.new_folders))
        self.new_folders += folders
        applied = Applied(
            manifest,
            self.target.release,
            time.time(),
            self.mtime_ns,
            originals,
            tuple(folders),
            self.override,
        )
        self.entries[applied.diff_path] = File(data, self._meta(applied.diff_path, 0o644))
        self.state = self.state.push(applied)
        names = set(backups)
        self.state = replace(
            self.state, kept=tuple(kept for kept in self.state.kept if kept.path not in names)
        )
        self.done.append(("adopt" if by_hand else "apply", applied))

    def _check_unattended(self, path: str) -> None:
        """A path that no applied patch touches must have its disk content recorded for the transaction."""
        if path not in self.entries:
            self._disk(path)

    def _original(self, path: str, content: Content) -> Original:
        entry = self.entries.get(path)
        if isinstance(entry, File):
            return Original(content.mode, entry.meta.mtime_ns)
        absolute = self.tree.path(path)
        link = os.readlink(absolute) if os.path.islink(absolute) else None
        info = os.stat(absolute) if os.path.exists(absolute) else os.stat(self.target.root)
        return Original(content.mode, info.st_mtime_ns, link)

    def _put_backup(self, path: str, backup: File) -> None:
        if path not in self.entries and (present := self._disk(path)) is not None:
            if present.data != backup.data:
                raise BackupInTheWayError(path)
            return
        self.entries[path] = backup

    def _patched_by_hand(self, files: tuple[FilePin, ...]) -> bool:
        """Whether every file is what the patch makes of it, and at least one is not as before."""
        changed = False
        for pin in files:
            content = self.read(pin.path)
            if (content is None) != (pin.after is None):
                return False
            if content is not None and pin.after is not None and not pin.after.matches(content):
                return False
            if pin.source is not None and self.read(pin.source) is not None:
                return False
            changed = (
                changed or pin.before is None or pin.after is None or pin.before.sha256 != pin.after.sha256
            )
        return changed

    def _pristine_behind(self, patch: str, parsed: diff.Diff, files: tuple[FilePin, ...]) -> selection.Reader:
        """The pristine bytes of a tree patched by hand: backups of the right digest, else reversed."""
        reversed_: dict[str, Content | None] | None = None
        found: dict[str, Content | None] = {}
        for pin in files:
            path = pin.source or pin.path
            if pin.before is None:
                found[path] = None
                continue
            content = self._disk(backup_name(path, patch))
            if content is None or not pin.before.matches(content):
                if reversed_ is None:
                    reversed_ = diff.apply(diff.reverse(parsed), self.read)
                content = reversed_.get(path)
            if content is None or not pin.before.matches(content):
                raise BackupLostError(path, f"is patched by hand with '{patch}'", self.target.distribution)
            found[path] = content
        return lambda path: found[path] if path in found else self.read(path)

    # restoring -------------------------------------------------------------------------------

    def restore(self, applied: Applied) -> None:
        """Take ``applied`` off. Files that were reinstalled since are left alone."""
        above = [other.patch for other in self.state.above(applied)]
        if above:
            raise CoveredError(applied.patch, above)
        problems: list[PatchkitError] = []
        for pin in applied.manifest.files:
            try:
                self._take_off(applied, pin)
            except (DriftedError, BackupLostError) as error:
                problems.append(error)
        if problems:
            raise ManyErrors(problems)
        self.entries[applied.diff_path] = None
        self.old_folders += sorted(applied.folders, reverse=True)
        self.state = self.state.drop(applied)
        self.done.append(("restore", applied))

    def _take_off(self, applied: Applied, pin: FilePin) -> None:
        old_path = pin.source or pin.path
        current = self.read(pin.path)
        backup = backup_name(old_path, applied.patch)
        patched = (
            pin.after.matches(current) if pin.after and current else (pin.after is None and current is None)
        )
        if pin.source is not None and patched and self.read(pin.source) is not None:
            raise DriftedError(pin.source, applied.patch, "appeared after")
        if not patched:
            reinstalled = self._reinstalled(applied, pin, current)
            if reinstalled:
                self.notes.append(f"{pin.path}: {reinstalled}; left as it is")
                self._drop_backup(applied, backup, pin)
                return
            if not self.force:
                what = "was removed after" if current is None else "was changed after"
                raise DriftedError(pin.path, applied.patch, what)
            if current is not None:
                self.rescues[pin.path] = current.data
        if pin.before is not None:
            self.entries[old_path] = self._pristine(applied, pin, backup, patched=patched)
        if pin.before is None or pin.source is not None:
            self.entries[pin.path] = None
        self._drop_backup(applied, backup, pin)

    def _reinstalled(self, applied: Applied, pin: FilePin, current: Content | None) -> str | None:
        """Why the file at ``pin.path`` is the installer's and not a drifted patch; None if it is drifted."""
        if (
            current is not None
            and pin.before is not None
            and pin.source is None
            and pin.before.matches(current)
        ):
            return "already has its pristine bytes"
        recorded = {entry.path: entry.sha256 for entry in self.target.record}
        if current is not None and recorded.get(pin.path) == Fingerprint.of_data(current.data).sha256:
            return f"is the file of {self.target.label}, installed after the patch"
        upgraded = self.target.release != applied.release
        if current is None and (
            upgraded or not self.target.packages or (recorded and pin.path not in recorded)
        ):
            return f"is gone from {self.target.label}" if pin.before is not None else "is gone"
        return None

    def _pristine(self, applied: Applied, pin: FilePin, backup: str, *, patched: bool) -> Entry:
        """The entry from before the patch: its backup, else the reversed diff; always digest-checked."""
        assert pin.before is not None  # noqa: S101 (the caller checked; for the type checker)
        path = pin.source or pin.path
        original = applied.originals.get(path)
        if original is not None and original.link is not None:
            return Symlink(original.link)
        saved = self.read(backup)
        if saved is not None and pin.before.matches(saved):
            entry = self.entries.get(backup)
            return entry if isinstance(entry, File) else File(saved.data, Meta.of(self.tree.path(backup)))
        reason = "is missing" if saved is None else "does not hold the pinned bytes"
        rebuilt = self._reverse(applied, path) if patched else None
        if rebuilt is None or not pin.before.matches(rebuilt):
            raise BackupLostError(backup, reason, applied.distribution)
        self.notes.append(
            f"{backup} {reason}; the pristine bytes were rebuilt from the diff and match the pinned sha256"
        )
        mtime = original.mtime_ns if original else self.mtime_ns
        mode = original.mode if original else rebuilt.mode
        return File(rebuilt.data, replace(self._meta(pin.path, mode), mtime_ns=mtime))

    def _reverse(self, applied: Applied, path: str) -> Content | None:
        saved = self._disk(applied.diff_path)
        if saved is None or Fingerprint.of_data(saved.data).sha256 != applied.manifest.diff_sha256:
            return None
        try:
            undone = diff.reverse(diff.parse(saved.data, name=applied.diff_path))
            return diff.apply(undone, self._as_patched(applied)).get(path)
        except diff.DiffError:
            return None

    def _as_patched(self, applied: Applied) -> selection.Reader:
        """The tree with ``applied`` still on, although some of its files were taken off already."""
        ours = applied.touched()
        return lambda path: self._disk(path) if path in ours else self.read(path)

    def _drop_backup(self, applied: Applied, backup: str, pin: FilePin) -> None:
        saved = self.read(backup) if pin.before is not None else None
        if saved is None or pin.before is None:
            return
        if not pin.before.matches(saved):
            self.rescues[backup] = saved.data
        elif self.keep_backup:
            self.state = replace(
                self.state, kept=(*self.state.kept, Kept(backup, applied.patch, pin.before.sha256))
            )
            return
        self.entries[backup] = None

    # the outcome -----------------------------------------------------------------------------

    def _differs(self, path: str, expected: str | None) -> bool:
        content = self.read(path)
        return (Fingerprint.of_data(content.data).sha256 if content else None) != expected

    @property
    def files(self) -> list[str]:
        """The distribution's files that will change, sorted."""
        own = {path for path in self.entries if not path.startswith(f"{APPLIED}/")}
        backups = {name for _, applied in self.done for name in applied.backups()}
        return sorted(path for path in own - backups if self._operation(path, self.entries[path]) is not None)

    def operations(self) -> list[Operation]:
        """The transaction: folders, backups, files, removals, old folders, and the state last."""
        found = [
            operation
            for path, entry in self.entries.items()
            if (operation := self._operation(path, entry)) is not None
        ]
        folders = list(self.new_folders)
        for path in self.entries:
            folders += [name for name in self.tree.missing_folders(path) if self.entries[path] is not None]
        makes = [MakeFolder(name) for name in sorted(set(folders))]
        puts = [item for item in found if not isinstance(item, Remove)]
        puts.sort(key=lambda item: ".bak_" not in item.path)
        removes = [item for item in found if isinstance(item, Remove)]
        gone = [RemoveFolder(name) for name in [*self.old_folders, APPLIED]]
        if not found and self.state == self.started:
            return []
        return [*makes, *puts, *removes, *gone, self._state_operation()]

    def _operation(self, path: str, entry: Entry) -> Operation | None:
        absolute = self.tree.path(path)
        now = self.seen[path] if path in self.seen else fingerprint(absolute)
        if entry is not None and now is not None and now.kind in ("dir", "other"):
            raise NotAFileError(path, "a folder" if now.kind == "dir" else "a device, pipe or socket")
        if entry is None:
            return None if now is None else Remove(path)
        if isinstance(entry, Symlink):
            return None if now == Fingerprint("link", target=entry.target) else Link(path, entry.target)
        same = (
            now == Fingerprint.of_data(entry.data)
            and stat.S_IMODE(os.lstat(absolute).st_mode) == entry.meta.mode
        )
        return None if same else Put(path, entry.data, entry.meta)

    def _state_operation(self) -> Operation:
        data = self.state.dump()
        if data is None:
            return Remove(STATE)
        return Put(STATE, data, replace(self._meta(STATE, 0o644), mtime_ns=time.time_ns()))


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


def fresh_mtime_ns(last_ns: int) -> int:
    """A modification time (ns) whose second no earlier change of this tree used.

    Bytecode records the source's mtime in whole seconds, and bytecode may also lie where we cannot see it
    (another ``PYTHONPYCACHEPREFIX``); so two versions of a file must never share a second.
    """
    second = 1_000_000_000
    return max(time.time_ns(), (last_ns // second + 1) * second)
