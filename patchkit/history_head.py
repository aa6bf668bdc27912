"""``history.head``: which line the history ends with, so that a change of its last lines shows, too.

A chain of hashes proves every line but the last, which nothing follows. This file names that one. It is
written before a line is appended, with the line that comes, and again after; so a crash between leaves both
in it, and either may be the last.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from patchkit.durable import write_durably
from patchkit.state import FOLDER, SCHEMA, StateFileError, dump_json, load_json

HEAD = f"{FOLDER}/history.head"
UNPROVEN = "0" * 64  # what a line follows where nobody knows any more which one was the last
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Head:
    """``sha256`` of the last line, None before there is one; ``next`` that of the line being appended."""

    sha256: str | None
    next: str | None = None

    @classmethod
    def load(cls, root: str) -> Head | None:
        """None for a history from before there were heads. Raises StateFileError."""
        path = os.path.join(root, HEAD)
        data = load_json(path)
        if data is None:
            return None
        digests = (data.get("sha256"), data.get("next"))
        for one in digests:
            if one is not None and not (isinstance(one, str) and _SHA256.fullmatch(one)):
                raise StateFileError(path, "damaged (not the sha256 of a line)")
        return cls(*digests)

    def write(self, root: str) -> None:
        """Write atomically and durably."""
        write_durably(root, HEAD, dump_json({"schema": SCHEMA, **vars(self)}))

    def allows(self, last: str | None) -> bool:
        """Whether a history may end with the line of sha256 ``last``."""
        return last == self.sha256 or (self.next is not None and last == self.next)
