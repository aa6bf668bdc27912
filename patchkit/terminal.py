"""The controlling terminal: who is in its foreground, and the modes that it had."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from typing import Any


class Terminal:
    """The controlling terminal of this process, if it has one.

    SIGTTOU is ignored by the supervisor, so that it may move the foreground from the background.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._modes: list[Any] | None = None
        try:
            self.descriptor = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
            self._modes = termios.tcgetattr(self.descriptor)
        except (OSError, termios.error):
            self.close()

    def is_ours(self) -> bool:
        """Whether this process's group is in the foreground."""
        try:
            return self.descriptor >= 0 and os.tcgetpgrp(self.descriptor) == os.getpgrp()
        except OSError:
            return False

    def is_of(self, group: int) -> bool:
        try:
            return self.descriptor >= 0 and os.tcgetpgrp(self.descriptor) == group
        except OSError:
            return False

    def give(self, group: int) -> None:
        """Put ``group`` into the foreground."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):  # the terminal is gone, or the group is
                os.tcsetpgrp(self.descriptor, group)

    def take_back(self, group: int) -> None:
        """Put this process's group into the foreground if ``group`` is there, alive or dead."""
        if self.is_of(group):
            self.give(os.getpgrp())

    def restore_modes(self) -> None:
        """Undo what a killed command did to the modes (raw, no echo)."""
        if self._modes is not None and self.is_ours():
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self.descriptor, termios.TCSADRAIN, self._modes)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def stop_own_group() -> None:
    """Stop this process's group as ^Z would; returns when it is continued.

    The kernel does nothing for a group that no shell looks after (it is orphaned), and then this returns at
    once.
    """
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(0, signal.SIGTSTP)
    finally:
        signal.signal(signal.SIGTSTP, before)
