"""Does a process belong to the environment that is about to change?

Three witnesses, from the best to the weakest:

1. what its interpreter says (``sys.prefix``, ``sys.path``, modules below the root);
2. where its memory may not be read (Yama, a missing capability, an interpreter that we do not know) but
   ``/proc/PID/maps`` may: mapped files, its executable, its first argument, its environment variables;
3. where nothing of it may be read (another user's process): its command line, its name and its uid.

For the third this is the rule. The process counts, so that the change is refused, when its first
argument lies in the environment, or is an interpreter that the environment *is* (no venv), or is a
Python that runs something inside the environment; or when it retitled itself and names the package
(``sglang::scheduler``); or when it is a Python without a path (``python train.py``), which may be any
environment's, unless the files lie in a home that is not its own. It does not count when its first
argument is an absolute path that leads elsewhere (``/usr/bin/python3 /usr/bin/networkd-dispatcher``),
or when its user may not even read the root.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from functools import lru_cache
from typing import TYPE_CHECKING

from patchkit.guard import procfs

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchkit.guard.cpython import Snapshot
    from patchkit.guard.places import ProcessView, Tree

_PYTHON = re.compile(r"^(python|pypy|graalpy)[\d.]*[a-z]?$")


class Environment:
    """The environment of ``tree``; each method returns the reason why a process is of it, or None."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        places = [tree.root]
        # Each process of a base installation, and each venv made from it, maps the base's libpython.
        # Only in a venv, files below the prefix mean the prefix.
        if tree.prefix and tree.is_venv:
            places.append(tree.prefix)
        self._places = tuple(dict.fromkeys(places))
        self._may_read: dict[int, bool] = {}
        self._words = re.compile(
            r"(?<![a-z0-9])(" + "|".join(map(re.escape, sorted(tree.packages))) + r")(?![a-z0-9])",
            re.IGNORECASE,
        )

    def by_interpreter(self, view: ProcessView, snapshot: Snapshot) -> str | None:
        tree = self.tree
        if tree.prefix_identity and snapshot.prefix and not self._root_is_elsewhere():
            identity, _ = view.folder(snapshot.prefix)
            if identity == tree.prefix_identity:
                return f"its sys.prefix is {snapshot.prefix}"
        if tree.root_identity is None:
            return None
        for folder in snapshot.search_path:
            if folder.startswith("/") and view.folder(folder)[0] == tree.root_identity:
                return f"its sys.path has {folder}"
        for folder in {path.rpartition("/")[0] for path in snapshot.paths if path.startswith("/")}:
            if view.is_below(folder or "/", tree.root_identity):
                return f"it has imported modules from {folder}"
        return None

    def _root_is_elsewhere(self) -> bool:
        """A root outside its prefix that is not a venv's: a base interpreter proves nothing then."""
        tree = self.tree
        return not tree.is_venv and not f"{tree.root}/".startswith(f"{tree.prefix}/")

    def by_outside(self, pid: int, view: ProcessView, maps: bytes) -> str | None:
        tree = self.tree
        paths = procfs.mapped_paths(maps)
        for path in paths:
            if any(path.startswith(f"{place}/") for place in self._places):
                return f"it maps {path}"
        if tree.root_identity is not None and view.base:
            for folder in {path.rpartition("/")[0] for path in paths}:
                if view.is_below(folder or "/", tree.root_identity):
                    return f"it maps a file of {folder}"
        try:
            program = procfs.program(pid)
        except OSError:
            program = ""
        if tree.prefix and not tree.is_venv and not self._root_is_elsewhere():
            name = os.path.basename(program)
            if _PYTHON.match(name) and program.startswith(f"{tree.prefix.rstrip('/')}/"):
                return f"it runs {program}"
        return self._by_variables(pid, view) or self._by_command(pid, procfs.arguments(pid))

    def _by_variables(self, pid: int, view: ProcessView) -> str | None:
        tree = self.tree
        variables = procfs.environment(pid)
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME"):
            value = variables.get(name, "")
            if value.startswith("/") and view.folder(value)[0] in {tree.prefix_identity} - {None}:
                return f"its {name} is {value}"
        for value in variables.get("PYTHONPATH", "").split(":"):
            if value.startswith("/") and view.folder(value)[0] == tree.root_identity:
                return f"its PYTHONPATH has {value}"
        started_as = variables.get("_", "")
        if self._in_prefix(started_as):
            return f"it was started as {started_as}"
        return None

    def _in_prefix(self, path: str) -> bool:
        """Whether ``path``, or what it links to, is a program of the prefix."""
        prefix = self.tree.prefix
        if not prefix or not path.startswith("/"):
            return False
        if not self.tree.is_venv and self._root_is_elsewhere():
            return False
        # The folder is resolved and the name is not: a venv's python is a link that leaves it.
        folder = os.path.realpath(os.path.dirname(path))
        return f"{folder}/".startswith(f"{prefix.rstrip('/')}/") and (
            self.tree.is_venv or bool(_PYTHON.match(os.path.basename(path)))
        )

    def _by_command(self, pid: int, arguments: list[str]) -> str | None:
        if not arguments:
            return None
        first = arguments[0]
        if "/" in first and not first.startswith("/"):
            try:
                first = os.path.normpath(os.path.join(os.readlink(f"/proc/{pid}/cwd"), first))
            except OSError:
                return None
        if self._in_prefix(first):
            return f"it was started as {first}"
        if _PYTHON.match(os.path.basename(first)):
            return self._named_in(arguments[1:])
        if self._is_title(arguments) and self._words.search(arguments[0]):
            return f"it calls itself {arguments[0]!r}"
        return None

    def _named_in(self, arguments: list[str]) -> str | None:
        for argument in arguments:
            if any(f"{place}/" in f"{argument}/" for place in self._places):
                return f"it was started with {argument}"
        return None

    @staticmethod
    def _is_title(arguments: list[str]) -> bool:
        """Whether this looks like a text of setproctitle, not like a program's path or name."""
        first = arguments[0]
        return len(arguments) == 1 and not first.startswith("/") and not first.startswith("-")

    def by_stranger(
        self, arguments: list[str], name: str, uid: int, *, on_gpu: Callable[[], bool]
    ) -> str | None:
        """``arguments`` and ``name`` (``comm``) are all that is visible of the process of ``uid``."""
        if not self._may_enter(uid):
            return None
        first = arguments[0] if arguments else ""
        if first.startswith("/"):
            if self._in_prefix(first):
                return f"it was started as {first}"
            return self._named_in(arguments[1:]) if _PYTHON.match(os.path.basename(first)) else None
        words = first.split(" ")[0]
        if _PYTHON.match(os.path.basename(words)):
            reason = self._named_in(arguments[1:]) or self._package_in(arguments[1:])
            if reason or self._in_foreign_home(uid):
                return reason
            return f"it runs {words}, of an environment that cannot be seen"
        if self._words.search(name) or (self._is_title(arguments or [""]) and self._words.search(first)):
            return f"it calls itself {first or name!r}"
        if not self._in_foreign_home(uid) and on_gpu():
            return "it computes on a GPU, and what it runs cannot be seen"
        return None

    def by_program(self, program: str, name: str, uid: int) -> str | None:
        """``program`` (``/proc/PID/exe``) and ``name`` are all that can be had of a process that hangs."""
        if not self._may_enter(uid):
            return None
        if _PYTHON.match(os.path.basename(program)):
            return f"it runs {program}, of an environment that cannot be seen"
        if self._in_prefix(program):
            return f"it runs {program}"
        return f"it calls itself {name!r}" if self._words.search(name) else None

    def _may_enter(self, uid: int) -> bool:
        if uid not in self._may_read:
            self._may_read[uid] = may_read(uid, self.tree.root)
        return self._may_read[uid]

    def _package_in(self, arguments: list[str]) -> str | None:
        for argument in arguments:
            if self._words.search(argument):
                return f"it was started with {argument}"
        return None

    def _in_foreign_home(self, uid: int) -> bool:
        """Whether the root lies in the home of somebody else than ``uid``."""
        return any(owner != uid and f"{self.tree.root}/".startswith(f"{home}/") for owner, home in _homes())


@lru_cache(maxsize=1)
def _homes() -> tuple[tuple[int, str], ...]:
    homes = []
    for entry in pwd.getpwall():
        home = entry.pw_dir.rstrip("/")
        # System accounts have /, /bin, /usr/sbin and the like for a home.
        person = entry.pw_uid == 0 or entry.pw_uid >= 1000
        if person and (home.count("/") >= 2 or home == "/root"):
            homes.append((entry.pw_uid, os.path.realpath(home)))
    return tuple(homes)


@lru_cache(maxsize=64)
def _groups(uid: int) -> frozenset[int]:
    try:
        entry = pwd.getpwuid(uid)
        return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))
    except (KeyError, OSError):
        return frozenset()


def may_read(uid: int, folder: str) -> bool:
    """Whether ``uid`` may enter ``folder`` and each folder above it, by their modes (not by ACLs)."""
    if uid == 0:
        return True
    while True:
        try:
            status = os.stat(folder)
        except OSError:
            return True  # not known: it may
        mode = status.st_mode
        if status.st_uid == uid:
            bit = stat.S_IXUSR
        elif status.st_gid in _groups(uid):
            bit = stat.S_IXGRP
        else:
            bit = stat.S_IXOTH
        if not mode & bit:
            return False
        if folder == "/":
            return True
        folder = os.path.dirname(folder)
