"""What a session ran on, in writing: an in-toto Statement that other tools read too.

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md. The subjects are the tree as the
command saw it, and the files that it made. Trees are digested as ``dirHash`` of that specification (the
sorted lines of ``sha256sum``, hashed again), over the distribution's files without bytecode and backups.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit import __version__, history
from patchkit.commands.holding import LOCK_WAIT_S
from patchkit.digest import StatCache
from patchkit.errors import USAGE, PatchkitError
from patchkit.lock import LockedError, tree_lock
from patchkit.state import BACKUP, prepare
from patchkit.tree import sha256_file
from patchkit.witness import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from patchkit.manifest import Manifest
    from patchkit.target import Target

SCHEMA = 1
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:sgl-patchkit:run:v1"
PREFIX = "patchkit-run-"


class RecordError(PatchkitError):
    """A file that is no provenance record, or one of another schema."""

    code = "bad-record"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}", path=path, hint=f"name a {PREFIX}….json")


class OutputError(PatchkitError):
    """``--output`` names something that can never be there.

    It may come into being while the command runs, its folder may not.
    """

    code = "no-output"
    exit_code = USAGE

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"--output {path}: {reason}", path=path)


@dataclass
class TreeState:
    """One target before, while and after the command ran; each digest is a ``dirHash`` in hex."""

    target: Target
    before: str
    during: str | None = None
    after: str | None = None
    clean: bool | None = None
    witness: str | None = None
    changed: bool | None = None  # whether it differed from ``during`` when the command had ended

    def to_json(self) -> dict[str, Any]:
        return {
            "distribution": self.target.distribution,
            "release": self.target.release,
            "root": self.target.root,
            "packages": list(self.target.packages),
            "digest": {
                name: None if digest is None else {"dirHash": digest}
                for name, digest in (("before", self.before), ("during", self.during), ("after", self.after))
            },
            "changed_during": self.changed,
            "clean_after": self.clean,
            "witness": self.witness,
        }


@dataclass
class Record:
    """All that is known of one session; ``write`` makes the file of it. Times in seconds since the epoch."""

    session: str
    command: list[list[str]] = field(default_factory=list)
    trees: list[TreeState] = field(default_factory=list)
    patches: list[Manifest] = field(default_factory=list)
    env_set: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.time)
    ended: float | None = None
    exit_code: int | None = None
    exit_signal: int | None = None  # what ended the command, if it did not exit by itself
    signals: list[int] = field(default_factory=list)
    restored: bool | None = None
    gpus_held: list[str] = field(default_factory=list)  # after the last process had ended
    written: list[dict[str, Any]] = field(default_factory=list)  # the outputs as ``write`` found them
    statement: str = ""
    env_names: set[str] = field(default_factory=set)  # of variables that were passed on as they were

    def note_environment(self, given: Mapping[str, str]) -> None:
        """Keep what a command is given; of what it would have inherited just so, the name alone."""
        for name, value in given.items():
            if os.environ.get(name) == value:
                self.env_names.add(name)
            else:
                self.env_set[name] = value

    def to_json(self) -> dict[str, Any]:
        subjects = [
            {"name": f"{tree.target.distribution}@{tree.target.release}", "digest": {"dirHash": digest}}
            for tree in self.trees
            if (digest := tree.during or tree.before)
        ]
        outputs = [_output(path, self.outputs) for path in self.outputs]
        self.written = outputs
        for output in outputs:
            subjects += [
                {"name": _under(output, name), "digest": {"sha256": sha256}}
                for name, sha256 in output["files"].items()
            ]
        return {
            "_type": STATEMENT,
            "subject": subjects,
            "predicateType": PREDICATE,
            "predicate": {
                "schema": SCHEMA,
                "patchkit": __version__,
                "session": self.session,
                "statement": self.statement,
                "commands": self.command,
                "exit_code": self.exit_code,
                "exit_signal": self.exit_signal,
                "signals": self.signals,
                "started": _utc(self.begun),
                "ended": None if self.ended is None else _utc(self.ended),
                "trees": [tree.to_json() for tree in self.trees],
                "patches": [
                    {
                        "name": manifest.patch,
                        "diff": {"sha256": manifest.diff_sha256},
                        "manifest": {"sha256": hashlib.sha256(manifest.to_json()).hexdigest()},
                    }
                    for manifest in self.patches
                ],
                "restored": self.restored,
                "gpus_held": self.gpus_held,
                # Values may be secrets: only those that patchkit set itself are written down.
                "environment": {
                    "names": sorted({*os.environ, *self.env_set, *self.env_names}),
                    "set": dict(sorted(self.env_set.items())),
                },
                "machine": self.machine,
                "outputs": outputs,
            },
        }

    def write(self, folder: str) -> str:
        """Write ``patchkit-run-<session>.json`` into ``folder``; returns its path. Raises OSError.

        The history of each tree gets its sha256, so that a record that was changed later is told.
        """
        data = (json.dumps(_spelled(self.to_json()), indent=2, sort_keys=True) + "\n").encode("ascii")
        path = os.path.join(folder, f"{PREFIX}{self.session}.json")
        temp = f"{path}.tmp"
        try:
            with open(temp, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temp, path)
        except BaseException:
            if os.path.exists(temp):
                os.unlink(temp)
            raise
        self._witness(hashlib.sha256(data).hexdigest())
        return path

    def _witness(self, sha256: str) -> None:
        for tree in self.trees:
            entry = history.record(
                "run", [], distribution=tree.target.distribution, record={"sha256": sha256}, id=self.session
            )
            with contextlib.suppress(OSError, LockedError), tree_lock(tree.target.root, LOCK_WAIT_S):
                prepare(tree.target.root)
                history.History(tree.target.root).append(entry)


def tree_digest(target: Target) -> str:
    """The ``dirHash`` of the distribution's files under the root, in hex."""
    cache = StatCache(target.root)
    lines = []
    for path in sorted(files_of(target), key=os.fsencode):
        if BACKUP.search(path) or "/__pycache__/" in f"/{path}" or path.endswith(".pyc"):
            continue
        try:
            sha256 = cache.sha256(path)
        except FileNotFoundError:
            sha256 = None  # a dangling link
        lines.append(f"{sha256 or '-' * 64}  ".encode("ascii") + os.fsencode(path) + b"\n")
    cache.save()
    return hashlib.sha256(b"".join(lines)).hexdigest()


def machine() -> dict[str, Any]:
    """Host, kernel, GPUs and driver, as far as they say."""
    system = os.uname()
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": f"{system.sysname} {system.release} {system.machine}",
        "gpus": [],
        "driver": None,
    }
    if os.path.exists("/dev/nvidiactl"):
        _ask_nvml(found)
    return found


def _ask_nvml(found: dict[str, Any]) -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        found["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
            found["gpus"].append({"name": name, "uuid": uuid})
    except pynvml.NVMLError:
        return  # what was read so far stands
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def check_output(path: str) -> str:
    """The absolute path of a named output, which need not exist yet. Raises OutputError."""
    absolute = os.path.abspath(path)
    parent = os.path.dirname(absolute)
    if not os.path.exists(absolute) and not os.path.isdir(parent):
        raise OutputError(path, f"there is no folder {parent}")
    return absolute


def _output(path: str, all_paths: Sequence[str]) -> dict[str, Any]:
    """The sha256 of a file, or of each file below a folder, by its path there.

    ``name`` stands for it in the subjects, which must not share a name. ``unread`` says why for each file
    or folder that could not be read.
    """
    base = os.path.basename(path)
    unique = [os.path.basename(other) for other in all_paths].count(base) == 1
    kind = "folder" if os.path.isdir(path) else "file" if os.path.isfile(path) else None
    files, unread = digests(path)
    return {
        "path": path,
        "name": base if base and unique else path,
        "kind": kind,
        "files": files,
        "unread": unread,
    }


def digests(path: str) -> tuple[dict[str, str], dict[str, str]]:
    """The sha256 of each regular file below ``path``, and what could not be read and why, both by the path
    relative to it, "" for itself. Records are no outputs.
    """
    files: dict[str, str] = {}
    unread: dict[str, str] = {}

    def fail(error: OSError, name: str | None = None) -> None:
        found = os.path.relpath(error.filename, path) if name is None else name
        unread[spelled(found)] = error.strerror or str(error)

    for name in _names(path, fail):
        try:
            files[spelled(name)] = sha256_file(place(path, name))[0]
        except OSError as error:
            fail(error, name)
    return files, unread


def _names(path: str, fail: Callable[[OSError], None]) -> Iterator[str]:
    if not os.path.isdir(path):
        if os.path.isfile(path):
            yield ""
        return
    for top, folders, files in os.walk(path, onerror=fail):
        folders.sort()
        for name in sorted(files):
            full = os.path.join(top, name)
            try:
                regular = stat.S_ISREG(os.lstat(full).st_mode)
            except OSError as error:
                fail(error)
                continue
            if regular and not name.startswith(PREFIX):
                yield os.path.relpath(full, path)


def _under(output: dict[str, Any], name: str) -> str:
    return f"{output['name']}/{name}" if name else str(output["name"])


def place(output: str, name: str) -> str:
    """Where the file ``name`` of an output lies."""
    return os.path.join(output, name) if name else output


def spelled(text: str) -> str:
    """JSON is UTF-8, names and arguments need not be: other bytes are spelled as Python spells them."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def _spelled(data: Any) -> Any:
    if isinstance(data, str):
        return spelled(data)
    if isinstance(data, dict):
        return {spelled(key): _spelled(value) for key, value in data.items()}
    return [_spelled(item) for item in data] if isinstance(data, (list, tuple)) else data


# -- reading ------------------------------------------------------------------------------------------


def load(path: str) -> dict[str, Any]:
    """The predicate of the record at ``path``, its layout checked. Raises RecordError, OSError."""
    with open(path, "rb") as file:
        raw = file.read()
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecordError(path, f"not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("_type") != STATEMENT:
        raise RecordError(path, "not an in-toto Statement v1")
    if data.get("predicateType") != PREDICATE:
        raise RecordError(path, f"a statement of another kind ({data.get('predicateType')!r})")
    predicate = data.get("predicate")
    if not isinstance(predicate, dict) or predicate.get("schema") != SCHEMA:
        found = predicate.get("schema") if isinstance(predicate, dict) else None
        raise RecordError(path, f"schema is {found!r}; this patchkit reads schema {SCHEMA}")
    _check_layout(path, data, predicate)
    return predicate


def _check_layout(path: str, statement: dict[str, Any], predicate: dict[str, Any]) -> None:
    try:
        if not predicate["trees"] or not isinstance(predicate["session"], str):
            raise RecordError(path, "it names no tree or no session")
        for tree in predicate["trees"]:
            if not all(
                isinstance(text, str) for text in (tree["distribution"], tree["root"], *tree["packages"])
            ):
                raise RecordError(path, "a tree without distribution, root or packages")
            for digest in tree["digest"].values():
                if digest is not None and not isinstance(digest["dirHash"], str):
                    raise RecordError(path, "a tree's digest is no text")
        names = {subject["name"]: subject["digest"] for subject in statement["subject"]}
        for output in predicate["outputs"]:
            if not (isinstance(output["path"], str) and isinstance(output["name"], str)):
                raise RecordError(path, "an output without path or name")
            output["unread"].keys()
            for name, sha256 in output["files"].items():
                if names.get(_under(output, name)) != {"sha256": sha256}:
                    raise RecordError(path, f"its subject and its outputs disagree about {name!r}")
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(path, f"damaged ({type(error).__name__}: {error})") from None


def witnessed(path: str, session: str, root: str) -> bool | None:
    """Whether the record at ``path`` is as the history of ``root`` says that it was written.

    None if that history does not know the session.
    """
    with open(path, "rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    entries = history.History(root).records()
    known = [entry.get("record") for entry in entries if entry.get("id") == session]
    return {"sha256": found} in known if known else None


def differences(output: dict[str, Any], folder: str) -> list[tuple[str, str]]:
    """(path, what is wrong) for each file of a recorded output that is not at ``folder`` as it was."""
    recorded = output["files"]
    present, unread = digests(folder)
    wrong = dict.fromkeys(recorded.keys() - present.keys(), "missing")
    wrong |= dict.fromkeys(present.keys() - recorded.keys() - output["unread"].keys(), "unexpected")
    wrong |= {name: "modified" for name, sha256 in present.items() if recorded.get(name, sha256) != sha256}
    wrong |= {name: f"unreadable ({reason})" for name, reason in unread.items()}
    return [(place(folder, name), wrong[name]) for name in sorted(wrong)]
