"""The one renderer: a result becomes text for people or one versioned JSON object for programs.

Commands never print. They return a ``Result``; ``render`` writes it, so that text and ``--json`` cannot
drift apart and nothing but the object reaches stdout with ``--json``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from patchkit.errors import DONE, ManyErrors, PatchkitError

if TYPE_CHECKING:
    from collections.abc import Sequence

JSON_SCHEMA = 1


@dataclass
class Result:
    """What a command has to say.

    ``data`` is the JSON form; ``lines`` the text (``quiet`` drops it, errors stay), each line optionally a
    ``(style, text)`` pair with a style of ``STYLES``; ``details`` are further lines for ``-v``.
    ``json_errors`` are errors that the lines already say; ``raw`` are bytes for stdout instead of lines.
    ``aside``: the lines go to stderr, because stdout belongs to a wrapped command.
    """

    data: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[str | tuple[str, str]] = ()
    details: Sequence[str] = ()
    exit_code: int = DONE
    errors: Sequence[PatchkitError] = ()
    json_errors: Sequence[PatchkitError] = ()
    raw: bytes | None = None
    aside: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == DONE


STYLES: dict[str, dict[str, Any]] = {
    "good": {"fg": "green"},
    "bad": {"fg": "red"},
    "warn": {"fg": "yellow"},
    "dim": {"dim": True},
    "title": {"bold": True},
}


def render(
    result: Result, command: str, *, as_json: bool, quiet: bool = False, verbose: bool = False, color: bool
) -> None:
    """Write ``result`` to stdout, and its errors to stderr (with ``--json``: into the object)."""
    if as_json:
        _write_json(command, ok=result.ok, data=result.data, errors=[*result.errors, *result.json_errors])
        return
    if result.raw is not None:
        sys.stdout.flush()
        sys.stdout.buffer.write(result.raw)
        sys.stdout.flush()
    if not quiet:
        for line in [*result.lines, *(result.details if verbose else ())]:
            _write(line, sys.stderr if result.aside else sys.stdout, color=color)
    for error in result.errors:
        _write_error(error, color=color)


def render_error(error: PatchkitError, command: str, *, as_json: bool, color: bool) -> None:
    """Write an error that ended a command: one line each on stderr, or the JSON object."""
    errors = error.errors if isinstance(error, ManyErrors) else [error]
    if as_json:
        _write_json(command, ok=False, data={}, errors=errors)
        return
    for one in errors:
        _write_error(one, color=color)


def _write_json(command: str, *, ok: bool, data: dict[str, Any], errors: Sequence[PatchkitError]) -> None:
    envelope = {
        "schema": JSON_SCHEMA,
        "command": command,
        "ok": ok,
        "data": data,
        "errors": [error.to_json() for error in errors],
    }
    # ASCII, because file names may hold surrogate escapes that no terminal encoding can write.
    sys.stdout.write(json.dumps(envelope, indent=2, sort_keys=True) + "\n")
    sys.stdout.flush()


def _write(line: str | tuple[str, str], stream: TextIO, *, color: bool) -> None:
    import click

    style, text = ("", line) if isinstance(line, str) else line
    text = printable(text)
    if color and style:
        text = click.style(text, **STYLES[style])
    stream.write(text + "\n")
    stream.flush()


def _write_error(error: PatchkitError, *, color: bool) -> None:
    where = f"{error.path}: " if error.path and error.path not in error.message else ""
    _write(("bad", f"patchkit: {where}{error}"), sys.stderr, color=color)


def printable(text: str) -> str:
    """``text`` as one line that any terminal can write: controls and undecodable bytes are escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(
            sys.stdout.encoding or "utf-8"
        )
    )
