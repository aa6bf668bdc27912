"""The scratch copy of a patch: ``patches/<patch>/edit/``, the files as the patch leaves them.

Whatever stands in it is the author's: it is only ever added to. ``base.json`` beside the files says what was
opened, so that a file which is no longer there is known to be deleted.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.authoring import store
from patchkit.authoring.errors import NotInTreeError, ScratchError
from patchkit.diff import names
from patchkit.diff.model import Content
from patchkit.manifest import ManifestError
from patchkit.selection import public

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from patchkit.authoring.base import Base
    from patchkit.catalog import Catalog, Variant

SCHEMA = 1
FOLDER = "edit"
INDEX = "base.json"
# What editors and interpreters leave beside a file.
_LITTER = (".pyc", "~", ".swp", ".swo")


@dataclass(frozen=True)
class Opened:
    """``files`` are all that the scratch copy knows, ``added`` those that this call put there."""

    patch: str
    folder: str
    files: tuple[str, ...]
    added: tuple[str, ...]
    kept: tuple[str, ...]  # named again, but already there and left alone


@dataclass(frozen=True)
class Scratch:
    """A scratch copy's place and what was opened in it."""

    folder: str
    release: str
    on: tuple[str, ...]
    opened: frozenset[str]

    @property
    def files(self) -> str:
        return os.path.join(self.folder, "files")

    def path(self, relative: str) -> str:
        return os.path.join(self.files, relative)

    def present(self) -> Iterator[str]:
        """The root-relative paths of the files that are there now, in order."""
        if not os.path.isdir(self.files):
            # Not every file deleted, but the whole copy moved away.
            raise ScratchError(
                self.folder, "has an index but no files", "put them back, or move the folder away"
            )
        found = []
        for top, folders, entries in os.walk(self.files):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in [*folders, *entries]:
                full = os.path.join(top, name)
                if os.path.islink(full):
                    raise ScratchError(full, "is a symbolic link; a patch holds regular files only")
            for name in entries:
                full = os.path.join(top, name)
                if name.endswith(_LITTER) or name.startswith((".#", "#", store.TEMPORARY)):
                    continue
                if not stat.S_ISREG(os.stat(full).st_mode):
                    raise ScratchError(full, "is no regular file")
                relative = os.path.relpath(full, self.files)
                try:
                    names.check_path(relative)
                except ValueError as error:
                    raise ScratchError(full, str(error)) from None
                found.append(relative)
        yield from sorted(found)

    def read(self, relative: str) -> Content:
        with open(self.path(relative), "rb") as file:
            return Content(file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))

    def save_index(self) -> None:
        entry = {"schema": SCHEMA, "release": self.release, "on": list(self.on), "files": sorted(self.opened)}
        store.write(
            os.path.join(self.folder, INDEX), json.dumps(entry, indent=2, sort_keys=True).encode() + b"\n"
        )


def below(catalog: Catalog, name: str, release: str | None) -> tuple[str, ...]:
    """The patches that ``name`` is made on: as its scratch copy was opened, else as its one variant for the
    release says.
    """
    scratch = load(store.folder_of(catalog, name))
    if scratch is not None:
        return scratch.on
    if name not in catalog or release is None:
        return ()
    try:
        variants = catalog[name].variants
    except ManifestError:
        return ()  # 'pin' is there to mend it; whatever needs the variants refuses by itself
    stacks = {
        variant.manifest.on
        for variant in variants
        if public(release) in {public(one) for one in variant.manifest.releases}
    }
    return stacks.pop() if len(stacks) == 1 else ()


def load(patch_folder: str) -> Scratch | None:
    """The patch's scratch copy, or None when none is open: a folder without an index is none yet."""
    folder = os.path.join(patch_folder, FOLDER)
    path = os.path.join(folder, INDEX)
    try:
        with open(path, "rb") as file:
            entry = json.load(file)
        if entry["schema"] != SCHEMA:
            raise ScratchError(path, f"unknown schema {entry['schema']!r}; this patchkit knows {SCHEMA}")
        on, files = entry["on"], entry["files"]
        if not all(isinstance(item, str) for item in [entry["release"], *on, *files]):
            raise TypeError
        for item in files:
            names.check_path(item)
        return Scratch(folder, entry["release"], tuple(on), frozenset(files))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ScratchError(path, "is not the index of a scratch copy") from None


def new(name: str, paths: Sequence[str], *, base: Base, catalog: Catalog) -> Opened:
    """Open a scratch copy of the files named (root-relative), or add them to the one that is open. Of an
    existing patch the files that it touches are opened too, as it leaves them. A folder means all files
    below it. No file that is already in the scratch copy is written.
    """
    patch_folder = store.folder_of(catalog, name)
    distribution = store.distribution_of(catalog, name, base.target.distribution)
    scratch = _open(patch_folder, base)
    variant = own_variant(catalog, name, base)
    patched = {} if variant is None else results(variant, base)
    wanted = dict.fromkeys([*(path for path in patched), *_expand(paths, base, scratch)])
    contents: dict[str, Content] = {}
    for path in wanted:
        content = patched[path] if path in patched else base.read(path)
        if content is not None and path not in scratch.opened:
            contents[path] = content
    store.write_toml(patch_folder, name, distribution, base.below(wanted))
    kept = tuple(path for path in wanted if path in scratch.opened or os.path.lexists(scratch.path(path)))
    # The files first: a file that only the index has would count as deleted.
    opened = Scratch(scratch.folder, scratch.release, scratch.on, scratch.opened | set(wanted))
    _write_missing(opened, contents)
    opened.save_index()
    added = tuple(sorted(path for path in contents if path not in kept))
    return Opened(name, opened.files, tuple(sorted(opened.opened)), added, kept)


def own_variant(catalog: Catalog, name: str, base: Base) -> Variant | None:
    """The author's own variant for the base."""
    patch = store.existing(catalog, name)
    return None if patch is None else base.variant(patch)


def results(variant: Variant, base: Base) -> dict[str, Content | None]:
    """What the variant makes of the files that it touches."""
    return variant.manifest.apply(diff.parse(variant.diff_bytes(), name=variant.diff_path), base.read)


def _open(patch_folder: str, base: Base) -> Scratch:
    scratch = load(patch_folder)
    if scratch is None:
        return Scratch(os.path.join(patch_folder, FOLDER), base.release, base.on, frozenset())
    check_base(scratch, base)
    return scratch


def check_base(scratch: Scratch, base: Base) -> None:
    """Refuse to mix a scratch copy with another base than it was opened from."""
    if (scratch.release, scratch.on) != (base.release, base.on):
        below = f" on {', '.join(scratch.on)}" if scratch.on else ""
        raise ScratchError(
            scratch.folder,
            f"was opened from release {scratch.release}{below}",
            "refresh it there, then move the folder away",
        )


def _expand(paths: Iterable[str], base: Base, scratch: Scratch) -> Iterator[str]:
    for given in paths:
        path = given.rstrip("/")
        absolute = base.tree.path(path)
        if os.path.isdir(absolute):
            for top, folders, entries in os.walk(absolute):
                folders[:] = sorted(name for name in folders if name != "__pycache__")
                for entry in sorted(entries):
                    if not entry.endswith(_LITTER):
                        yield os.path.relpath(os.path.join(top, entry), base.target.root)
        elif base.has_file(path):
            yield path
        elif not os.path.lexists(scratch.path(path)):
            raise NotInTreeError(path, base.target.root)


def _write_missing(scratch: Scratch, contents: dict[str, Content]) -> None:
    for path, content in contents.items():
        full = scratch.path(path)
        if os.path.lexists(full):
            continue
        store.write(full, content.data)
        os.chmod(full, 0o755 if content.mode & 0o100 else 0o644)
