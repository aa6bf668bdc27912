"""Whether a whole distribution is as its installer left it: against RECORD, git, or the pinned digests."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchkit import bytecode
from patchkit.digest import StatCache
from patchkit.errors import REFUSED, PatchkitError
from patchkit.state import BACKUP, FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set as AbstractSet

    from patchkit.target import Target

RECORD = "RECORD"
GIT = "git"
MANIFESTS = "manifests"
NOTHING = "none"
ABSENT = "absent"


class GitFailedError(PatchkitError):
    """git could not say what belongs to the checkout."""

    code = "git-failed"
    exit_code = REFUSED

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(
            f"{root}: git cannot say what belongs here: {reason}", path=root, hint="run 'git status' there"
        )


@dataclass(frozen=True)
class Offender:
    """A file that is not as its witness or the stack says. ``kind``: modified, missing, unexpected,
    unreadable, patched, or replaced (an installer's file where a patched one should be).
    """

    path: str
    kind: str
    detail: str = ""

    def to_json(self) -> dict[str, str]:
        return {"path": self.path, "kind": self.kind, "detail": self.detail}


@dataclass
class Testimony:
    """What ``witness`` says of ``checked`` files."""

    witness: str
    checked: int = 0
    offenders: list[Offender] = field(default_factory=list)


def examine(
    target: Target,
    expected: dict[str, str | None],
    pinned: Callable[[], dict[str, set[str]]],
    foreign: AbstractSet[str] = frozenset(),
) -> Testimony:
    """Compare the whole distribution with its witness.

    ``expected`` overrides the witness: path -> sha256, or None for "must not exist" (applied patches and
    their backups). ``pinned`` gives, by path, the pristine sha256s that the manifests for this release pin:
    the witness of last resort. ``foreign`` are paths that patches of other distributions brought to the root.
    """
    cache = StatCache(target.root)
    try:
        if not target.is_installed:
            testimony = Testimony(ABSENT)
            _check_expected(target, expected, cache, testimony)
            return testimony
        if target.record:
            return _by_record(target, expected, cache, foreign)
        if _in_repository(target.root) and _git_tracks(target):
            return _by_git(target, expected, cache)
        return _by_manifests(target, expected, pinned(), cache)
    finally:
        cache.save()


def _by_record(
    target: Target, expected: dict[str, str | None], cache: StatCache, foreign: AbstractSet[str]
) -> Testimony:
    testimony = Testimony(RECORD)
    listed: set[str] = set()
    for entry in target.record:
        path = os.path.normpath(entry.path)
        listed.add(path)
        if path in expected or entry.sha256 is None:
            continue  # RECORD itself and bytecode have no digest
        testimony.checked += 1
        _compare(path, entry.sha256, cache, testimony.offenders)
    _check_expected(target, expected, cache, testimony)
    strangers = [path for path in files_of(target) if path not in listed and expected.get(path) is None]
    strangers = [path for path in strangers if not _is_bytecode_of(path, listed | _present(expected))]
    strangers = [path for path in strangers if not _is_bytecode_of(path, set(foreign))]
    others = target.neighbours | foreign if strangers else frozenset()
    testimony.offenders += [
        Offender(path, "unexpected") for path in strangers if path not in others and path not in expected
    ]
    return testimony


def _present(expected: dict[str, str | None]) -> set[str]:
    return {path for path, sha256 in expected.items() if sha256 is not None}


def _check_expected(
    target: Target, expected: dict[str, str | None], cache: StatCache, testimony: Testimony
) -> None:
    for path, sha256 in sorted(expected.items()):
        testimony.checked += 1
        if sha256 is not None:
            _compare(path, sha256, cache, testimony.offenders)
        elif os.path.lexists(os.path.join(target.root, path)):
            testimony.offenders.append(Offender(path, "unexpected", "an applied patch removed it"))


def _compare(path: str, sha256: str, cache: StatCache, offenders: list[Offender]) -> None:
    try:
        found = cache.sha256(path)
    except (FileNotFoundError, NotADirectoryError):
        offenders.append(Offender(path, "missing"))
        return
    except OSError as error:
        offenders.append(Offender(path, "unreadable", error.strerror or str(error)))
        return
    if found is None:
        offenders.append(Offender(path, "modified", "is not a regular file"))
    elif found != sha256:
        offenders.append(Offender(path, "modified", _hint(path)))


def _hint(path: str) -> str:
    return "a backup whose bytes changed" if BACKUP.search(path) else ""


def files_of(target: Target) -> Iterator[str]:
    """Every file of the distribution's packages, relative to the root."""
    pending = [*target.packages]
    while pending:
        path = pending.pop()
        absolute = os.path.join(target.root, path)
        try:
            info = os.lstat(absolute)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(info.st_mode):
            yield path
            continue
        with os.scandir(absolute) as entries:
            for entry in entries:
                child = f"{path}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(child)
                else:
                    yield child


def _is_bytecode_of(path: str, known: set[str]) -> bool:
    """Whether ``path`` is the cached bytecode of a known module. Any other bytecode is a stranger."""
    folder, name = os.path.split(path)
    stem = bytecode.stem_of(name)
    if os.path.basename(folder) != "__pycache__" or stem is None:
        return False
    return f"{os.path.dirname(folder)}/{stem}.py".lstrip("/") in known


def _by_manifests(
    target: Target, expected: dict[str, str | None], pinned: dict[str, set[str]], cache: StatCache
) -> Testimony:
    """No RECORD, no git: only the files that patches are pinned to can be proven."""
    testimony = Testimony(MANIFESTS if pinned else NOTHING)
    for path, digests in sorted(pinned.items()):
        if path in expected:
            continue
        testimony.checked += 1
        try:
            found = cache.sha256(path)
        except (FileNotFoundError, NotADirectoryError):
            testimony.offenders.append(Offender(path, "missing"))
            continue
        if found not in digests:
            testimony.offenders.append(Offender(path, "modified"))
    _check_expected(target, expected, cache, testimony)
    testimony.offenders += [
        Offender(path, "unexpected", "a backup of no applied patch")
        for path in files_of(target)
        if BACKUP.search(path) and path not in expected
    ]
    return testimony


# git -----------------------------------------------------------------------------------------------


def _git(root: str, *arguments: str) -> bytes:
    # A pre-commit hook runs with GIT_DIR and GIT_INDEX_FILE of *its* repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            ["git", "-C", root, *arguments],
            capture_output=True,
            check=False,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise GitFailedError(root, "git is not installed") from None
    if done.returncode:
        raise GitFailedError(root, done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:][0])
    return done.stdout


def _in_repository(root: str) -> bool:
    folder = root
    while not os.path.exists(os.path.join(folder, ".git")):
        if folder == os.path.dirname(folder):
            return False
        folder = os.path.dirname(folder)
    return True


def _git_tracks(target: Target) -> bool:
    """Whether the repository around the root has the package in it; it has not that of a venv inside it."""
    # Any other failure (no git, another owner's checkout) is raised: "cannot say" is not "nothing to see".
    if not _git(target.root, "rev-list", "--max-count=1", "--all"):
        return False  # a repository without a commit
    names = (f"./{name}" for name in target.packages)
    return bool(_git(target.root, "ls-tree", "-z", "HEAD", "--", *names))


def _by_git(target: Target, expected: dict[str, str | None], cache: StatCache) -> Testimony:
    testimony = Testimony(GIT)
    names = [f"./{name}" for name in target.packages]
    tracked = _git(target.root, "ls-tree", "-r", "-z", "--name-only", "HEAD", "--", *names).split(b"\0")[:-1]
    testimony.checked = len(tracked)
    listing = ("--name-status", "--no-renames", "--no-ext-diff", "--relative", "-z")
    changed = _git(target.root, "-c", "core.fileMode=false", "diff", *listing, "HEAD", "--", *names).split(
        b"\0"
    )[:-1]
    kinds = {b"D": "missing", b"A": "unexpected"}
    for status, name in zip(changed[::2], changed[1::2], strict=True):
        path = os.fsdecode(name)
        if path not in expected:
            testimony.offenders.append(Offender(path, kinds.get(status, "modified")))
    hidden = _git(target.root, "ls-files", "-v", "-z", "--", *names).split(b"\0")[:-1]
    for line in hidden:
        # "assume unchanged" (lower case) and "skip worktree" (S) files are invisible to git diff.
        if line[:1].islower() or line[:1] == b"S":
            path = os.fsdecode(line[2:])
            testimony.offenders.append(Offender(path, "unreadable", "git is told not to look at it"))
    strangers = _git(target.root, "ls-files", "--others", "-z", "--", *names).split(b"\0")[:-1]
    known = {os.fsdecode(name) for name in tracked} | _present(expected)
    for name in strangers:
        path = os.fsdecode(name)
        if path in expected or _is_bytecode_of(path, known):
            continue
        if _is_ignored_build(target.root, path):
            continue
        testimony.offenders.append(Offender(path, "unexpected"))
    _check_expected(target, expected, cache, testimony)
    return testimony


def _is_ignored_build(root: str, path: str) -> bool:
    """A file that the checkout's own rules ignore (built extensions, versions), but never a backup."""
    if BACKUP.search(path) or path.startswith(FOLDER):
        return False
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", root, "check-ignore", "-q", "--", path], check=False, env=env, stdin=subprocess.DEVNULL
    )
    return done.returncode == 0
