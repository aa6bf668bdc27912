"""Unified diffs on bytes: parsed strictly, applied exactly, or refused with the line that is wrong."""

from __future__ import annotations

from patchkit.diff.application import apply, reverse
from patchkit.diff.errors import DiffError
from patchkit.diff.model import Content, Diff, FileDiff, Hunk
from patchkit.diff.scan import parse
from patchkit.diff.writing import compare, render

__all__ = [
    "Content",
    "Diff",
    "DiffError",
    "FileDiff",
    "Hunk",
    "apply",
    "compare",
    "parse",
    "render",
    "reverse",
]
