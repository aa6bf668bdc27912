"""How long a verdict takes, against the method of reading object by object.

    python bench/bench_guard.py [--processes 300] [--candidates 10] [--modules 7000]

Starts real processes: interpreters that have imported that many real modules, and idle programs beside
them. Prints medians of several runs, in milliseconds, and the number of system calls.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from patchkit.guard import inspect, layout as layouts
from patchkit.guard.cpython import Interpreter
from patchkit.guard.interpreters import Finder
from patchkit.guard.memory import ProcessMemory, UnreadableError
from patchkit.guard.procfs import maps, pids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BODY = '''"""Module {number}."""
import os, sys, re
from collections import OrderedDict

LIMIT = {number}
TABLE = dict(a=1, b=(2, 3), name="module {number}")


class Thing{number}(OrderedDict):
    """A class."""

    def method(self, x, y=2):
        return [x * y + LIMIT for _ in range(3)]

    def other(self, *args, **kwargs):
        return {{key: value for key, value in kwargs.items()}} or args


def function_{number}(a, b, *, c=None):
    if c is None:
        raise ValueError(f"nothing for {{a}} and {{b}}")
    return re.sub(str(a), str(b), str(c))
'''

# One process imports, then forks: what is measured is the reading of each child's memory.
PARENT = """
import importlib, os, sys, time
sys.path.insert(0, {root!r})
for number in range({modules}):
    importlib.import_module(f"engine.p{{number % 70}}.m{{number}}")
if {load}:
    import engine.victim
for _ in range({children}):
    if not os.fork():
        time.sleep(600)
        os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


def write_tree(root: str, modules: int) -> None:
    for number in range(modules):
        folder = f"{root}/engine/p{number % 70}"
        if number < 70:
            os.makedirs(folder)
            open(f"{folder}/__init__.py", "w").close()
        with open(f"{folder}/m{number}.py", "w") as file:
            file.write(BODY.format(number=number))
    open(f"{root}/engine/__init__.py", "w").close()
    with open(f"{root}/engine/victim.py", "w") as file:
        file.write("def f():\n    return 1\n")


@contextlib.contextmanager
def running(root: str, modules: int, candidates: int, idle: int, *, load: bool) -> Iterator[int]:
    """Yields the pid of one candidate."""
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(idle)]
    parent = None
    try:
        if candidates:
            text = PARENT.format(root=root, modules=modules, load=load, children=candidates - 1)
            parent = subprocess.Popen(
                [sys.executable, "-c", text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
        yield parent.pid if parent else 0
    finally:
        if parent:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, 9)
            parent.wait()
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()


def timed(action: Callable[[], object], times: int = 5) -> tuple[float, float]:
    """Median milliseconds, and the least that the processor needed (user and system)."""
    walls, works = [], []
    for _ in range(times):
        start, work = time.perf_counter(), time.process_time()
        action()
        walls.append(1e3 * (time.perf_counter() - start))
        works.append(1e3 * (time.process_time() - work))
    return statistics.median(walls), min(works)


class CountingMemory(ProcessMemory):
    calls = 0

    def _call(self, *arguments: int) -> int:
        CountingMemory.calls += 1
        return super()._call(*arguments)


def one_by_one(pid: int) -> int:
    """The plain method: one system call an object. Returns the number of modules with a file."""
    memory = CountingMemory(pid)
    symbols = Finder().find(memory, maps(pid))
    assert symbols is not None
    layout, _ = layouts.find(memory, symbols)

    def text(address: int) -> str:
        head = memory.read(address, 64)
        (length,) = struct.unpack_from("<Q", head, 16)
        start = layout.ascii
        if start + length <= 64:
            return head[start : start + length].decode("latin-1")
        return memory.read(address + start, length).decode("latin-1")

    def items(address: int) -> Iterator[tuple[int, int]]:
        keys = memory.word(address + 32)
        start, size, count = reader._keys_shapes(memory.read(keys, 40), 40)[0]
        yield from reader._live(memory.read(keys + start, size * count), size)

    reader = Interpreter(memory, symbols)
    state = memory.word(symbols["_PyRuntime"] + layout.head)
    found = 0
    named: int | None = None
    for key, value in items(memory.word(state + layout.modules)):
        text(key)
        with contextlib.suppress(UnreadableError):  # sys.modules may hold anything
            for name, member in items(memory.word(value + 16)):
                if named is None and text(name) == "__file__":
                    named = name
                if name == named:
                    text(member)
                    found += 1
                    break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=300)
    parser.add_argument("--candidates", type=int, default=10)
    parser.add_argument("--modules", type=int, default=7000)
    options = parser.parse_args()
    idle = options.processes - options.candidates
    with tempfile.TemporaryDirectory() as root:
        write_tree(root, options.modules)
        files = ["engine/victim.py"]
        two = [*files, "engine/not_there.py"]  # a patch that also adds a file, which no process can have
        others = set(pids())  # what else runs on this machine is not measured
        with running(root, options.modules, 0, options.processes, load=False):
            took, work = timed(lambda: inspect(root, files, exclude=others), 15)
            print(f"no candidate among {options.processes} processes: {took:.0f} ms (CPU {work:.0f} ms)")
        for load, asked, what in (
            (True, files, "all have loaded the file"),
            (True, two, "all have loaded one of two files"),
            (False, files, "none has: memory is searched too"),
        ):
            with running(root, options.modules, options.candidates, idle, load=load) as pid:
                took, work = timed(lambda asked=asked: inspect(root, asked, exclude=others), 9)
                found = inspect(root, asked, exclude=others)
                expected = options.candidates if load else 0
                assert len(found.blockers) == expected, found
                print(
                    f"{options.candidates} candidates of {options.modules} modules among {options.processes}"
                    f" processes, {what}: {took:.0f} ms (CPU {work:.0f} ms)"
                )
                if asked is two:
                    compare(pid)


def compare(pid: int) -> None:
    memory = CountingMemory(pid)
    symbols = Finder().find(memory, maps(pid))
    assert symbols is not None
    CountingMemory.calls = 0
    batched, _ = timed(lambda: Interpreter(memory, symbols).snapshot())
    calls = CountingMemory.calls // 5
    CountingMemory.calls = 0
    plain, _ = timed(lambda: one_by_one(pid), 3)
    print(
        f"one process: {batched:.0f} ms in {calls} system calls; object by object {plain:.0f} ms in"
        f" {CountingMemory.calls // 3}: {plain / batched:.1f} times as long"
    )


if __name__ == "__main__":
    main()
