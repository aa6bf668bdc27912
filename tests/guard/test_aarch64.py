"""CPython for aarch64, emulated by qemu: its objects lie in memory just as they do on a real machine."""

from __future__ import annotations

from patchkit.guard import Verdict, inspect, layout as layouts, procfs
from patchkit.guard.interpreters import Finder
from patchkit.guard.memory import ProcessMemory
from tests.guard.debian import DebianPython
from tests.guard.processes import DROPPED, IMPORT, NOTHING, VICTIM, WAIT, Engine

MENTION = f"""
    import engine
    name = engine.__file__.replace("__init__.py", "models/victim.py")
    text = open(name).read()
    {WAIT}
"""
# The words of the interpreter's own objects at which what we look for is found.
ASK = """
    import builtins, sys
    code = (lambda: 0).__code__
    print(id(sys.modules), id(code), id(code.co_filename), id(code.co_name), flush=True)
    sys.stdin.read()
"""


def test_the_guard_reads_it(engine: Engine, aarch64_python: DebianPython):
    common = {"python": aarch64_python.path, "before": aarch64_python.before}
    loaded, dropped, quiet, mention = (
        engine.start(code, **common).pid for code in (IMPORT, DROPPED, NOTHING, MENTION)
    )
    holders = {holder.pid: holder for holder in inspect(engine.root, engine.files).holders}
    assert holders[loaded].verdict is Verdict.LOADED
    assert holders[loaded].files == (VICTIM,)
    assert f"sys.modules has {engine.victim} (CPython {aarch64_python.version}" in holders[loaded].evidence
    assert holders[dropped].verdict is Verdict.LOADED
    assert "sys.modules does not show it" in holders[dropped].evidence
    assert holders[quiet].verdict is Verdict.NOT_LOADED
    assert holders[mention].verdict is Verdict.NOT_LOADED


def test_each_offset_is_the_one_that_it_has(engine: Engine, aarch64_python: DebianPython):
    process = engine.start(ASK, python=aarch64_python.path, before=aarch64_python.before)
    modules, code, filename, name = map(int, process.said)  # type: ignore[attr-defined]
    memory = ProcessMemory(process.pid)
    symbols = Finder().find(memory, procfs.maps(process.pid))
    assert symbols is not None
    layout, _ = layouts.find(memory, symbols)
    state = memory.word(symbols["_PyRuntime"] + layout.head)
    assert memory.word(state + layout.modules) == modules
    assert memory.word(code + layout.filename) == filename
    assert memory.word(code + layout.name) == name
    assert memory.word(code + 8) == symbols["PyCode_Type"]


def test_it_is_a_program_for_aarch64(aarch64_python: DebianPython):
    with open(aarch64_python.path, "rb") as file:
        assert file.read(20)[18:20] == b"\xb7\x00"  # EM_AARCH64
