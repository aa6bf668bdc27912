"""How far a long command is: a bar on a terminal, a line every few seconds elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
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
            self._bar.stop()
        elif not self.quiet and kind is None:
            self._line()

    def restart(self) -> None:
        """Time counts from now on: what came before was preparation."""
        self.began = self._last = time.monotonic()

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[text]}"),
            TimeRemainingColumn(),
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
            self._bar.update(self._task, completed=self.before + self.counts.samples, text=self._rates(now))
        elif not self.quiet and now - self._last >= LINE_SECONDS:
            self._last = now
            self._line()

    def _mark(self, now: float) -> None:
        counts = self.counts
        self.marks.append((round(now - self.began, 3), counts.samples, counts.tokens, counts.size))
        if len(self.marks) >= 2 * MARKS:
            del self.marks[:-1:2]

    def _rates(self, now: float) -> str:
        seconds = max(1e-9, now - self.began)
        counts = self.counts
        errors = f", {counts.errors} errors" if counts.errors else ""
        return (
            f"{counts.samples / seconds:.1f} samples/s, {counts.tokens} tokens "
            f"({counts.tokens / seconds:.0f}/s), {human(counts.size)} "
            f"({human(counts.size / seconds)}/s){errors}"
        )

    def _line(self) -> None:
        now = time.monotonic()
        done = self.before + self.counts.samples
        left = ""
        if self.counts.samples > 0 and done < self.total:
            seconds = (now - self.began) / self.counts.samples * (self.total - done)
            left = f", {duration(seconds)} left"
        sys.stderr.write(f"{self.verb}: {done}/{self.total} samples, {self._rates(now)}{left}\n")
        sys.stderr.flush()


def human(size: float) -> str:
    """Bytes in decimal units, as disks and networks are sold: 924 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
