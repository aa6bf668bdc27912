"""Stale bytecode. CPython trusts a ``.pyc`` whose recorded second and size match its source, and an
``unchecked-hash`` one always (cpython #75953, #121376), so every one of a touched module goes.
"""

from __future__ import annotations

import os

from patchkit.durable import fsync_folder, unlink_if_there


def cached(source: str) -> list[str]:
    """Every cached bytecode file of the module at ``source`` (absolute), for every tag and level."""
    if not source.endswith(".py"):
        return []
    folder, name = os.path.split(source)
    stem = name.removesuffix(".py")
    folders = [os.path.join(folder, "__pycache__")]
    prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    if prefix:
        folders.append(os.path.join(os.path.abspath(prefix), folder.lstrip("/")))
    found = []
    for cache in folders:
        try:
            names = os.listdir(cache)
        except (FileNotFoundError, NotADirectoryError):
            continue
        # "<stem>.<tag>[.opt-N].pyc", and the temporary "….pyc.<number>" that CPython renames into place
        found += [
            os.path.join(cache, entry) for entry in names if entry.startswith(stem + ".") and ".pyc" in entry
        ]
    return sorted(found)


def purge(source: str) -> None:
    """Remove the cached bytecode of the module at ``source``, durably: a power cut must not bring it back."""
    paths = cached(source)
    for path in paths:
        unlink_if_there(path)  # another process may have removed it first: as good
    for folder in sorted({os.path.dirname(path) for path in paths}):
        fsync_folder(folder)
