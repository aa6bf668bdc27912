"""What the sessions of one process have in common: its signal handlers, and that orphans are handed to it."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from patchkit import processes

if TYPE_CHECKING:
    from patchkit.supervisor import Supervisor

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # these end the session
_PASSED_ON = (*ENDING, signal.SIGWINCH, signal.SIGTSTP)
_TERMINAL = (signal.SIGTTOU, signal.SIGTTIN)  # ignored, so that the terminal may be moved from the background


class Common:
    """Taken by the first session and given back with the last one, in whatever order they end."""

    def __init__(self) -> None:
        self.ignored: set[int] = set()  # by whoever started this process: nohup, a shell's background job
        self._open: list[Supervisor] = []
        self._catching: list[Supervisor] = []
        self._handlers: dict[int, Any] = {}
        self._was_subreaper = False
        self._owner = 0
        self._lock = threading.Lock()

    def enter(self, supervisor: Supervisor) -> None:
        in_main = threading.current_thread() is threading.main_thread()  # signals can be handled in no other
        with self._lock:
            if self._owner != os.getpid():  # the sessions that this fork remembers are its parent's
                if in_main:
                    self._give_back()
                self._open.clear()
                self._catching.clear()
                self._owner = os.getpid()
            if not self._open:
                self._was_subreaper = processes.become_subreaper()
            self._open.append(supervisor)
        if in_main:
            if not self._catching:
                self._catch()
            self._catching.append(supervisor)

    def leave(self, supervisor: Supervisor) -> None:
        if supervisor in self._catching:
            self._catching.remove(supervisor)
            if not self._catching:
                self._give_back()
        with self._lock:
            self._open.remove(supervisor)
            if not self._open:
                processes.become_subreaper(self._was_subreaper)

    def _catch(self) -> None:
        self._handlers.clear()
        self.ignored.clear()
        for number in (*_PASSED_ON, *_TERMINAL):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN:
                self.ignored.add(number)  # it stays so
                continue
            self._handlers[number] = before
            signal.signal(number, self._handler_of(number))

    def _handler_of(self, number: int) -> Any:
        return signal.SIG_IGN if number in _TERMINAL else self._on_signal

    def _give_back(self) -> None:
        for number, handler in self._handlers.items():
            # What the program has set meanwhile is its own.
            if signal.getsignal(number) == self._handler_of(number):
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._handlers.clear()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._owner != os.getpid():
            # A forked child has no part in the session: it does what it would have done without.
            self._give_back()
            os.kill(os.getpid(), number)
            return
        waiting = [one for one in self._catching if one.is_waiting]
        for one in (waiting or self._catching)[-1:]:
            one.on_signal(number)
