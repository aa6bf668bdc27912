"""A session ends when no process holds the tree any more, and the GPUs have let go of what its own held.

Accelerators are stood in for: device nodes by nodes of /dev/null's device, NVIDIA's list by a small library.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from patchkit import processes
from patchkit.gpu_memory import GpuMemory
from patchkit.guard import accelerators, procfs
from tests.support import bare, nvml_stand_in, snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: device nodes, a mount namespace")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
# Otherwise memory that nobody accounts for is a process that cannot be seen, and refuses.
sees_all = pytest.mark.skipif(
    not procfs.in_initial_pid_namespace(), reason="needs a PID namespace that shows every process"
)
MIB = 1 << 20
# A /dev of its own, in which NVIDIA's nodes are there.
DEV = (
    "mount -t tmpfs none /dev && ln -s /proc/self/fd /dev/fd && "
    "for node in null nvidiactl nvidia0; do mknod -m 666 /dev/$node c 1 3 || exit; done; "
    'mknod -m 666 /dev/urandom c 1 9; exec "$@"'
)
HOLD = "import sys; node = open(sys.argv[1], 'rb'); print('holds', flush=True); sys.stdin.read()"


class Running:
    """``patchkit run p1`` that was started, and what it has said so far."""

    def __init__(self, kit, folder, command, *, prefix=(), **env):
        self.folder = folder
        self._err = folder / "err"
        with self._err.open("w") as err:
            self.process = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    "-m",
                    "patchkit",
                    *kit.where,
                    "run",
                    "p1",
                    "--",
                    *map(str, command),
                ],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env={**bare(), **env},
            )

    @property
    def err(self):
        return self._err.read_text()

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.err
            time.sleep(0.02)

    def says(self, text):
        self.until(lambda: text in self.err)

    def end(self):
        return self.process.wait(60)

    def predicate(self):
        (path,) = self.folder.glob("patchkit-run-*.json")
        return json.loads(path.read_text())["predicate"]


@pytest.fixture
def before(venv):
    return snapshot(venv.site)


# -- device nodes ---------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path):
    made = tmp_path / "accelerator0"
    os.mknod(made, 0o20666, os.makedev(1, 3))
    return made


@pytest.fixture
def held(kit, venv, tmp_path, node, before):
    """A session whose command has ended while a process that is not its own, of the same environment, holds
    the accelerator: it may load the patched file at any moment."""
    go = tmp_path / "go"
    command = ["sh", "-c", f"while [ ! -e {go} ]; do sleep 0.05; done"]
    running = Running(kit, tmp_path, command, PATCHKIT_DEVICE_NODES=str(node))
    running.until((venv.site / "demopkg/core.py.bak_p1").exists)
    running.until(lambda: not (venv.site / ".patchkit/journal.json").exists())
    with subprocess.Popen(
        [venv.python, "-c", HOLD, node], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stranger:
        assert stranger.stdout.readline() == b"holds\n"
        go.touch()
        running.says(f"process {stranger.pid}")
        yield running, stranger
        stranger.kill()
    running.process.kill()
    running.process.wait()


def test_a_holder_of_an_accelerator_is_waited_for(held, venv, before):
    running, stranger = held
    assert "it holds a GPU and may load it at any moment" in running.err
    assert running.process.poll() is None
    stranger.kill()
    assert running.end() == 0, running.err
    assert "restored  p1" in running.err
    assert snapshot(venv.site) == before


def test_a_holder_that_stays_is_named_and_the_tree_stays_marked(held, kit, venv, before):
    running, stranger = held
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 125, running.err
    last = running.err.splitlines()[-1]
    assert "p1 could not be restored" in last
    assert f"process {stranger.pid}" in last
    assert "abandoned session" in kit.spawn("check", code=1).out
    stranger.kill()
    stranger.wait()
    kit.spawn("recover")
    assert snapshot(venv.site) == before


def test_a_command_that_holds_an_accelerator_itself_is_ended_with_it(kit, venv, tmp_path, node, before):
    # Its child forks away and holds the node; the session ends both, so nothing is left to wait for.
    script = f"exec 3<{node}; sleep 600 & exit 0"
    running = Running(kit, tmp_path, ["sh", "-c", script], PATCHKIT_DEVICE_NODES=str(node))
    assert running.end() == 0, running.err
    assert "waiting" not in running.err
    assert snapshot(venv.site) == before


# -- NVIDIA's list --------------------------------------------------------------------------------


def answers(used, pid=None, its=0):
    """What the driver says of its one GPU: the MiB in use, and a process with its own."""
    process = f"process 0 -1 c {pid} {its * MIB}\n" if pid else ""
    return f"gpu {used * MIB} 0\n{process}"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return nvml_stand_in(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def start(kit, venv, tmp_path, library, before):
    """Start a session on a machine with one GPU; ``state`` is what its driver says of it."""
    state = tmp_path / "gpu"
    started = []

    def run(command, used=0):
        state.write_text(answers(used))
        prefix = ["unshare", "--mount", "sh", "-c", DEV, "sh"]
        env = {"LD_LIBRARY_PATH": str(library), "NVML_ANSWERS": str(state)}
        started.append(Running(kit, tmp_path, command, prefix=prefix, **env))
        return started[-1], state

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()
    assert snapshot(venv.site) == before


@needs_compiler
def test_the_driver_is_waited_for_while_it_lists_a_process_of_the_session(start):
    running, state = start(["sh", "-c", f'echo "{answers(5000, "$$", 5000)}" >"$NVML_ANSWERS"'])
    running.says("waiting for GPU 0 to be released")
    assert "restored" not in running.err
    state.write_text(answers(0))
    assert running.end() == 0, running.err
    assert "restored  p1" in running.err
    predicate = running.predicate()
    assert predicate["gpus_held"] == []
    assert predicate["machine"]["gpus"] == [{"name": "Stand-in", "uuid": "GPU-0"}]
    assert predicate["machine"]["driver"] == "999.1"


@needs_compiler
@sees_all
def test_memory_that_nobody_accounts_for_is_waited_for_and_a_signal_ends_the_waiting(start):
    running, _ = start(["sh", "-c", f'echo "{answers(5000)}" >"$NVML_ANSWERS"; exit 3'])
    running.says("waiting for GPU 0 to be released")
    running.process.send_signal(signal.SIGINT)
    # The files are put back all the same: memory does not read them.
    assert running.end() == 3, running.err
    assert "GPU 0 still has 5000 MiB in use" in running.err
    assert "restored  p1" in running.err
    assert running.predicate()["gpus_held"] == ["GPU 0"]


@needs_compiler
@sees_all
def test_what_others_held_before_is_not_waited_for(start):
    running, _ = start(["sh", "-c", f'echo "{answers(5100, 1, 100)}" >"$NVML_ANSWERS"'], used=5000)
    assert running.end() == 0, running.err
    assert "GPU" not in running.err


def test_a_pid_that_passed_to_another_process_is_not_the_sessions(monkeypatch):
    living = processes.look(os.getpid())
    gpu = accelerators.Gpu("GPU 0", "compute", "GPU-1", 1 << 30)
    listed = accelerators.Listed(by_pid={living.pid: [gpu]})
    memory = GpuMemory()
    monkeypatch.setattr(accelerators, "listed", lambda: listed)
    earlier = processes.Process(living.pid, living.started - 1, 1, 1, 1, "Z")
    assert memory.held({earlier}) == []
    assert memory.held({living}) == [gpu]
