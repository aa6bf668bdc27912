"""What NVIDIA's library answers, and what follows: with a library of ours in its place, behind the real bindings.

Device nodes, and a PID namespace that does not show every process, are real.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import patchkit
from tests.guard.processes import NOTHING, VICTIM, WAIT, Engine, needs_compiler, needs_root
from tests.support import nvml_stand_in

pytestmark = [needs_compiler, needs_root]

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(patchkit.__file__)))
MIB = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return nvml_stand_in(tmp_path_factory.mktemp("nvml"))


class Machine:
    """A machine with these GPUs: nodes in a /dev of its own, and the library's answers."""

    def __init__(self, library: pathlib.Path, folder: pathlib.Path) -> None:
        self.library = library
        self.answers = folder / "answers"

    def says(self, answers: str) -> None:
        self.answers.write_text(textwrap.dedent(answers).strip() + "\n")

    def run(self, code: str, *namespaces: str) -> str:
        script = (
            "mount -t tmpfs tmpfs /dev && mknod /dev/nvidiactl c 1 5 && mknod /dev/nvidia0 c 1 7 && "
            "mknod /dev/null c 1 3 && mknod /dev/kfd c 1 8 && mount -t tmpfs tmpfs /sys/class && "
            'exec "$0" -c "$1"'
        )
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library),
            "NVML_ANSWERS": str(self.answers),
            "PYTHONPATH": SOURCE,
        }
        done = subprocess.run(
            ["unshare", "--mount", *namespaces, "sh", "-c", script, sys.executable, textwrap.dedent(code)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def listed(self) -> dict:
        code = """
            import dataclasses, json
            from patchkit.guard.accelerators import listed
            print(json.dumps(dataclasses.asdict(listed(kfd="/nonexistent"))))
        """
        return json.loads(self.run(code))

    def inspect(self, engine: Engine, *namespaces: str, before: str = "") -> dict:
        code = f"""
            import json
            from patchkit.guard import inspect, stalls
            {before}
            print(json.dumps(inspect({engine.root!r}, [{VICTIM!r}]).to_json()))
        """
        return json.loads(self.run(code, *namespaces))


@pytest.fixture
def machine(library: pathlib.Path, tmp_path: pathlib.Path) -> Machine:
    return Machine(library, tmp_path)


APART = ("--pid", "--fork", "--mount-proc")


def test_each_list_is_asked_and_a_process_in_several_counts_once(machine: Machine):
    machine.says(
        f"""
        gpu {900 * MIB} 0
        gpu {300 * MIB} 0
        process 0 -1 c 41 {500 * MIB}
        process 0 -1 m 41 {500 * MIB}
        process 0 -1 m 42 {100 * MIB}
        process 0 -1 g 43 {20 * MIB}
        process 1 -1 c 41 {200 * MIB}
        """
    )
    found = machine.listed()
    assert {
        pid: [(gpu["name"], gpu["kind"], gpu["memory"] // MIB) for gpu in gpus]
        for pid, gpus in found["by_pid"].items()
    } == {
        "41": [("GPU 0", "compute", 500), ("GPU 1", "compute", 200)],
        "42": [("GPU 0", "mps", 100)],
        "43": [("GPU 0", "graphics", 20)],
    }
    assert [gpu["name"] for gpu in found["unexplained"]] == ["GPU 0"]


def test_a_process_of_a_mig_instance_is_of_that_instance_alone(machine: Machine):
    """The GPU itself lists the processes of its instances again, to whoever may see them all."""
    machine.says(
        f"""
        gpu {5000 * MIB} 1
        instance 0 {2000 * MIB}
        instance 0 {3000 * MIB}
        process 0 -1 c 41 {1900 * MIB}
        process 0 0 c 41 {1900 * MIB}
        process 0 1 m 42 {2990 * MIB}
        """
    )
    found = machine.listed()
    assert {
        pid: [(gpu["name"], gpu["kind"], gpu["uuid"]) for gpu in gpus]
        for pid, gpus in found["by_pid"].items()
    } == {"41": [("GPU 0 MIG 0", "compute", "MIG-0-0")], "42": [("GPU 0 MIG 1", "mps", "MIG-0-1")]}
    assert found["unexplained"] == []


def test_memory_of_a_mig_instance_that_nobody_accounts_for(machine: Machine):
    machine.says(
        f"""
        gpu {5000 * MIB} 1
        instance 0 {30 * MIB}
        instance 0 {3000 * MIB}
        """
    )
    assert [gpu["name"] for gpu in machine.listed()["unexplained"]] == ["GPU 0 MIG 1"]


@pytest.mark.parametrize(
    ("answers", "unexplained"),
    [
        (f"gpu {200 * MIB} 0", 0),  # an idle driver
        (f"gpu {2000 * MIB} 0", 1),
        (f"gpu {2000 * MIB} 0\nprocess 0 -1 c 41 {1990 * MIB}", 0),
        (f"gpu {2000 * MIB} 0\nprocess 0 -1 c 41 -1", 0),  # the driver does not say how much: nor do we
        (f"gpu {2000 * MIB} 0\nfail memory 3", 0),
    ],
)
def test_memory_that_no_process_accounts_for(machine: Machine, answers: str, unexplained: int):
    machine.says(answers)
    assert len(machine.listed()["unexplained"]) == unexplained


def test_a_list_that_the_driver_does_not_have_is_left_out(machine: Machine):
    machine.says(f"gpu {MIB} 0\nprocess 0 -1 c 41 {MIB}\nfail mps 3")
    assert list(machine.listed()["by_pid"]) == ["41"]


def test_a_driver_that_does_not_start_is_noted(machine: Machine):
    machine.says("gpu 0 0\nfail init 18")
    (note,) = machine.listed()["notes"]
    assert note.startswith("NVIDIA's list was not read (")
    assert "mismatch" in note


def test_a_gpu_in_use_by_an_invisible_process_refuses(engine: Engine, machine: Machine):
    machine.says(f"gpu {2000 * MIB} 0")
    (holder,) = machine.inspect(engine, *APART)["holders"]
    assert (holder["pid"], holder["verdict"], holder["blocks"]) == (0, "cannot-tell", True)
    assert "--pid=host" in holder["hint"]


def test_a_list_that_names_an_invisible_process_refuses(engine: Engine, machine: Machine):
    machine.says(f"gpu {2000 * MIB} 0\nprocess 0 -1 c 4194000 {1990 * MIB}")
    (holder,) = machine.inspect(engine, *APART)["holders"]
    assert (holder["verdict"], holder["blocks"]) == ("cannot-tell", True)
    assert "4194000" in holder["evidence"]


def test_on_the_host_a_busy_gpu_is_explained_by_the_processes_that_are_seen(engine: Engine, machine: Machine):
    machine.says(f"gpu {2000 * MIB} 0")
    assert [one for one in machine.inspect(engine)["holders"] if one["pid"] == 0] == []


def test_a_gpu_that_idles_refuses_nothing(engine: Engine, machine: Machine):
    machine.says(f"gpu {100 * MIB} 0")
    assert machine.inspect(engine, *APART)["holders"] == []


HELD = """
            import subprocess, sys
            child = subprocess.Popen(
                [sys.executable, "-c", "held = open({node!r}); " + {code!r}],
                env={{"PYTHONPATH": {root!r}}}, stdin=-1, stdout=-1,
            )
            child.stdout.readline()
            with open({answers!r}, "w") as file:
                file.write({text!r}.replace("PID", str(child.pid)))
            """


@pytest.mark.parametrize(("kind", "name"), [("c", "compute"), ("m", "mps"), ("g", "graphics")])
def test_a_process_that_has_not_loaded_the_file_is_named_with_its_gpu(
    engine: Engine, machine: Machine, kind: str, name: str
):
    text = f"gpu {750 * MIB} 0\nprocess 0 -1 {kind} PID {700 * MIB}\n"
    before = HELD.format(
        node="/dev/nvidia0", code=NOTHING, root=engine.root, answers=str(machine.answers), text=text
    )
    (holder,) = machine.inspect(engine, *APART, before=before + "\n")["holders"]
    assert (holder["verdict"], holder["blocks"]) == ("not-loaded", True)
    assert holder["gpus"] == [{"name": "GPU 0", "kind": name, "uuid": "GPU-0", "memory": 700 * MIB}]


def test_a_driver_that_hangs_is_noted_and_the_nodes_count(engine: Engine, machine: Machine):
    """As nvidia-smi hangs after some faults of a GPU."""
    hurry = "from patchkit.guard import accelerators; accelerators._DRIVER_S = 0.5"
    before = HELD.format(
        node="/dev/nvidia0",
        code=NOTHING,
        root=engine.root,
        answers=str(machine.answers),
        text="gpu 0 0\nhang init\n",
    )
    found = machine.inspect(engine, *APART, before=f"{before}{hurry}")
    (holder,) = found["holders"]
    assert (holder["verdict"], holder["blocks"]) == ("not-loaded", True)
    assert [gpu["name"] for gpu in holder["gpus"]] == ["/dev/nvidia0"]
    assert any("lists were not read" in note for note in found["notes"])


def test_a_monitoring_agent_of_another_environment_does_not_block(engine: Engine, machine: Machine):
    text = f"gpu {100 * MIB} 0\nprocess 0 -1 c PID {50 * MIB}\n"
    before = HELD.format(
        node="/dev/nvidia0", code=WAIT, root="/nowhere", answers=str(machine.answers), text=text
    )
    holders = machine.inspect(engine, *APART, before=before)["holders"]
    assert [(one["verdict"], one["blocks"]) for one in holders] == [("not-loaded", False)]


def test_an_amd_gpus_process_is_named_with_its_memory(engine: Engine, machine: Machine):
    machine.says("")
    held = HELD.format(node="/dev/kfd", code=NOTHING, root=engine.root, answers=str(machine.answers), text="")
    before = f"""{held}
            import os
            folder = f"/sys/class/kfd/kfd/proc/{{child.pid}}"
            os.makedirs(folder)
            open(f"{{folder}}/vram_51545", "w").write("{700 * MIB}\\n")
            """
    (holder,) = machine.inspect(engine, *APART, before=before)["holders"]
    assert (holder["verdict"], holder["blocks"]) == ("not-loaded", True)
    assert holder["gpus"] == [{"name": "AMD GPU 51545", "kind": "compute", "uuid": None, "memory": 700 * MIB}]


def test_an_amd_list_that_names_an_invisible_process_refuses(engine: Engine, machine: Machine):
    machine.says("")
    before = f"""
            import os
            os.makedirs("/sys/class/kfd/kfd/proc/4194000")
            open("/sys/class/kfd/kfd/proc/4194000/vram_51545", "w").write("{700 * MIB}\\n")
            """
    (holder,) = machine.inspect(engine, *APART, before=before)["holders"]
    assert (holder["pid"], holder["verdict"], holder["blocks"]) == (0, "cannot-tell", True)
