"""Paths that mean something to one process only: names under ``/proc/self``, and roots of other namespaces."""

from __future__ import annotations

import os
import pathlib
import shlex
import sys

import pytest

from patchkit.guard import Verdict, inspection
from tests.guard.processes import IMPORT, NOTHING, VICTIM, WAIT, Engine, needs_root

NAMES = {
    "/proc/self/cwd": "engine.models.victim",
    "/proc/self/cwd/link": "engine.models.victim",
    "/proc/thread-self/cwd/engine/..": "engine.models.victim",
    "/proc/self/root{root}": "engine.models.victim",
    "/proc/self/fd/9": "engine.models.victim",
    "/dev/fd/9": "engine.models.victim",
}


@pytest.mark.parametrize(
    ("path", "dropped"),
    [
        *((path, dropped) for path in NAMES for dropped in (False, True)),
        ("/proc/self/cwd/engine/models", False),
    ],
)
def test_a_name_that_means_another_folder_to_each_process(engine: Engine, path: str, dropped: bool):
    os.symlink(engine.root, f"{engine.root}/link")
    module = NAMES.get(path, "victim")
    opened = f"import os, sys; os.dup2(os.open({{!r}}, os.O_RDONLY), 9); sys.path.insert(0, {path!r}); "
    drop = f"sys.modules.pop({module!r}); " if dropped else ""
    load = f"import {module}; work = sys.modules[{module!r}].work; {drop}del {module.partition('.')[0]}; "
    opened = opened.replace("{root}", engine.root)
    other = engine.start(opened.format("/") + WAIT, root="/nowhere", cwd="/")
    engine.start(opened.format(engine.root) + load + WAIT, root="/nowhere", cwd=engine.root)
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))
    other_holder = engine.look(other.pid)
    # The name of a whole path is the same folder for both: one may load the file, and has not.
    assert other_holder is None or other_holder.verdict is Verdict.NOT_LOADED


def test_a_script_that_is_run_by_its_descriptor(engine: Engine):
    pathlib.Path(engine.victim).write_text(WAIT)
    with open(engine.victim, "rb") as file:
        name = f"/dev/fd/{file.fileno()}"
        engine.start("", arguments=(name,), root="/nowhere", pass_fds=(file.fileno(),))
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))


@needs_root
@pytest.mark.parametrize("name", ["/proc/self/cwd", "/proc/self/fd/9", "."])
def test_such_a_name_in_another_root(engine: Engine, tmp_path: pathlib.Path, name: str):
    """The kernel tells us where it leads by a path that leads nowhere in there."""
    base = tmp_path / "root"
    code = f"import os, sys; os.dup2(os.open('.', 0), 9); sys.path.insert(0, {name!r}); {IMPORT}"
    python = os.path.realpath(sys.executable)
    inner = f"cd /tree && exec {python} -c {shlex.quote(code)}"
    parts = [
        one for one in ("usr", "lib", "lib64", "proc", "root", "opt", "home") if os.path.isdir(f"/{one}")
    ]
    script = " && ".join(
        [
            *(f"mkdir -p {base}/{one} && mount --rbind /{one} {base}/{one}" for one in parts),
            f"mkdir {base}/tree && mount --bind {engine.root} {base}/tree",
            f"exec chroot {base} sh -c {shlex.quote(inner)}",
        ]
    )
    process = engine.start("", python="unshare", arguments=("--mount", "sh", "-c", script), root="/nowhere")
    holder = engine.look(process.pid)
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))


@needs_root
def test_a_container_whose_first_process_ends_during_the_look(
    engine: Engine, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Its other processes still call the file by a path that only their root has."""
    inside = tmp_path / "inside"
    inside.mkdir()
    script = f"mount --bind {engine.root} {inside} && exec {sys.executable} -c {shlex.quote(NOTHING)}"
    arguments = ("--mount", "sh", "-c", script)
    first = engine.start("", python="unshare", arguments=arguments, root=str(inside))
    enter = ("nsenter", "--mount", "--target", str(first.pid))
    second = engine.start(IMPORT, before=enter, root=str(inside))
    assert not (inside / "engine").exists()
    look = inspection.Inspection._look
    seen = []

    def end(self, pid, maps):
        answer = look(self, pid, maps)
        seen.append(pid)
        if pid == first.pid:
            first.kill()
            first.wait()
        return answer

    monkeypatch.setattr(inspection.Inspection, "_look", end)
    before = len(os.listdir("/proc/self/fd"))
    holder = engine.look(second.pid)
    assert seen.index(first.pid) < seen.index(second.pid)
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))
    assert len(os.listdir("/proc/self/fd")) == before
