"""Ask about other processes, and never wait for ever for one of them.

Reading ``/proc/PID/maps``, ``cmdline`` or another process's memory waits in the kernel for as long as that
process holds the lock of its address space, or for a page that is not there yet (userfaultfd, a network
file system that is gone); a driver may not answer at all. Such a call cannot be cancelled. So the questions
are asked on a thread that can be left behind: a daemon thread, which does not hold up the end of the program.

What counts is not how long an answer takes (a memory of 100 GB takes long to search) but whether it makes
progress: ``beat`` is called after each system call that may wait.

One thread asks at a time. More of them were measured to be slower: most answers are many short system calls,
after each of which a thread must get the interpreter's lock back.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")

STALL_S = 5.0  # without progress


class StalledError(OSError):
    """The kernel did not answer a question in time."""


_beats: dict[int, float] = {}  # when each watched thread made progress
_left: dict[Any, threading.Thread] = {}  # questions that were never answered, and who still waits


def beat() -> None:
    """Say that this thread makes progress."""
    thread = threading.get_ident()
    if thread in _beats:
        _beats[thread] = time.monotonic()


def is_stalled(subject: Hashable) -> bool:
    """Whether an earlier question about ``subject`` still waits for its answer."""
    thread = _left.get(subject)
    if thread is not None and not thread.is_alive():
        _left.pop(subject, None)
        return False
    return thread is not None


def bounded(subject: Hashable, ask: Callable[[], V]) -> V:
    """What ``ask`` returns, or raises; ``StalledError`` if it makes no progress for ``STALL_S``."""
    if threading.get_ident() in _beats:
        return ask()  # this thread is watched already
    return apart(subject, ask)


def apart(subject: Hashable, ask: Callable[[], V], stall_s: float | None = None) -> V:
    """The same on a thread of its own, which may be left behind alone."""
    stall_s = STALL_S if stall_s is None else stall_s
    answers = ask_all([subject], lambda _: ask(), stall_s)
    if subject not in answers:
        raise StalledError(f"no answer about {subject} for {stall_s:.0f} s")
    return answers[subject]


def ask_all(subjects: Iterable[K], ask: Callable[[K], V], stall_s: float | None = None) -> dict[K, V]:
    """Ask about each of ``subjects``; those that made no progress for ``stall_s`` are not in the answers.

    What ``ask`` raises is raised here; the rest is not asked then.
    """
    return _Round(list(subjects), ask, STALL_S if stall_s is None else stall_s).run()


class _Round(Generic[K, V]):
    def __init__(self, subjects: list[K], ask: Callable[[K], V], stall_s: float) -> None:
        self._ask = ask
        self._stall_s = stall_s
        self._pending = subjects[::-1]
        self._answers: dict[K, V] = {}
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._asking: threading.Thread | None = None  # the one that was not left behind
        self._subject: K | None = None

    def run(self) -> dict[K, V]:
        with self._changed:
            try:
                while self._pending:
                    self._start()
                    while self._asking is not None:
                        beat()  # waiting here is progress of whoever asked
                        self._changed.wait(min(1.0, self._stall_s / 4))
                        self._leave_behind()
            finally:
                self._pending.clear()  # also when interrupted
        if self._failure is not None:
            raise self._failure
        return self._answers

    def _start(self) -> None:
        self._asking = threading.Thread(target=self._work, name="patchkit-guard", daemon=True)
        self._asking.start()

    def _leave_behind(self) -> None:
        """Give the thread up if it makes no progress."""
        if self._asking is not None and self._asking.ident is not None:
            now = time.monotonic()
            if now - _beats.get(self._asking.ident, now) > self._stall_s:
                _left[self._subject] = self._asking
                self._asking = None

    def _work(self) -> None:
        me, number = threading.current_thread(), threading.get_ident()
        try:
            while True:
                with self._changed:
                    if self._asking is not me or not self._pending:
                        return
                    subject = self._subject = self._pending.pop()
                    _beats[number] = time.monotonic()
                if is_stalled(subject):
                    continue
                answer = self._ask(subject)
                with self._changed:
                    if self._asking is me:
                        self._answers[subject] = answer
        except BaseException as error:  # noqa: BLE001 (raised where the question was asked)
            with self._changed:
                if self._asking is me:
                    self._failure = error
                    self._pending.clear()
        finally:
            with self._changed:
                _beats.pop(number, None)
                if self._asking is me:
                    self._asking = None
                    self._changed.notify()
