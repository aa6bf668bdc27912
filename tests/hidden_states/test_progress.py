from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from patchkit.hidden_states.progress import Progress, thousands
from tests.hidden_states.conftest import REPOSITORY

# As long as its numbers get in a real extraction.
LONG = """
from patchkit.hidden_states.progress import Progress
with Progress("extract", 10_000) as progress:
    progress.say("starting the server")
    progress.restart()
    progress.began -= 1000
    progress.add(samples=9_990, tokens=17_300_000, size=924_000_000_000)
"""


def on_a_terminal(code: str, columns: int) -> str:
    """What the code shows on a terminal of so many columns, without its control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm", "PYTHONPATH": str(REPOSITORY)},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # how Linux says that nobody writes any more
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait() == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def test_eighty_columns_hold_every_number_and_the_time_left():
    shown = on_a_terminal(LONG, 80)
    last = [line for line in re.split(r"[\r\n]+", shown) if line.strip()][-1]
    assert "9990/10000 17.3M tokens (17.3k/s), 924.0 GB (924.0 MB/s)" in last
    assert re.search(r"(\d:\d\d:\d\d|-:--:--)$", last.rstrip())
    assert len(last.rstrip()) <= 80


def test_a_note_stands_on_a_line_of_its_own_above_the_bar():
    shown = on_a_terminal(LONG, 80)
    assert "extract: starting the server\r\n" in shown


def test_without_a_terminal_there_are_plain_lines(capsys):
    with Progress("pack", 3, before=1) as progress:
        progress.say("looking")
        progress.add(samples=2, tokens=30, size=4000, errors=1)
    looking, last = capsys.readouterr().err.splitlines()
    assert looking == "pack: looking"
    assert last.startswith("pack: 3/3 samples, ")
    assert "30 tokens" in last
    assert "4.0 kB" in last
    assert last.endswith("1 errors")


def test_quiet_says_nothing(capsys):
    with Progress("pack", 3, quiet=True) as progress:
        progress.say("looking")
        progress.add(samples=3)
    assert capsys.readouterr().err == ""


def test_what_was_done_before_the_time_counts_is_in_no_rate(capsys):
    with Progress("extract", 4) as progress:
        progress.add(samples=2, tokens=1000, size=1000)
        progress.restart()
        progress.began -= 100
        progress.add(samples=1, tokens=100, size=100)
    (last,) = capsys.readouterr().err.splitlines()
    assert "3/4 samples, 0.0 samples/s, 1100 tokens (1/s)" in last
    assert [mark[1] for mark in progress.marks] == [3]


def test_a_stream_that_takes_nothing_stops_nothing():
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"{LONG}\nprint(progress.counts.samples)"],
            check=False,
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
    assert done.stdout == "9990\n"


@pytest.mark.parametrize(("count", "text"), [(7, "7"), (999, "999"), (17_300_000, "17.3M"), (2.5e9, "2.5G")])
def test_large_numbers_are_short(count, text):
    assert thousands(count) == text
