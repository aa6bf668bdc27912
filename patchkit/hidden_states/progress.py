"""How far a long command is: a bar on a terminal, a line every few seconds elsewhere; always on stderr."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

LINE_SECONDS = 10.0
MARKS = 500  # remembered for the report; every second one is dropped when there are twice as many


@dataclass
class Counts:
    """What is done so far."""

    samples: int = 0
    tokens: int = 0
    size: int = 0
    errors: int = 0


@dataclass
class Progress:
    """``total`` samples are to be done, of which ``before`` already were, in an earlier run."""

    verb: str
    total: int
    before: int = 0
    quiet: bool = False
    counts: Counts = field(default_factory=Counts)
    earlier: Counts = field(default_factory=Counts)  # what was done before the time counts
    marks: list[tuple[float, int, int, int]] = field(default_factory=list)
    _bar: Any = None
    _task: Any = None
    _last: float = 0.0

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        self._last = self.began
        if not self.quiet and sys.stderr.isatty():
            self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()
        elif kind is None:
            self._line()

    def restart(self) -> None:
        """Time counts from now on: what came before was preparation, and is in no rate."""
        self.began = self._last = time.monotonic()
        self.earlier = replace(self.counts)
        self.marks.clear()

    def say(self, text: str) -> None:
        """One line about what is going on, above the bar where there is one.

        A terminal that is gone stops nothing: what runs may be the way back to a clean tree.
        """
        with suppress(OSError):
            if self._bar is not None:
                self._bar.console.print(f"{self.verb}: {text}", highlight=False, markup=False, soft_wrap=True)
            elif not self.quiet:
                sys.stderr.write(f"{self.verb}: {text}\n")
                sys.stderr.flush()

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # On a narrow terminal only the bar gives way: the numbers are what one looks at.
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[text]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(self.verb, total=self.total, completed=self.before, text="")
        self._bar.start()

    def add(self, *, samples: int = 0, tokens: int = 0, size: int = 0, errors: int = 0) -> None:
        self.counts.samples += samples
        self.counts.tokens += tokens
        self.counts.size += size
        self.counts.errors += errors
        now = time.monotonic()
        self._mark(now)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.before + self.counts.samples, text=self._short())
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            self._line()

    def _mark(self, now: float) -> None:
        counts = self.counts
        self.marks.append((round(now - self.began, 3), counts.samples, counts.tokens, counts.size))
        if len(self.marks) >= 2 * MARKS:
            del self.marks[:-1:2]

    def _per_second(self) -> tuple[float, float, float]:
        """Samples, tokens and bytes, until what was done last: a server's slow end makes nothing slower."""
        seconds = max(1e-3, self.marks[-1][0]) if self.marks else math.inf
        done, earlier = self.counts, self.earlier
        return (
            (done.samples - earlier.samples) / seconds,
            (done.tokens - earlier.tokens) / seconds,
            (done.size - earlier.size) / seconds,
        )

    def _short(self) -> str:
        """For a line of 80 columns that has the bar and the time left in it too."""
        counts, (_, tokens, size) = self.counts, self._per_second()
        errors = f", {counts.errors} errors" if counts.errors else ""
        return (
            f"{thousands(counts.tokens)} tokens ({thousands(tokens)}/s), "
            f"{human(counts.size)} ({human(size)}/s){errors}"
        )

    def _line(self) -> None:
        counts, (samples, tokens, size) = self.counts, self._per_second()
        done = self.before + counts.samples
        errors = f", {counts.errors} errors" if counts.errors else ""
        left = ""
        if samples > 0 and done < self.total:
            left = f", {duration((self.total - done) / samples)} left"
        self.say(
            f"{done}/{self.total} samples, {samples:.1f} samples/s, {counts.tokens} tokens "
            f"({tokens:.0f}/s), {human(counts.size)} ({human(size)}/s){errors}{left}"
        )


def human(size: float) -> str:
    """Bytes in decimal units, as disks and networks are sold: 924 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def thousands(count: float) -> str:
    """A number in four characters or so: 17.3M."""
    for unit in ("", "k", "M"):
        if count < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}G"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
