"""Which processes block a change: real processes, every interpreter that this machine has."""

from __future__ import annotations

import os
import pathlib
import subprocess
import textwrap
import time

import patchkit
from patchkit.guard import Verdict, inspect
from tests.guard.processes import (
    IMPORT,
    INTERPRETERS,
    NOTHING,
    VICTIM,
    WAIT,
    Engine,
    needs_compiler,
)


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


def test_a_package_is_found_by_its_init(engine: Engine, python: str):
    engine.files = ("engine/models/__init__.py",)
    engine.start(NOTHING, python=python)
    holder = engine.look()
    assert holder is not None
    assert holder.files == ("engine/models/__init__.py",)


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
