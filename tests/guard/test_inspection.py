"""Which processes block a change: real processes, every interpreter that this machine has."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import patchkit
from patchkit.guard import Findings, Verdict, inspect, procfs
from tests.guard.processes import (
    IMPORT,
    INTERPRETERS,
    NOTHING,
    VICTIM,
    WAIT,
    Engine,
    needs_compiler,
    write_engine,
)

DROPPED = f"""
    import sys, engine.models
    from engine.models.victim import work
    del sys.modules["engine.models.victim"], engine.models.victim
    {WAIT}
"""


def test_there_are_interpreters_to_test_with():
    assert INTERPRETERS


def test_a_process_that_imported_the_file_blocks(engine: Engine, python: str):
    engine.start(IMPORT, python=python)
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED
    assert holder.blocks
    assert holder.files == (VICTIM,)
    assert engine.victim in holder.evidence


def test_a_process_of_the_tree_without_the_file_does_not_block(engine: Engine, python: str):
    engine.start(NOTHING, python=python)
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks, holder.files) == (Verdict.NOT_LOADED, False, ())


def test_a_process_of_another_environment_is_not_named(engine: Engine, python: str):
    engine.start(WAIT, python=python, root="/nowhere")
    assert engine.look() is None


def test_code_dropped_from_sys_modules_is_found_while_a_function_lives(engine: Engine, python: str):
    engine.start(DROPPED, python=python)
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))
    assert "sys.modules does not show it" in holder.evidence


def test_code_that_was_freed_does_not_accuse(engine: Engine, python: str):
    engine.start(
        f"""
        import gc, sys
        import engine.models.victim
        kept = engine.models.victim.__file__
        del sys.modules["engine.models.victim"], engine.models.victim
        gc.collect()
        {WAIT}
        """,
        python=python,
    )
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.NOT_LOADED


def test_a_process_that_merely_mentions_the_path_is_not_accused(engine: Engine, python: str):
    engine.start(
        f"""
        import os, linecache
        import engine
        root = os.path.dirname(os.path.dirname(engine.__file__))
        names = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
        lines = [linecache.getlines(name) for name in names if name.endswith(".py")]
        {WAIT}
        """,
        python=python,
    )
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.NOT_LOADED


def test_a_package_is_found_by_its_init(engine: Engine, python: str):
    engine.files = ("engine/models/__init__.py",)
    engine.start(NOTHING, python=python)
    holder = engine.look()
    assert holder is not None
    assert holder.files == ("engine/models/__init__.py",)


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


def test_a_forked_child_and_a_forkserver_child_are_found(engine: Engine, python: str):
    engine.start(
        """
        import multiprocessing, os, sys, time
        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["engine.models.victim"])
            child = context.Process(target=time.sleep, args=(600,))
            child.start()
            time.sleep(0.5)
            print(child.pid, flush=True)
            sys.stdin.read()
        """,
        python=python,
    )
    child = int(engine.processes[-1].said[0])  # type: ignore[attr-defined]
    try:
        holder = engine.look(child)
        assert holder is not None
        assert holder.verdict is Verdict.LOADED
        assert (engine.look() or holder).verdict is not Verdict.CANNOT_TELL
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_gibibytes_of_other_memory_do_not_hide_it(engine: Engine):
    engine.start(f"data = bytearray(b'x') * (2 << 30); {IMPORT}")
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_the_evidence_says_what_was_skipped_and_thorough_searches_it(engine: Engine):
    """A code object whose path lies in a mapping over 64 MiB is found only by a thorough search."""
    engine.start(f"data = bytearray(b'x') * (200 << 20); {NOTHING}")
    holder = engine.look()
    assert holder is not None
    assert "over 64 MiB" in holder.evidence
    assert "--thorough" in holder.evidence
    thorough = engine.look(thorough=True)
    assert thorough is not None
    assert thorough.verdict is Verdict.NOT_LOADED
    assert "skipped" not in thorough.evidence


def test_five_thousand_modules(engine: Engine, python: str):
    engine.start(
        f"""
        import sys, types, engine.models.victim
        for number in range(5000):
            name = f"engine.made{{number}}"
            sys.modules[name] = module = types.ModuleType(name)
            module.__file__ = f"/somewhere/made{{number}}.py"
        {WAIT}
        """,
        python=python,
    )
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED
    assert int(holder.evidence.split(" modules read")[0].rsplit(" ", 1)[1]) > 5000


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


CHANGING = """
    import sys, threading, types
    {first}
    def churn():
        number = 0
        while True:
            number += 1
            name = f"made{{number % 5000}}"
            module = types.ModuleType(name)
            module.__file__ = "/somewhere/" + name
            sys.modules[name] = module
            sys.modules.pop(f"made{{(number * 7) % 5000}}", None)
    threading.Thread(target=churn, daemon=True).start()
    {wait}
"""


def test_a_process_that_changes_sys_modules_all_the_time_is_found(engine: Engine, python: str):
    engine.start(CHANGING.format(first="import engine.models.victim", wait=WAIT), python=python)
    for _ in range(3):
        holder = engine.look()
        assert holder is not None
        assert holder.verdict is Verdict.LOADED


def test_stopping_to_read_settles_a_process_that_changes_all_the_time(engine: Engine, python: str):
    process = engine.start(CHANGING.format(first="import engine.models", wait=WAIT), python=python)
    for _ in range(2):
        holder = engine.look(stop_to_read=True)
        assert holder is not None
        assert holder.verdict is Verdict.NOT_LOADED
    status = procfs.stat(process.pid)
    assert status is not None
    assert status.state not in "Tt"


def test_processes_that_exec_and_exit_while_they_are_read_do_no_harm(engine: Engine):
    code = "import os, sys, engine; os.execv(sys.executable, [sys.executable, '-c', 'import engine'])"
    stop = time.monotonic() + 4
    running: list[subprocess.Popen[bytes]] = []
    while time.monotonic() < stop:
        running = [process for process in running if process.poll() is None]
        while len(running) < 4:
            running.append(subprocess.Popen([sys.executable, "-c", code], env={"PYTHONPATH": engine.root}))
        found = inspect(engine.root, engine.files)
        assert isinstance(found, Findings)
        assert not [holder for holder in found.holders if holder.verdict is Verdict.LOADED]
    for process in running:
        process.wait()


def test_a_zombie_holds_nothing(engine: Engine):
    process = engine.start(IMPORT)
    os.kill(process.pid, signal.SIGKILL)
    while (known := procfs.stat(process.pid)) is not None and not known.ended:
        time.sleep(0.01)
    assert engine.look() is None


@needs_compiler
def test_an_interpreter_embedded_in_another_program_is_read(engine: Engine, tmp_path: pathlib.Path):
    program = build_embedding(tmp_path)
    engine.start("", python=program, arguments=(IMPORT,))
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED
    assert "CPython" in holder.evidence


def build_embedding(folder: pathlib.Path) -> str:
    """A C program that links a shared libpython and runs its argument."""
    for python in INTERPRETERS:
        config = f"{os.path.realpath(python)}-config"
        if not os.path.exists(config):
            continue
        flags = subprocess.run(
            [config, "--cflags", "--ldflags", "--embed"], capture_output=True, text=True, check=False
        )
        if flags.returncode:
            continue
        source = folder / "embedding.c"
        source.write_text(
            "#include <Python.h>\n"
            "int main(int argc, char **argv) { Py_Initialize(); return PyRun_SimpleString(argv[1]); }\n"
        )
        program = folder / "embedding"
        libraries = os.path.realpath(f"{os.path.dirname(os.path.realpath(python))}/../lib")
        done = subprocess.run(
            ["cc", str(source), "-o", str(program), *flags.stdout.split(), f"-L{libraries}",
             f"-Wl,-rpath,{libraries}", "-Wl,--export-dynamic"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return str(program)
    raise AssertionError("no interpreter here has its headers and library")


def test_an_extension_module_is_held_by_whoever_maps_it(engine: Engine, python: str, tmp_path: pathlib.Path):
    found = subprocess.run(
        [python, "-c", "import _struct; print(getattr(_struct, '__file__', ''))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not found:
        found = subprocess.run(
            [python, "-c", "import _ctypes; print(_ctypes.__file__)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    root, name = os.path.split(found)
    engine.start(f"import _struct, _ctypes; {WAIT}", python=python)
    findings = inspect(root, [name])
    holder = next(one for one in findings.holders if one.pid == engine.processes[-1].pid)
    assert holder.verdict is Verdict.LOADED
    assert "maps" in holder.evidence


SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(patchkit.__file__)))


def test_the_calling_process_is_a_holder_only_if_it_loaded_the_file(engine: Engine):
    code = f"""
        import os, sys
        sys.path.insert(0, {SOURCE!r})
        from patchkit.guard import inspect
        root = {engine.root!r}
        if len(sys.argv) > 1:
            import engine.models.victim
        print(len([one for one in inspect(root, [{VICTIM!r}]).holders if one.pid == os.getpid()]), flush=True)
        sys.stdin.read()
    """
    assert engine.start(code).said == ["0"]  # type: ignore[attr-defined]
    loaded = engine.start("", arguments=("-c", textwrap.dedent(code), "load"))
    assert loaded.said == ["1"]  # type: ignore[attr-defined]


def test_excluded_processes_are_left_out(engine: Engine):
    process = engine.start(IMPORT)
    assert engine.look(exclude=[process.pid]) is None


def test_nothing_to_change_needs_no_look(engine: Engine):
    engine.start(IMPORT)
    assert inspect(engine.root, ()).holders == ()


def test_blockers_come_first_and_are_json(engine: Engine):
    quiet = engine.start(NOTHING)
    loaded = engine.start(IMPORT)
    holders = [
        holder
        for holder in inspect(engine.root, engine.files).holders
        if holder.pid in {quiet.pid, loaded.pid}
    ]
    assert [holder.pid for holder in holders] == [loaded.pid, quiet.pid]
    entry = holders[0].to_json()
    assert entry["verdict"] == "loaded"
    assert entry["files"] == [VICTIM]
    assert abs(entry["started"] - time.time()) < 60


# -- accelerators ------------------------------------------------------------------------------------------


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
