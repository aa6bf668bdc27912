"""What a session holds of its trees: the leases, and the duty to restore of whoever leaves last."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from patchkit import abandonment, lease
from patchkit.commands import change
from patchkit.commands.holding import LOCK_WAIT_S
from patchkit.lease import Claim, Lease, LeasedError
from patchkit.lock import tree_lock
from patchkit.state import State

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from patchkit.commands.holding import Holding
    from patchkit.target import Target
    from patchkit.workspace import Workspace


class Tenancy:
    """The leases of session ``session``, which needs exactly ``patches`` on each tree.

    ``found`` are those that somebody had applied before, with no session: not ours to take off when the
    session does not come about.
    """

    def __init__(self, session: str, patches: Sequence[str], command: str, holding: Holding) -> None:
        self.session = session
        self.patches = list(patches)
        self.command = command
        self.holding = holding
        self.claims: list[Claim] = []
        self.found: set[str] = set()
        self._beat_at = 0.0

    def claim(self, target: Target) -> None:
        """Take a lease on ``target``. Raises LeasedError while a session with other patches has one."""

        def attempt() -> None:
            with tree_lock(target.root):
                others = lease.live(target.root, target.distribution)
                for other in others:
                    if not other.shares(self.patches):
                        raise LeasedError(other)
                lease.sweep(target.root)
                # Those who share the patches now may end before us, and leave to us what they applied.
                found = others[0].found if others else self._applied(target)
                self.claims.append(
                    lease.claim(
                        *(target.root, target.distribution, self.patches, self.session, self.command),
                        found=found,
                    )
                )
                self.found.update(found)

        self.holding.retrying(attempt)

    def apply(self, workspace: Workspace) -> None:
        """Put the patches on, unless a session that shares them has."""
        done = change.apply(workspace, self.patches, holding=replace(self.holding, sharing=self.patches))
        self.found.update(one["name"] for one in done.data["done"] if one["action"] == "adopt")

    def restore(
        self, workspace: Workspace, target: Target, wait_s: float, *, but: Collection[str] = ()
    ) -> list[Lease]:
        """Take the patches off ``target`` without ``but``, or leave them to the sessions that need them and
        return those. The lease on it is given up.
        """
        holding = replace(self.holding, wait_s=max(self.holding.wait_s, wait_s))
        while True:
            with tree_lock(target.root, LOCK_WAIT_S):
                others = self._others(target)
                mine = [name for name in self._applied(target) if name not in but]
                if others or not mine:
                    # Under the lock, so that of two that end at once one sees that it is the last, and that
                    # nobody who comes leaves to us what we have taken off already.
                    self._drop(target.root)
                    return others
            with contextlib.suppress(LeasedError):  # a session came that shares the patches
                change.restore(workspace, mine, holding=holding)

    def keep(self, target: Target) -> list[Lease]:
        """Leave the patches on; returns the sessions that need them, the last of which decides."""
        with tree_lock(target.root, LOCK_WAIT_S):
            others = self._others(target)
            self._drop(target.root)
            return others

    def _others(self, target: Target) -> list[Lease]:
        """Sessions that need the tree as it is, those too whose patchkit died but not what it started."""
        others = lease.live(target.root, target.distribution, but=self.session)
        return others + [error.lease for error in abandonment.alive(target)]

    def _applied(self, target: Target) -> list[str]:
        applied = {
            one.patch for one in State.load(target.root).stack if one.distribution == target.distribution
        }
        return [name for name in self.patches if name in applied]

    def release(self) -> None:
        """Give every lease up."""
        for root in dict.fromkeys(claim.lease.root for claim in self.claims):
            with tree_lock(root, LOCK_WAIT_S):
                self._drop(root)

    def _drop(self, root: str) -> None:
        for claim in [one for one in self.claims if one.lease.root == root]:
            claim.release()
            self.claims.remove(claim)

    def abandon(self) -> None:
        """Leave the leases as marks of an unfinished session."""
        for claim in self.claims:
            claim.abandon()
        self.claims.clear()

    def beat(self) -> None:
        """Say that the session lives, if it is time to."""
        now = time.monotonic()
        if now - self._beat_at >= lease.BEAT_S:
            self._beat_at = now
            for claim in self.claims:
                claim.beat()

    def stop(self) -> None:
        """Say that this process is being stopped and will not beat until it is continued."""
        for claim in self.claims:
            claim.stop()
        self._beat_at = 0.0
