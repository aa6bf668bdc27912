"""The pinned sha256, size and mode of each file before and after one variant of a patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Change = Literal["modify", "add", "delete", "rename"]


@dataclass(frozen=True)
class Pin:
    """What a file must be: sha256 of its bytes (hex), size in bytes, permission bits."""

    sha256: str
    size: int
    mode: int


@dataclass(frozen=True)
class FilePin:
    """One file of a variant; ``path`` is POSIX and relative to the root."""

    path: str
    change: Change
    before: Pin | None
    after: Pin | None
    source: str | None = None  # "from" in the file: the old path of a rename


@dataclass(frozen=True)
class Manifest:
    patch: str
    distribution: str
    releases: tuple[str, ...]
    on: tuple[str, ...]
    diff_sha256: str
    files: tuple[FilePin, ...]
