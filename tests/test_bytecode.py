"""Old bytecode cannot run: not of the same second and size, not unchecked, not of another tag or level."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from patchkit import bytecode
from tests import support
from tests.support import Kit, Venv

CORE = "demopkg/core.py"
ASK = "import demopkg.core as c; print(c.answer())"

INTERPRETERS = [
    str(path)
    for path in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python3"))
    if path.parts[-3].split(".")[1] in ("9", "10", "11", "12", "13")
]


@pytest.fixture(params=INTERPRETERS or [None], ids=lambda path: path.split("/")[-3] if path else "own")
def any_venv(request, tmp_path, wheels):
    """An environment of each interpreter that is there."""
    made = Venv.create(tmp_path / "venv", *([request.param] if request.param else []))
    made.uv("install", wheels["1.0"])
    return made


def kit_of(venv, patches, **env):
    return Kit(["--python", str(venv.python), "--patches", str(patches)], env=env)


@pytest.mark.parametrize("flags", [(), ("-O",), ("-OO",)], ids=["level 0", "-O", "-OO"])
def test_each_interpreter_runs_the_new_code_at_once(any_venv, patches, flags):
    """Installed, imported, patched and restored within a second, and the two sources are of one size."""
    kit = kit_of(any_venv, patches)
    assert any_venv.run(ASK, *flags) == "AAA"
    kit("apply", "p1")
    assert any_venv.run(ASK, *flags) == "BBB"
    kit("restore")
    assert any_venv.run(ASK, *flags) == "AAA"
    kit("apply", "p1")
    assert any_venv.run(ASK, *flags) == "BBB"


def test_unchecked_hash_bytecode_is_removed_for_every_level(any_venv, patches):
    kit = kit_of(any_venv, patches)
    compile_all = (
        "import compileall, py_compile\n"
        "for level in 0, 1, 2:\n"
        f"    compileall.compile_dir({str(any_venv.site)!r}, quiet=2, force=True, optimize=level,\n"
        "        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)\n"
    )
    for command, answer in ((("apply", "p1"), "BBB"), (("restore",), "AAA")):
        any_venv.run(compile_all)
        stale = any_venv.run(ASK)
        kit(*command)
        for flags in ((), ("-O",), ("-OO",)):
            assert any_venv.run(ASK, *flags) == answer, (command, flags, stale)


def test_the_bytecode_of_other_modules_stays(venv, kit):
    venv.run("import demopkg.core, demopkg.util")
    kit("apply", "p1")
    names = {path.name.split(".")[0] for path in (venv.site / "demopkg/__pycache__").iterdir()}
    assert "util" in names
    assert "core" not in names


def test_a_cache_prefix_that_is_set_for_us_is_cleaned_too(venv, patches, tmp_path, monkeypatch):
    prefix = str(tmp_path / "cache")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", prefix)
    unchecked = (
        "import py_compile, demopkg.core as c\n"
        "py_compile.compile(c.__file__, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    venv.run(unchecked, PYTHONPYCACHEPREFIX=prefix)
    kit = kit_of(venv, patches)
    kit("apply", "p1")
    assert venv.run(ASK, PYTHONPYCACHEPREFIX=prefix) == "BBB"
    venv.run(unchecked, PYTHONPYCACHEPREFIX=prefix)
    kit("restore")
    assert venv.run(ASK, PYTHONPYCACHEPREFIX=prefix) == "AAA"


def test_a_cache_prefix_that_we_do_not_know_cannot_serve_old_code(venv, kit, tmp_path):
    """No file there is removed, and still no two versions of the source share a second."""
    prefix = str(tmp_path / "cache")
    for command, answer in ((("apply", "p1"), "BBB"), (("restore",), "AAA"), (("apply", "p1"), "BBB")):
        venv.run(ASK, PYTHONPYCACHEPREFIX=prefix)
        kit(*command)
        assert venv.run(ASK, PYTHONPYCACHEPREFIX=prefix) == answer


def test_an_update_within_a_second_runs_at_once(venv, kit, patches, tmp_path):
    prefix = str(tmp_path / "cache")
    kit("apply", "p1")
    assert venv.run(ASK, PYTHONPYCACHEPREFIX=prefix) == "BBB"
    newer = {CORE: support.P1[CORE].replace(b"BBB", b"ZZZ")}
    support.write_patch(patches, "p1", support.DEMO["1.0"], newer)
    kit("apply", "p1")
    assert venv.run(ASK, PYTHONPYCACHEPREFIX=prefix) == "ZZZ"


def test_a_source_from_the_future_is_patched_with_a_later_time_still(site, rooted):
    future = 4_000_000_000 * 10**9
    os.utime(site / CORE, ns=(future, future))
    rooted("apply", "p1")
    assert (site / CORE).stat().st_mtime_ns // 10**9 > future // 10**9
    rooted("restore")
    assert (site / CORE).stat().st_mtime_ns == future


def test_every_tag_and_level_and_the_half_written_ones_are_found(tmp_path):
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    ours = [
        "core.cpython-39.pyc", "core.cpython-313.opt-1.pyc", "core.cpython-313.opt-2.pyc", "core.pypy310.pyc",
        "core.cpython-311.pyc.140213",
    ]  # fmt: skip
    others = ["core2.cpython-39.pyc", "notcore.cpython-39.pyc", "core.txt"]
    for name in (*ours, *others):
        (cache / name).write_bytes(b"")
    bytecode.purge(str(tmp_path / "core.py"))
    assert sorted(path.name for path in cache.iterdir()) == sorted(others)


def test_a_file_that_is_no_module_has_no_bytecode(tmp_path):
    assert bytecode.cached(str(tmp_path / "data.txt")) == []
