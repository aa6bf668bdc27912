"""What a unified diff says, as values. Everything is bytes; only a newline byte ends a line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from patchkit.diff.errors import UnsupportedDiffError

Change = Literal["modify", "add", "delete", "rename"]


@dataclass(frozen=True)
class Content:
    """A file: its bytes and permission bits (``0o644``)."""

    data: bytes
    mode: int


@dataclass(frozen=True)
class Hunk:
    """One hunk. ``old_start`` and ``new_start`` are the header's numbers (1-based; of an empty side, the
    line before it). Each entry of ``body`` is a sign (``+``, ``-`` or space) and a whole line with its
    newline, or without where the diff says that the file ends there.
    """

    line: int  # of the header, in the patch
    old_start: int
    new_start: int
    body: tuple[bytes, ...]
    section: bytes = b""  # what follows the second @@

    @property
    def old_lines(self) -> list[bytes]:
        return [entry[1:] for entry in self.body if entry[0] != 43]

    @property
    def new_lines(self) -> list[bytes]:
        return [entry[1:] for entry in self.body if entry[0] != 45]

    @property
    def old_count(self) -> int:
        return sum(entry[0] != 43 for entry in self.body)

    @property
    def new_count(self) -> int:
        return sum(entry[0] != 45 for entry in self.body)

    @property
    def old_index(self) -> int:
        """Lines of the old file before the hunk."""
        return self.old_start - 1 if self.old_count else self.old_start

    @property
    def new_index(self) -> int:
        return self.new_start - 1 if self.new_count else self.new_start

    def patch_line(self, index: int) -> int:
        """The line in the patch of ``body[index]``: each marker of a missing newline takes a line too."""
        return self.line + 1 + index + sum(not entry.endswith(b"\n") for entry in self.body[:index])


@dataclass(frozen=True)
class Binary:
    """One direction of a git binary patch, inflated: the new bytes, or a delta that makes them."""

    line: int
    kind: str  # "literal" | "delta"
    data: bytes


@dataclass(frozen=True)
class FileDiff:
    """One file's section. ``path`` is POSIX, relative to the root, surrogateescape-decoded; of a deleted
    file the old path. ``source`` is a rename's old path. The modes are those that the diff states
    (None: it states none, and the file keeps its own).
    """

    path: str
    change: Change
    source: str | None
    line: int  # where the section starts in the patch
    hunks: tuple[Hunk, ...] = ()
    old_mode: int | None = None
    new_mode: int | None = None
    forward: Binary | None = None
    backward: Binary | None = None
    old_id: str | None = None  # blob names of git's index line
    new_id: str | None = None

    @property
    def old_path(self) -> str:
        return self.path if self.source is None else self.source


@dataclass(frozen=True)
class Unusable:
    """A section about ``path`` of a kind that is never applied; ``error`` says which."""

    path: str
    error: UnsupportedDiffError


@dataclass(frozen=True)
class Diff:
    """A whole patch, in its own order. ``name`` is what errors call it. ``unusable`` are the sections that
    were passed over because the reader asked for it.
    """

    name: str
    files: tuple[FileDiff, ...]
    unusable: tuple[Unusable, ...] = field(default=(), compare=False)
