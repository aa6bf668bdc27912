"""What a session refuses, and what it could not do after its command."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from patchkit.errors import AFTER_COMMAND, NO, USAGE, PatchkitError

if TYPE_CHECKING:
    from patchkit.commands.check import Verdict


class NothingToRunOnError(PatchkitError):
    """Neither a patch nor ``--clean`` is named, or both are."""

    code = "usage"
    exit_code = USAGE

    def __init__(self, reason: str) -> None:
        super().__init__(reason, hint="patchkit run NAME... -- CMD, or patchkit run --clean -- CMD")


class SessionUseError(PatchkitError):
    """A session is used before it is open, opened a second time, or used by a forked child."""

    code = "session-use"
    exit_code = USAGE


class NotCleanAtStartError(PatchkitError):
    """A run on the pristine tree is asked for, and the tree is not."""

    code = "not-clean"
    exit_code = NO

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        first = [*verdict.complaints, *(f"{one.kind} {one.path}" for one in verdict.offenders)]
        more = f" and {len(first) - 1} more" if len(first) > 1 else ""
        target = verdict.target
        super().__init__(
            f"{target.label} in {target.root} is not clean: {first[0]}{more}",
            path=target.root,
            hint="'patchkit check' names each file",
        )


class SessionInterruptedError(PatchkitError):
    """A signal came before the command was started, or while its end was waited for."""

    code = "interrupted"

    def __init__(self, number: int, doing: str) -> None:
        self.exit_code = 128 + number  # type: ignore[misc]
        super().__init__(f"{signal.Signals(number).name} while {doing}")


class AfterCommandError(PatchkitError):
    """The command has ended, but patchkit could not do the rest."""

    code = "after-command"
    exit_code = AFTER_COMMAND

    def __init__(self, what: str, cause: BaseException | None, *, path: str | None, hint: str | None) -> None:
        self.cause = cause
        super().__init__(what if cause is None else f"{what}: {sentence(cause)}", path=path, hint=hint)


def sentence(cause: BaseException) -> str:
    if isinstance(cause, OSError):
        return f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause)
    return str(cause)
