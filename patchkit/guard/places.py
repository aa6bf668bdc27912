"""Which file of the tree a path means, in the mount namespace of the process that uses it.

A file is identified by its folder (device and inode) and its name, not by its own inode: uv and conda
link one inode into many environments, and a server that still runs old code names a file whose inode
was replaced or removed since. The file's own inode counts only where it has no second link (a file
that is bind-mounted somewhere else).
"""

from __future__ import annotations

import os
import re
import stat
import weakref
from typing import TYPE_CHECKING

from patchkit.guard import stalls

if TYPE_CHECKING:
    from collections.abc import Iterable

Identity = tuple[int, int]
# The nearest folder that exists, and what follows it (more than one name where folders are gone).
Place = tuple[int, int, str]

_CACHED = re.compile(r"^(.*/)?__pycache__/([^/]+?)\.[^./]+-[^./]+(?:\.opt-[^./]+)?\.pyc$")
_MAX_LINKS = 40
# Names that mean another file to each process.
_OWN_NAME = re.compile(
    r"/+(?:proc/+(?:self|thread-self)(?:/+task/+\d+)?|dev(?=/+fd/))/+(cwd|root|fd/+\d+)(/.*)?", re.DOTALL
)


def source_of(path: str) -> str:
    """The source file that a ``__pycache__`` path belongs to; other paths as they are."""
    found = _CACHED.match(path)
    return f"{found[1] or ''}{found[2]}.py" if found else path


class View:
    """The file system as one process sees it.

    Absolute symbolic links below ``/proc/PID/root`` would lead the kernel back to *our* root, so they
    are followed here, step by step. Views with the same root share their answers.
    """

    def __init__(self, base: str = "") -> None:
        self.base = base  # "" for our own root, else /proc/PID/root
        self.cleared: set[str] = set()  # paths that are none of the asked files
        self._folders: dict[str, tuple[Identity | None, str]] = {}
        self._below: dict[tuple[str, Identity], bool] = {}
        self._places: dict[str, tuple[tuple[Place, ...], Identity | None]] = {}

    def clear(self, path: str) -> None:
        self.cleared.add(path)

    def status(self, path: str) -> os.stat_result | None:
        """Of ``path`` itself, not of what it links to; None if it does not exist."""
        try:
            return os.lstat(self.base + path)
        except (OSError, ValueError):
            return None
        finally:
            stalls.beat()  # a network file system may take its time for each

    def resolve(self, path: str) -> str:
        """``path`` (absolute) without symbolic links, as far as it exists."""
        if not self.base:
            try:
                return os.path.realpath(path)
            except (OSError, ValueError):
                return os.path.normpath(path)
        pending = [part for part in path.split("/") if part][::-1]
        found = ""
        links = 0
        while pending:
            part = pending.pop()
            if part == ".":
                continue
            if part == "..":
                found = found.rpartition("/")[0]
                continue
            step = f"{found}/{part}"
            known = self.status(step)
            if known is not None and stat.S_ISLNK(known.st_mode) and links < _MAX_LINKS:
                links += 1
                try:
                    target = os.readlink(self.base + step)
                except OSError:
                    found = step
                    continue
                if target.startswith("/"):
                    found = ""
                pending.extend([piece for piece in target.split("/") if piece][::-1])
                continue
            found = step
        return found or "/"

    def folder(self, path: str) -> tuple[Identity | None, str]:
        """Identity (None if it does not exist) and real path of the folder at ``path``."""
        known = self._folders.get(path)
        if known is None:
            real = self.resolve(path)
            status = self.status(real)
            known = ((status.st_dev, status.st_ino) if status else None, real)
            self._folders[path] = known
        return known

    def place(self, folder: str, name: str) -> Place:
        identity, real = self.folder(folder)
        while identity is None:
            real, _, last = real.rpartition("/")
            name = f"{last}/{name}"
            identity, real = self.folder(real or "/")
            if identity is None and real == "/":
                return (0, 0, name)
        return (*identity, name)

    def places(self, path: str) -> tuple[tuple[Place, ...], Identity | None]:
        """Where ``path`` (absolute) leads: itself and each link after it; and the file's own identity.

        The identity is None unless it is a file with a single link.
        """
        known = self._places.get(path)
        if known is not None:
            return known
        places: list[Place] = []
        own: Identity | None = None
        step = path
        for _ in range(_MAX_LINKS):
            folder, _, name = step.rpartition("/")
            if name in {"", ".", ".."}:
                break
            places.append(self.place(folder or "/", name))
            status = self.status(f"{self.folder(folder or '/')[1].rstrip('/')}/{name}")
            if status is None:
                break
            if not stat.S_ISLNK(status.st_mode):
                if status.st_nlink == 1:
                    own = (status.st_dev, status.st_ino)
                break
            real = self.folder(folder or "/")[1].rstrip("/")
            try:
                target = os.readlink(f"{self.base}{real}/{name}")
            except OSError:
                break
            step = target if target.startswith("/") else f"{real}/{target}"
        known = (tuple(places), own)
        self._places[path] = known
        return known

    def is_below(self, folder: str, top: Identity) -> bool:
        """Whether ``folder`` is the folder ``top`` or lies below it."""
        identity, real = self.folder(folder)
        if identity == top:
            return True
        known = self._below.get((real, top))
        if known is None:
            known = real != "/" and self.is_below(real.rpartition("/")[0] or "/", top)
            self._below[(real, top)] = known
        return known

    def exists(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        identity, real = self.folder(folder or "/")
        return identity is not None and self.status(f"{real.rstrip('/')}/{name}") is not None


class ProcessView:
    """The ``View`` that a process shares with others of the same root, and what only it calls by a name.

    ``/proc/self/cwd`` and ``/dev/fd/3`` are another folder for each process: never those of the caller.
    """

    def __init__(self, shared: View, pid: int) -> None:
        self.base = shared.base
        self.cleared = shared.cleared
        self._shared = shared
        self._pid = pid
        self._own: dict[str, tuple[View, str]] = {}

    def _at(self, path: str) -> tuple[View, str]:
        """The view in which ``path`` is looked up, and how it is called there."""
        found = _OWN_NAME.fullmatch(path)
        if found is None:
            return self._shared, path
        place = f"/proc/{self._pid}/{found[1]}"
        if place not in self._own:
            self._own[place] = self._follow(place)
        view, start = self._own[place]
        return view, f"{start.rstrip('/')}{found[2] or ''}" or "/"

    def _follow(self, place: str) -> tuple[View, str]:
        try:
            text, there = os.readlink(place), os.stat(place)
            named = self._shared.status(text)
            if named is not None and os.path.samestat(named, there):
                return self._shared, text
        except OSError:
            pass
        return View(place), "/"  # no path of its own view leads there: it was removed, or is out of its root

    def clear(self, path: str) -> None:
        if _OWN_NAME.fullmatch(path) is None:
            self.cleared.add(path)

    def status(self, path: str) -> os.stat_result | None:
        view, path = self._at(path)
        return view.status(path)

    def folder(self, path: str) -> tuple[Identity | None, str]:
        view, path = self._at(path)
        return view.folder(path)

    def place(self, folder: str, name: str) -> Place:
        view, folder = self._at(folder)
        return view.place(folder, name)

    def places(self, path: str) -> tuple[tuple[Place, ...], Identity | None]:
        view, path = self._at(path)
        return view.places(path)

    def is_below(self, folder: str, top: Identity) -> bool:
        view, folder = self._at(folder)
        return view.is_below(folder, top)

    def exists(self, path: str) -> bool:
        view, path = self._at(path)
        return view.exists(path)


class Views:
    """One ``View`` for each root that processes have."""

    def __init__(self) -> None:
        self._own = self._key("self")
        self._views: dict[tuple[int, Identity], View] = {}
        if self._own is not None:
            self._views[self._own] = View()

    @staticmethod
    def _key(process: str) -> tuple[int, Identity] | None:
        try:
            namespace = os.stat(f"/proc/{process}/ns/mnt").st_ino
            root = os.stat(f"/proc/{process}/root")
        except OSError:
            return None
        return namespace, (root.st_dev, root.st_ino)

    def of(self, pid: int) -> ProcessView:
        """The view of ``pid``; our own where it cannot be known."""
        return ProcessView(self._shared(pid), pid)

    def _shared(self, pid: int) -> View:
        key = self._key(str(pid))
        if key is None:
            key = self._own
        if key is None:
            return View()
        if key not in self._views:
            try:
                self._views[key] = _view_below(f"/proc/{pid}/root", key[1])
            except OSError:
                return self._views[self._own] if self._own is not None else View()  # it has ended
        return self._views[key]


def _view_below(root: str, identity: Identity) -> View:
    """Of the folder at ``root``, held open: the process that it is named by may end, and others go on in it.

    Raises OSError.
    """
    descriptor = os.open(root, os.O_PATH | os.O_CLOEXEC)
    view = View(f"/proc/self/fd/{descriptor}")
    weakref.finalize(view, os.close, descriptor)
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != identity:
        raise ProcessLookupError(root)  # its number went to another process
    return view


class Tree:
    """The files that are about to change, and the environment that they belong to."""

    def __init__(self, root: str, files: Iterable[str], prefix: str | None = None) -> None:
        own = View()
        self.root = os.path.realpath(root)
        prefix = prefix or _venv_around(self.root)
        self.prefix = os.path.realpath(prefix) if prefix else None
        self.files = tuple(dict.fromkeys(files))
        self.root_identity = own.folder(self.root)[0]
        self.prefix_identity = own.folder(self.prefix)[0] if self.prefix else None
        # A venv's interpreter is a link out of it; a base installation holds its own.
        self.is_venv = bool(self.prefix) and os.path.exists(f"{self.prefix}/pyvenv.cfg")
        self.packages = {name.partition("/")[0].removesuffix(".py") for name in self.files}
        self._names = {name.rpartition("/")[2] for name in self.files}
        self._by_place: dict[Place, str] = {}
        self._by_identity: dict[Identity, str] = {}
        for name in self.files:
            folder, _, base = f"{self.root}/{name}".rpartition("/")
            self._by_place[own.place(folder, base)] = name
            try:
                status = os.lstat(f"{self.root}/{name}")
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                self._by_identity[(status.st_dev, status.st_ino)] = name

    def matches(self, view: View | ProcessView, paths: Iterable[str]) -> dict[str, str]:
        """Asked files that some of ``paths`` (absolute, as the process names them) mean."""
        found: dict[str, str] = {}
        for path in set(paths) - view.cleared:
            name = self.match(view, path)
            if name is None:
                if not self.may_be_moved(view, path):
                    view.clear(path)
            elif name not in found or path.endswith(".py"):  # rather __file__ than __cached__
                found[name] = path
        return found

    def match(self, view: View | ProcessView, path: str) -> str | None:
        """The asked file that ``path`` (absolute) means, if any."""
        if path.rpartition("/")[2] not in self._names and not path.endswith(".pyc"):
            # Another name: the same file only as a link, or as a file mounted on another.
            status = view.status(path)
            if status is None or not (
                stat.S_ISLNK(status.st_mode) or (status.st_dev, status.st_ino) in self._by_identity
            ):
                return None
        places, own = view.places(source_of(path))
        for place in places:
            if place in self._by_place:
                return self._by_place[place]
        return self._by_identity.get(own) if own is not None else None

    def may_be_moved(self, view: View | ProcessView, path: str) -> bool:
        """Whether ``path`` (absolute) means a file of a tree that is not there any more, and may be this one.

        By its path, a tree that was renamed since is another folder. Only within a device can it be renamed.
        """
        source = source_of(path)
        if source.rpartition("/")[2] not in self._names or self.root_identity is None:
            return False
        for name in self.files:
            root = source.removesuffix(f"/{name}")
            if root not in {source, ""} and not view.exists(root):
                folder, _, base = root.rpartition("/")
                return view.place(folder or "/", base)[0] == self.root_identity[0]
        return False

    def ends_like(self, path: str) -> str | None:
        """The asked file whose path ends with the relative ``path``, if any."""
        tail = "/" + os.path.normpath(source_of(path)).lstrip("./")
        return next((name for name in self.files if f"{self.root}/{name}".endswith(tail)), None)


def _venv_around(root: str) -> str | None:
    """The venv whose site-packages ``root`` is (``lib/pythonX.Y/site-packages`` below it)."""
    folder = root
    for _ in range(3):
        folder = os.path.dirname(folder)
        if os.path.exists(f"{folder}/pyvenv.cfg"):
            return folder
    return None
