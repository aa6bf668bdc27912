from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess

import pytest

from patchkit.guard import elf, procfs
from patchkit.guard.memory import ProcessMemory
from tests.guard.processes import needs_compiler

SOURCE = """
#include <stdio.h>
int exported_data = 5;
int exported_function(void) { return exported_data; }
static int hidden_function(void) { return 7; }
"""


@pytest.fixture(params=["gnu", "sysv", "both"])
def library(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    source = tmp_path / "library.c"
    source.write_text(SOURCE)
    built = tmp_path / f"library-{request.param}.so"
    subprocess.run(
        ["cc", "-w", "-shared", "-fPIC", f"-Wl,--hash-style={request.param}", str(source), "-o", str(built)],
        check=True,
    )
    return built


@needs_compiler
def test_symbols_have_the_addresses_that_the_loader_gives_them(library: pathlib.Path):
    loaded = ctypes.CDLL(str(library))
    base = next(
        base for base, _, path in procfs.mapped_objects(procfs.maps(os.getpid())) if path == str(library)
    )
    names = ("exported_data", "exported_function", "hidden_function", "no_such_thing", "")
    found = elf.symbols(ProcessMemory(os.getpid()), base, names)
    assert found == {
        "exported_data": ctypes.addressof(ctypes.c_int.in_dll(loaded, "exported_data")),
        "exported_function": ctypes.cast(loaded.exported_function, ctypes.c_void_p).value,
    }


def test_what_is_no_elf_object_is_refused():
    data = ctypes.create_string_buffer(b"#!/bin/sh\n" + bytes(64))
    with pytest.raises(elf.NotElfError):
        elf.symbols(ProcessMemory(os.getpid()), ctypes.addressof(data), ["main"])


@needs_compiler
def test_every_object_of_this_process_can_be_asked():
    memory = ProcessMemory(os.getpid())
    for base, _, _ in procfs.mapped_objects(procfs.maps(os.getpid())):
        try:
            elf.symbols(memory, base, ["_PyRuntime", "malloc"])
        except (elf.NotElfError, OSError):
            continue
