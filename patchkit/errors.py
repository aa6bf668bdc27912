"""Every error that a user can meet: what, where, and what to do next.

An error carries the objects it is about, builds its own one-line message, and knows its stable code
(for ``--json``) and its exit code. ``cli.main`` is the only place that turns one into a process exit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

# Exit codes of DESIGN section 6.
DONE = 0
NO = 1
USAGE = 2
HELD = 3
REFUSED = 4
INTERRUPTED = 5
IO_FAILED = 6
AFTER_COMMAND = 125


class PatchkitError(Exception):
    """Base of all expected errors.

    ``code`` is kebab-case and stable; ``exit_code`` is the process's; ``path`` is the offending file
    (or ``file:line`` of a patch), ``hint`` the next thing to do.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = REFUSED

    def __init__(self, message: str, *, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def to_json(self) -> dict[str, str]:
        entry = {"code": self.code, "message": self.message}
        if self.path is not None:
            entry["path"] = self.path
        if self.hint is not None:
            entry["hint"] = self.hint
        return entry


class ManyErrors(PatchkitError):
    """Several refusals found before any write; all are reported, the first decides the exit code."""

    code = "several"

    def __init__(self, errors: Iterable[PatchkitError]) -> None:
        self.errors = list(errors)
        super().__init__("; ".join(str(error) for error in self.errors))
        # Shadowing the class variable: the group exits as its first member would.
        self.exit_code = self.errors[0].exit_code  # type: ignore[misc]


def short(text: str, width: int) -> str:
    """The text in ``width`` characters at most; what was cut shows."""
    return text if len(text) <= width else text[: width - 1] + "…"
