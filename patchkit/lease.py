"""A running command's claim on a tree: no change under it while it lives.

A lease is a file in ``.patchkit/leases``, locked (flock) by the process that holds it, so that it dies with
that process. The kernel answers for processes of this machine. Another machine on a shared file system
cannot be asked: its lease counts as alive until its heartbeat, the file's modification time, is too old.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import socket
import sys
import time
import uuid
import weakref
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from patchkit import values
from patchkit.durable import own_like_root
from patchkit.errors import HELD, PatchkitError, short
from patchkit.foreign import open_own
from patchkit.state import FOLDER, SCHEMA, State, StateFileError, check_ours, dump_json, load_json, prepare

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

LEASES = f"{FOLDER}/leases"
BEAT_S = 10.0  # how often a holder says that it lives
EXPIRY_S = 120.0  # how long another host's lease stands without a heartbeat
_STOPPED_S = 10 * 365 * 86400  # a stopped process (^Z) cannot beat, but it lives
_SUFFIX = ".json"


class LeasedError(PatchkitError):
    """A live session uses the tree. ``hopeless``: it waits for this very process, so waiting cannot help."""

    code = "leased"
    exit_code = HELD

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.hopeless = lease.is_above()
        hint = (
            "this command runs inside that session; end the session first"
            if self.hopeless
            else "wait for its end (--wait 10m) or stop it"
        )
        beat = "" if lease.is_local() else f"; last heartbeat {max(0, int(lease.silence_s()))} s ago"
        super().__init__(f"{lease.root} is in use by {lease.describe()}{beat}", path=lease.root, hint=hint)


@dataclass(frozen=True)
class Lease:
    """One claim as its file says it. ``pid`` counts in the PID namespace of its holder.

    ``patches`` are the applied patches that it needs, none for a session of the pristine tree;
    ``found`` are those of them that had been applied before by no session; ``created`` is in seconds since
    the epoch.
    """

    session: str
    root: str
    distribution: str
    patches: tuple[str, ...]
    command: str
    pid: int
    user: str
    host: str
    boot_id: str
    created: float
    found: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return os.path.join(self.root, LEASES, f"{self.session}.{self.distribution}{_SUFFIX}")

    def describe(self) -> str:
        what = " ".join(self.patches) or "the pristine tree"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.created))
        who = f"process {self.pid} of {self.user} on {self.host}"
        return f"session {self.session} ({what}; {who} since {since}: {short(self.command, 120)})"

    def shares(self, patches: Collection[str]) -> bool:
        """Whether a session with ``patches`` needs the very same tree."""
        return set(patches) == set(self.patches)

    def is_local(self) -> bool:
        """Whether this kernel can say if it lives; a container has another host name, not another boot."""
        return self.boot_id == boot_id()

    def is_above(self) -> bool:
        """Whether its holder is an ancestor of this process."""
        if not self.is_local():
            return False
        from patchkit.guard import procfs

        if self.pid not in procfs.ancestors(os.getpid()):
            return False
        # The number may be of another PID namespace (1 in a container); the holder has the lease open.
        return procfs.has_open(self.pid, self.path) is not False

    def silence_s(self) -> float:
        """Seconds since the last heartbeat, by the clock of the file system; infinite if the file is gone."""
        try:
            beat = os.stat(self.path).st_mtime
        except FileNotFoundError:
            return float("inf")
        return _now(os.path.dirname(self.path)) - beat

    def is_alive(self) -> bool:
        if not self.is_local():
            return self.silence_s() < EXPIRY_S
        try:
            descriptor = open_own(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except PermissionError:
            return self.silence_s() < EXPIRY_S
        try:
            return _is_locked(descriptor)
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        """Remove the file of a lease that is over. The caller holds the tree's lock."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        _drop_folder(self.root)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "patches": list(self.patches), "found": list(self.found)}


class Claim:
    """A lease held by this process."""

    def __init__(self, lease: Lease, descriptor: int) -> None:
        self.lease = lease
        self._descriptor: int | None = descriptor
        _claims.add(self)

    def beat(self) -> None:
        """Say that the holder lives."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # a file system that is full or gone for a moment
                os.utime(self._descriptor)

    def stop(self) -> None:
        """Say that the holder is being stopped: it will not beat until it is continued."""
        if self._descriptor is not None:
            until = time.time() + _STOPPED_S
            with contextlib.suppress(OSError):
                os.utime(self._descriptor, (until, until))

    def release(self) -> None:
        """Give the claim up. The caller holds the tree's lock."""
        self.lease.discard()
        self.abandon()

    def abandon(self) -> None:
        """Leave the file as the mark of an unfinished session."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _forget_claims() -> None:
    """In a forked child: the lock is that of the open file, and would outlive the process that holds it."""
    for one in list(_claims):
        one.abandon()


os.register_at_fork(after_in_child=_forget_claims)


def claim(
    root: str,
    distribution: str,
    patches: Iterable[str],
    session: str,
    command: str,
    *,
    found: Iterable[str] = (),
) -> Claim:
    """Take a lease; the caller holds the tree's lock and has seen that no other lease is against it."""
    from patchkit.history import user_name

    lease = Lease(
        session=session,
        root=root,
        distribution=distribution,
        patches=tuple(patches),
        command=command,
        pid=os.getpid(),
        user=user_name(),
        host=socket.gethostname(),
        boot_id=boot_id(),
        created=time.time(),
        found=tuple(found),
    )
    prepare(root)
    folder = os.path.join(root, LEASES)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o755)
        own_like_root(root, folder)
    # Locked before it has its name: nobody can see it and take it for a dead one.
    temp = os.path.join(folder, f".{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        entry = {key: value for key, value in lease.to_json().items() if key != "root"}
        data = dump_json({"schema": SCHEMA, **entry})
        os.write(descriptor, data)
        own_like_root(root, temp)
        os.rename(temp, lease.path)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    return Claim(lease, descriptor)


def new_session() -> str:
    return uuid.uuid4().hex[:12]


def leases(root: str) -> list[Lease]:
    """Every lease of ``root``, alive or not, oldest first."""
    check_ours(root)
    folder = os.path.join(root, LEASES)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [_load(root, os.path.join(folder, name)) for name in names if name.endswith(_SUFFIX)]
    return sorted((one for one in found if one is not None), key=lambda lease: (lease.created, lease.session))


class UnreadableLeaseError(PatchkitError):
    """A lease that cannot be read, and whose session may live."""

    code = "unreadable-lease"
    exit_code = HELD

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} cannot be read, and the session that holds it may live",
            path=path,
            hint=f"end that session; if there is none, try again in {EXPIRY_S:.0f} s",
        )


def unreadable(root: str) -> list[StateFileError]:
    """The error of each lease that cannot be read."""
    folder = os.path.join(root, LEASES)
    found = []
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        if name.endswith(_SUFFIX):
            try:
                _load(root, os.path.join(folder, name))
            except StateFileError as error:
                found.append(error)
    return found


def require_dead(path: str) -> None:
    """Raise UnreadableLeaseError unless nobody can hold the unreadable lease at ``path`` any more."""
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except IsADirectoryError:
        return  # no session holds a folder
    try:
        # Of another host's session only the heartbeat tells, and the file does not say any more whose it is.
        silence_s = _now(os.path.dirname(path)) - os.fstat(descriptor).st_mtime
        if _is_locked(descriptor) or silence_s < EXPIRY_S:
            raise UnreadableLeaseError(path)
    finally:
        os.close(descriptor)


def _load(root: str, path: str) -> Lease | None:
    data = load_json(path)
    if data is None:
        return None  # released between the listing and now
    try:
        lease = _from_json(root, data)
    except ValueError as error:
        raise StateFileError(path, f"damaged ({error})") from None
    if lease.path != path:
        raise StateFileError(path, f"is named for another session than {lease.session}")
    return lease


def _from_json(root: str, data: dict[str, Any]) -> Lease:
    keys = {field.name for field in fields(Lease)} - {"root", "found"}
    values.keys(data, "it", keys, {"schema", "found"})
    return Lease(
        session=values.name(data["session"], "session"),
        root=root,
        distribution=values.name(data["distribution"], "distribution"),
        patches=values.names(data["patches"], "patches"),
        command=values.text(data["command"], "command"),
        pid=values.process(data["pid"], "pid"),
        user=values.text(data["user"], "user"),
        host=values.text(data["host"], "host"),
        boot_id=values.text(data["boot_id"], "boot_id"),
        created=values.seconds(data["created"], "created"),
        found=values.names(data.get("found", []), "found"),
    )


def live(root: str, distribution: str, *, but: str | None = None) -> list[Lease]:
    """The living leases on ``distribution`` in ``root``, without those of session ``but``."""
    return [
        lease
        for lease in leases(root)
        if lease.distribution == distribution and lease.session != but and lease.is_alive()
    ]


def abandoned(root: str) -> list[Lease]:
    """Leases whose holder died and whose patches are still applied: sessions to be finished."""
    applied = {(one.distribution, one.patch) for one in State.load(root).stack}
    return [
        lease
        for lease in leases(root)
        if any((lease.distribution, patch) in applied for patch in lease.patches) and not lease.is_alive()
    ]


def sweep(root: str) -> None:
    """Remove the leases of dead holders that left nothing to finish. The caller holds the tree's lock."""
    unfinished = abandoned(root)
    for lease in leases(root):
        if lease not in unfinished and not lease.is_alive():
            lease.discard()
    folder = os.path.join(root, LEASES)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith(".tmp"):  # whoever makes one holds the tree's lock
                os.unlink(os.path.join(folder, name))
    _drop_folder(root)


def refuse(
    root: str, distribution: str, *, own: str | None = None, sharing: Collection[str] | None = None
) -> None:
    """Raise LeasedError if a session other than ``own`` uses the tree.

    One that needs exactly the patches ``sharing`` is no hindrance to applying them as long as they are not
    all applied: then its command does not run yet, or any more. The caller holds the tree's lock for that.
    """
    others = live(root, distribution, but=own)
    if others and sharing is not None:
        applied = {one.patch for one in State.load(root).stack if one.distribution == distribution}
        others = [one for one in others if not one.shares(sharing) or applied.issuperset(one.patches)]
    if others:
        raise LeasedError(others[0])


def boot_id() -> str:
    """What tells this running kernel from every other; the host's name where the kernel does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def command_line() -> str:
    return shlex.join(sys.argv)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _now(folder: str) -> float:
    """The file system's own time, since heartbeats are stamped by it and hosts' clocks differ."""
    probe = os.path.join(folder, f".{uuid.uuid4().hex}.tmp")
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return time.time()
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):  # swept
            os.unlink(probe)


def _drop_folder(root: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(os.path.join(root, LEASES))
