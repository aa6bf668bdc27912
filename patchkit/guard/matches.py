"""Which of the asked files one process names, by whatever path."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchkit.guard.places import ProcessView, Tree


class Matches:
    """The asked files among the paths that one process names."""

    def __init__(self, tree: Tree, view: ProcessView) -> None:
        self.hits: dict[str, str] = {}
        self.unsure: str | None = None  # a path that may be one, and why that is not known
        self._tree = tree
        self._view = view

    def add(self, paths: set[str]) -> bool:
        """Look at some more paths; returns whether all asked files were found."""
        fresh = paths - self._view.cleared
        relative = {path for path in fresh if not path.startswith("/")}
        for name, path in self._tree.matches(self._view, fresh - relative).items():
            self.hits.setdefault(name, path)
        for path in fresh - relative - self._view.cleared - set(self.hits.values()):
            if self._tree.may_be_moved(self._view, path):
                self.unsure = f"{path}, of a folder that was moved or removed since"
        if relative:
            self._add_relative(relative)
        return len(self.hits) == len(self._tree.files)

    def _add_relative(self, paths: set[str]) -> None:
        for path in paths:
            absolute = f"/proc/self/cwd/{path}"
            name = self._tree.match(self._view, absolute)
            if name is not None:
                self.hits.setdefault(name, path)
            elif self._tree.ends_like(path) and not self._view.exists(absolute):
                self.unsure = f"{path}, relative to a folder that is no longer known"
