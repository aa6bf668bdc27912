"""Offsets are verified against each interpreter's own objects, through ctypes inside it."""

from __future__ import annotations

import json
import struct

import pytest

from patchkit.guard import layout as layouts
from patchkit.guard.cpython import Interpreter
from patchkit.guard.interpreters import Finder
from patchkit.guard.memory import ProcessMemory, UnreadableError
from patchkit.guard.procfs import maps
from tests.guard.debian import DebianPython
from tests.guard.processes import WAIT, Engine, needs_root

ASK = """
    import ctypes, json, sys
    pointer = ctypes.c_size_t.from_address
    runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    ctypes.pythonapi.PyInterpreterState_Get.restype = ctypes.c_void_p
    state = ctypes.pythonapi.PyInterpreterState_Get()
    code = (lambda: 0).__code__
    text, wide = "plain text", "text \\u00e9"
    def at(start, wanted, reach=1 << 13):
        return [offset for offset in range(0, reach, 8) if pointer(start + offset).value == wanted]
    def data(text, raw):
        return ctypes.string_at(id(text), 120).index(raw)
    print(json.dumps({
        "head": at(runtime, state), "modules": at(state, id(sys.modules)),
        "filename": at(id(code), id(code.co_filename), 400), "name": at(id(code), id(code.co_name), 400),
        "ascii": [data(text, b"plain text")], "compact": [data(wide, wide.encode("latin-1"))],
        "version": sys.hexversion,
    }).replace(" ", ""), flush=True)
    sys.stdin.read()
"""


def test_each_offset_is_the_one_that_the_interpreter_itself_has(engine: Engine, python: str):
    process = engine.start(ASK, python=python)
    truth = json.loads(process.said[0])  # type: ignore[attr-defined]
    memory = ProcessMemory(process.pid)
    symbols = Finder().find(memory, maps(process.pid))
    assert symbols is not None
    assert set(symbols) >= set(layouts.SYMBOLS) - {"Py_Version"}
    layout, version = layouts.find(memory, symbols)
    assert version in {0, truth["version"]}
    for name in ("head", "modules", "filename", "name", "ascii", "compact"):
        assert getattr(layout, name) in truth[name], name


@needs_root
def test_debians_newer_interpreters_describe_themselves(engine: Engine, debian_python: DebianPython):
    process = engine.start(WAIT, python=debian_python.path, before=debian_python.before, root="/")
    memory = ProcessMemory(process.pid)
    symbols = Finder().find(memory, maps(process.pid))
    assert symbols is not None
    interpreter = Interpreter(memory, symbols)
    assert interpreter.snapshot().version.startswith(debian_python.version)


class Described:
    """Memory with a runtime state at 4096 and a version at 64."""

    def __init__(
        self,
        version: int,
        *,
        cookie: bytes = layouts.COOKIE,
        free_threaded: int = 0,
        claimed: int | None = None,
    ) -> None:
        words = [0] * 96
        words[1] = version if claimed is None else claimed
        words[2] = free_threaded
        words[5], words[8], words[11], words[35], words[36] = 632, 7264, 7656, 112, 120
        words[45], words[57], words[68], words[69], words[70] = 8, 32, 32, 16, 40
        self.blocks = {4096: (cookie + struct.pack("<95Q", *words[1:])), 64: struct.pack("<I", version)}

    def read(self, address: int, size: int) -> bytes:
        block = self.blocks.get(address, b"")
        if len(block) < size:
            raise UnreadableError(14, "nothing there")
        return block[:size]


SYMBOLS = {"_PyRuntime": 4096, "Py_Version": 64}


def test_a_table_of_offsets_is_used_as_it_says():
    layout, version = layouts.find(Described(0x030D00F0), SYMBOLS)  # type: ignore[arg-type]
    assert (version, layout.head, layout.modules, layout.ascii, layout.compact) == (
        0x030D00F0,
        632,
        7656,
        40,
        56,
    )


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (Described(0x030F00F0), "3.15.0, whose layout is not verified"),
        (Described(0x040000F0), "4.0.0, whose layout is not verified"),
        (Described(0x030D00F0, free_threaded=1), "free-threaded CPython 3.13.0"),
        (Described(0x030D00F0, cookie=b"xdebugqy"), "without its table"),
        (Described(0x030D00F0, claimed=0x030D01F0), "without its table"),
    ],
)
def test_what_is_not_verified_is_refused_never_guessed(memory: Described, said: str):
    with pytest.raises(layouts.UnsupportedInterpreterError, match=said):
        layouts.find(memory, SYMBOLS)  # type: ignore[arg-type]


def test_the_unreadable_runtime_of_an_interpreter_is_refused():
    with pytest.raises(layouts.UnsupportedInterpreterError):
        layouts.find(Described(0x030B00F0), {"_PyRuntime": 1 << 20, "Py_Version": 64})  # type: ignore[arg-type]
