"""``patchkit run`` in a real terminal, under a real shell with job control."""

from __future__ import annotations

import os
import shlex
import sys
import time

import pexpect
import pytest

from tests.support import Kit, bare, snapshot

PROMPT = "ready-for-more> "
# Reads lines and answers them: it needs the terminal, in the foreground.
ECHO = (
    "import sys, demopkg.core\n"
    "print('started', demopkg.core.answer(), flush=True)\n"
    "for line in iter(sys.stdin.readline, ''): print('heard', line.strip().upper(), flush=True)\n"
    "print('finished', flush=True)\n"
)
# What is printed must not stand in the line that the terminal echoes.
SLEEP = "import time, demopkg.core; print('started', demopkg.core.answer(), flush=True); time.sleep(600)"
RAW = "import os, signal, tty; tty.setraw(0); os.kill(os.getpid(), signal.SIGKILL)"


class Shell:
    """An interactive bash on a terminal of its own."""

    def __init__(self, kit: Kit, venv, folder):
        self.kit, self.venv = kit, venv
        env = {**bare(), "PS1": PROMPT, "TERM": "dumb", "HISTFILE": "/dev/null"}
        self.child = pexpect.spawn(
            "/bin/bash",
            ["--norc", "--noprofile", "-i"],
            env=env,
            cwd=str(folder),
            encoding="utf-8",
            timeout=60,
            dimensions=(24, 400),
        )
        self.child.expect_exact(PROMPT)

    def run(self, code, *options, end=""):
        """Start ``patchkit run`` of ``code`` in the environment's Python."""
        line = [sys.executable, "-m", "patchkit", *self.kit.where, "run", "p1", "--grace", "1s", *options]
        line += ["--", str(self.venv.python), "-B", "-c", code]
        self.child.sendline(shlex.join(line) + end)

    def send(self, line):
        self.child.sendline(line)

    def expect(self, text):
        self.child.expect_exact(text)

    def code(self):
        self.expect(PROMPT)
        self.send('echo "code:$?:"')
        self.child.expect(r"code:(\d+):")
        code = int(self.child.match[1])
        self.expect(PROMPT)
        return code


@pytest.fixture
def before(venv):
    return snapshot(venv.site)


@pytest.fixture
def shell(kit, venv, tmp_path, before):
    made = Shell(kit, venv, tmp_path)
    yield made
    made.child.close(force=True)


def test_interrupt_ends_the_command_and_restores(shell, venv, before):
    shell.run(SLEEP)
    shell.expect("started BBB")
    shell.child.sendintr()
    shell.expect("restored  p1")
    assert shell.code() == 130
    assert snapshot(venv.site) == before


def test_the_command_reads_and_writes_the_terminal(shell, venv, before):
    shell.run(ECHO)
    shell.expect("started BBB")
    shell.send("one")
    shell.expect("heard ONE")
    shell.child.sendeof()
    shell.expect("finished")
    shell.expect("restored  p1")
    assert shell.code() == 0
    assert snapshot(venv.site) == before


def test_stop_and_fg_keep_the_lease_and_the_terminal(shell, venv, kit, before):
    shell.run(ECHO)
    shell.expect("started BBB")
    shell.child.sendcontrol("z")
    shell.expect("Stopped")
    shell.expect(PROMPT)
    # The shell has its terminal back; the session lives, and nobody changes its tree.
    shell.send("echo a$((1+1))b")
    shell.expect("a2b")
    assert "in use by session" in kit.spawn("status").out
    assert "in use by session" in kit.spawn("restore", code=3).err
    shell.send("fg")
    shell.send("two")
    shell.expect("heard TWO")
    shell.child.sendcontrol("z")
    shell.expect("Stopped")
    shell.send("fg")
    shell.send("three")
    shell.expect("heard THREE")
    shell.child.sendeof()
    shell.expect("restored  p1")
    assert shell.code() == 0
    assert snapshot(venv.site) == before


def test_in_the_background_it_stops_when_it_reads_and_fg_gives_it_the_terminal(shell, venv, before):
    shell.run(ECHO, end=" &")
    shell.expect("started BBB")
    for _ in range(100):  # a shell tells of its jobs with the next prompt
        shell.send("")
        if shell.child.expect_exact(["Stopped", pexpect.TIMEOUT], timeout=0.5) == 0:
            break
    shell.send("fg")
    shell.send("four")
    shell.expect("heard FOUR")
    shell.child.sendintr()
    shell.expect("restored  p1")
    shell.expect(PROMPT)
    assert snapshot(venv.site) == before


def test_a_whole_pipeline_stops_and_continues(shell, venv, before):
    shell.run(ECHO, end=" | cat")
    shell.expect("started BBB")
    shell.child.sendcontrol("z")
    shell.expect("Stopped")
    shell.send("fg")
    shell.send("five")
    shell.expect("heard FIVE")
    shell.child.sendeof()
    shell.expect("restored  p1")
    assert shell.code() == 0
    assert snapshot(venv.site) == before


def test_a_killed_command_leaves_the_terminal_as_it_was(shell, venv, before):
    shell.send("stty -a | md5sum; echo done-$((1))")
    shell.child.expect(r"([0-9a-f]{32})")
    modes = shell.child.match[1]
    shell.expect(PROMPT)
    shell.run(RAW)
    shell.expect("restored  p1")
    assert shell.code() == 137
    shell.send("stty -a | md5sum")
    shell.child.expect(r"([0-9a-f]{32})")
    assert shell.child.match[1] == modes
    assert snapshot(venv.site) == before


def test_a_closed_terminal_ends_the_session_and_restores(shell, venv, kit, before):
    shell.run(SLEEP)
    shell.expect("started BBB")
    assert "in use by session" in kit.spawn("status").out
    os.close(os.dup(shell.child.fileno()))
    shell.child.close(force=False)
    deadline = time.monotonic() + 60
    while kit.spawn("check", code=None).code and time.monotonic() < deadline:
        time.sleep(0.1)
    kit.spawn("check")
    assert snapshot(venv.site) == before
