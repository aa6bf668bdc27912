"""How fast a patch is parsed, checked and applied in memory, beside ``git apply`` and GNU ``patch``.

Run: ``python bench/bench_diff.py``. Prints the best of several runs, ratios, and the peak memory of one
hunk in a 100 MB file. Exits 1 when a promise does not hold: 100 ms for 50 files and 3,200 lines; two
copies of the large file at most (the one that is read and the one that is made); time that grows with
the size, not with its square.
"""

from __future__ import annotations

import gc
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc

from patchkit import diff
from patchkit.diff.model import Content, Diff
from patchkit.manifest import Manifest

ROUNDS = 7


def best(action, rounds: int = ROUNDS) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(rounds):
        gc.collect()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def patch_of_50_files() -> tuple[dict[str, Content], bytes]:
    """50 modules of 1,500 lines, and a patch of about 3,200 lines in 150 hunks."""
    old, sections = {}, []
    for number in range(50):
        lines = [b"    value_%d = compute(%d, %d)\n" % (at, number, at * 7) for at in range(1500)]
        path = f"pkg/sub{number % 7}/module_{number}.py"
        old[path] = Content(b"".join(lines), 0o644)
        for at in (100, 700, 1300):
            lines[at : at + 5] = [b"    changed_%d()\n" % (at + step) for step in range(9)]
        sections.append(diff.compare(path, old[path], Content(b"".join(lines), 0o644)))
    return old, diff.render(Diff("bench", tuple(sections)))


def write(folder: str, files: dict[str, Content]) -> None:
    for path, content in files.items():
        name = os.path.join(folder, path)
        os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content.data)


def external(command: list[str], files: dict[str, Content], patch: bytes) -> float | None:
    """Seconds of the fastest run of a program that patches the files on disk; None if it is not there."""
    if shutil.which(command[0]) is None:
        return None
    times = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            write(folder, files)
            start = time.perf_counter()
            subprocess.run(command, cwd=folder, input=patch, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
    return min(times)


def bench_many_files() -> bool:
    files, patch = patch_of_50_files()
    pinned = Manifest.build(
        diff.parse(patch), files.get, patch="p", distribution="d", releases=["1"], on=[], diff_bytes=patch
    )
    lines = patch.count(b"\n")
    parse = best(lambda: diff.parse(patch))
    applied = best(lambda: diff.apply(diff.parse(patch), files.get))
    checked = best(lambda: pinned.apply(diff.parse(patch), files.get))
    print(f"{len(files)} files, {lines} lines:")
    print(f"  parse                      {parse * 1e3:8.1f} ms")
    print(f"  parse, apply               {applied * 1e3:8.1f} ms")
    print(f"  parse, apply, check sha256 {checked * 1e3:8.1f} ms   (promised: 100 ms)")
    for name, command in (("git apply", ["git", "apply", "-"]), ("patch -p1", ["patch", "-p1", "-s", "-F0"])):
        seconds = external(command, files, patch)
        if seconds is not None:
            ratio = f"ratio ours/theirs {checked / seconds:.2f} (theirs writes)"
            print(f"  {name:<26} {seconds * 1e3:8.1f} ms   {ratio}")
    try:
        import unidiff
    except ImportError:
        pass
    else:
        text = patch.decode("latin-1")
        seconds = best(lambda: unidiff.PatchSet(io.StringIO(text, newline="\n")))
        print(
            f"  unidiff, parse only        {seconds * 1e3:8.1f} ms   ratio ours/theirs {parse / seconds:.2f}"
        )
    return checked < 0.1


def bench_large_file() -> bool:
    def one_hunk(size: int) -> tuple[float, float]:
        """Seconds, and peak memory in copies of the file beside the one that was read."""
        line = b"x" * 39 + b"\n"
        count = size // len(line)
        at = count * 3 // 4
        old = b"".join([line * at, b"needle\n", line * (count - at)])
        patch = b"--- a/f\n+++ b/f\n@@ -%d +%d @@\n-needle\n+thread\n" % (at + 1, at + 1)
        content = Content(old, 0o644)
        parsed = diff.parse(patch)
        seconds = best(lambda: diff.apply(parsed, lambda _: content), 3)
        tracemalloc.start()
        result = diff.apply(parsed, lambda _: content)
        peak = tracemalloc.get_traced_memory()[1] / len(old)
        tracemalloc.stop()
        assert result["f"] is not None
        assert len(result["f"].data) == len(old)
        return seconds, peak

    small, _ = one_hunk(10_000_000)
    large, peak = one_hunk(100_000_000)
    print("one hunk at three quarters of a file:")
    print(f"  10 MB  {small * 1e3:8.1f} ms")
    print(f"  100 MB {large * 1e3:8.1f} ms   {large / small:.1f} times as long")
    print(f"  {peak:.2f} copies made beside the one that was read")
    return peak < 1.5 and large / small < 60


def bench_long_patch() -> bool:
    """A new file of 200,000 lines, twice: the time must double, not quadruple."""
    times = []
    for count in (200_000, 400_000):
        patch = b"--- /dev/null\n+++ b/f\n@@ -0,0 +1,%d @@\n" % count + b"+some text\n" * count
        times.append(best(lambda patch=patch: diff.apply(diff.parse(patch), {}.get), 3))
    print(f"new file of 200k / 400k lines: {times[0] * 1e3:.0f} / {times[1] * 1e3:.0f} ms")
    return times[1] / times[0] < 3


def main() -> int:
    held = [bench_many_files(), bench_large_file(), bench_long_patch()]
    if not all(held):
        print("a promise does not hold")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
