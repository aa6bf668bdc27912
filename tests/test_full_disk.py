"""A session on a file system that its command fills up."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.support import Kit, snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a file system of its own")


@pytest.fixture
def small(site, tmp_path):
    """The tree on 4 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], check=True)
    shutil.copytree(site, disk / "site")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_the_command_filled_leaves_the_tree_marked_until_there_is_room(small, patches, tmp_path):
    tree = small / "site"
    before = snapshot(tree)
    kit = Kit([], env={"PATCHKIT_ROOT": str(tree), "PATCHKIT_PATCHES": str(patches)})
    fill = small / "fill"
    done = kit.spawn("run", "p1", "--", "sh", "-c", f"cat /dev/zero >{fill}; exit 0", code=125, cwd=tmp_path)
    assert "p1 could not be restored: No space left on device" in done.err
    assert "abandoned session" in kit.spawn("check", code=1).out
    kit.spawn("recover", code=6)
    assert "abandoned session" in kit.spawn("check", code=1).out
    fill.unlink()
    assert "restored p1" in kit.spawn("recover").out
    assert snapshot(tree) == before
