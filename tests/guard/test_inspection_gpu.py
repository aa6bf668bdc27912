"""Processes that hold an accelerator: a real character device stands in for a GPU's node."""

from __future__ import annotations

import os
import pathlib

import pytest

from patchkit.guard import Verdict
from tests.guard.processes import (
    NOTHING,
    WAIT,
    Engine,
    needs_root,
)

FULL = os.makedev(1, 7)


@pytest.fixture
def accelerator(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real character device (that of /dev/full) by another name."""
    node = str(tmp_path / "accelerator0")
    try:
        os.mknod(node, 0o20666, FULL)
    except PermissionError:
        pytest.skip("mknod needs root")
    monkeypatch.setenv("PATCHKIT_DEVICE_NODES", str(tmp_path / "accelerator*"))
    return node


def test_a_process_of_the_environment_that_holds_a_gpu_blocks_before_it_loads(
    engine: Engine, accelerator: str
):
    engine.start(f"held = open({accelerator!r}, 'rb'); {NOTHING}")
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.NOT_LOADED, True)
    assert [gpu.name for gpu in holder.gpus] == [accelerator]
    assert "may load it" in holder.evidence


@needs_root
@pytest.mark.parametrize("gone", [False, True], ids=["there", "removed"])
def test_a_node_is_known_by_its_number_in_another_root(
    engine: Engine, accelerator: str, tmp_path: pathlib.Path, gone: bool
):
    """A container's node is called by the path of its root here, and one that was removed has a remark."""
    node = tmp_path / "root/dev/accel0"
    node.parent.mkdir(parents=True)
    os.mknod(node, 0o20666, FULL)
    engine.start(f"held = open({str(node)!r}, 'rb'); null = open('/dev/null'); {NOTHING}")
    if gone:
        node.unlink()
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.NOT_LOADED, True)
    assert [gpu.name for gpu in holder.gpus] == [accelerator]


def test_another_device_is_no_accelerator(engine: Engine, accelerator: str):
    engine.start(f"held = open('/dev/zero', 'rb'); {NOTHING}")
    holder = engine.look()
    assert holder is not None
    assert (holder.gpus, holder.blocks) == ((), False)


def test_a_monitoring_agent_of_another_environment_does_not_block(engine: Engine, accelerator: str):
    engine.start(f"held = open({accelerator!r}, 'rb'); {WAIT}", root="/nowhere")
    holder = engine.look()
    assert holder is None or not holder.blocks
