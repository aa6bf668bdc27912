"""Making patches: take in a diff, pin it, edit a scratch copy, refresh, lint."""

from __future__ import annotations
