from __future__ import annotations

import os
import pathlib

import pytest

from patchkit.guard import Gpu
from patchkit.guard.accelerators import NODES, NodeMatcher, any_present, listed, patterns


def names(*paths: str) -> list[str]:
    return [gpu.name for gpu in NodeMatcher(NODES).gpus(paths)]


def test_nodes_of_each_vendor_are_recognised():
    for node in (
        "/dev/nvidia0",
        "/dev/kfd",
        "/dev/dri/renderD128",
        "/dev/accel/accel0",
        "/dev/accel0",
        "/dev/davinci3",
    ):
        assert names(node) == [node]
    assert names("/dev/null", "/dev/dri/card0", "socket:[5]", "/tmp/dev/nvidia0", "/dev/hlx") == []


def test_control_nodes_are_named_only_alone():
    assert names(
        "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap2"
    ) == ["/dev/nvidia1"]
    assert names("/dev/nvidiactl") == ["/dev/nvidiactl"]


def test_more_nodes_can_be_named_by_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATCHKIT_DEVICE_NODES", "/dev/tpu*::/dev/rebel[0-9]")
    assert [
        gpu.name for gpu in NodeMatcher(patterns()).gpus(["/dev/tpu7", "/dev/rebel1", "/dev/rebelx"])
    ] == ["/dev/rebel1", "/dev/tpu7"]


def test_presence_is_asked_of_the_file_system(tmp_path: pathlib.Path):
    assert not any_present([f"{tmp_path}/tpu*"])
    (tmp_path / "tpu0").touch()
    assert any_present([f"{tmp_path}/tpu*"])


def test_amds_list_counts_only_memory_in_use(tmp_path: pathlib.Path):
    for pid, used in (("41", "4096\n"), ("42", "0\n"), ("43", ""), ("not-a-pid", "9\n")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "vram_51545").write_text(used)
        (tmp_path / pid / "sdma_51545").write_text("77\n")
    (tmp_path / "44").mkdir()
    found = listed(kfd=str(tmp_path))
    assert {pid: gpus for pid, gpus in found.by_pid.items() if pid < 100} == {
        41: [Gpu("AMD GPU 51545", "compute", None, 4096)]
    }


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has an NVIDIA GPU")
def test_without_a_gpu_no_gpu_library_is_loaded():
    import subprocess
    import sys

    code = (
        "import sys; from patchkit.guard.accelerators import listed; print(listed(), 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Listed(by_pid={},", "unexplained=[],", "notes=[])", "False"]
