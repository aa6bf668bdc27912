"""Files of ``.patchkit`` and manifests with values that no writer of ours writes: refused in words, whatever the
command, and nothing outside the root is touched.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from patchkit import lease, transaction
from patchkit.history import record
from patchkit.transaction import MakeFolder, Put, Remove
from patchkit.tree import Meta
from tests import support
from tests.support import DEMO, P1, Kit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEED = 4
VALUES_A_PLACE = 1  # of all the bad values, those tried in each place of each file
MUTATIONS = 30  # of all those of a file, those that a run of the tests tries
COMMANDS = 2  # of those that read, and of those that write, on each changed file
READING = (
    ("status",), ("check",), ("verify",), ("log",), ("log", "--verify"), ("restore", "--dry-run"), ("diff", "p1"),
    ("ps",),
)  # fmt: skip
WRITING = (
    ("apply", "p1"), ("apply", "p2"), ("restore",), ("restore", "--force"), ("recover",), ("recover", "--force"),
)  # fmt: skip

# What json.dumps does not write, put in the place of these strings afterwards.
RAW = {
    '"<deep>"': b"[" * 100_000 + b"]" * 100_000,
    '"<nested>"': b"[" * 300 + b"]" * 300,
    '"<digits>"': b"9" * 5_000,
    '"<latin1>"': b'"caf\xe9"',
    '"<exponent>"': b"1e400",
}


def bad_values(outside: Path) -> list[Any]:
    return [
        None, True, False, 0, -1, 1, 0.5, 511, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, -(10**400), 1e308, -1e18,
        float("nan"), float("inf"), "", "x", "p1", "p2", "0" * 64, "0" * 32, "\0", "demopkg/core.py\0", "\ud800",
        "caf\udce9", "\n\x1b[31m", "é", "x" * 5_000, ".", "..", "../victim", "demopkg/../../victim", "demopkg",
        "demopkg/core.py", "demopkg//core.py", ".patchkit/state.json", str(outside / "victim"), f"{outside}/new",
        "../outside/victim", "dir", "link", "open", "committed", "put", "link", "remove", "mkdir", "rmdir",
        "refresh", "modify", "rename", [], {}, [[]], [1], [None], ["x", "x"], [-1, 2**64, -(2**80)], {"": None},
        {"path": 1}, {"kind": "dir"}, *(name.strip('"') for name in RAW),
    ]  # fmt: skip


BAD_BYTES = [
    b"", b"\n", b"null", b"7", b'"x"', b"[]", b"{}", b"{", b"\xff\xfe", b"\x00" * 100, b'\xef\xbb\xbf{"schema": 1}',
    '{"schema": 1}'.encode("utf-16"), b'{"schema": 1}', b'{"schema": true}', b'{"schema": 2}', b'{"schema": [[]]}',
    b'{"schema": ' + b"[" * 900 + b"]" * 900 + b"}", b"[" * 100_000, b'{"schema": 1, "a": ' * 50_000,
    b'{"schema": ' + b"9" * 5000 + b"}", b'{"schema": "\xe9"}',
]  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in ``value``, itself first."""
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*here, key))


def changed(value: Any, place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """A copy in which ``change(container, key)`` was called for ``place``."""
    box = [copy.deepcopy(value)]
    container: Any = box
    way = (0, *place)
    for key in way[:-1]:
        container = container[key]
    change(container, way[-1])
    return box[0]


def written(value: Any) -> bytes:
    data = json.dumps(value).encode("ascii")
    for text, raw in RAW.items():
        data = data.replace(text.encode("ascii"), raw)
    return data


def mutations(data: bytes, outside: Path, chance: random.Random) -> list[tuple[str, bytes]]:
    """(What was done, other bytes) for one JSON file."""
    found = list(all_mutations(data, outside, chance))
    return chance.sample(found, min(MUTATIONS, len(found)))


def all_mutations(data: bytes, outside: Path, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    value = json.loads(data)
    for place in places(value):
        for bad in chance.sample(bad_values(outside), VALUES_A_PLACE):

            def put(container: Any, key: Any, bad: Any = bad) -> None:
                container[key] = bad

            yield f"{place} = {bad!r:.60}", written(changed(value, place, put))
        if place and chance.random() < 0.5:
            yield f"{place} gone", written(changed(value, place, lambda container, key: container.pop(key)))
        if place and isinstance(place[-1], int):
            yield f"{place} twice", written(changed(value, place, lambda box, key: box.append(box[key])))
        elif place:
            yield f"{place} more", written(changed(value, place, lambda box, _: box.update(more=1)))
    for bad in BAD_BYTES:
        yield repr(bad[:40]), bad
    for _ in range(VALUES_A_PLACE):
        cut = chance.randrange(len(data))
        yield f"cut at {cut}", data[:cut]
        yield f"a byte at {cut}", data[:cut] + bytes([chance.randrange(256)]) + data[cut + 1 :]


@dataclass
class Bench:
    """A tree with p1 applied, a history, the lease of a dead session, and on demand an open journal."""

    kit: Kit
    site: Path
    outside: Path
    pristine: Path

    def reset(self) -> None:
        shutil.rmtree(self.site, ignore_errors=True)
        shutil.copytree(self.pristine, self.site, symlinks=True)

    def others(self) -> dict[str, Any]:
        """Everything that is not the tree."""
        top = self.site.parent
        return {
            str(path.relative_to(top)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_size)
            for path in sorted(top.rglob("*"))
            if not path.is_relative_to(self.site)
        }

    def attack(self, relative: str, done: str, data: bytes, commands: list[tuple[str, ...]]) -> None:
        """Every command on a tree whose file ``relative`` has ``data``."""
        before = self.others()
        for command in commands:
            # What a writing command left is what the next one finds; but each finds the bad file.
            path = self.site.parent / relative
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            if not relative.startswith("site/"):
                before = self.others()
            answer = self.kit(*command, code=None)
            what = f"{relative}: {done}: {' '.join(command)}: {answer}"
            assert answer.code in (0, 1, 2, 3, 4, 5, 6), what
            assert "Traceback" not in answer.err, what
            assert "internal error" not in answer.err, what
            assert answer.code in (0, 1) or answer.err.startswith("patchkit: "), what
            assert (answer.out + answer.err).isprintable() or all(
                line.isprintable() for line in (answer.out + answer.err).split("\n")
            ), what
            assert self.others() == before, what


@pytest.fixture
def bench(site, rooted, patches, tmp_path):
    support.write_patch(patches, "p2", {**DEMO["1.0"], **P1}, {"demopkg/util.py": b"x\n"})
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (outside / "victim", tmp_path / "victim"):
        path.write_bytes(b"mine\n")
    rooted("apply", "p1")
    rooted("restore")
    rooted("apply", "p1")
    lease.claim(str(site), "demopkg", ["p1"], "abc", "python serve.py").abandon()
    return Bench(rooted, site, outside, tmp_path / "pristine")


def die_in_a_transaction(site: Path) -> None:
    """Leave what a kill just before the first rename leaves."""
    meta = Meta(0o644, os.getuid(), os.getgid(), 1_700_000_000_000_000_000)
    operations = [
        MakeFolder("demopkg/made"),
        Put("demopkg/made/one.py", b"1\n", meta),
        Put("demopkg/util.py", b"x\n", meta),
        Remove("demopkg/data/blob.bin"),
        Remove(".patchkit/state.json"),
    ]
    more = {"distribution": "demopkg", "release": None, "mtime_ns": 1}
    entry = record("apply", [{"name": "p2", "action": "apply", "diff_sha256": "0" * 64, "files": []}], **more)
    child = os.fork()
    if child == 0:
        transaction.run(str(site), operations, entry, before_change=lambda: os._exit(0))
    os.waitpid(child, 0)


def run_all(bench: Bench, relative: str, chance: random.Random) -> None:
    shutil.copytree(bench.site, bench.pristine, symlinks=True)
    original = (bench.site.parent / relative).read_bytes()
    for done, data in mutations(original, bench.outside, chance):
        bench.reset()
        bench.attack(relative, done, data, some_commands(chance))
    (bench.site.parent / relative).write_bytes(original)


def some_commands(chance: random.Random) -> list[tuple[str, ...]]:
    """Those that read come first; the order of those that write decides which meets the bad value first."""
    return [*chance.sample(READING, COMMANDS), *chance.sample(WRITING, COMMANDS)]


def test_values_in_the_state(bench):
    run_all(bench, "site/.patchkit/state.json", random.Random(SEED))


@pytest.mark.parametrize("phase", ["open", "committed"])
def test_values_in_the_journal(bench, phase):
    die_in_a_transaction(bench.site)
    path = bench.site / ".patchkit/journal.json"
    path.write_bytes(path.read_bytes().replace(b'"open"', f'"{phase}"'.encode()))
    run_all(bench, "site/.patchkit/journal.json", random.Random(SEED))


def test_values_in_the_head_of_the_history(bench):
    run_all(bench, "site/.patchkit/history.head", random.Random(SEED))


def test_values_in_a_lease(bench):
    run_all(bench, "site/.patchkit/leases/abc.demopkg.json", random.Random(SEED))


def test_values_in_a_manifest(bench):
    run_all(bench, "patches/p1/demopkg-1.0.manifest.json", random.Random(SEED))


def test_values_in_the_stat_cache(bench):
    data = {"schema": 1, "files": {"demopkg/core.py": [1, 2, 3, 4, "0" * 64]}}
    (bench.site / ".patchkit/statcache.json").write_text(json.dumps(data))
    run_all(bench, "site/.patchkit/statcache.json", random.Random(SEED))


@pytest.mark.parametrize("line", [0, 2], ids=["first", "last"])
def test_values_in_the_history(bench, line):
    chance = random.Random(SEED)
    path = bench.site / ".patchkit/history.jsonl"
    lines = path.read_bytes().splitlines()
    shutil.copytree(bench.site, bench.pristine, symlinks=True)
    for done, data in mutations(lines[line], bench.outside, chance):
        bench.reset()
        tampered = b"\n".join([*lines[:line], data.replace(b"\n", b" "), *lines[line + 1 :]]) + b"\n"
        bench.attack("site/.patchkit/history.jsonl", done, tampered, some_commands(chance))
