"""Read the dumps that the ``hsdump`` patches write.

A record is a ``.pt`` and a ``.json`` that was written after it; a ``.pt`` alone does not exist for us. A
prompt that was prefilled in chunks is several records, each naming the one before: they are joined, and
rows that are missing (a radix-cache hit) are an error, never padding.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import BadDumpError, ForeignDumpError, SpoolFolderError, need
from patchkit.hidden_states.sample import Sample, sequence_key

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = 1
# What every record of one data set must agree on.
ORIGIN = ("layers", "model_path", "patch_digest", "release", "tp_size")
_REQUIRED = {
    "chunk": int,
    "layers": list,
    "missing_rows": int,
    "name": str,
    "prefix_length": int,
    "shapes": list,
    "dtypes": list,
    "sha256": str,
    "size": int,
    "tokens": int,
}
RADIX_HINT = "start the server with --disable-radix-cache, so that every prompt is prefilled whole"


@dataclass(frozen=True)
class Record:
    """One ``.json``: the piece ``chunk`` of a prompt, ``tokens`` rows after ``prefix_length`` others."""

    folder: str
    entry: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def data_path(self) -> str:
        return os.path.join(self.folder, self.name + ".pt")

    @property
    def json_path(self) -> str:
        return os.path.join(self.folder, self.name + ".json")

    @property
    def previous(self) -> str | None:
        return self.entry.get("previous")

    @property
    def tokens(self) -> int:
        return int(self.entry["tokens"])

    @property
    def origin(self) -> dict[str, Any]:
        return {key: self.entry.get(key) for key in ORIGIN}

    @classmethod
    def read(cls, folder: str, name: str) -> Record | None:
        """The record ``name``; None when it is gone. Raises BadDumpError."""
        path = os.path.join(folder, name + ".json")
        try:
            with open(path, "rb") as file:
                entry = json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise BadDumpError(path, f"not JSON ({error})") from None
        if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
            found = entry.get("schema") if isinstance(entry, dict) else None
            raise BadDumpError(path, f"schema {found!r} is not one that this patchkit knows ({SCHEMA})")
        for key, kind in _REQUIRED.items():
            if not isinstance(entry.get(key), kind):
                raise BadDumpError(path, f"'{key}' is missing or no {kind.__name__}")
        if entry["name"] != name:
            raise BadDumpError(path, f"says that it is {entry['name']!r}")
        return cls(folder, entry)

    def load(self, *, digest: bool) -> tuple[Any, list[Any]]:
        """``input_ids`` int64 [tokens] and the states, each [tokens, hidden], mapped from the file.

        With ``digest`` the file's sha256 must be the recorded one. Raises BadDumpError.
        """
        torch = need("torch")
        path = self.data_path
        try:
            size = os.stat(path).st_size
            if size != self.entry["size"]:
                raise BadDumpError(path, f"has {size} bytes, its .json says {self.entry['size']}")
            if digest and (found := _mapped_sha256(path, size)) != self.entry["sha256"]:
                raise BadDumpError(path, f"has sha256 {found}, its .json says {self.entry['sha256']}")
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            ids, states = loaded["input_ids"], list(loaded["hidden_states"])
        except FileNotFoundError:
            raise BadDumpError(path, "is gone, its .json is there") from None
        except OSError:
            raise
        except BadDumpError:
            raise
        except Exception as error:  # noqa: BLE001 (unpickling raises anything)
            raise BadDumpError(path, f"cannot be loaded ({type(error).__name__}: {error})") from None
        shapes = [list(state.shape) for state in states]
        kinds = [str(state.dtype).removeprefix("torch.") for state in states]
        if shapes != self.entry["shapes"] or kinds != self.entry["dtypes"]:
            raise BadDumpError(path, f"holds {kinds} {shapes}, its .json says otherwise")
        if len(states) != len(self.entry["layers"]) or ids.shape != (self.tokens,):
            raise BadDumpError(path, f"holds {len(states)} states and {list(ids.shape)} token ids")
        if any(shape[0] != self.tokens for shape in shapes):
            raise BadDumpError(path, f"holds states of {shapes} for {self.tokens} tokens")
        return ids.to(torch.int64), states


@dataclass(frozen=True)
class Prompt:
    """The records of one whole prompt, in order."""

    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        return self.records[-1].json_path

    @property
    def tokens(self) -> int:
        return sum(record.tokens for record in self.records)

    @property
    def key(self) -> str | None:
        """sha256 of the whole prompt's token ids (int64, little-endian), where the dump says it."""
        return self.records[-1].entry.get("sequence_sha256")

    def load(self, *, digest: bool = True) -> Sample:
        """The joined sample. Raises BadDumpError when rows are missing or the records disagree."""
        torch = need("torch")
        first = self.records[0].entry
        if first["missing_rows"]:
            raise BadDumpError(
                self.label, f"the first {first['missing_rows']} rows came from a cache", RADIX_HINT
            )
        end = 0
        for record in self.records:
            if record.entry["prefix_length"] != end or record.origin != self.records[0].origin:
                raise BadDumpError(record.json_path, "does not continue the record before it")
            end += record.tokens
        parts = [record.load(digest=digest) for record in self.records]
        if len(parts) == 1:
            ids, states = parts[0]
        else:
            ids = torch.cat([part[0] for part in parts])
            states = [torch.cat(pieces) for pieces in zip(*(part[1] for part in parts), strict=True)]
        if self.key is not None and sequence_key(ids) != self.key:
            raise BadDumpError(self.label, "its token ids are not those that its .json was written for")
        return Sample(ids, None, states, tuple(first["layers"]))

    def delete(self) -> None:
        """Remove the files, the ``.json`` of each record first: a reader must not see half of one."""
        for record in reversed(self.records):
            for path in (record.json_path, record.data_path):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass


class Spool:
    """A folder that servers dump into.

    ``prompts`` gives each complete prompt once. A chain is complete when its last record says so, or,
    where the dump cannot say (SGLang before 0.5.10), when its tokens are among those ``wanted``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.seen: set[str] = set()
        self.waiting: dict[str, list[Record]] = {}  # name of the last record -> the chain so far
        self.early: dict[str, Record] = {}  # name of the record it waits for -> a later piece

    def prompts(self, wanted: Any = None) -> Iterator[Prompt]:
        """Complete prompts that were not given before. ``wanted`` is asked with a sequence_sha256."""
        for name in self._names():
            record = Record.read(self.folder, name)
            if record is None:
                continue
            self.seen.add(name)
            yield from self._take(record, wanted)

    def _names(self) -> list[str]:
        try:
            listed = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        names = {one[:-5] for one in listed if one.endswith(".json") and not one.startswith(".")}
        self.seen &= names  # deleted ones need no memory
        return sorted(names - self.seen)

    def _take(self, record: Record, wanted: Any) -> Iterator[Prompt]:
        if record.previous is None:
            chain = [record]
        elif record.previous in self.waiting:
            chain = [*self.waiting.pop(record.previous), record]
        else:
            self.early[record.previous] = record  # writers are several: the .json may come out of order
            return
        final = record.entry.get("final")
        if final or (final is None and self._may_end(record, wanted)):
            yield Prompt(tuple(chain))
        if not final:
            self.waiting[record.name] = chain
            later = self.early.pop(record.name, None)
            if later is not None:
                yield from self._take(later, wanted)

    def _may_end(self, record: Record, wanted: Any) -> bool:
        if record.entry["missing_rows"] or wanted is None:
            return True
        return bool(wanted(record.entry.get("sequence_sha256")))

    def unfinished(self) -> list[list[Record]]:
        """Chains whose last piece never came."""
        waiting = [chain for chain in self.waiting.values() if chain[-1].entry.get("final") is False]
        return [*waiting, *([record] for record in self.early.values())]

    def usage(self) -> int:
        """Bytes of all files in the folder."""
        total = 0
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    try:
                        if entry.is_file(follow_symlinks=False):
                            total += entry.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue
        except FileNotFoundError:
            return 0
        return total

    def skip(self) -> None:
        """Take none of the records that are there now."""
        self.seen.update(self._names())

    def require_own(self) -> None:
        """Raise SpoolFolderError unless the folder is ours alone, or not there yet."""
        try:
            found = os.lstat(self.folder)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode):
            raise SpoolFolderError(self.folder, "is no folder")
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise SpoolFolderError(self.folder, "another user can write there")

    def clear(self) -> None:
        """Remove all files of servers that are gone; only for a folder that is ours alone."""
        self.require_own()
        if os.path.lexists(self.folder):
            shutil.rmtree(self.folder)
        os.makedirs(self.folder, mode=0o700)
        self.seen.clear()
        self.waiting.clear()
        self.early.clear()

    def discard(self, *, records: bool) -> None:
        """Remove the folder, which is ours alone; one with records in it only where these may go too."""
        self.seen.clear()
        if records or not self._names():
            shutil.rmtree(self.folder, ignore_errors=True)

    def failures(self, since: float = 0.0) -> list[str]:
        """What the servers' status files say went wrong, of those written after ``since`` (epoch seconds)."""
        folder = os.path.join(self.folder, "status")
        found = []
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            try:
                if os.stat(path).st_mtime < since:
                    continue
                with open(path, "rb") as file:
                    status = json.loads(file.read())
            except (OSError, ValueError):
                continue
            if isinstance(status, dict) and status.get("state") == "failed":
                found.append(str(status.get("error")))
        return found


def file_sha256(path: str) -> str:
    """The file's sha256 in hex, read in pieces so that memory stays bounded."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _mapped_sha256(path: str, size: int) -> str:
    """The same without a copy, a quarter faster; the file is about to be mapped for its states anyway."""
    with open(path, "rb") as file:
        if not size:
            return hashlib.sha256().hexdigest()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            return hashlib.sha256(mapped).hexdigest()


def same_origin(folder: str, first: dict[str, Any], prompt: Prompt) -> None:
    """Refuse to mix dumps of different models, releases, layers or patches. Raises ForeignDumpError."""
    for key, value in prompt.records[0].origin.items():
        if first.get(key) != value:
            raise ForeignDumpError(
                prompt.label,
                f"has {key} {value!r}, the data set in {folder} has {first.get(key)!r}",
                "dumps of different servers cannot be one data set",
            )
