"""File names in a diff: git's C-quoting, strip levels, and which paths are safe to touch."""

from __future__ import annotations

import re
import unicodedata

MAX_NAME = 255  # bytes of one component, on every file system in use
MAX_PATH = 4096

_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r",
    b'"': b'"', b"\\": b"\\",
}  # fmt: skip
_UNESCAPES = {value[0]: b"\\" + key for key, value in _ESCAPES.items()}
_ESCAPE = re.compile(rb"\\([abtnvfr\"\\]|[0-3][0-7]{2}|.?)", re.DOTALL)
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)


def unquote(body: bytes) -> bytes:
    """The bytes that a C-quoted name stands for; ``body`` is what lies between the quotes."""

    def one(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        if len(escape) == 3:
            return bytes([int(escape, 8)])
        try:
            return _ESCAPES[escape]
        except KeyError:
            raise ValueError(f"unknown escape \\{escape.decode('latin-1')} in a quoted name") from None

    return _ESCAPE.sub(one, body)


def quote(name: bytes) -> bytes:
    """The name as git prints it: C-quoted only where a byte needs it."""
    if not any(byte < 0x20 or byte >= 0x7F or byte in b'"\\' for byte in name):
        return name
    parts = []
    for byte in name:
        if byte in _UNESCAPES:
            parts.append(_UNESCAPES[byte])
        elif byte < 0x20 or byte >= 0x7F:
            parts.append(b"\\%03o" % byte)
        else:
            parts.append(bytes([byte]))
    return b'"' + b"".join(parts) + b'"'


def header_name(rest: bytes) -> tuple[bytes, bytes]:
    """The name and what follows its tab (a time stamp, or nothing) in a ``---`` or ``+++`` line."""
    if rest.startswith(b'"'):
        match = _QUOTED.match(rest)
        if match is None:
            raise ValueError("a quoted name without its closing quote")
        tail = rest[match.end() :]
        if tail and not tail.startswith(b"\t"):
            raise ValueError("text after a quoted name")
        return unquote(match[1]), tail[1:]
    name, _, stamp = rest.partition(b"\t")
    return name, stamp


def whole_name(rest: bytes) -> bytes:
    """The name of a ``rename from`` line: quoted or not, and nothing after it."""
    if not rest.startswith(b'"'):
        return rest
    match = _QUOTED.fullmatch(rest)
    if match is None:
        raise ValueError("a quoted name without its closing quote")
    return unquote(match[1])


def git_pairs(rest: bytes) -> list[tuple[bytes, bytes]]:
    """Every way to read the two names of a ``diff --git`` line: unquoted ones may hold spaces."""
    if len(rest) > 4 * MAX_PATH:
        raise ValueError("names that are too long for files")
    if rest.startswith(b'"'):
        match = _QUOTED.match(rest)
        if match is None or rest[match.end() : match.end() + 1] != b" ":
            raise ValueError("a quoted name without its closing quote")
        return [(unquote(match[1]), whole_name(rest[match.end() + 1 :]))]
    if rest.endswith(b'"'):
        old, _, new = rest.partition(b' "')
        return [(old, whole_name(b'"' + new))]
    spaces = [index for index, byte in enumerate(rest) if byte == 0x20]
    return [(rest[:index], rest[index + 1 :]) for index in spaces]


def stripped(name: bytes, strip: int) -> str:
    """The root-relative path that a name means at this strip level. Raises ``ValueError`` with the reason
    for a name that is absolute, climbs, has empty components, or has too few of them.
    """
    if not name:
        raise ValueError("an empty file name")
    if b"\0" in name:
        raise ValueError("a NUL byte in a file name")
    text = name.decode("utf-8", "surrogateescape")
    if text.startswith("/"):
        raise ValueError(f"absolute path {show(text)}")
    parts = text.split("/")
    if ".." in parts:
        raise ValueError(f"path {show(text)} has '..'")
    kept = parts[strip:]
    if not kept:
        raise ValueError(f"path {show(text)} has fewer than {strip + 1} components (strip level {strip})")
    check_path("/".join(kept))
    return "/".join(kept)


def check_path(path: str) -> None:
    """Refuse (``ValueError``) any path that is not a plain one below the root."""
    parts = path.split("/")
    if path.startswith("/"):
        raise ValueError(f"absolute path {show(path)}")
    if ".." in parts:
        raise ValueError(f"path {show(path)} has '..'")
    if "" in parts or "." in parts or "\0" in path:
        raise ValueError(f"path {show(path)} is not a plain relative path")
    if len(path) > MAX_PATH or any(len(part.encode("utf-8", "surrogateescape")) > MAX_NAME for part in parts):
        raise ValueError(f"path {show(path[:40])}... is too long for a file")
    if parts[0].casefold() in (".patchkit", ".git"):
        raise ValueError(f"path {show(path)} is inside {parts[0]}")


def collision_key(path: str) -> str:
    """Equal for two paths that some file system takes for one (case, Unicode composition)."""
    return unicodedata.normalize("NFC", path).casefold()


def show(path: str) -> str:
    """A path fit for a one-line message, whatever bytes it holds."""
    return quote(path.encode("utf-8", "surrogateescape")).decode("ascii")
