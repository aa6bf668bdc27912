"""What is interrupted: commands on small trees, and what the tree may be afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit import catalog
from patchkit.history import History
from patchkit.journal import COMMITTED, OPEN, Journal
from tests.faults import injection
from tests.faults.injection import KILL, Fault
from tests.support import DEMO, LATIN1, P1, snapshot, write_patch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.injection import Outcome

Tree = dict[str, tuple[Any, ...]]

P1_NEW = {**P1, "demopkg/core.py": b"answer = None\n", "demopkg/extra/more.py": b"x = 1\n"}
MTIME = 1_600_000_000_123_456_789


@dataclass
class Scenario:
    """``command`` on a copy of ``start`` ends in a tree that is one of ``allowed``: label -> snapshot."""

    name: str
    command: list[str]
    start: Path
    allowed: dict[str, Tree]


class Scenarios:
    """Builds the trees once, in ``folder``; each run works on a fresh copy at ``folder/site``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        self.patches, self.newer = folder / "patches", folder / "newer-patches"
        before = {**DEMO["1.0"], LATIN1: b"caf\xe9\n"}
        write_patch(self.patches, "p1", before, {**P1, LATIN1: b"the\xe9\n"})
        write_patch(self.newer, "p1", before, P1_NEW)
        pristine = folder / "pristine"
        for path, data in before.items():
            file = pristine / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            os.utime(file, ns=(MTIME, MTIME))
        os.link(pristine / "demopkg/core.py", folder / "elsewhere.py")
        os.chmod(pristine / "demopkg/core.py", 0o640)
        os.setxattr(pristine / "demopkg/core.py", "user.note", b"kept")
        os.chmod(pristine / "demopkg", 0o750)
        # A symlinked file, as uv --link-mode symlink makes them.
        (folder / "linked.py").write_bytes(DEMO["1.0"]["demopkg/old.py"])
        (pristine / "demopkg/old.py").unlink()
        (pristine / "demopkg/old.py").symlink_to(folder / "linked.py")
        os.utime(pristine / "demopkg/old.py", ns=(MTIME, MTIME), follow_symlinks=False)
        (pristine / "demopkg/__pycache__").mkdir()
        (pristine / "demopkg/__pycache__/core.cpython-311.pyc").write_bytes(b"stale")
        self.pristine = pristine
        # Reading the hundreds of manifests of the built-in patches is most of what a command opens, and
        # touches no tree.
        catalog.builtin_folder = lambda: str(folder / "no built-in patches")
        self.reset(pristine)
        injection.warm_up(
            self.arguments("apply", "p1"),
            self.arguments("apply", "p1", newer=True),
            self.arguments("status"),
            self.arguments("restore", "--verify"),
            self.arguments("recover"),
            self.arguments("apply", "p2"),
        )

    def __iter__(self) -> Iterator[Scenario]:
        apply, restore, recover = (
            self.arguments("apply", "p1"),
            self.arguments("restore"),
            self.arguments("recover"),
        )
        update = self.arguments("apply", "p1", newer=True)
        patched = self._after("patched", self.pristine, apply)
        newer = self._after("newer", patched, update)
        undo = self._killed("undo", self.pristine, apply, OPEN)
        finish = self._killed("finish", self.pristine, apply, COMMITTED)
        undo_restore = self._killed("undo-restore", patched, restore, OPEN)
        trees = {path.name: content(path) for path in (self.pristine, patched, newer)}
        pick = {name: {name: tree} for name, tree in trees.items()}
        yield Scenario("apply", apply, self.pristine, {**pick["pristine"], **pick["patched"]})
        yield Scenario("restore", restore, patched, {**pick["pristine"], **pick["patched"]})
        yield Scenario("update", update, patched, {**pick["patched"], **pick["newer"]})
        yield Scenario("recover, undoing an apply", recover, undo, pick["pristine"])
        yield Scenario("recover, finishing an apply", recover, finish, pick["patched"])
        yield Scenario("recover, undoing a restore", recover, undo_restore, pick["patched"])

    def arguments(self, *command: str, newer: bool = False) -> list[str]:
        override = ["--override-guard", "--reason", "faults"] if command[0] in _WRITE else []
        patches = self.newer if newer else self.patches
        return [*command, "--root", str(self.site), "--patches", str(patches), *override]

    def reset(self, start: Path) -> None:
        shutil.rmtree(self.site, ignore_errors=True)
        subprocess.run(["cp", "-a", str(start), str(self.site)], check=True)

    def _save(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.site.rename(self.folder / name)

    def _after(self, name: str, start: Path, command: list[str]) -> Path:
        self.reset(start)
        outcome = injection.run(command, self.folder)
        assert outcome.code == 0, outcome
        return self._save(name)

    def _killed(self, name: str, start: Path, command: list[str], phase: str) -> Path:
        """A tree left by a kill: just after the commit mark, or with all files swapped just before it."""
        last = None
        for count in range(1, 100):
            self.reset(start)
            outcome = injection.run_with(Fault("unlink", count, KILL), command, self.folder)
            journal = Journal.load(str(self.site)) if outcome.code < 0 else None
            if journal is not None and journal.phase == COMMITTED and phase == COMMITTED:
                return self._save(name)
            if outcome.code == 0 or (journal is not None and journal.phase == COMMITTED):
                break
            if journal is not None:
                last = self._save(name)
        assert last is not None
        return last


def content(root: Path) -> Tree:
    """A snapshot without what differs from one run to the next: the times of new files."""
    return {
        path: (*entry[:-2], entry[-2] if entry[-2] == MTIME else "new", entry[-1])
        if entry[0] == "file"
        else entry
        for path, entry in snapshot(root).items()
    }


def judge(scenarios: Scenarios, scenario: Scenario, outcome: Outcome) -> list[str]:
    """What is wrong after ``outcome``; empty if one more command brings an allowed tree."""
    bad = _bad_ending(scenarios, scenario, outcome)
    after = injection.run(scenarios.arguments("recover"), scenarios.folder)
    if after.code != 0:
        bad.append(f"recover ended with {after.code}: {after.err}")
    bad += _bad_tree(scenarios.site, scenario.allowed)
    if (broken := History(str(scenarios.site)).verify()) is not None:
        bad.append(f"history: {broken}")
    restored = injection.run([*scenarios.arguments("restore"), "--verify"], scenarios.folder)
    if restored.code != 0:
        bad.append(f"restore --verify ended with {restored.code}: {restored.err}{restored.out}")
    if snapshot(scenarios.site) != snapshot(scenarios.pristine):
        bad.append("restore did not bring back every byte, mode and time")
    folder = scenarios.site / ".patchkit"  # not there if the command was ended before it made it
    litter = [name for name in os.listdir(folder) if name not in _OWN] if folder.exists() else []
    if litter:
        bad.append(f"left in .patchkit: {litter}")
    return bad


_WRITE = ("apply", "restore", "recover")
_OWN = {".gitignore", "lock", "history.jsonl", "history.head", "statcache.json"}


def _bad_ending(scenarios: Scenarios, scenario: Scenario, outcome: Outcome) -> list[str]:
    """A failed call must end in a promised exit code, and one that claims an untouched tree must leave one."""
    if outcome.code < 0:
        return []
    bad = []
    if outcome.code not in (0, 2, 3, 4, 5, 6):
        bad.append(f"exit code {outcome.code}")
    if outcome.code and (outcome.err.count("\n") != 1 or "Traceback" in outcome.err):
        bad.append(f"not one line: {outcome.err}")
    # What `recover` has mended stays mended, even if it then cannot look for what else there is to do.
    mended = scenario.command[0] == "recover"
    if outcome.code in (2, 3, 4, 6) and not mended and snapshot(scenarios.site) != snapshot(scenario.start):
        bad.append(f"exit code {outcome.code}, and yet something changed")
    return bad


def _bad_tree(site: Path, allowed: dict[str, Tree]) -> list[str]:
    found = content(site)
    if any(found == tree for tree in allowed.values()):
        return []
    near = min(allowed, key=lambda name: len(_difference(found, allowed[name])))
    return [
        f"a tree that is none of {', '.join(allowed)}: from {near} differ {_difference(found, allowed[near])}"
    ]


def _difference(one: Tree, other: Tree) -> list[str]:
    return sorted(path for path in {*one, *other} if one.get(path) != other.get(path))
