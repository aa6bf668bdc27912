"""The ``patches/`` folders: which patches there are, and their variants.

Folders are searched in order; the first that has a name wins, the built-in patches come last. A broken
patch is an error only for a command that asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from patchkit.errors import REFUSED, USAGE, PatchkitError
from patchkit.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
MANIFEST_SUFFIX = ".manifest.json"
PATCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEYS: dict[str, type] = {
    "schema": int,
    "name": str,
    "distribution": str,
    "summary": str,
    "after": list,
    "conflicts": list,
    "members": list,
    "env": dict,
}


class UnknownPatchError(PatchkitError):
    """No patch has that name."""

    code = "unknown-patch"
    exit_code = USAGE

    def __init__(self, name: str, known: Sequence[str]) -> None:
        import difflib

        self.name = name
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean '{near[0]}'?" if near else "'patchkit list' shows what there is"
        super().__init__(f"no patch named '{name}'", hint=hint)


class PatchFolderError(PatchkitError):
    """A ``patch.toml`` that cannot be used: unreadable, another schema, a wrong or unknown key."""

    code = "bad-patch-toml"
    exit_code = REFUSED

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}", path=path)


class NoPatchesFolderError(PatchkitError):
    """``--patches`` names something that is not a folder."""

    code = "no-patches-folder"
    exit_code = USAGE

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"--patches {path}: {reason}", path=path, hint="name a folder that holds patches")


class DiffDigestError(PatchkitError):
    """The diff's bytes are not the ones that the manifest pins."""

    code = "diff-digest"
    exit_code = REFUSED

    def __init__(self, path: str, pinned: str, found: str) -> None:
        super().__init__(
            f"{path}: sha256 is {found[:12]}…, its manifest pins {pinned[:12]}…",
            path=path,
            hint="restore the file (a line-ending conversion also changes it) or run 'patchkit pin'",
        )


@dataclass(frozen=True)
class Variant:
    """One diff of a patch with its manifest."""

    manifest: Manifest
    manifest_path: str
    diff_path: str

    def diff_bytes(self) -> bytes:
        """The diff, proven to be the pinned one."""
        with open(self.diff_path, "rb") as file:
            data = file.read()
        found = hashlib.sha256(data).hexdigest()
        if found != self.manifest.diff_sha256:
            raise DiffDigestError(self.diff_path, self.manifest.diff_sha256, found)
        return data


@dataclass(frozen=True)
class Patch:
    """A named change. A series has ``members`` and no variants."""

    name: str
    distribution: str
    summary: str
    folder: str
    builtin: bool
    after: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, hash=False)

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        names = sorted(name for name in os.listdir(self.folder) if name.endswith(MANIFEST_SUFFIX))
        return tuple(self._variant(os.path.join(self.folder, name)) for name in names)

    @property
    def releases(self) -> tuple[str, ...]:
        """Every release that a variant serves, oldest first."""
        found = {release for variant in self.variants for release in variant.manifest.releases}
        return tuple(sorted(found, key=release_key))

    def _variant(self, manifest_path: str) -> Variant:
        with open(manifest_path, "rb") as file:
            manifest = Manifest.from_json(file.read(), name=manifest_path)
        if manifest.patch != self.name:
            raise PatchFolderError(manifest_path, f"is for patch '{manifest.patch}', not '{self.name}'")
        return Variant(manifest, manifest_path, manifest_path.removesuffix(MANIFEST_SUFFIX) + ".patch")


class Catalog:
    """All patches that the given folders and the package hold."""

    def __init__(self, folders: Sequence[str] | None = None) -> None:
        for folder in folders or ():
            try:
                if not stat.S_ISDIR(os.stat(folder).st_mode):
                    raise NoPatchesFolderError(folder, "not a folder")
            except OSError as error:
                raise NoPatchesFolderError(folder, error.strerror or str(error)) from None
        self.folders = [os.path.abspath(folder) for folder in folders or ["patches"]]
        self._loaded: dict[str, Patch] = {}

    @cached_property
    def _paths(self) -> dict[str, tuple[str, bool]]:
        """Patch name -> (folder, built-in), first folder wins."""
        found: dict[str, tuple[str, bool]] = {}
        for folder, builtin in [*((folder, False) for folder in self.folders), (builtin_folder(), True)]:
            if not os.path.isdir(folder):
                continue
            for name in sorted(os.listdir(folder)):
                path = os.path.join(folder, name)
                if os.path.isfile(os.path.join(path, "patch.toml")):
                    found.setdefault(name, (path, builtin))
        return found

    def names(self) -> list[str]:
        return sorted(self._paths)

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def __iter__(self) -> Iterator[Patch]:
        return (self[name] for name in self.names())

    def __getitem__(self, name: str) -> Patch:
        if name not in self._paths:
            raise UnknownPatchError(name, self.names())
        if name not in self._loaded:
            self._loaded[name] = load_patch(*self._paths[name])
        return self._loaded[name]

    def diff(self, name: str, sha256: str) -> bytes | None:
        """The bytes of that patch's diff with this digest (hex), where one of the folders has them."""
        with contextlib.suppress(PatchkitError, OSError):
            for variant in self[name].variants:
                if variant.manifest.diff_sha256 == sha256:
                    return variant.diff_bytes()
        return None

    def expand(self, names: Sequence[str]) -> list[Patch]:
        """The patches named, series replaced by their members, each once, in order."""
        found: dict[str, Patch] = {}

        def visit(name: str, trail: tuple[str, ...]) -> None:
            patch = self[name]
            if name in trail:
                raise PatchFolderError(
                    os.path.join(patch.folder, "patch.toml"),
                    f"series contains itself: {' -> '.join((*trail, name))}",
                )
            if not patch.members:
                found.setdefault(name, patch)
            for member in patch.members:
                visit(member, (*trail, name))

        for name in names:
            visit(name, ())
        return list(found.values())


def builtin_folder() -> str:
    """The patches that ship with patchkit: inside the wheel, or beside the package in a checkout."""
    package = os.path.dirname(os.path.abspath(__file__))
    packed = os.path.join(package, "_patches")
    return packed if os.path.isdir(packed) else os.path.join(os.path.dirname(package), "patches")


def load_patch(folder: str, builtin: bool = False) -> Patch:
    """Read and validate ``folder/patch.toml``."""
    path = os.path.join(folder, "patch.toml")
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PatchFolderError(path, f"not valid TOML: {error}") from None
    if table.get("schema") != SCHEMA:
        raise PatchFolderError(
            path, f"schema is {table.get('schema')!r}; this patchkit reads schema {SCHEMA}"
        )
    _validate(path, table)
    name = table["name"]
    if name != os.path.basename(os.path.normpath(folder)):
        raise PatchFolderError(path, f"name is '{name}' but the folder is '{os.path.basename(folder)}'")
    return Patch(
        name=name,
        distribution=table["distribution"],
        summary=table.get("summary", ""),
        folder=folder,
        builtin=builtin,
        after=tuple(table.get("after", ())),
        conflicts=tuple(table.get("conflicts", ())),
        members=tuple(table.get("members", ())),
        env=dict(table.get("env", {})),
    )


def _validate(path: str, table: dict[str, Any]) -> None:
    for key, value in table.items():
        if key not in _KEYS:
            raise PatchFolderError(path, f"unknown key '{key}'")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise PatchFolderError(path, f"'{key}' must be a {_KEYS[key].__name__}")
    for key in ("name", "distribution"):
        if not PATCH_NAME.fullmatch(table.get(key, "")):
            raise PatchFolderError(path, f"'{key}' is missing or not a plain name")
    for key in ("after", "conflicts", "members"):
        if not all(isinstance(item, str) and PATCH_NAME.fullmatch(item) for item in table.get(key, ())):
            raise PatchFolderError(path, f"'{key}' must list patch names")
    for name, value in table.get("env", {}).items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise PatchFolderError(path, f"[env] {name!r} must be a string")


def release_key(release: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that orders releases as PEP 440 does for the forms in use (1.2, rc, post, dev)."""
    early = ("dev", "a", "b", "rc")  # alphabetical order happens to be theirs but for dev, which sorts first
    parts = re.findall(r"\d+|[a-z]+", release.lower().split("+")[0])
    key = [
        (2, int(part), "") if part.isdigit() else (0 if part == "dev" else 1 if part in early else 3, 0, part)
        for part in parts
    ]
    # The end of a release sorts after its pre-releases and before its post-releases.
    return (*key, (2, -1, ""))
