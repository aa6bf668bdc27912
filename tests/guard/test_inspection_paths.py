"""One file has many paths: links, names of any kind, files that were replaced or are gone."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest

from patchkit.guard import Verdict, inspect
from tests.guard.processes import (
    DROPPED,
    IMPORT,
    NOTHING,
    VICTIM,
    WAIT,
    Engine,
    write_engine,
)


def test_a_module_run_with_dash_m_is_found(engine: Engine, python: str):
    pathlib.Path(engine.victim).write_text(WAIT)
    engine.start("", python=python, arguments=("-m", "engine.models.victim"))
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_script_run_by_its_relative_path_is_found(engine: Engine, python: str):
    pathlib.Path(engine.victim).write_text(WAIT)
    engine.start("", python=python, arguments=("models/victim.py",), cwd=f"{engine.root}/engine")
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_relative_file_of_a_process_that_left_its_folder_cannot_be_told(engine: Engine):
    engine.start(
        f"""
        import os, types, sys
        module = types.ModuleType("victim")
        module.__file__ = "engine/models/victim.py"
        sys.modules["victim"] = module
        os.chdir("/")
        {WAIT}
        """
    )
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.CANNOT_TELL, True)


def test_a_module_without_its_file_is_found_by_its_bytecode(engine: Engine, python: str):
    engine.start(f"import engine.models.victim as v; del v.__file__; v.work = None; {WAIT}", python=python)
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_the_server_still_runs_old_code_after_the_file_was_replaced(engine: Engine, python: str):
    engine.start(IMPORT, python=python)
    other = f"{engine.victim}.new"
    pathlib.Path(other).write_text("def work():\n    return 2\n")
    os.replace(other, engine.victim)
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_removed_file_is_still_known(engine: Engine):
    engine.start(IMPORT)
    os.unlink(engine.victim)
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_removed_folder_is_still_known(engine: Engine):
    engine.start(IMPORT)
    shutil.rmtree(f"{engine.root}/engine")
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_tree_that_was_renamed_since_may_be_the_one(engine: Engine, tmp_path: pathlib.Path):
    # A package of its own: its processes may be those of any tree that has the like, in other tests too.
    os.rename(f"{engine.root}/engine", f"{engine.root}/wanderer")
    engine.files = (VICTIM.replace("engine", "wanderer"),)
    processes = [engine.start(IMPORT.replace("engine", "wanderer")) for _ in range(2)]
    quiet = engine.start(NOTHING.replace("engine", "wanderer"))
    os.rename(engine.root, tmp_path / "live")
    engine.root = str(tmp_path / "live")
    for process in processes:
        holder = engine.look(process.pid)
        assert holder is not None
        assert (holder.verdict, holder.blocks) == (Verdict.CANNOT_TELL, True)
        assert "of a folder that was moved or removed since" in holder.evidence
    assert engine.look(quiet.pid) is None


def test_another_tree_that_is_still_there_is_not_the_one(engine: Engine, tmp_path: pathlib.Path):
    shutil.copytree(engine.root, tmp_path / "other")
    engine.start(IMPORT, root=str(tmp_path / "other"))
    os.unlink(tmp_path / "other" / VICTIM)
    assert engine.look() is None


def test_a_file_that_does_not_exist_yet_is_held_by_nobody(engine: Engine):
    engine.files = ("engine/models/added.py",)
    engine.start(IMPORT)
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.NOT_LOADED, False)


def test_a_tree_reached_through_a_link_is_the_same_tree(engine: Engine, tmp_path: pathlib.Path):
    (tmp_path / "alias").symlink_to(engine.root)
    engine.start(IMPORT, root=str(tmp_path / "alias"))
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_module_that_is_a_link_to_the_file_has_loaded_it(engine: Engine, tmp_path: pathlib.Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/copy.py").symlink_to(engine.victim)
    engine.start(f"import copy; assert copy.work; {WAIT}", root=str(tmp_path / "other"))
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_another_environments_hard_link_to_the_same_bytes_is_another_file(
    engine: Engine, tmp_path: pathlib.Path
):
    """uv links one inode into many environments; changing ours breaks the link."""
    other = tmp_path / "other"
    shutil.copytree(engine.root, other, copy_function=os.link)
    assert os.stat(other / VICTIM).st_ino == os.stat(engine.victim).st_ino
    engine.start(IMPORT, root=str(other))
    assert engine.look() is None


@pytest.mark.parametrize(
    "name", ["with space", "h\xf6f", "\u4e2d\u6587", "\U0001f40d", "tab\t", b"undecodable\xff"]
)
def test_any_name_of_a_root(tmp_path: pathlib.Path, python: str, name: str | bytes):
    """All characters of a path have the width of its widest one, in memory."""
    root = tmp_path / os.fsdecode(name)
    root.mkdir()
    write_engine(root)
    engine = Engine(str(root))
    utf8 = {"PYTHONUTF8": "1"}
    try:
        loaded = engine.start(IMPORT, python=python, env=utf8)
        dropped = engine.start(DROPPED, python=python, env=utf8)
        quiet = engine.start(NOTHING, python=python, env=utf8)
        verdicts = {holder.pid: holder.verdict for holder in inspect(engine.root, engine.files).holders}
    finally:
        engine.stop()
    assert verdicts == {
        loaded.pid: Verdict.LOADED,
        dropped.pid: Verdict.LOADED,
        quiet.pid: Verdict.NOT_LOADED,
    }


def test_a_file_whose_own_name_is_not_ascii(engine: Engine, python: str):
    engine.files = ("engine/mod\xe8le.py", "engine/\u6a21.py")
    for name in engine.files:
        pathlib.Path(engine.root, name).write_text("def work(): pass\n")
    engine.start(
        f"""
        import importlib, sys, engine
        kept = [importlib.import_module(name).work for name in ("engine.mod\xe8le", "engine.\u6a21")]
        for name in list(sys.modules):
            if name.startswith("engine."):
                del sys.modules[name], engine.__dict__[name.partition(".")[2]]
        {WAIT}
        """,
        python=python,
        env={"PYTHONUTF8": "1"},
    )
    holder = engine.look()
    assert holder is not None
    assert holder.files == engine.files
