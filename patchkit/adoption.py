"""A tree that someone patched by hand, with bytes equal to the pinned result: recognised, and taken over when
the pristine bytes can be proven.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.errors import REFUSED, PatchkitError
from patchkit.state import backup_name
from patchkit.tree import parents

if TYPE_CHECKING:
    from patchkit.diff import Content, Diff
    from patchkit.manifest import FilePin, Manifest
    from patchkit.overlay import Overlay
    from patchkit.selection import Reader


class NotAdoptableError(PatchkitError):
    """A tree patched by hand whose pristine bytes cannot be proven."""

    code = "not-adoptable"
    exit_code = REFUSED

    def __init__(self, path: str, patch: str, distribution: str) -> None:
        super().__init__(
            f"{path} is patched by hand with '{patch}', and its pristine bytes cannot be proven: no "
            f"{os.path.basename(backup_name(path, patch))} has them, and the reversed diff fails",
            path=path,
            hint=f"put such a backup beside it, or reinstall {distribution} and apply again",
        )


@dataclass(frozen=True)
class Pristine:
    """The bytes behind a hand-made patch; ``mtime_ns`` of the backup that proved them, if one did."""

    content: Content | None
    mtime_ns: int | None = None


def is_by_hand(overlay: Overlay, files: tuple[FilePin, ...]) -> bool:
    """Whether every file is what the patch makes of it, and at least one is not as before."""
    changed = False
    for pin in files:
        content = overlay.read(pin.path)
        if (content is None) != (pin.after is None):
            return False
        if content is not None and pin.after is not None and not pin.after.matches(content):
            return False
        if pin.source is not None and overlay.read(pin.source) is not None:
            return False
        changed = changed or pin.before is None or pin.after is None or pin.before.sha256 != pin.after.sha256
    return changed


def pristine_behind(
    overlay: Overlay, parsed: Diff, manifest: Manifest, distribution: str
) -> dict[str, Pristine]:
    """Path -> what was there before: a backup of the pinned digest, else the reversed diff."""
    found: dict[str, Pristine] = {}
    undone: dict[str, Content | None] | None = None
    for pin in manifest.files:
        path = pin.source or pin.path
        if pin.before is None:
            found[path] = Pristine(None)
            continue
        backup = backup_name(path, manifest.patch)
        content = overlay.disk(backup)
        if content is not None and pin.before.matches(content):
            found[path] = Pristine(content, os.stat(overlay.tree.path(backup)).st_mtime_ns)
            continue
        if undone is None:
            undone = _reversed(parsed, overlay.read)
        content = undone.get(path)
        if content is None or not pin.before.matches(content):
            raise NotAdoptableError(path, manifest.patch, distribution)
        found[path] = Pristine(content)
    return found


def _reversed(parsed: Diff, read: Reader) -> dict[str, Content | None]:
    try:
        return diff.apply(diff.reverse(parsed), read)
    except diff.DiffError:
        return {}


def own_folders(overlay: Overlay, files: tuple[FilePin, ...]) -> list[str]:
    """The folders that hold nothing but files which the patch added: it made them, and takes them away."""
    added = {pin.path for pin in files if pin.before is None}
    found: set[str] = set()
    for path in sorted({folder for name in added for folder in parents(name)}, key=len, reverse=True):
        names = {f"{path}/{name}" for name in os.listdir(overlay.tree.path(path)) if name != "__pycache__"}
        if names <= added | found:
            found.add(path)
    return sorted(found)
