"""Stale bytecode. CPython trusts a ``.pyc`` whose recorded second and size match its source, an
``unchecked-hash`` one always (cpython #75953, #121376), and one beside a source that is not there any more
(``compileall -b``); so whatever of a touched module could run goes.
"""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING

from patchkit.durable import fsync_folder, unlink_if_there
from patchkit.tree import UnsafePathError, info, is_folder, is_there

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from patchkit.tree import Tree

_FOLDER = "__pycache__"
# "<stem>.<tag>[.opt-N].pyc", pytest's "<stem>.<tag>-pytest-8.3.4.pyc" (and, with -O, ".pyo"), and the
# temporary "….pyc.<number>" that is renamed into place.
_CACHED = re.compile(
    r"(?P<stem>.+?)\.[^.]+(?:-pytest-.+?)?(?:\.opt-[^.]+)?\.py[co](?:\.[0-9]+)?",
    re.DOTALL,
)


def stem_of(name: str) -> str | None:
    """The stem of the module whose bytecode a cache keeps under ``name``; None if that is no bytecode."""
    match = _CACHED.fullmatch(name)
    return match["stem"] if match else None


def check_inside(tree: Tree, sources: Iterable[str]) -> None:
    """Raise UnsafePathError if the cache of a module among ``sources`` is a link out of the root."""
    for source in _modules(sources):
        try:
            _cache_of(tree, source)
        except UnsafePathError as error:
            error.hint = "nothing was changed; remove this link, which leads to mere bytecode"
            raise


def find(tree: Tree, sources: Iterable[str], going: Collection[str] = ()) -> tuple[list[str], list[OSError]]:
    """Every bytecode file (absolute) of the modules ``sources`` (relative), for every tag and level; and an
    error for each folder that could not be searched.

    In the cache folders, below a ``PYTHONPYCACHEPREFIX`` that is set for us, and beside the sources that are
    not there, or that are ``going``: bytecode beside a source is never run, and a wheel may have brought it.
    What a link out of the root leads to is not ours, and is one of the errors.
    """
    modules = _modules(sources)
    refused: list[OSError] = []
    found = set()
    mirrors = _mirrors({os.path.dirname(tree.path(source)) for source in modules}, refused)
    for source in modules:
        path = tree.path(source)
        folder, name = os.path.split(path)
        beside = f"{path}c"
        try:
            if (source in going or not is_there(path)) and is_there(beside) and not is_folder(beside):
                found.add(beside)
        except OSError as error:
            refused.append(_about(beside, error))
        caches = list(mirrors[folder])
        try:
            caches.append(_cache_of(tree, source))
        except UnsafePathError:
            refused.append(OSError(errno.ELOOP, "is a link out of the root", os.path.join(folder, _FOLDER)))
        for cache in caches:
            try:
                found.update(_in_cache(cache, name.removesuffix(".py")))
            except OSError as error:
                refused.append(error)
    return sorted(found), refused


def purge(
    tree: Tree, sources: Iterable[str], going: Collection[str] = (), keep: Iterable[str] = ()
) -> list[OSError]:
    """Remove what ``find`` finds, but never the files ``keep`` (relative), durably: a power cut must not
    bring it back. Returns what the system refused; the rest is gone.
    """
    found, refused = find(tree, sources, going)
    folders = {}
    for path in sorted({*found} - {tree.path(path) for path in keep}):
        try:
            unlink_if_there(path)  # another process may have removed it first: as good
            folders[os.path.dirname(path)] = path
        except OSError as error:
            refused.append(error)
    for folder, path in folders.items():
        try:
            fsync_folder(folder)
        except OSError as error:
            refused.append(_about(path, error))
    return refused


def _about(path: str, error: OSError) -> OSError:
    """``error`` as one about the bytecode at ``path``: it may name the source or its folder, and what we name
    is what the user is told to remove.
    """
    return OSError(error.errno, error.strerror, path)


def _modules(sources: Iterable[str]) -> list[str]:
    return [source for source in sources if source.endswith(".py")]


def _cache_of(tree: Tree, source: str) -> str:
    folder, name = os.path.split(source)
    return os.path.dirname(tree.path(os.path.join(folder, _FOLDER, f"{name}c")))


def _in_cache(cache: str, stem: str) -> Iterator[str]:
    try:
        with os.scandir(cache) as entries:
            for entry in entries:
                if stem_of(entry.name) == stem and not entry.is_dir(follow_symlinks=False):
                    yield entry.path
    except (FileNotFoundError, NotADirectoryError):
        return


def _mirrors(folders: Iterable[str], refused: list[OSError]) -> dict[str, list[str]]:
    """Where the ``PYTHONPYCACHEPREFIX`` keeps the bytecode of each of ``folders``.

    CPython mirrors the path as the interpreter was told it. That may lead through any link (to the venv,
    say), so each folder of the mirror is asked whether the one it stands for is the one that we mean. One
    that is closed to us and may lead there is added to ``refused``.
    """
    mirrors: dict[str, list[str]] = {folder: [] for folder in folders}
    variable = os.environ.get("PYTHONPYCACHEPREFIX")
    if not variable:
        return mirrors
    prefix = os.path.abspath(variable)
    meant: dict[tuple[int, int], list[str]] = {}
    for folder, found_for in mirrors.items():
        found_for.append(os.path.join(prefix, folder.lstrip("/")))
        try:
            if (found := info(folder)) is not None:
                meant.setdefault((found.st_dev, found.st_ino), []).append(folder)
        except OSError as error:
            refused.append(_about(found_for[0], error))
    if prefix == "/" or not meant:
        return mirrors  # every folder is its own mirror

    def stands_for(mirror: str) -> str:
        return os.path.normpath(os.path.join("/", os.path.relpath(mirror, prefix)))

    def closed(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            return
        above = os.path.join(os.path.realpath(stands_for(os.fsdecode(error.filename))), "")
        if any(os.path.join(os.path.realpath(folder), "").startswith(above) for folder in mirrors):
            refused.append(error)

    for mirror, names, _ in os.walk(prefix, onerror=closed):
        try:
            found = os.stat(stands_for(mirror))
        except OSError:  # not there, or not ours to see
            names.clear()
            continue
        for folder in meant.get((found.st_dev, found.st_ino), ()):
            mirrors[folder].append(mirror)
    return mirrors
