"""Where in a process its CPython is: not always in the first file that is mapped, nor the same for all."""

from __future__ import annotations

import glob
import os
import pathlib
import subprocess

import pytest

from patchkit.guard import Verdict
from tests.guard.processes import INTERPRETERS, VICTIM, WAIT, Engine, needs_compiler

MAPPER = r"""
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int count, char **names)
{
    for (int at = 1; at < count; at++) {
        struct stat status;
        int file = open(names[at], O_RDONLY);
        if (fstat(file, &status) || mmap(0, status.st_size, PROT_READ, MAP_PRIVATE, file, 0) == MAP_FAILED)
            return 1;
    }
    puts("ready");
    fflush(stdout);
    pause();
}
"""


def _import_unseen(engine: Engine) -> str:
    """An import of which the command line and the environment variables say nothing."""
    root = engine.root.encode().hex()
    return f"import sys; sys.path.insert(0, bytes.fromhex({root!r}).decode()); import engine.models.victim; {WAIT}"


@needs_compiler
def test_a_process_that_maps_an_interpreter_as_data_hides_no_other(
    engine: Engine, python: str, tmp_path: pathlib.Path
):
    mapper = tmp_path / "mapper"
    subprocess.run(["cc", "-x", "c", "-", "-o", str(mapper)], input=MAPPER, text=True, check=True)
    first = engine.start(_import_unseen(engine), python=python, root="/nowhere")
    maps = pathlib.Path(f"/proc/{first.pid}/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in maps if "python" in line and "/" in line}
    engine.stop()
    engine.start("", python=str(mapper), arguments=tuple(names))
    engine.start(_import_unseen(engine), python=python, root="/nowhere")
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))


UNLIMITED = ("sh", "-c", 'ulimit -s unlimited && exec "$@"', "sh")


@needs_compiler
@pytest.mark.parametrize("way", ["usual", "an unlimited stack", "ld.so"])
def test_an_interpreter_that_is_not_the_first_in_the_maps_is_found(
    engine: Engine, tmp_path: pathlib.Path, way: str
):
    """With such a stack, or started by hand through ld.so, a program lies behind its libraries."""
    program, home = _static_interpreter(tmp_path)
    before = {"usual": (), "an unlimited stack": UNLIMITED, "ld.so": (_loader(),)}[way]
    engine.start(
        _import_unseen(engine), python=program, before=before, root="/nowhere", env={"PYTHONHOME": home}
    )
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))


def _static_interpreter(folder: pathlib.Path) -> tuple[str, str]:
    """A position-independent Python that has its library linked in, and its home."""
    source = folder / "main.c"
    source.write_text(
        "#include <Python.h>\nint main(int count, char **words) { return Py_BytesMain(count, words); }\n"
    )
    for python in map(os.path.realpath, INTERPRETERS):
        home = os.path.dirname(os.path.dirname(python))
        for library in glob.glob(f"{home}/lib/python3*/config*/libpython3*.a"):
            program, version = str(folder / "static-python"), library[:-2].rpartition("libpython")[2]
            command = ["cc", "-pie", "-fPIE", str(source), f"-I{home}/include/python{version}"]
            command += ["-Wl,--whole-archive", library, "-Wl,--no-whole-archive", "-Wl,--export-dynamic"]
            done = subprocess.run(
                [*command, "-lm", "-ldl", "-lpthread", "-lutil", "-o", program],
                capture_output=True,
                check=False,
            )
            if done.returncode == 0:
                return program, home
    raise AssertionError("no interpreter here has its static library")


def _loader() -> str:
    """The dynamic loader of this machine."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in maps if "/ld-" in line)
