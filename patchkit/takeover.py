"""What came over a tree while a patch was applied: its distribution was uninstalled, another release took its
place, the same release was installed again, or somebody put files back without patchkit.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.errors import PatchkitError
from patchkit.removal import not_ours, sides

if TYPE_CHECKING:
    from patchkit.selection import Reader
    from patchkit.state import Applied, State
    from patchkit.target import Target

UNINSTALLED, REPLACED, REINSTALLED, PUT_BACK = "uninstalled", "replaced", "reinstalled", "put-back"


@dataclass(frozen=True)
class Takeover:
    """``files`` says, for each path that is not the patch's any more, what it is now ("is the file of ...").

    ``now`` is the release that is there now; ``when`` the time of the installation in seconds since the
    epoch, None where nothing says it.
    """

    what: str
    applied: Applied
    now: str | None
    when: float | None
    files: dict[str, str]

    def sentence(self) -> str:
        patch, distribution = self.applied.patch, self.applied.distribution
        old = f"{distribution} {self.applied.release or '(release unknown)'}"
        if self.what == PUT_BACK:
            return f"files of '{patch}' were put back without patchkit and without an installation"
        done = {
            UNINSTALLED: "uninstalled",
            REPLACED: f"replaced by {distribution} {self.now or '(release unknown)'}",
            REINSTALLED: "reinstalled",
        }[self.what]
        at = time.strftime(" at %Y-%m-%d %H:%M:%S,", time.localtime(self.when)) if self.when else ""
        return f"{old} was {done}{at} while '{patch}' was applied"

    def advice(self) -> str:
        patch = self.applied.patch
        again = f"; 'patchkit apply {patch}' puts it on anew" if self.what in (REINSTALLED, PUT_BACK) else ""
        return f"'patchkit restore {patch}' clears what is left of it{again}"

    def to_json(self) -> dict[str, Any]:
        return {
            "patch": self.applied.patch,
            "what": self.what,
            "release_before": self.applied.release,
            "release_now": self.now,
            "time": self.when,
            "files": dict(sorted(self.files.items())),
            "message": self.sentence(),
        }


def find_takeover(target: Target, state: State, applied: Applied, read: Reader) -> Takeover | None:
    """What happened to ``applied`` of ``state`` in ``target``, whose files ``read`` gives; None: nothing."""
    files: dict[str, str] = {}
    found = False
    for path in applied.touched():
        top = state.top(path)
        if top is None:
            continue
        side = next(one for one in sides(top[1]) if one.path == path)
        try:
            current = read(path)
        except (OSError, PatchkitError):
            continue  # named by whoever needs its bytes
        reason = not_ours(target, top[0], side, current)
        if reason is not None:
            files[path] = reason
            # An added file that is gone may just as well have been deleted by hand.
            found |= side.before is not None or current is not None
    installed = _installed_at(target)
    when = installed if installed is not None and installed > applied.applied_at else None
    if not target.is_installed:
        return Takeover(UNINSTALLED, applied, None, None, files)
    if target.release != applied.release:
        return Takeover(REPLACED, applied, target.release, when, files)
    if not found:
        return None
    return Takeover(PUT_BACK if when is None else REINSTALLED, applied, target.release, when, files)


def _installed_at(target: Target) -> float | None:
    """When the files were installed: every installer writes a RECORD of its own, last."""
    if target.metadata is None or target.editable:
        return None
    try:
        return os.stat(os.path.join(target.metadata, "RECORD")).st_mtime
    except OSError:
        return None
