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
)


@pytest.fixture
def accelerator(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real character device (that of /dev/null) by another name."""
    node = str(tmp_path / "accelerator0")
    try:
        os.mknod(node, 0o20666, os.makedev(1, 3))
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


def test_a_monitoring_agent_of_another_environment_does_not_block(engine: Engine, accelerator: str):
    engine.start(f"held = open({accelerator!r}, 'rb'); {WAIT}", root="/nowhere")
    holder = engine.look()
    assert holder is None or not holder.blocks
