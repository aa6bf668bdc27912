"""What a session holds of its trees: the leases, and the duty to restore of whoever leaves last."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from patchkit import lease
from patchkit.commands import change
from patchkit.commands.holding import LOCK_WAIT_S
from patchkit.lease import Claim, Lease, LeasedError
from patchkit.lock import tree_lock
from patchkit.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.commands.holding import Holding
    from patchkit.target import Target
    from patchkit.workspace import Workspace


class Tenancy:
    """The leases of session ``session``, which needs exactly ``patches`` on each tree."""

    def __init__(self, session: str, patches: Sequence[str], command: str, holding: Holding) -> None:
        self.session = session
        self.patches = list(patches)
        self.command = command
        self.holding = holding
        self.claims: list[Claim] = []
        self._beat_at = 0.0

    def claim(self, target: Target) -> None:
        """Take a lease on ``target``. Raises LeasedError while a session with other patches has one."""

        def attempt() -> None:
            with tree_lock(target.root):
                for other in lease.live(target.root, target.distribution):
                    if not other.shares(self.patches):
                        raise LeasedError(other)
                lease.sweep(target.root)
                self.claims.append(
                    lease.claim(target.root, target.distribution, self.patches, self.session, self.command)
                )

        self.holding.retrying(attempt)

    def restore(self, workspace: Workspace, target: Target, wait_s: float) -> list[Lease]:
        """Take the patches off ``target``, or leave them to the sessions that share them and return those."""
        holding = replace(self.holding, wait_s=max(self.holding.wait_s, wait_s))
        while True:
            with tree_lock(target.root, LOCK_WAIT_S):
                others = lease.live(target.root, target.distribution, but=self.session)
                if others:
                    # Under the lock, so that of two that end at once one sees that it is the last.
                    self._drop(target.root)
                    return others
            applied = {one.patch for one in State.load(target.root).stack}
            mine = [name for name in self.patches if name in applied]
            try:
                if mine:
                    change.restore(workspace, mine, holding=holding)
                return []
            except LeasedError:
                continue  # a session came that shares the patches

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
