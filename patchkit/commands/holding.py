"""Refuse while a process uses the tree, or while someone else changes it; wait if told to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from patchkit import lease
from patchkit.errors import HELD, USAGE, ManyErrors, PatchkitError, short
from patchkit.lease import LeasedError
from patchkit.lock import LockedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from patchkit.guard import Holder
    from patchkit.target import Target

T = TypeVar("T")
LOCK_WAIT_S = 60.0  # for what need not ask: the lock of a tree is held for moments
_POLL_S = 1.0


class HolderError(PatchkitError):
    """A process that has, or may have, loaded a file that would change."""

    code = "held"
    exit_code = HELD

    def __init__(self, holder: Holder, root: str) -> None:
        self.holder = holder
        who = (
            f"process {holder.pid} ({holder.user}: {short(holder.command, 80)})"
            if holder.pid
            else holder.command
        )
        files = holder.files[0] if holder.files else "the tree"
        if len(holder.files) > 1:
            files += f" and {len(holder.files) - 1} more"
        super().__init__(
            f"{who} {_VERB[holder.verdict.value].format(files)} ({holder.evidence})",
            path=root,
            hint=holder.hint or "stop it and try again, or use --wait 10m",
        )


_VERB = {
    "loaded": "has loaded {}",
    "not-loaded": "may load {} at any moment",
    "cannot-tell": "cannot be looked into",
}


class ReasonMissingError(PatchkitError):
    """``--override-guard`` without a reason, or a reason for nothing."""

    code = "usage"
    exit_code = USAGE

    def __init__(self, *, override: bool) -> None:
        super().__init__(
            '--override-guard needs --reason "…", which goes into the history'
            if override
            else "--reason says why the guard is overridden; give --override-guard too, or leave it out"
        )


@dataclass(frozen=True)
class Holding:
    """How to meet a holder: ``wait_s`` seconds at most, or go on regardless for ``reason``.

    ``lock_wait_s`` is for the tree's lock alone, which is held for moments; ``session`` is the one whose own
    leases do not stand in its way, nor do those of sessions that are about to apply the same patches
    (``sharing``). ``thorough`` and ``stop_to_read`` are the guard's.
    """

    wait_s: float = 0.0
    override: bool = False
    reason: str | None = None
    say: Callable[[str], None] = lambda _: None
    lock_wait_s: float = 0.0
    session: str | None = None
    sharing: Sequence[str] | None = None
    thorough: bool = False
    stop_to_read: bool = False

    def __post_init__(self) -> None:
        if self.override and not (self.reason or "").strip():
            raise ReasonMissingError(override=True)
        if self.reason is not None and not self.override:
            raise ReasonMissingError(override=False)

    @property
    def overridden(self) -> str | None:
        return self.reason if self.override else None

    def check(self, target: Target, files: Sequence[str]) -> None:
        """Raise unless no session leases ``target``, no process of an abandoned one lives, and none holds
        ``files`` of it.
        """
        if not files:
            return
        lease.refuse(target.root, target.distribution, own=self.session, sharing=self.sharing)
        if self.override:
            return
        from patchkit import abandonment, guard

        if living := abandonment.alive(target):
            raise living[0]

        blockers = guard.inspect(
            target.root,
            files,
            prefix=target.prefix,
            thorough=self.thorough,
            stop_to_read=self.stop_to_read,
        ).blockers
        if blockers:
            raise ManyErrors([HolderError(holder, target.root) for holder in blockers])

    def retrying(self, attempt: Callable[[], T]) -> T:
        """Run ``attempt`` until nothing holds it up any more (exit code 3) or the time is up."""
        begun = time.monotonic()
        while True:
            try:
                return attempt()
            except PatchkitError as error:
                wait_s = max(self.wait_s, self.lock_wait_s) if isinstance(error, LockedError) else self.wait_s
                left = begun + wait_s - time.monotonic()
                hopeless = isinstance(error, LeasedError) and error.hopeless
                if error.exit_code != HELD or left <= 0 or hopeless:
                    raise
                first = error.errors[0] if isinstance(error, ManyErrors) else error
                self.say(f"waiting {left:.0f} s more: {first.message}")
                time.sleep(min(_POLL_S, left))
