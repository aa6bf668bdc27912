"""Sessions whose patchkit died: finished by whoever comes next, once what they started is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from patchkit import lease, processes
from patchkit.commands import change
from patchkit.commands.holding import LOCK_WAIT_S
from patchkit.errors import HELD, PatchkitError, short
from patchkit.lock import tree_lock
from patchkit.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.commands.holding import Holding
    from patchkit.lease import Lease
    from patchkit.processes import Process
    from patchkit.target import Target
    from patchkit.workspace import Workspace


class SessionAliveError(PatchkitError):
    """The holder of an abandoned session died, but processes that it started live on."""

    code = "abandoned-session-alive"
    exit_code = HELD

    def __init__(self, abandoned: Lease, alive: Sequence[Process]) -> None:
        self.lease = abandoned
        self.processes = list(alive)
        who = ", ".join(f"{process.pid} ({short(process.title(), 80)})" for process in alive[:4])
        super().__init__(
            f"abandoned {abandoned.describe()}: its processes still run: {who}",
            path=abandoned.root,
            hint="stop them, or wait for them with --wait 10m",
        )


def alive(target: Target) -> list[SessionAliveError]:
    """The abandoned sessions on ``target`` whose processes live on."""
    found = []
    for one in lease.abandoned(target.root):
        if one.distribution == target.distribution and (living := processes.marked(one.session)):
            found.append(SessionAliveError(one, living))
    return found


def finish(workspace: Workspace, abandoned: Lease, holding: Holding) -> str:
    """End a session whose holder died: restore its patches once its processes are gone.

    Returns a sentence. Raises SessionAliveError while they live, HolderError while others use the files.
    """

    def attempt() -> str:
        alive = processes.marked(abandoned.session)
        if alive:
            raise SessionAliveError(abandoned, alive)
        with tree_lock(abandoned.root, LOCK_WAIT_S):
            others = lease.live(abandoned.root, abandoned.distribution)
            if others:
                abandoned.discard()
                return (
                    f"abandoned {abandoned.describe()}: its patches are in use by session {others[0].session}"
                )
        applied = {one.patch for one in State.load(abandoned.root).stack}
        names = [name for name in abandoned.patches if name in applied]
        if names:
            change.restore(workspace, names, holding=replace(holding, wait_s=0.0))
        with tree_lock(abandoned.root, LOCK_WAIT_S):
            lease.sweep(abandoned.root)
        restored = f": restored {' '.join(names)}" if names else ""
        return f"finished abandoned {abandoned.describe()}{restored}"

    return holding.retrying(attempt)
