"""What a value in a file of ``.patchkit`` may be: whatever else stands there was not written by patchkit.

Each check returns the value, or raises ValueError with its place (``stack[0].release``) and what is wrong.
"""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

from patchkit.errors import short

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

LATEST_S = 253_402_300_799  # the end of the year 9999, after which no calendar can say it
_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_NS = 2**63
_MAX_ID = 2**32  # of users and groups; the last one means "leave it"
_SHOWN = 60


def show(value: Any) -> str:
    """A value in a message: a container by its kind, for it may be of any size and depth."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a huge number"  # Python refuses to spell one of thousands of digits
    return short(repr(value), _SHOWN)


def bad(where: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{where} is {show(value)}, not {wanted}")


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(where, value, "an object")
    return value


def sequence(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad(where, value, "a list")
    return value


def keys(value: Any, where: str, needed: set[str], allowed: set[str] | None = None) -> dict[str, Any]:
    """An object with all of the keys ``needed`` and, unless ``allowed`` is None, no other ones but those."""
    entry = mapping(value, where)
    for key in sorted(needed - entry.keys()):
        raise ValueError(f"{where} lacks {key!r}")
    for key in sorted(entry.keys() - needed - allowed) if allowed is not None else ():
        raise ValueError(f"{where} has an unknown key {show(key)}")
    return entry


def optional(check: Callable[[Any, str], T], value: Any, where: str) -> T | None:
    return None if value is None else check(value, where)


def text(value: Any, where: str) -> str:
    """A text that the system can spell; any other character may be in it."""
    if not isinstance(value, str):
        raise bad(where, value, "a text")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise bad(where, value, "a text in Unicode") from None
    return value


def name(value: Any, where: str) -> str:
    """A name of a patch, distribution or session: it becomes part of a file's name."""
    if not isinstance(value, str) or not value or not value.isprintable() or "/" in value:
        raise bad(where, value, "a name")
    return text(value, where)


def names(value: Any, where: str) -> tuple[str, ...]:
    return tuple(name(one, f"{where}[{index}]") for index, one in enumerate(sequence(value, where)))


def path(value: Any, where: str) -> str:
    """A plain POSIX path below the root."""
    parts = text(value, where).split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in value:
        raise bad(where, value, "a plain path below the root")
    return str(value)


def link(value: Any, where: str) -> str:
    """Where a symlink leads."""
    if not text(value, where) or "\0" in value:
        raise bad(where, value, "the target of a link")
    return str(value)


def sha256(value: Any, where: str) -> str:
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise bad(where, value, "a sha256 in lower-case hex")
    return value


def whole(value: Any, where: str, *, least: int = 0, below: int = _MAX_NS) -> int:
    """A whole number in ``range(least, below)``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < below:
        raise bad(where, value, f"a whole number from {least} to {below - 1}")
    return value


def mode(value: Any, where: str) -> int:
    """Permission bits."""
    return whole(value, where, below=0o10000)


def owner(value: Any, where: str) -> int:
    """A user or group id."""
    return whole(value, where, below=_MAX_ID - 1)


def process(value: Any, where: str) -> int:
    return whole(value, where, least=1, below=2**31)


def nanoseconds(value: Any, where: str) -> int:
    """A file's time since the epoch, which may also be before it."""
    return whole(value, where, least=-_MAX_NS)


def seconds(value: Any, where: str) -> float:
    """A time since the epoch, as a float."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= LATEST_S or not math.isfinite(value):
        raise bad(where, value, "a time in seconds since 1970")
    return float(value)
