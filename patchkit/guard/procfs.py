"""What ``/proc`` says about one process, as far as the kernel lets us see it."""

from __future__ import annotations

import array
import contextlib
import os
import pwd
import re
import signal
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from patchkit.guard import stalls

if TYPE_CHECKING:
    from collections.abc import Iterator

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_FORKED = 0x00000040  # PF_FORKNOEXEC: it runs what it was forked with
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO
_TICKS = os.sysconf("SC_CLK_TCK")
_MAPPED_FILE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) 0+ (\S+ \d+) +(/[^\n]*)$", re.MULTILINE)
_BEFORE_PATH = 40  # paths begin at column 73
_DELETED = b" (deleted)"
MappedAs = tuple[bytes, bytes, int]  # device and inode, mode, size in bytes of the first mapping
_TITLE_WIDTH = 200


@dataclass(frozen=True)
class Stat:
    """``/proc/PID/stat``: readable for everybody, unless ``/proc`` hides other users' processes."""

    command: str
    state: str
    parent: int
    kernel: bool
    forked: bool  # and has not called exec since: its memory began as its parent's
    started: float
    ticks: int  # the same, since boot: with it a process is told from a later one of the same number

    threads: int

    @property
    def ended(self) -> bool:
        """Also False when only its main thread has ended: the process lives on in the others."""
        return self.state in "ZXx" and self.threads < 2


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _slurp(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 20):
            parts.append(part)
            stalls.beat()
    finally:
        os.close(descriptor)
    return b"".join(parts)


def _slurp_of(pid: int, name: str) -> bytes:
    """A file that the kernel makes from the process's address space, which the process may have locked."""
    return stalls.bounded(pid, lambda: _slurp(f"/proc/{pid}/{name}"))


def stat(pid: int) -> Stat | None:
    """None when the process is gone."""
    try:
        text = _slurp(f"/proc/{pid}/stat").decode("utf-8", "replace")
    except OSError:
        return None
    # The name is in parentheses and may hold parentheses and spaces itself.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    # Boot time from now, not from btime: that one is cut to whole seconds.
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return Stat(
        command=name,
        state=fields[0],
        parent=int(fields[1]),
        kernel=bool(int(fields[6]) & _KERNEL_THREAD),
        forked=bool(int(fields[6]) & _FORKED),
        started=boot + int(fields[19]) / _TICKS,
        ticks=int(fields[19]),
        threads=int(fields[17]),
    )


def living_thread(pid: int, known: Stat | None) -> int:
    """``pid``; or, where only its main thread has ended, another thread: /proc/PID shows no memory and no
    files of the process then, and the kernel reads its memory under that thread's number alone.
    """
    if known is None or known.ended or known.state not in "ZXx":
        return pid
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            thread = stat(int(name))
            if thread is not None and thread.state not in "ZXx":
                return int(name)
    return pid


def uids(pid: int) -> tuple[int, int] | None:
    """Real and effective user; None when the process is gone."""
    try:
        status = _slurp(f"/proc/{pid}/status")
    except OSError:
        return None
    found = re.search(rb"^Uid:\s+(\d+)\s+(\d+)", status, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


@lru_cache(maxsize=256)
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def arguments(pid: int) -> list[str]:
    """The command line as the process shows it now; empty for one that has none, or is gone."""
    try:
        raw = _slurp_of(pid, "cmdline")
    except OSError:
        return []
    # setproctitle writes one text over the whole block and leaves blanks or NULs behind it.
    parts = raw.rstrip(b"\0 ").split(b"\0")
    return [os.fsdecode(part) for part in parts] if parts != [b""] else []


def title(arguments: list[str], command: str) -> str:
    """One readable line for a person."""
    text = " ".join(" ".join(arguments).split()) or f"[{command}]"
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= _TITLE_WIDTH else text[: _TITLE_WIDTH - 1] + "…"


def environment(pid: int) -> dict[str, str]:
    """The environment that the process was started with; empty where it may not be read."""
    try:
        raw = _slurp_of(pid, "environ")
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def limit(pid: int, name: str) -> int | None:
    """The hard limit of that name as ``/proc/PID/limits`` calls it; None if there is none, or for a process
    that is gone. Readable for everybody.
    """
    try:
        limits = _slurp(f"/proc/{pid}/limits")
    except OSError:
        return None
    found = re.search(rb"^%s +\S+ +(\d+) " % name.encode("ascii"), limits, re.MULTILINE)
    return int(found[1]) if found else None


def auxiliary(pid: int, key: int) -> int | None:
    """A value of the vector that the kernel gave the program with ``exec``. Raises OSError."""
    words = array.array("L", _slurp_of(pid, "auxv"))
    return dict(zip(words[::2], words[1::2], strict=False)).get(key)


def maps(pid: int) -> bytes:
    """``/proc/PID/maps``. Raises OSError (``StalledError`` too); empty for kernel threads and zombies."""
    return _slurp_of(pid, "maps")


def mapped_objects(maps: bytes) -> Iterator[tuple[int, MappedAs, str]]:
    """Base address, what is mapped there and how, and path of each file that is mapped from its start.

    The second tells a program that was loaded from the same file mapped as data.
    """
    for found in _MAPPED_FILE.finditer(maps):
        start, end, mode, file, path = found.groups()
        path = path.removesuffix(_DELETED)
        yield int(start, 16), (file, mode, int(end, 16) - int(start, 16)), os.fsdecode(path)


def executable_programs(maps: bytes) -> set[bytes]:
    """Device and inode (as one key) of each file that is not named as a library and of which some part may
    be executed.
    """
    found = set()
    for line in maps.split(b"\n"):
        # Addresses, offset and device are hexadecimal: an x in front of the path is the mode's.
        if b"x" in line[:_BEFORE_PATH] and line.find(b".so", line.rfind(b"/")) < 0:
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(b"/"):
                found.add(b" ".join(fields[3:5]))
    return found


def mapped_paths(maps: bytes) -> set[str]:
    """Paths of all files that are mapped, in whatever part; deleted ones too."""
    paths = set()
    for line in maps.splitlines():
        at = line.find(b"/")
        if at > 0:
            paths.add(os.fsdecode(line[at:].removesuffix(_DELETED)))
    return paths


def descriptors(pid: int) -> dict[str, str]:
    """The path behind each open descriptor (by its name in ``/proc``); empty where it may not be read."""
    folder = f"/proc/{pid}/fd"
    targets = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for name in names:
        with contextlib.suppress(OSError):
            targets[f"{folder}/{name}"] = os.readlink(f"{folder}/{name}")
    return targets


def has_open(pid: int, path: str) -> bool | None:
    """Whether the process has the file at ``path`` open; None where its descriptors may not be read."""
    folder = f"/proc/{pid}/fd"
    try:
        wanted = os.stat(path)
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    for name in names:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"{folder}/{name}"), wanted):
                return True
    return False


def program(pid: int) -> str:
    """The path of the program that the process runs. Raises OSError."""
    return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")


def ancestors(pid: int) -> set[int]:
    """The processes above ``pid``."""
    found: set[int] = set()
    known = stat(pid)
    while known is not None and known.parent > 0 and known.parent not in found:
        found.add(known.parent)
        known = stat(known.parent)
    return found


def in_initial_pid_namespace() -> bool:
    """Whether every process of the machine has a number here."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return True


def hides_others() -> bool:
    """Whether this ``/proc`` shows only the caller's own processes (``hidepid``)."""
    return not os.path.exists("/proc/1")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold the process still (SIGSTOP) for a moment; one that was stopped already stays so."""
    before = stat(pid)
    if before is None or before.state in "Tt":
        yield
        return
    _held.add(pid)
    try:
        os.kill(pid, signal.SIGSTOP)
        for _ in range(200):
            now = stat(pid)
            if now is None or now.state in "TtZXx":
                break
            time.sleep(0.0005)
        yield
    finally:
        resume(pid)


_held: set[int] = set()


def resume(pid: int) -> None:
    """Let a process that ``stopped`` holds go on, even if the reading of it never ends."""
    if pid in _held:
        _held.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
