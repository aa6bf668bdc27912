"""Which of the asked files one process names, by whatever path."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchkit.guard.places import Tree, View


class Matches:
    """The asked files among the paths that one process names."""

    def __init__(self, tree: Tree, view: View, pid: int) -> None:
        self.hits: dict[str, str] = {}
        self.unsure: str | None = None  # a relative path that may be one
        self._tree = tree
        self._view = view
        self._pid = pid

    def add(self, paths: set[str]) -> bool:
        """Look at some more paths; returns whether all asked files were found."""
        fresh = paths - self._view.cleared
        relative = {path for path in fresh if not path.startswith("/")}
        for name, path in self._tree.matches(self._view, fresh - relative).items():
            self.hits.setdefault(name, path)
        if relative:
            self._add_relative(relative)
        return len(self.hits) == len(self._tree.files)

    def _add_relative(self, paths: set[str]) -> None:
        try:
            folder = os.readlink(f"/proc/{self._pid}/cwd")
        except OSError:
            folder = "/"
        for path in paths:
            absolute = os.path.normpath(os.path.join(folder, path))
            name = self._tree.match(self._view, absolute)
            if name is not None:
                self.hits.setdefault(name, path)
            elif self._tree.ends_like(path) and not self._view.exists(absolute):
                self.unsure = path
