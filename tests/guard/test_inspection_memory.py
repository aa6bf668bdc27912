"""The second witness: code that ``sys.modules`` does not show, and memory that only mentions the path."""

from __future__ import annotations

import pathlib
import subprocess
import textwrap

import pytest

from patchkit.guard import Verdict
from tests.guard.processes import (
    DROPPED,
    IMPORT,
    NOTHING,
    VICTIM,
    WAIT,
    Engine,
    needs_compiler,
)


def test_code_dropped_from_sys_modules_is_found_while_a_function_lives(engine: Engine, python: str):
    engine.start(DROPPED, python=python)
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,))
    assert "sys.modules does not show it" in holder.evidence


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(DROPPED, Verdict.LOADED), (NOTHING, Verdict.NOT_LOADED)],
    ids=["dropped", "nothing"],
)
def test_however_often_a_process_mentions_the_path_it_is_told_right(
    engine: Engine, python: str, code: str, verdict: Verdict
):
    """Strings of their own, made before the code: a bound on how many are looked at would leave it out."""
    made = f"kept = [bytes({engine.victim!r}, 'utf-8').decode() for _ in range(1000)]"
    engine.start(f"{made}\n{textwrap.dedent(code)}", python=python)
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is verdict


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


def test_two_gibibytes_of_other_memory_do_not_hide_it(engine: Engine):
    engine.start(f"data = bytearray(b'x') * (2 << 30); {IMPORT}")
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_the_evidence_says_what_was_skipped_and_thorough_searches_it(engine: Engine):
    engine.start(f"data = bytearray(b'x') * (200 << 20); {NOTHING}")
    holder = engine.look()
    assert holder is not None
    assert "over 64 MiB" in holder.evidence
    assert "--thorough" in holder.evidence
    thorough = engine.look(thorough=True)
    assert thorough is not None
    assert thorough.verdict is Verdict.NOT_LOADED
    assert "skipped" not in thorough.evidence


# An allocator that takes everything from one large mapping, as those made for large servers do.
ALLOCATOR = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

static char *start, *next;

void *malloc(size_t size)
{
    if (!start)
        start = next = mmap(0, 1ul << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t *block = (size_t *)__atomic_fetch_add(&next, ((size + 15) & ~15ul) + 16, __ATOMIC_SEQ_CST);
    block[1] = size;
    return block + 2;
}

void free(void *block) { (void)block; }
void *calloc(size_t count, size_t size) { return malloc(count * size); /* fresh pages are zeros */ }

void *realloc(void *block, size_t size)
{
    void *fresh = malloc(size);
    if (block) {
        size_t before = ((size_t *)block)[-1];
        memcpy(fresh, block, before < size ? before : size);
    }
    return fresh;
}
"""


@needs_compiler
def test_thorough_finds_code_in_a_large_mapping(engine: Engine, python: str, tmp_path: pathlib.Path):
    library = tmp_path / "allocator.so"
    command = ["cc", "-O1", "-fno-builtin", "-Werror", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=ALLOCATOR, text=True, check=True)
    engine.start(DROPPED, python=python, env={"LD_PRELOAD": str(library), "PYTHONMALLOC": "malloc"})
    usual, thorough = engine.look(), engine.look(thorough=True)
    assert usual is not None
    assert thorough is not None
    assert usual.verdict is Verdict.NOT_LOADED
    assert "1 mapping over 64 MiB (1024 MiB) was skipped: --thorough searches it" in usual.evidence
    assert (thorough.verdict, thorough.files) == (Verdict.LOADED, (VICTIM,))
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
