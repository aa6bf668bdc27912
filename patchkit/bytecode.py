"""Stale bytecode. CPython trusts a ``.pyc`` whose recorded second and size match its source, an
``unchecked-hash`` one always (cpython #75953, #121376), and one beside a source that is not there any more
(``compileall -b``); so every one of a touched module goes.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from patchkit.durable import fsync_folder, unlink_if_there
from patchkit.tree import UnsafePathError, info, is_folder, is_there

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from patchkit.tree import Tree

_FOLDER = "__pycache__"
# "<stem>.<tag>[.opt-N].pyc", and the temporary "….pyc.<number>" that CPython renames into place.
_CACHED = re.compile(r"(?P<stem>.+?)\.[^.]+(?:\.opt-[^.]+)?\.pyc(?:\.[0-9]+)?", re.DOTALL)


def stem_of(name: str) -> str | None:
    """The stem of the module whose bytecode a cache keeps under ``name``; None if that is no bytecode."""
    match = _CACHED.fullmatch(name)
    return match["stem"] if match else None


def check_inside(tree: Tree, sources: Iterable[str]) -> None:
    """Raise UnsafePathError if the cache of a module among ``sources`` is a link out of the root."""
    for source in _modules(sources):
        tree.path(os.path.join(os.path.dirname(source), _FOLDER, "any"))


def cached(tree: Tree, sources: Iterable[str]) -> list[str]:
    """Every bytecode file (absolute) of the modules ``sources`` (relative), for every tag and level.

    In the cache folders, beside the sources, and below a ``PYTHONPYCACHEPREFIX`` that is set for us. What a
    link out of the root leads to is not ours.
    """
    modules = _modules(sources)
    mirrors = _mirrors({os.path.dirname(tree.path(source)) for source in modules})
    found = set()
    for source in modules:
        folder, name = os.path.split(tree.path(source))
        stem = name.removesuffix(".py")
        beside = os.path.join(folder, f"{stem}.pyc")
        if is_there(beside) and not is_folder(beside):
            found.add(beside)
        caches = list(mirrors[folder])
        try:
            caches.append(os.path.dirname(tree.path(f"{os.path.dirname(source)}/{_FOLDER}/any".lstrip("/"))))
        except UnsafePathError:
            pass
        for cache in caches:
            found.update(_in_cache(cache, stem))
    return sorted(found)


def purge(tree: Tree, sources: Iterable[str], keep: Iterable[str] = ()) -> list[OSError]:
    """Remove the bytecode of the modules ``sources``, but never the files ``keep`` (all relative), durably: a
    power cut must not bring it back. Returns what the system refused; the rest is gone.
    """
    refused = []
    folders = set()
    kept = {tree.path(path) for path in keep}
    try:
        paths = cached(tree, sources)
    except OSError as error:
        return [error]
    for path in paths:
        if path in kept:
            continue
        try:
            unlink_if_there(path)  # another process may have removed it first: as good
            folders.add(os.path.dirname(path))
        except OSError as error:
            refused.append(error)
    for folder in sorted(folders):
        try:
            fsync_folder(folder)
        except OSError as error:
            refused.append(error)
    return refused


def _modules(sources: Iterable[str]) -> list[str]:
    return [source for source in sources if source.endswith(".py")]


def _in_cache(cache: str, stem: str) -> Iterator[str]:
    try:
        with os.scandir(cache) as entries:
            for entry in entries:
                if stem_of(entry.name) == stem and not entry.is_dir(follow_symlinks=False):
                    yield entry.path
    except (FileNotFoundError, NotADirectoryError):
        return


def _mirrors(folders: Iterable[str]) -> dict[str, list[str]]:
    """Where the ``PYTHONPYCACHEPREFIX`` keeps the bytecode of each of ``folders``.

    CPython mirrors the path as the interpreter was told it. That may lead through any link (to the venv,
    say), so each folder of the mirror is asked whether the one it stands for is the one that we mean.
    """
    mirrors: dict[str, list[str]] = {folder: [] for folder in folders}
    variable = os.environ.get("PYTHONPYCACHEPREFIX")
    if not variable:
        return mirrors
    prefix = os.path.abspath(variable)
    meant: dict[tuple[int, int], list[str]] = {}
    for folder, found_for in mirrors.items():
        found_for.append(os.path.join(prefix, folder.lstrip("/")))
        if (found := info(folder)) is not None:
            meant.setdefault((found.st_dev, found.st_ino), []).append(folder)
    if prefix == "/" or not meant:
        return mirrors  # every folder is its own mirror
    for mirror, names, _ in os.walk(prefix):
        stands_for = os.path.join("/", os.path.relpath(mirror, prefix))
        try:
            found = os.stat(stands_for)
        except OSError:  # not there, or not ours to see
            names.clear()
            continue
        for folder in meant.get((found.st_dev, found.st_ino), ()):
            mirrors[folder].append(mirror)
    return mirrors
