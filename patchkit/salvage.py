"""What can be proven where a file of ``.patchkit`` cannot be read: the stack by the copies of the applied
diffs, the files by the second names that an unreadable journal left. All is set aside, nothing deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from typing import TYPE_CHECKING, Any

from patchkit import lease
from patchkit.adoption import own_folders
from patchkit.durable import fsync_folder, own_like_root
from patchkit.errors import PatchkitError
from patchkit.history import History
from patchkit.journal import Journal
from patchkit.overlay import File, Overlay, Symlink
from patchkit.plan import expectations
from patchkit.recovery import rescue_name
from patchkit.removal import sides
from patchkit.selection import public
from patchkit.state import (
    APPLIED,
    FOLDER,
    RESCUED,
    STATE,
    Applied,
    Original,
    State,
    StateFileError,
    backup_name,
)
from patchkit.tree import Meta, fingerprint, is_there, sha256_file
from patchkit.witness import files_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from patchkit.catalog import Catalog, Variant
    from patchkit.diff import Content
    from patchkit.plan import Plan
    from patchkit.target import Target

_TEMPORARY = re.compile(r"\..{0,40}\.[0-9a-f]{8}\.\d+\.tmp", re.DOTALL)  # of transaction's steps
_UNDO = re.compile(r"undo\.[0-9a-f]{32}")
_DIFF = ".patch"


def unreadable(root: str) -> list[StateFileError]:
    """The error of each file of ``.patchkit`` that stops every command."""
    found = []
    for load in (Journal.load, State.load):
        try:
            load(root)
        except StateFileError as error:
            found.append(error)
    return found + lease.unreadable(root)


def second_names(root: str) -> list[str]:
    """Undo folders (relative) that no readable journal knows: an unreadable one left them."""
    try:
        journal = Journal.load(root)
    except StateFileError:
        return []
    names = _names(os.path.join(root, FOLDER))
    own = journal.undo if journal is not None else None
    return [path for name in names if _UNDO.fullmatch(name) and (path := f"{FOLDER}/{name}") != own]


def lost_stack(root: str) -> bool:
    """Whether diffs of applied patches lie there and no state that knows them."""
    return not is_there(os.path.join(root, STATE)) and bool(_copies(root))


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _copies(root: str) -> list[str]:
    return [name for name in _names(os.path.join(root, APPLIED)) if name.endswith(_DIFF)]


def set_aside(root: str, path: str) -> str:
    """Move ``path`` (relative) into ``.patchkit/rescued``; returns its new one. The caller holds the lock."""
    folder = os.path.join(root, RESCUED)
    os.makedirs(folder, exist_ok=True)
    own_like_root(root, folder)
    name = rescue_name(path.removeprefix(f"{FOLDER}/"), uuid.uuid4().hex[:8])
    os.rename(os.path.join(root, path), os.path.join(root, name))
    fsync_folder(folder)
    fsync_folder(os.path.dirname(os.path.join(root, path)))
    return name


def temporary_files(target: Target) -> list[str]:
    """What a transaction wrote beside the distribution's files, and had no time to rename."""
    found = (path for path in files_of(target) if _TEMPORARY.fullmatch(os.path.basename(path)))
    return [path for path in found if path not in target.recorded]


# the stack -----------------------------------------------------------------------------------------


def rebuilt(root: str, catalog: Catalog, releases: Mapping[str, str | None]) -> tuple[State, list[str]]:
    """The stack that the copies of the applied diffs tell, and the patches that the catalog does not know.

    ``releases`` are the installed ones by distribution. What a file was a symlink to is lost with the state.
    """
    overlay = Overlay(root, 0)
    told = _told(root)
    found: list[Applied] = []
    unknown = []
    for name in _copies(root):
        patch = name.removesuffix(_DIFF)
        sha256 = sha256_file(os.path.join(root, APPLIED, name))[0]
        variants = _variants_of(catalog, patch, sha256)
        if variants:
            found.append(_applied(overlay, variants, told.get((patch, sha256), {}), releases))
        else:
            unknown.append(patch)
    return State(tuple(_ordered(found))), unknown


def _told(root: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(patch, sha256 of its diff) -> the last record of its being applied."""
    found = {}
    for entry in History(root).records():
        for patch in entry.get("patches", ()):
            if patch.get("action") != "restore":
                found[patch.get("name"), patch.get("diff_sha256")] = entry
    return found


def _variants_of(catalog: Catalog, patch: str, sha256: str) -> list[Variant]:
    with contextlib.suppress(PatchkitError, OSError):
        return [one for one in catalog[patch].variants if one.manifest.diff_sha256 == sha256]
    return []


def _applied(
    overlay: Overlay,
    variants: list[Variant],
    told: dict[str, Any],
    releases: Mapping[str, str | None],
) -> Applied:
    release = told.get("release") or releases.get(variants[0].manifest.distribution)
    serving = [one for one in variants if release and public(release) in map(public, one.manifest.releases)]
    manifest = (serving or variants)[0].manifest
    if not serving:
        release = manifest.releases[-1]
    originals = {}
    for pin in manifest.files:
        path = pin.source or pin.path
        backup = overlay.disk(backup_name(path, manifest.patch)) if pin.before is not None else None
        if backup is not None and pin.before is not None and pin.before.matches(backup):
            info = os.stat(overlay.tree.path(backup_name(path, manifest.patch)))
            originals[path] = Original(backup.mode, info.st_mtime_ns)
    there = tuple(pin for pin in manifest.files if is_there(overlay.tree.path(pin.path)))
    times = [os.lstat(overlay.tree.path(pin.path)).st_mtime_ns for pin in there]
    mtime_ns = told.get("mtime_ns") or max(times, default=0)
    when = told.get("time") or mtime_ns / 1e9
    folders = tuple(own_folders(overlay, there))
    return Applied(manifest, release, when, mtime_ns, originals, folders, told.get("override"))


def _ordered(found: Iterable[Applied]) -> list[Applied]:
    """By time, but none before one that it stands on."""
    pending = sorted(found, key=lambda one: one.applied_at)
    names = {one.patch for one in pending}
    ordered: list[Applied] = []
    while pending:
        placed = {one.patch for one in ordered}
        ready = [one for one in pending if set(one.manifest.on) & names <= placed]
        ordered.append((ready or pending)[0])
        pending.remove(ordered[-1])
    return ordered


# the files -----------------------------------------------------------------------------------------


class Expectation:
    """What each path of ``target`` must be with ``state``. ``digests``: path -> sha256s that it may have
    (none: must not exist); ``pinned``: path -> every sha256 that a known patch finds or makes there.
    """

    def __init__(self, target: Target, catalog: Catalog, state: State) -> None:
        self.digests: dict[str, set[str]] = {}
        self.pinned: dict[str, set[str]] = {}
        own = [one for one in state.stack if one.distribution == target.distribution]
        for manifest, pristine in _manifests(target, catalog, own):
            for pin in manifest.files:
                for side in sides(pin):
                    digests = self.digests.setdefault(side.path, set())
                    for one in (side.before, side.after):
                        self.pinned.setdefault(side.path, set()).update({one.sha256} if one else ())
                    if side.before is not None:
                        backup = backup_name(side.path, manifest.patch)
                        self.digests.setdefault(backup, set())
                        self.pinned.setdefault(backup, set()).add(side.before.sha256)
                        if pristine:
                            digests.add(side.before.sha256)
        recorded = ((os.path.normpath(entry.path), entry.sha256) for entry in target.record)
        self.digests |= {path: {one} for path, one in recorded if one and not path.startswith("..")}
        for applied in own:
            self.digests |= {
                path: {one} if one else set() for path, one in expectations(applied, state).items()
            }
            self.digests |= {
                path: {pin.before.sha256} for path, pin in applied.backups().items() if pin.before
            }
            self.digests[applied.diff_path] = {applied.manifest.diff_sha256}
        for kept in state.kept:
            self.digests[kept.path] = {kept.sha256}

    def unmet(self, plan: Plan) -> list[str]:
        """The pinned paths that will not be as expected."""
        return [path for path in self.pinned if not _meets(plan, path, self.digests[path])]


def _manifests(target: Target, catalog: Catalog, own: list[Applied]) -> list[tuple[Any, bool]]:
    found = [(one.manifest, not one.manifest.on) for one in own]
    for name in catalog.names():
        with contextlib.suppress(PatchkitError, OSError):
            patch = catalog[name]
            for variant in patch.variants if patch.distribution == target.distribution else ():
                served = {public(release) for release in variant.manifest.releases}
                if target.release is None or public(target.release) in served:
                    found.append((variant.manifest, not variant.manifest.on))
    return found


def mend(plan: Plan, expected: Expectation, folders: Iterable[str]) -> None:
    """Plan what an unreadable transaction left as it was before: by the second names in ``folders``.

    Bytes that go are rescued; a file that is neither pinned nor expected is left alone.
    """
    root = plan.target.root
    files: dict[str, str] = {}
    links: list[tuple[str, int]] = []
    for folder in folders:
        for name in _names(os.path.join(root, folder)):
            path = os.path.join(root, folder, name)
            found = fingerprint(path)
            if found is not None and found.sha256 is not None:
                files[found.sha256] = path
            elif found is not None and found.target is not None:
                links.append((found.target, os.lstat(path).st_mtime_ns))
    for path, digests in expected.digests.items():
        if digests and not links and not digests & files.keys():
            continue  # nothing to mend it from
        if _meets(plan, path, digests):
            continue
        entry = _source(plan, path, digests, files, links)
        current = plan.overlay.disk(path)
        if digests and entry is None:
            continue
        if current is not None:
            if _sha256(current) not in expected.pinned.get(path, ()):
                continue  # someone else's; `check` names it
            plan.rescues[path] = current.data
        if entry is None:
            plan.clear(path)
        else:
            plan.overlay.entries[path] = entry


def _source(
    plan: Plan, path: str, digests: set[str], files: dict[str, str], links: list[tuple[str, int]]
) -> File | Symlink | None:
    for goal, mtime_ns in links:
        content = plan.overlay.linked(path, goal)
        if content is not None and _sha256(content) in digests:
            return Symlink(goal, mtime_ns)
    for sha256 in digests & files.keys():
        with open(files[sha256], "rb") as file:
            return File(file.read(), Meta.of(files[sha256]))
    return None


def _meets(plan: Plan, path: str, digests: set[str]) -> bool:
    content = plan.overlay.read(path)
    return not digests if content is None else _sha256(content) in digests


def _sha256(content: Content) -> str:
    return hashlib.sha256(content.data).hexdigest()
