"""Whoever dies, of whatever, whenever: the tree is pristine or plainly marked, and nothing of ours lives."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from patchkit import processes
from patchkit.lock import tree_lock
from tests import support
from tests.support import DEMO, P1, Kit, Venv, snapshot

SERVE = str(Path(__file__).with_name("serve.py"))
PRISTINE, MARKED, EITHER = "pristine", "marked", "either"
PATIENCE_S = 60
SCENE = "TESTS_SCENE"  # marks, by inheritance, every process of one test


@dataclass(frozen=True)
class Death:
    """One row: who gets which signal in which phase, what the tree must be then, patchkit's exit code."""

    who: str
    number: signal.Signals
    phase: str
    tree: str
    code: int | None

    def __str__(self) -> str:
        return f"{self.who}-{self.number.name}-{self.phase}"


TERM, INT, HUP, QUIT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL
SEGV, ABRT = signal.SIGSEGV, signal.SIGABRT
ASKING = (TERM, INT, HUP, QUIT)

ROWS = [
    # The command dies, of itself or of its own fault.
    *(
        Death("command", number, phase, PRISTINE, 128 + number)
        for phase in ("starting", "serving")
        for number in (*ASKING, KILL, SEGV, ABRT)
    ),
    Death("command", KILL, "stubborn", PRISTINE, 137),
    Death("command", TERM, "daemon", PRISTINE, 143),
    Death("command", KILL, "daemon", PRISTINE, 137),
    Death("daemon", KILL, "daemon", PRISTINE, 143),  # then the command is asked to end
    Death("nobody", TERM, "orphan", PRISTINE, 0),  # the command ends well and leaves a daemon
    # patchkit is asked to end.
    *(
        Death("patchkit", number, phase, PRISTINE, 128 + number)
        for phase in ("waiting", "applying", "starting", "serving", "daemon")
        for number in ASKING
    ),
    *(Death("patchkit", number, "stubborn", PRISTINE, 137) for number in ASKING),
    *(Death("patchkit", number, "ending", PRISTINE, 137) for number in (TERM, INT)),
    *(Death("patchkit", number, "restoring", PRISTINE, 0) for number in ASKING),
    *(Death("patchkit", number, "held", MARKED, 125) for number in ASKING),
    # patchkit is killed.
    Death("patchkit", KILL, "waiting", PRISTINE, -9),
    Death("patchkit", KILL, "applying", EITHER, -9),
    *(
        Death("patchkit", KILL, phase, MARKED, -9)
        for phase in ("starting", "serving", "stubborn", "daemon", "ending", "held")
    ),
    Death("patchkit", KILL, "restoring", EITHER, -9),
    # Everything at once, and what is no process.
    Death("both", KILL, "serving", MARKED, -9),
    Death("nobody", TERM, "held", MARKED, 125),
    Death("disk", TERM, "full", MARKED, 125),
    Death("patchkit", KILL, "clean", PRISTINE, -9),
    Death("command", KILL, "clean", PRISTINE, 137),
    Death("patchkit", TERM, "clean", PRISTINE, 143),
]


@dataclass
class Bed:
    """One environment for all rows: each must leave it as it found it."""

    venv: Venv
    kit: Kit
    before: dict

    @property
    def root(self) -> Path:
        return self.venv.site

    @property
    def journal(self) -> Path:
        return self.root / ".patchkit" / "journal.json"


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bed")
    wheel = support.build_wheel(folder, "1.0")
    venv = Venv.create(folder / "venv")
    venv.uv("install", "--link-mode", "hardlink", wheel)
    support.write_patch(folder / "patches", "p1", DEMO["1.0"], P1)
    kit = Kit(["--python", str(venv.python), "--patches", str(folder / "patches")])
    return Bed(venv, kit, snapshot(venv.site))


@dataclass
class Scene:
    """A running ``patchkit run``: its process, and what runs below it."""

    bed: Bed
    folder: Path
    patchkit: subprocess.Popen | None = None
    stranger: subprocess.Popen | None = None

    @property
    def ready(self) -> str:
        return str(self.folder / "ready")

    @property
    def daemon_ready(self) -> str:
        return str(self.folder / "daemon")

    def run(self, *command, options=("p1",), grace="0.5s"):
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            self.patchkit = subprocess.Popen(
                [
                    *(sys.executable, "-m", "patchkit", *self.bed.kit.where, "run", *options),
                    *("--grace", grace, "--", *map(str, command)),
                ],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, SCENE: str(self.folder)},
                start_new_session=True,
            )

    def serve(self, *flags, **more):
        self.run(self.bed.venv.python, "-B", SERVE, self.ready, *flags, **more)

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def pid_of(self, ready: str) -> int:
        self.until(lambda: os.path.exists(ready))
        return int(Path(ready).read_text().split()[0])

    def until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"it did not come to that:\n{self.err}"
            time.sleep(0.005)

    def ours(self) -> list[processes.Process]:
        """Everything that lives of what this test's patchkit started."""
        mark = f"{SCENE}={self.folder}"
        return [
            process
            for pid, process in processes.table().items()
            if not process.ended and mark in _environ(pid).split("\0")
        ]

    def end(self) -> int:
        return self.patchkit.wait(PATIENCE_S)


@pytest.fixture
def scene(bed, tmp_path):
    assert snapshot(bed.root) == bed.before, "the row before left something"
    made = Scene(bed, tmp_path)
    yield made
    for process in (made.patchkit, made.stranger):
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    for process in made.ours():
        processes.send(process, KILL)


def _environ(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def _strike(scene: Scene, row: Death) -> None:
    """Bring about the phase, and the death in it."""

    def patchkit() -> None:
        os.kill(scene.patchkit.pid, row.number)

    if row.phase == "waiting":
        with tree_lock(str(scene.bed.root)):
            scene.serve()
            scene.until(lambda: "waiting" in scene.err)
            patchkit()
            scene.end()
        assert not os.path.exists(scene.ready)
    elif row.phase == "applying":
        scene.serve()
        scene.until(scene.bed.journal.exists)
        patchkit()
    elif row.phase == "restoring":
        scene.run("true")
        scene.until(functools.partial(_is_restoring, scene))
        patchkit()
    elif row.phase == "held":
        # Someone else imports the patched module while the session runs, and stays.
        scene.run("sleep", "3")
        scene.until((scene.bed.root / "demopkg/core.py.bak_p1").exists)
        scene.until(lambda: not scene.bed.journal.exists())
        scene.stranger = subprocess.Popen(
            [scene.bed.venv.python, "-B", SERVE, scene.ready], env={**os.environ, "PYTHONPATH": ""}
        )
        assert scene.pid_of(scene.ready) == scene.stranger.pid
        if row.who == "patchkit":
            scene.until(lambda: "waiting" in scene.err)
            patchkit()
    elif row.phase == "full":
        scene.serve()
        pid = scene.pid_of(scene.ready)
        # As on a full disk, no write of patchkit succeeds any more; the kernel says EFBIG.
        resource.prlimit(scene.patchkit.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        os.kill(pid, row.number)
    elif row.phase == "orphan":
        scene.serve("--daemon", scene.daemon_ready, "--exit")
        scene.pid_of(scene.daemon_ready)
    else:
        _strike_server(scene, row, patchkit)


def _is_restoring(scene: Scene) -> bool:
    """Whether the journal of the restore is there."""
    with contextlib.suppress(OSError):
        return b'"restore"' in scene.bed.journal.read_bytes()
    return False


def _strike_server(scene: Scene, row: Death, patchkit) -> None:
    flags = {
        "starting": ["--late"],
        "serving": [],
        "stubborn": ["--ignore"],
        "ending": ["--ignore"],
        "daemon": ["--daemon", scene.daemon_ready],
        "clean": [],
    }[row.phase]
    options = ("--clean",) if row.phase == "clean" else ("p1",)
    scene.serve(*flags, options=options, grace="2s" if row.phase == "ending" else "0.5s")
    pid = scene.pid_of(scene.ready)
    if row.phase == "daemon":
        daemon = scene.pid_of(scene.daemon_ready)
    if row.phase == "ending":
        os.kill(scene.patchkit.pid, TERM)
        time.sleep(0.3)
        assert scene.patchkit.poll() is None
    if row.who in ("patchkit", "both"):
        patchkit()
    if row.who in ("command", "both"):
        os.kill(pid, row.number)
    if row.who == "daemon":
        os.kill(daemon, row.number)
        scene.until(lambda: not os.path.exists(f"/proc/{daemon}") or processes.look(daemon).ended)
        assert scene.patchkit.poll() is None
        os.kill(pid, TERM)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_after_any_death_the_tree_is_pristine_or_marked_and_nothing_of_ours_lives(
    row, scene, record_property
):
    _strike(scene, row)
    code = scene.end()
    assert row.code is None or code == row.code, f"{code}\n{scene.err}"
    found = _outcome(scene)
    record_property("death", found)
    assert found == row.tree or row.tree == EITHER, scene.err
    if found == MARKED:
        _recover(scene)
    assert not scene.ours()
    assert snapshot(scene.bed.root) == scene.bed.before
    assert scene.bed.kit.spawn("recover").out == "nothing to recover\n"
    shutil.rmtree(scene.bed.root / ".patchkit")


def _outcome(scene: Scene) -> str:
    """pristine, or marked as check and status say it to whoever comes next."""
    kit = scene.bed.kit
    checked = kit.spawn("check", code=None)
    if checked.code == 0:
        assert not (scene.bed.root / ".patchkit/journal.json").exists()
        return PRISTINE
    assert "abandoned session" in checked.out or "was interrupted" in checked.out, str(checked)
    if "abandoned session" in checked.out:
        assert "abandoned session" in kit.spawn("status").out
        tried = kit.spawn("apply", "p1", "--dry-run", code=None)
        assert "abandoned session" in tried.out or "was interrupted" in tried.err, str(tried)
    return MARKED


def _recover(scene: Scene) -> None:
    """``recover`` refuses while the session's processes live, names them, and then ends the session."""
    kit = scene.bed.kit
    if scene.patchkit.returncode == -KILL:
        # Those that do not ignore it were told to end by the kernel when patchkit died.
        deadline = time.monotonic() + 2
        while scene.ours() and time.monotonic() < deadline:
            time.sleep(0.05)
    alive = scene.ours()
    if alive:
        refused = kit.spawn("recover", code=3)
        assert str(alive[0].pid) in refused.err
        for process in alive:
            processes.send(process, KILL)
    if scene.stranger is not None:
        refused = kit.spawn("recover", code=3)
        assert str(scene.stranger.pid) in refused.err
        scene.stranger.kill()
        scene.stranger.wait()
    assert scene.patchkit.returncode == -KILL or not alive
    recovered = kit.spawn("recover", "--wait", "20s")
    assert "nothing" not in recovered.out
