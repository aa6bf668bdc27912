from __future__ import annotations

import os

import pytest

from patchkit.guard import Verdict
from patchkit.guard.cpython import Interpreter, Snapshot, TornError
from patchkit.guard.interpreters import Finder
from patchkit.guard.memory import ProcessMemory
from patchkit.guard.procfs import maps
from tests.guard.processes import WAIT, Engine


def read(engine: Engine) -> Snapshot:
    pid = engine.processes[-1].pid
    memory = ProcessMemory(pid)
    symbols = Finder().find(memory, maps(pid))
    assert symbols is not None
    return Interpreter(memory, symbols).snapshot()


def test_the_snapshot_is_what_the_process_says_of_itself(engine: Engine, python: str):
    engine.start(
        """
        import sys, json, engine.models.victim, email.mime.text, collections.abc
        files = {m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
        print(len(sys.modules), sys.prefix, *sorted(files), flush=True)
        sys.stdin.read()
        """,
        python=python,
    )
    count, prefix, *files = engine.processes[-1].said  # type: ignore[attr-defined]
    found = read(engine)
    assert found.modules == int(count)
    assert found.prefix == prefix
    assert found.complete
    assert found.looks == 1
    assert set(files) <= found.paths
    assert engine.root in found.search_path


def test_what_is_no_module_is_passed_over(engine: Engine, python: str):
    engine.start(
        f"""
        import sys, types
        class Lazy:
            __file__ = "/lazy/class"
            def __init__(self): self.__dict__.update({{5: "a number", "__file__": "/lazy/instance", None: 1}})
        class Module(types.ModuleType): pass
        odd = types.ModuleType("odd"); odd.__file__ = b"bytes"
        pathlike = types.ModuleType("pathlike"); pathlike.__file__ = 5
        derived = Module("derived"); derived.__file__ = "/derived"
        late = types.ModuleType("late")
        for number in range(200): setattr(late, f"name{{number}}", number)
        late.__file__ = "/late"
        computed = types.ModuleType("computed")
        computed.__dict__["__fi" + str().join(["le", "__"])] = "/computed"
        wide = types.ModuleType("wide"); wide.__file__ = "/wide/\\u4e2d\\U0001f40d"
        long = types.ModuleType("long"); long.__file__ = "/long/" + "x" * 1000
        empty = types.ModuleType("empty"); empty.__dict__.clear()
        things = dict(a=None, b=5, c=Lazy(), d=Lazy, e=odd, f=pathlike, g=derived, h=late, i=computed,
                      j=wide, k=long, l=empty, m=object(), n="text", o={{"__file__": "/dict"}}, p=[1])
        sys.modules.update(things)
        sys.modules[7] = derived
        {WAIT}
        """,
        python=python,
    )
    found = read(engine)
    assert found.complete
    assert {"/derived", "/late", "/computed", "/wide/中🐍", "/long/" + "x" * 1000} <= found.paths
    assert "/lazy/class" not in found.paths


def test_another_dict_bound_to_sys_modules_is_read_too(engine: Engine, python: str):
    engine.start(
        f"""
        import sys, types
        sys.modules = dict(sys.modules)
        module = types.ModuleType("extra"); module.__file__ = "/extra"
        sys.modules["extra"] = module
        {WAIT}
        """,
        python=python,
    )
    assert "/extra" in read(engine).paths


def test_modules_of_a_subinterpreter_are_read(engine: Engine, python: str):
    engine.start(
        """
        import os, sys
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        sub = interpreters.create()
        run = getattr(interpreters, "exec", None) or interpreters.run_string
        run(sub, "import sys; sys.path.insert(0, %r); import engine.models.victim" % os.environ["PYTHONPATH"])
        print("ready", flush=True)
        sys.stdin.read()
        """,
        python=python,
    )
    assert engine.victim in read(engine).paths
    holder = engine.look()
    assert holder is not None
    assert holder.blocks


def test_a_very_large_sys_modules(engine: Engine, python: str):
    engine.start(
        f"""
        import sys, types
        for number in range(70_000):
            sys.modules[f"m{{number}}"] = types
        import engine.models.victim
        {WAIT}
        """,
        python=python,
    )
    found = read(engine)
    assert engine.victim in found.paths
    assert found.modules > 70_000


@pytest.mark.parametrize("garbage", [0x01, 0x51, 0xD1, 0xFF])
def test_what_is_no_table_any_more_is_a_hole_and_no_failure(engine: Engine, python: str, garbage: int):
    """As when a module's dict is freed, and its place taken by something else, while it is read."""
    engine.start(
        f"""
        import ctypes, gc, sys, types, engine
        gc.disable()
        sys.modules["torn"] = torn = types.ModuleType("torn")
        keys = ctypes.c_size_t.from_address(id(torn.__dict__) + 32).value
        ctypes.memset(keys + 8, {garbage}, 24)
        {WAIT}
        """,
        python=python,
    )
    assert not read(engine).complete
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.CANNOT_TELL, True)


def test_enough_ends_the_reading(engine: Engine):
    engine.start(WAIT)
    pid = engine.processes[-1].pid
    memory = ProcessMemory(pid)
    symbols = Finder().find(memory, maps(pid))
    assert symbols is not None
    asked: list[int] = []
    Interpreter(memory, symbols).snapshot(lambda paths: bool(asked.append(len(paths))) or True)
    assert len(asked) == 1


def test_another_layout_does_not_pass_for_a_reading(engine: Engine):
    """The dict that the table leads to must be sys.modules itself."""
    engine.start(WAIT)
    pid = engine.processes[-1].pid
    memory = ProcessMemory(pid)
    symbols = Finder().find(memory, maps(pid))
    assert symbols is not None
    import dataclasses

    for shift in (-16, -8, 8, 16, 24, 800, 1600):
        interpreter = Interpreter(memory, symbols)
        interpreter.layout = dataclasses.replace(
            interpreter.layout, modules=interpreter.layout.modules + shift
        )
        with pytest.raises((TornError, OSError)):
            interpreter.snapshot()
    interpreter = Interpreter(memory, symbols)
    interpreter.hexversion += 1 << 16
    with pytest.raises(TornError):
        interpreter.snapshot()


def test_this_process_can_read_itself():
    memory = ProcessMemory(os.getpid())
    symbols = Finder().find(memory, maps(os.getpid()))
    assert symbols is not None
    assert __file__ in Interpreter(memory, symbols).snapshot().paths
