"""The pinned sha256, size and mode of each file before and after one variant of a patch.

A file is identified by sha256 and size. Its mode is what the wheel has, and installers apply their own
umask to that (0644 here, 0664 there), so a mode is binding only for a file whose mode the diff itself
changes or that the diff creates; any other file keeps the mode that it has.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from patchkit.diff import names
from patchkit.diff.application import apply
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from patchkit.diff.model import Change, Content, Diff

SCHEMA = 1

_HEX = re.compile(r"[0-9a-f]{64}")
_MODE = re.compile(r"0[0-7]{3}")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_KEYS = {"schema", "patch", "distribution", "releases", "on", "diff_sha256", "files"}
_FILE_KEYS = {"path", "change", "before", "after"}
# Which sides a file has, by its change.
_SIDES = {"modify": (True, True), "add": (False, True), "delete": (True, False), "rename": (True, True)}


class ManifestError(PatchkitError):
    """A manifest that is not valid. ``path`` is the file, ``where`` the place in it (``files[2].after``)."""

    code = "manifest"

    def __init__(self, message: str, *, name: str, where: str = "") -> None:
        self.where = where
        super().__init__(
            f"{name}: {where}: {message}" if where else f"{name}: {message}",
            path=name,
            hint="write it again with 'patchkit pin'",
        )


class PinMismatchError(PatchkitError):
    """The diff, a file, or what the diff makes of it is not what the manifest pins."""

    code = "digest"

    def __init__(self, message: str, *, path: str, hint: str | None = None) -> None:
        super().__init__(message, path=path, hint=hint)


@dataclass(frozen=True)
class Pin:
    """What a file must be: sha256 of its bytes (hex), size in bytes, permission bits."""

    sha256: str
    size: int
    mode: int

    @classmethod
    def of(cls, content: Content) -> Pin:
        return cls(hashlib.sha256(content.data).hexdigest(), len(content.data), content.mode & 0o777)

    def matches(self, content: Content) -> bool:
        """Whether the bytes are the pinned ones, whatever the mode."""
        data = content.data
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.sha256

    def to_json(self) -> dict[str, Any]:
        return {"mode": f"{self.mode:04o}", "sha256": self.sha256, "size": self.size}


@dataclass(frozen=True)
class FilePin:
    """One file of a variant; ``path`` is POSIX and relative to the root."""

    path: str
    change: Change
    before: Pin | None
    after: Pin | None
    source: str | None = None  # "from" in the file: the old path of a rename

    @property
    def binds_mode(self) -> bool:
        """Whether ``after.mode`` is the diff's own doing."""
        return self.after is not None and (self.before is None or self.before.mode != self.after.mode)

    def mode_holds(self, mode: int) -> bool:
        """Whether a file with ``mode`` is executable or not as the diff made it, if it did either."""
        if self.before is None or self.after is None or self.before.mode == self.after.mode:
            return True
        return bool(mode & 0o100) == bool(self.after.mode & 0o100)

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "path": self.path,
            "change": self.change,
            "before": None if self.before is None else self.before.to_json(),
            "after": None if self.after is None else self.after.to_json(),
        }
        if self.source is not None:
            entry["from"] = self.source
        return entry


@dataclass(frozen=True)
class Manifest:
    """One variant. ``releases`` have equal files; ``on`` are the patches below it that touch them."""

    patch: str
    distribution: str
    releases: tuple[str, ...]
    on: tuple[str, ...]
    diff_sha256: str
    files: tuple[FilePin, ...]

    @classmethod
    def build(
        cls,
        diff: Diff,
        read: Callable[[str], Content | None],
        *,
        patch: str,
        distribution: str,
        releases: Iterable[str],
        on: Iterable[str],
        diff_bytes: bytes,
    ) -> Manifest:
        """Pin what the diff makes of the present files; raises a ``DiffError`` where it does not fit."""
        result = apply(diff, read)
        sources = {file.path: file.source for file in diff.files if file.source is not None}
        # A file renamed twice came from where it was first.
        origins = {path: _origin(path, sources) for path in sources if result.get(path) is not None}
        moved = {source for source in origins.values() if result.get(source) is None}
        files = []
        for path, after in result.items():
            if path in moved:
                continue
            source = origins.get(path)
            source = source if source in moved else None
            before = read(path if source is None else source)
            if before is None and after is None:
                continue  # came and went within the diff
            change: Change = (
                "rename" if source is not None
                else "add" if before is None
                else "delete" if after is None
                else "modify"
            )  # fmt: skip
            files.append(
                FilePin(
                    path,
                    change,
                    None if before is None else Pin.of(before),
                    None if after is None else Pin.of(after),
                    source,
                )
            )
        return cls(
            patch,
            distribution,
            tuple(releases),
            tuple(on),
            hashlib.sha256(diff_bytes).hexdigest(),
            tuple(sorted(files, key=lambda file: file.path)),
        )

    def apply(self, diff: Diff, read: Callable[[str], Content | None]) -> dict[str, Content | None]:
        """``diff.apply``, but refused unless the files before and after are the pinned ones."""
        for file in self.files:
            path = file.path if file.source is None else file.source
            before = read(path)
            if file.before is not None and (before is None or not file.before.matches(before)):
                state = "is missing" if before is None else "is not the pinned file"
                raise PinMismatchError(f"{names.show(path)} {state}", path=path)
            if file.before is None and before is not None:
                raise PinMismatchError(f"{names.show(path)} exists; the patch creates it", path=path)
        result = apply(diff, read)
        pinned: dict[str, FilePin | None] = {file.path: file for file in self.files}
        pinned.update({file.source: None for file in self.files if file.source is not None})
        for path in {**pinned, **result}:
            pin = pinned.get(path)
            want = None if pin is None else pin.after
            made = result.get(path)
            bad = (want is None) != (made is None)
            if want is not None and made is not None:
                wrong_mode = pin is not None and pin.binds_mode and want.mode != made.mode & 0o777
                bad = not want.matches(made) or wrong_mode
            if bad or (path in result and path not in pinned and read(path) is not None):
                raise PinMismatchError(
                    f"the diff makes other bytes of {names.show(path)} than the manifest pins",
                    path=path,
                    hint="the diff and its manifest do not belong together; 'patchkit lint' says more",
                )
        return result

    # -- JSON -------------------------------------------------------------------------------------

    def to_json(self) -> bytes:
        """Keys sorted, so that a diff of it reads well; ASCII; a newline at the end."""
        entry = {
            "schema": SCHEMA,
            "patch": self.patch,
            "distribution": self.distribution,
            "releases": list(self.releases),
            "on": list(self.on),
            "diff_sha256": self.diff_sha256,
            "files": [file.to_json() for file in self.files],
        }
        return json.dumps(entry, indent=2, sort_keys=True).encode("ascii") + b"\n"

    @classmethod
    def from_json(cls, data: bytes, *, name: str) -> Manifest:
        """Read and validate; ``name`` is the file's name for errors. Raises ``ManifestError``."""
        return _Reader(name).manifest(data)


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, message: str, where: str = "") -> ManifestError:
        return ManifestError(message, name=self.name, where=where)

    def manifest(self, data: bytes) -> Manifest:
        try:
            entry = json.loads(
                data.decode("utf-8"), object_pairs_hook=self.unique, parse_constant=self.constant
            )
        except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
            raise self.fail(f"not JSON ({error})") from None
        if not isinstance(entry, dict):
            raise self.fail("not a JSON object")
        schema = entry.get("schema")
        if schema != SCHEMA or isinstance(schema, bool):
            raise self.fail(f"unknown schema {schema!r}; this patchkit knows {SCHEMA}", "schema")
        self.keys(entry, _KEYS, set(), "")
        digest = entry["diff_sha256"]
        if not isinstance(digest, str) or not _HEX.fullmatch(digest):
            raise self.fail("not a sha256 in lower-case hex", "diff_sha256")
        if not isinstance(entry["files"], list) or not entry["files"]:
            raise self.fail("not a list with at least one file", "files")
        files = tuple(self.file(item, f"files[{index}]") for index, item in enumerate(entry["files"]))
        self.distinct(files)
        releases = self.texts(entry["releases"], "releases")
        if not releases:
            raise self.fail("names no release", "releases")
        return Manifest(
            self.text(entry["patch"], "patch"),
            self.text(entry["distribution"], "distribution"),
            releases,
            self.texts(entry["on"], "on"),
            digest,
            files,
        )

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entry = dict(pairs)
        if len(entry) != len(pairs):
            raise self.fail("a key twice in one object")
        return entry

    def constant(self, text: str) -> None:
        raise self.fail(f"{text} is not JSON")

    def keys(self, entry: dict[str, Any], needed: set[str], allowed: set[str], where: str) -> None:
        missing, unknown = sorted(needed - set(entry)), sorted(set(entry) - needed - allowed)
        if missing:
            raise self.fail(f"lacks {', '.join(map(repr, missing))}", where)
        if unknown:
            raise self.fail(f"has an unknown key {unknown[0]!r}", where)

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not value or not value.isprintable() or "/" in value:
            raise self.fail("not a name", where)
        return value

    def texts(self, value: Any, where: str) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise self.fail("not a list", where)
        found = tuple(self.text(item, f"{where}[{index}]") for index, item in enumerate(value))
        if len(set(found)) != len(found):
            raise self.fail("an entry twice", where)
        return found

    def path(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.fail("not a path", where)
        try:
            names.check_path(value)
            value.encode("utf-8", "surrogateescape")
        except ValueError as error:
            raise self.fail(str(error), where) from None
        return value

    def file(self, entry: Any, where: str) -> FilePin:
        if not isinstance(entry, dict):
            raise self.fail("not an object", where)
        self.keys(entry, _FILE_KEYS, {"from"}, where)
        path = self.path(entry["path"], f"{where}.path")
        change = entry["change"]
        if not isinstance(change, str) or change not in _SIDES:
            raise self.fail(f"change {change!r}; there are {', '.join(_SIDES)}", f"{where}.change")
        before = self.pin(entry["before"], f"{where}.before")
        after = self.pin(entry["after"], f"{where}.after")
        if (before is not None, after is not None) != _SIDES[change]:
            raise self.fail(f"before and after are not those of '{change}'", where)
        if ("from" in entry) != (change == "rename"):
            raise self.fail("'from' belongs to a rename, and only there", where)
        source = self.path(entry["from"], f"{where}.from") if "from" in entry else None
        return FilePin(path, cast("Change", change), before, after, source)

    def pin(self, entry: Any, where: str) -> Pin | None:
        if entry is None:
            return None
        if not isinstance(entry, dict):
            raise self.fail("neither an object nor null", where)
        self.keys(entry, {"sha256", "size", "mode"}, set(), where)
        digest, size, mode = entry["sha256"], entry["size"], entry["mode"]
        if not isinstance(digest, str) or not _HEX.fullmatch(digest):
            raise self.fail("not a sha256 in lower-case hex", f"{where}.sha256")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise self.fail("not a size in bytes", f"{where}.size")
        if not isinstance(mode, str) or not _MODE.fullmatch(mode):
            raise self.fail('not four octal digits ("0644")', f"{where}.mode")
        return Pin(digest, size, int(mode, 8))

    def distinct(self, files: tuple[FilePin, ...]) -> None:
        seen: dict[str, str] = {}
        for index, file in enumerate(files):
            for path in (file.path,) if file.source is None else (file.source, file.path):
                key = names.collision_key(path)
                if key in seen:
                    raise self.fail(
                        f"{names.show(path)} and {names.show(seen[key])} are one path", f"files[{index}]"
                    )
                seen[key] = path


def _origin(path: str, sources: dict[str, str]) -> str:
    seen = {path}
    while path in sources and sources[path] not in seen:
        path = sources[path]
        seen.add(path)
    return path
