"""The data set on disk: samples in one of the formats, and what is known of each.

``dataset.json`` is written last: without it a folder is unfinished. ``samples.jsonl`` has a line for each
row. While a data set grows, ``.growing/`` holds its plan, the lines so far and the settings that a
resumed run must share. ``provenance/`` has one file for each run; it alone holds times.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from array import array
from typing import TYPE_CHECKING, Any

from patchkit import __version__
from patchkit.hidden_states.errors import DatasetError, IncompleteError
from patchkit.hidden_states.files import durable, durable_and_large, write_json
from patchkit.hidden_states.formats import FORMATS, Format
from patchkit.hidden_states.plan import Plan
from patchkit.hidden_states.records import check_entry, check_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from patchkit.hidden_states.sample import Sample

SCHEMA = 1
RECORD, SAMPLES, GROWING, PROVENANCE = "dataset.json", "samples.jsonl", ".growing", "provenance"
VOCABULARY = ("d2t.npy", "t2d.npy")
CLOSED = -1


class Growing:
    """A data set that is being written. Threads may ``add`` different rows at the same time."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.settings = _read_json(os.path.join(folder, GROWING, "settings.json"))
        self.format: Format = FORMATS[self.settings["format"]]
        self.plan = Plan(os.path.join(folder, GROWING, "plan.arrow"))
        self.lock = threading.Lock()
        self.path = os.path.join(folder, GROWING, SAMPLES)
        self.places = array("q", [CLOSED]) * len(self.plan)  # where a row's line starts
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            raise DatasetError(folder, "another patchkit is writing it") from None
        self.end = self._recover()
        self.origin: dict[str, Any] | None = None

    @staticmethod
    def exists(folder: str) -> bool:
        return os.path.exists(os.path.join(folder, GROWING, "settings.json"))

    def _recover(self) -> int:
        """Take the lines that are whole and whose file is there; what a crash tore off is cut."""
        end = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)["row"]
                if os.path.exists(os.path.join(self.folder, self.format.path(row))):
                    self.places[row] = end
                end += len(line)
        os.ftruncate(self.descriptor, end)
        return end

    def has(self, row: int) -> bool:
        return self.places[row] != CLOSED

    @property
    def missing(self) -> list[int]:
        return [row for row, place in enumerate(self.places) if place == CLOSED]

    def add(self, row: int, sample: Sample, known: dict[str, Any], *, sync: bool = True) -> int:
        """Write the sample of ``row`` and remember ``known`` of it; on the disk when this returns.

        Returns the size of its file.
        """
        relative = self.format.path(row)
        path = os.path.join(self.folder, relative)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with durable_and_large(path, sync=sync) as file:
            self.format.write(file, sample)
            size = file.tell()
        self._remember(row, size, known, sync=sync)
        return size

    def link(self, row: int, existing: str, known: dict[str, Any]) -> bool:
        """Take the file of another data set in the same format; False where it cannot be linked."""
        path = os.path.join(self.folder, self.format.path(row))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            if os.path.lexists(path):
                os.unlink(path)
            os.link(existing, path)
        except OSError:
            return False
        self._remember(row, os.stat(path).st_size, known, sync=True)
        return True

    def _remember(self, row: int, size: int, known: dict[str, Any], *, sync: bool) -> None:
        entry = {"row": row, "line": self.plan.line(row), "bytes": size, **known}
        data = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"
        with self.lock:
            # A disk that fills takes a part, and only the next call says so.
            rest, at = memoryview(data), self.end
            while rest:
                written = os.pwrite(self.descriptor, rest, at)
                rest, at = rest[written:], at + written
            if sync:
                os.fdatasync(self.descriptor)
            self.places[row] = self.end
            self.end += len(data)

    def adopt(self, origin: dict[str, Any], hidden_size: int) -> dict[str, Any]:
        """Where this data set's states come from; the first caller says it, for resumed runs as well."""
        path = os.path.join(self.folder, GROWING, "origin.json")
        wanted = self.settings.get("layers")
        if wanted and origin and origin.get("layers") != wanted:
            raise DatasetError(
                self.folder, f"is to have the layers {wanted}, the dumps have {origin.get('layers')}"
            )
        with self.lock:
            if self.origin is None and os.path.exists(path):
                self.origin = _read_json(path)
            if self.origin is None:
                self.origin = {"schema": SCHEMA, "hidden_size": hidden_size, "origin": origin}
                write_json(path, self.origin)
            return dict(self.origin)

    def known_origin(self) -> dict[str, Any] | None:
        """What the states so far come from; None while there are none."""
        with self.lock:
            path = os.path.join(self.folder, GROWING, "origin.json")
            if self.origin is None and os.path.exists(path):
                self.origin = _read_json(path)
            return None if self.origin is None else dict(self.origin["origin"])

    def finish(self) -> dict[str, Any]:
        """Write the rest and make it a data set. Raises IncompleteError when rows are missing."""
        if missing := self.missing:
            raise IncompleteError(self.folder, missing, len(self.plan), "run it again with --resume")
        origin = self.adopt({}, 0)
        totals = {"samples": len(self.plan), "tokens": 0, "loss_tokens": 0, "bytes": 0}
        digest = hashlib.sha256()
        with durable(os.path.join(self.folder, SAMPLES)) as out:
            for line in self._lines():
                entry = json.loads(line)
                for key in ("tokens", "loss_tokens", "bytes"):
                    totals[key] += entry[key]
                digest.update(line)
                out.write(line)
        self.format.finish(self.folder, self.plan)
        whole = {
            "schema": SCHEMA,
            "format": self.format.name,
            "last_state": "after the final norm" if self.format.normed else "before the final norm",
            "patchkit": __version__,
            "samples_sha256": digest.hexdigest(),
            **totals,
            "hidden_size": origin["hidden_size"],
            "layers": origin["origin"]["layers"],
            "origin": origin["origin"],
            "input": self.settings["input"],
            "verifier": self.settings.get("verifier"),
        }
        write_json(os.path.join(self.folder, RECORD), whole)
        self.close()
        shutil.rmtree(os.path.join(self.folder, GROWING))
        return whole

    def _lines(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            for place in self.places:
                file.seek(place)
                yield file.readline()

    def close(self) -> None:
        if self.descriptor != CLOSED:
            os.close(self.descriptor)
            self.descriptor = CLOSED


def start(folder: str, settings: dict[str, Any]) -> str:
    """Make ``folder`` ready to grow; returns the path for the plan, which the caller writes.

    ``settings`` is written by ``settle`` once the plan is there: only then can a run be resumed.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise DatasetError(folder, "is there and no folder")
    if os.path.isdir(folder):
        others = [name for name in os.listdir(folder) if name != GROWING]
        if others:
            raise DatasetError(folder, f"is not empty ({min(others)})", "name a new folder, or use --resume")
        shutil.rmtree(os.path.join(folder, GROWING), ignore_errors=True)
    os.makedirs(os.path.join(folder, GROWING))
    if settings["format"] not in FORMATS:
        raise DatasetError(folder, f"there is no format {settings['format']!r}")
    return os.path.join(folder, GROWING, "plan.arrow")


def tidy(folder: str) -> None:
    """Remove what a run that died after its last step left in a finished data set."""
    shutil.rmtree(os.path.join(folder, GROWING), ignore_errors=True)


def settle(folder: str, settings: dict[str, Any]) -> None:
    write_json(os.path.join(folder, GROWING, "settings.json"), {"schema": SCHEMA, **settings})


class Dataset:
    """A finished data set."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        path = os.path.join(folder, RECORD)
        if not os.path.exists(path):
            if Growing.exists(folder):
                raise DatasetError(folder, "is unfinished", "finish it with --resume")
            raise DatasetError(folder, f"has no {RECORD}: not a data set that patchkit wrote")
        self.record = _read_json(path)
        name = self.record.get("format")
        if name not in FORMATS:
            raise DatasetError(folder, f"is in the format {name!r}, which this patchkit does not know")
        self.format: Format = FORMATS[name]
        check_record(path, self.record)
        self.layers: tuple[int, ...] = tuple(self.record["layers"])
        self.hidden_size: int = self.record["hidden_size"]
        self.samples: int = self.record["samples"]
        self._tokens: Plan | None = None
        self._has_tokens = True
        self.lock = threading.Lock()

    def entries(self) -> Iterator[dict[str, Any]]:
        """The lines of ``samples.jsonl``, in the order of the rows. Raises DatasetError."""
        path = os.path.join(self.folder, SAMPLES)
        try:
            file = open(path, "rb")  # noqa: SIM115 (closed below; only its opening may fail so)
        except FileNotFoundError:
            raise DatasetError(path, "no such file") from None
        count = 0
        with file:
            for row, line in enumerate(file):
                count = row + 1
                label = f"{path}:{count}"
                if count > self.samples:
                    raise DatasetError(label, f"is over the {self.samples} samples that {RECORD} says")
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DatasetError(label, f"not JSON ({error})") from None
                check_entry(label, entry, row, self.layers)
                yield entry
        if count < self.samples:
            raise DatasetError(path, f"has {count} lines, {RECORD} says {self.samples} samples")

    def samples_digest(self) -> str | None:
        from patchkit.hidden_states.dump import file_sha256

        try:
            return file_sha256(os.path.join(self.folder, SAMPLES))
        except FileNotFoundError:
            return None

    def path(self, row: int) -> str:
        return os.path.join(self.folder, self.format.path(row))

    def read(self, row: int) -> Sample:
        """The sample of ``row``. Raises BadSampleError, DatasetError."""
        return self.format.read(self.path(row), self.layers, self._row_tokens(row))

    def row_tokens(self, row: int) -> tuple[Any, Any] | None:
        return self._row_tokens(row)

    def _row_tokens(self, row: int) -> tuple[Any, Any] | None:
        with self.lock:
            if self._tokens is None and self._has_tokens:
                self._tokens = self.format.tokens(self.folder)
                self._has_tokens = self._tokens is not None
        if self._tokens is None:
            return None
        if row >= len(self._tokens):
            reason = f"has {len(self._tokens)} rows of tokens for {self.samples} samples"
            raise DatasetError(self._tokens.path, reason)
        return self._tokens.row(row)

    def vocabulary(self) -> tuple[str, str] | None:
        """The paths of ``d2t.npy`` and ``t2d.npy``, if the data set has a mapping."""
        paths = tuple(os.path.join(self.folder, name) for name in VOCABULARY)
        return (paths[0], paths[1]) if any(os.path.exists(path) for path in paths) else None


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            loaded = json.loads(file.read())
    except (ValueError, RecursionError) as error:
        raise DatasetError(path, f"not JSON ({error})") from None
    if not isinstance(loaded, dict) or loaded.get("schema") != SCHEMA:
        found = loaded.get("schema") if isinstance(loaded, dict) else None
        raise DatasetError(path, f"schema {found!r} is not one that this patchkit knows ({SCHEMA})")
    return loaded
