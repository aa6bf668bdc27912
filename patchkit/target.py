"""Find what is to be patched: the distribution, its root, its release, its metadata.

Nothing of the target is imported. With ``--python`` the interpreter is asked once, isolated from the
environment variables and the working directory, where its packages lie.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from patchkit.errors import REFUSED, USAGE, PatchkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_VERSION_LINE = re.compile(
    r"^(?:__version__|version)\s*(?::[^=\n]+)?=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", re.MULTILINE
)
_VERSION_FILES = ("_version.py", "version.py", "__init__.py")
_PROBE = (
    "import json,site,sys;"
    "own=sys.prefix!=sys.base_prefix;"
    "extra=[] if own else [site.getusersitepackages()];"
    "print(json.dumps([sys.prefix,sys.path+extra]))"
)


class NoInterpreterError(PatchkitError):
    """``--python``, or the active venv, is not a Python that answers."""

    code = "no-interpreter"
    exit_code = USAGE

    def __init__(self, python: str, reason: str, *, source: str = "--python") -> None:
        super().__init__(
            f"{source} {python}: {reason}", path=python, hint="name the python of the target's environment"
        )


class NotARootError(PatchkitError):
    """``--root`` names something that is not a folder."""

    code = "not-a-root"
    exit_code = USAGE

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(
            f"--root {root}: {reason}",
            path=root,
            hint="name the folder that holds the package, such as a site-packages",
        )


class NotInstalledError(PatchkitError):
    """The distribution is not in the environment or folder meant."""

    code = "not-installed"
    exit_code = REFUSED

    def __init__(self, distribution: str, where: str, hint: str) -> None:
        self.distribution = distribution
        super().__init__(f"'{distribution}' is not installed in {where}", hint=hint)


class AmbiguousInstallError(PatchkitError):
    """Two metadata folders claim the distribution."""

    code = "ambiguous-install"
    exit_code = REFUSED

    def __init__(self, distribution: str, found: Sequence[str]) -> None:
        super().__init__(
            f"'{distribution}' has two metadata folders, {found[0]} and {found[1]}",
            path=found[1],
            hint="reinstall it; an upgrade was probably cut short",
        )


@dataclass(frozen=True)
class Environment:
    """Where an interpreter finds its packages; ``python`` None means a plain folder given as ``--root``."""

    python: str | None
    prefix: str | None
    paths: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Target:
    """One installed distribution.

    ``root`` is real and absolute; ``packages`` are the top-level names under it that belong to the
    distribution; ``metadata`` is its dist-info folder or None; ``release`` None if nothing says it.
    """

    distribution: str
    release: str | None
    root: str
    packages: tuple[str, ...]
    metadata: str | None
    prefix: str | None
    editable: bool = False

    @property
    def label(self) -> str:
        unknown = "(release unknown)" if self.is_installed else "(not installed)"
        return f"{self.distribution} {self.release or unknown}"

    @property
    def is_installed(self) -> bool:
        """False for a distribution that was removed while a patch was applied: only what we left is there."""
        return bool(self.packages) or self.metadata is not None

    @cached_property
    def record(self) -> tuple[RecordEntry, ...]:
        """The RECORD's entries; empty for an editable or plain folder."""
        if self.metadata is None or self.editable:
            return ()
        return read_record(self.metadata)

    @cached_property
    def recorded(self) -> dict[str, str | None]:
        """Root-relative path -> sha256 of what the installer says it installed; empty without a RECORD."""
        return {os.path.normpath(entry.path): entry.sha256 for entry in self.record}

    @cached_property
    def neighbours(self) -> frozenset[str]:
        """What the other distributions of the root installed: a namespace package is shared."""
        found: set[str] = set()
        for name in os.listdir(self.root):
            metadata = os.path.join(self.root, name)
            if name.endswith(".dist-info") and metadata != self.metadata:
                found |= {os.path.normpath(entry.path) for entry in read_record(metadata)}
        return frozenset(found)

    def owns(self, path: str) -> bool:
        """Whether the root-relative ``path`` lies in the distribution, or would if it were made."""
        if path.split("/", 1)[0] not in self.packages:
            return False
        return not self.record or path in self.recorded or path not in self.neighbours


@dataclass(frozen=True)
class RecordEntry:
    """A line of RECORD: POSIX path relative to the root, sha256 in hex (None: not recorded), size."""

    path: str
    sha256: str | None
    size: int | None


def read_record(metadata: str) -> tuple[RecordEntry, ...]:
    """RECORD per the "Recording installed projects" specification; empty when there is none."""
    import base64
    import binascii

    try:
        with open(
            os.path.join(metadata, "RECORD"), encoding="utf-8", errors="surrogateescape", newline=""
        ) as file:
            rows = [row for row in csv.reader(file) if row]
    except FileNotFoundError:
        return ()
    entries = []
    for row in rows:
        path, digest, size = (*row, "", "")[:3]
        sha256 = None
        if digest.startswith("sha256="):
            encoded = digest.removeprefix("sha256=")
            try:
                sha256 = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
            except (binascii.Error, ValueError):
                sha256 = "unreadable"  # equals no digest: the file will be named as an offender
        entries.append(RecordEntry(path, sha256, int(size) if size.isdigit() else None))
    return tuple(entries)


def environment(python: str | None = None, root: str | None = None) -> Environment:
    """The environment meant: ``--root``, ``--python``, the active venv, or the current interpreter."""
    if root == "":
        raise NotARootError("''", "names no folder")
    if python == "":
        raise NoInterpreterError("''", "names no program")
    if root is not None:
        try:
            if not stat.S_ISDIR(os.stat(root).st_mode):
                raise NotARootError(root, "not a folder")
        except FileNotFoundError:
            raise NotARootError(root, "no such folder") from None
        except OSError as error:
            raise NotARootError(root, error.strerror or str(error)) from None
        real = os.path.realpath(root)
        return Environment(None, None, (real,), real)
    if python is None and os.environ.get("VIRTUAL_ENV"):
        venv = os.environ["VIRTUAL_ENV"]
        if os.path.realpath(venv) != os.path.realpath(sys.prefix):
            return _ask(os.path.join(venv, "bin", "python"), source="the active venv (VIRTUAL_ENV)")
    if python is None:
        paths = [path for path in sys.path if path and os.path.isdir(path)]
        return Environment(sys.executable, sys.prefix, tuple(paths), sys.prefix)
    return _ask(python)


def _ask(python: str, source: str = "--python") -> Environment:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        prefix, paths = json.loads(done.stdout)
    except FileNotFoundError:
        raise NoInterpreterError(python, "no such program", source=source) from None
    except PermissionError:
        reason = "a folder, not a program" if os.path.isdir(python) else "not executable"
        raise NoInterpreterError(python, reason, source=source) from None
    except OSError as error:
        raise NoInterpreterError(python, error.strerror or str(error), source=source) from None
    except subprocess.TimeoutExpired:
        raise NoInterpreterError(python, "did not answer within 60 s", source=source) from None
    except (ValueError, TypeError):
        # A program that is no Python, or a Python so broken that it cannot even start.
        raise NoInterpreterError(python, "does not answer as a Python interpreter", source=source) from None
    return Environment(python, prefix, tuple(path for path in paths if path and os.path.isdir(path)), prefix)


def locate(distribution: str, env: Environment, packages: Callable[[], Iterable[str]] = tuple) -> Target:
    """Find ``distribution`` in ``env``.

    ``packages`` gives the top-level names that its patches touch: for a folder or a checkout whose package
    is not named as the distribution is.
    """
    metadata = _metadata_folder(distribution, env.paths)
    if metadata is not None:
        return _from_metadata(distribution, metadata, env, packages)
    if env.python is None:
        return _from_folder(distribution, env, tuple(packages()))
    raise NotInstalledError(
        distribution, env.label, "install it there, or name the environment with --python or --root"
    )


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _metadata_folder(distribution: str, paths: Sequence[str]) -> str | None:
    wanted = _canonical(distribution)
    for path in paths:
        found = []
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
            stem, _, suffix = name.rpartition(".")
            if suffix == "dist-info" and _canonical(stem.rpartition("-")[0]) == wanted:
                found.append(os.path.join(path, name))
        if len(found) > 1:
            raise AmbiguousInstallError(distribution, found)
        if found:
            return found[0]
    return None


def _from_metadata(
    distribution: str, metadata: str, env: Environment, packages_touched: Callable[[], Iterable[str]]
) -> Target:
    release = _metadata_version(metadata)
    root = os.path.realpath(os.path.dirname(metadata))
    if _is_editable(metadata):
        usual = (_canonical(distribution).replace("-", "_"),)
        found = _editable_root(metadata, usual) or _editable_root(metadata, tuple(packages_touched()))
        if found is None:
            checkout = f"its editable checkout {_checkout(metadata)}"
            raise NotInstalledError(distribution, checkout, "is the checkout still there?")
        source, names = found
        return Target(
            distribution, release, source, names, os.path.realpath(metadata), env.prefix, editable=True
        )
    tops = {
        entry.path.split("/", 1)[0]
        for entry in read_record(metadata)
        if not entry.path.startswith(("..", "/"))
    }
    packages = tuple(
        sorted(top for top in tops if not top.endswith((".dist-info", ".data")) and top != "__pycache__")
    )
    if not packages:
        name = _canonical(distribution).replace("-", "_")
        packages = (name,) if _has_package(root, name) else ()
    return Target(distribution, release, root, packages, os.path.realpath(metadata), env.prefix)


def _metadata_version(metadata: str) -> str | None:
    try:
        with open(os.path.join(metadata, "METADATA"), encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.lower().startswith("version:"):
                    return line.split(":", 1)[1].strip()
                if not line.strip():
                    break
    except FileNotFoundError:
        pass
    return os.path.basename(metadata).removesuffix(".dist-info").rpartition("-")[2] or None


def _direct_url(metadata: str) -> dict[str, object]:
    try:
        with open(os.path.join(metadata, "direct_url.json"), encoding="utf-8") as file:
            loaded = json.load(file)
    except (FileNotFoundError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _is_editable(metadata: str) -> bool:
    info = _direct_url(metadata).get("dir_info")
    return isinstance(info, dict) and info.get("editable") is True


def _editable_root(metadata: str, names: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """The folder that an editable install puts on the path (from its .pth, its finder, or its checkout) and
    those of the packages ``names`` that are in it; None where none is.
    """
    site = os.path.dirname(metadata)
    candidates: list[str] = []
    for entry in read_record(metadata):
        path = os.path.join(site, entry.path)
        if entry.path.endswith(".pth") and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                candidates += [
                    line.strip() for line in file if line.strip() and not line.startswith(("import", "#"))
                ]
        elif (
            os.path.basename(entry.path).startswith("__editable__")
            and path.endswith(".py")
            and os.path.isfile(path)
        ):
            candidates += [os.path.dirname(mapped) for mapped in _finder_mapping(path).values()]
    checkout = _checkout(metadata)
    candidates += [checkout, os.path.join(checkout, "python"), os.path.join(checkout, "src")]
    for candidate in candidates:
        present = tuple(name for name in names if _has_package(candidate, name))
        if present:
            return os.path.realpath(candidate), present
    return None


def _checkout(metadata: str) -> str:
    return unquote(urlsplit(str(_direct_url(metadata).get("url", ""))).path)


def _finder_mapping(path: str) -> dict[str, str]:
    """``MAPPING`` of a setuptools editable finder, read without running it."""
    with open(path, encoding="utf-8", errors="replace") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        targets = (
            [node.target]
            if isinstance(node, ast.AnnAssign)
            else node.targets
            if isinstance(node, ast.Assign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == "MAPPING" for target in targets):
            try:
                value = ast.literal_eval(node.value) if node.value is not None else {}  # type: ignore[attr-defined]
            except ValueError:
                return {}
            return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}
    return {}


def _has_package(root: str, name: str) -> bool:
    return os.path.isdir(os.path.join(root, name)) or os.path.isfile(os.path.join(root, name + ".py"))


def _from_folder(distribution: str, env: Environment, packages: tuple[str, ...]) -> Target:
    root = env.paths[0]
    wanted = packages or (_canonical(distribution).replace("-", "_"),)
    present = tuple(
        name for name in wanted if _has_package(root, name) or os.path.exists(os.path.join(root, name))
    )
    if not present:
        raise NotInstalledError(
            distribution,
            root,
            f"--root must name the folder that holds '{wanted[0]}', such as a site-packages",
        )
    return Target(distribution, _folder_release(root, present), root, present, None, None)


def _folder_release(root: str, packages: Sequence[str]) -> str | None:
    for package in packages:
        for name in _VERSION_FILES:
            try:
                with open(os.path.join(root, package, name), encoding="utf-8", errors="replace") as file:
                    match = _VERSION_LINE.search(file.read())
            except (FileNotFoundError, NotADirectoryError):
                continue
            if match:
                return match[1]
    return None
