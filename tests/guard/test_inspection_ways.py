"""Ways to run a file other than ``import``: each leaves a module or code that the guard must see, or says why not."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from patchkit.guard import Verdict, inspect
from tests.guard.processes import IMPORT, NOTHING, VICTIM, WAIT, Engine, needs_root, write_engine

SPEC = """
    import importlib.util, os, sys, engine
    path = os.path.join(os.path.dirname(engine.__file__), "models", "victim.py")
    spec = importlib.util.spec_from_file_location("plugin", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""
LOADED = {
    "a spec under another name": SPEC + "    sys.modules['plugin'] = module",
    "a spec that nobody registered": SPEC,
    "a spec that nobody registered, of which a function is left": SPEC
    + "    work = module.work; del module, spec",
    "exec of its text": """
    import os, engine
    path = os.path.join(os.path.dirname(engine.__file__), "models", "victim.py")
    names = {}
    exec(compile(open(path).read(), path, "exec"), names)
    """,
    "runpy": """
    import os, runpy, engine
    names = runpy.run_path(os.path.join(os.path.dirname(engine.__file__), "models", "victim.py"))
    """,
    "an object in the module's place": """
    import sys, engine
    import engine.models.victim as victim
    class Proxy: work = staticmethod(victim.work)
    sys.modules["engine.models.victim"] = engine.models.victim = Proxy()
    del victim
    """,
    "a reload of other text": """
    import importlib, engine.models.victim
    importlib.reload(engine.models.victim)
    """,
    "a bound method in a thread that waits": """
    import sys, threading, engine.models
    from engine.models.victim import work
    def run(work=work): threading.Event().wait()
    threading.Thread(target=run, daemon=True).start()
    del sys.modules["engine.models.victim"], engine.models.victim, work
    """,
    "a pickled function's module": """
    import pickle, engine.models.victim
    work = pickle.loads(pickle.dumps(engine.models.victim.work))
    """,
}


@pytest.mark.parametrize("way", LOADED)
def test_it_is_loaded(engine: Engine, python: str, way: str):
    engine.start(LOADED[way].rstrip(" ").rstrip("\n") + f"\n    {WAIT}\n", python=python)
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.files) == (Verdict.LOADED, (VICTIM,)), holder


NOT_LOADED = {
    "its text is read": "import engine; text = open(engine.__file__.replace('__init__', 'models/victim')).read()",
    "its text is mapped": (
        "import engine, mmap; file = open(engine.__file__.replace('__init__', 'models/victim'));"
        " held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)"
    ),
    "it is parsed": (
        "import ast, engine; path = engine.__file__.replace('__init__', 'models/victim');"
        " tree = ast.parse(open(path).read(), path)"
    ),
    "its spec is found": "import importlib.util; spec = importlib.util.find_spec('engine.models.victim')",
    "its path is logged": (
        "import engine; names = [engine.__file__.replace('__init__', 'models/victim') + str(i) for i in range(9)]"
    ),
}


@pytest.mark.parametrize("way", NOT_LOADED)
def test_it_is_not_loaded(engine: Engine, python: str, way: str):
    engine.start(f"{NOT_LOADED[way]}; {WAIT}", python=python)
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.NOT_LOADED, holder


@pytest.mark.parametrize(
    ("then", "verdict"), [("pass", Verdict.LOADED), ("os.chdir('/')", Verdict.CANNOT_TELL)]
)
def test_code_that_was_run_by_a_relative_path(engine: Engine, python: str, then: str, verdict: Verdict):
    code = f"import os, runpy, engine; names = runpy.run_path({VICTIM!r}); {then}; {WAIT}"
    engine.start(code, python=python, cwd=engine.root)
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (verdict, True)


@pytest.mark.parametrize(
    "code",
    [
        "names = {}; exec(open('victim.py').read(), names)",
        "import runpy; names = runpy.run_path('victim.py')",
    ],
)
def test_code_whose_name_does_not_lead_to_the_file_is_not_seen(engine: Engine, code: str):
    """What the documentation says of the guard's limits."""
    engine.start(f"import engine; {code}; {WAIT}", cwd=f"{engine.root}/engine/models")
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.NOT_LOADED


def test_bytecode_that_is_run_by_itself_is_the_file(engine: Engine, python: str):
    pathlib.Path(engine.victim).write_text(WAIT)
    subprocess.run([python, "-m", "py_compile", engine.victim], check=True)
    (compiled,) = glob.glob(f"{engine.root}/engine/models/__pycache__/victim.*.pyc")
    engine.start("", python=python, arguments=(compiled,))
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_copy_in_a_zip_is_another_file(engine: Engine, python: str, tmp_path: pathlib.Path):
    archive = shutil.make_archive(str(tmp_path / "engine"), "zip", engine.root)
    engine.start(f"{IMPORT}", python=python, root=archive)
    assert engine.look() is None


def test_a_folder_that_was_reinstalled_is_the_same_place(engine: Engine, python: str):
    engine.start(IMPORT, python=python)
    shutil.rmtree(f"{engine.root}/engine")
    write_engine(pathlib.Path(engine.root))
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


def test_a_venv_reached_through_a_link_is_the_same_venv(tmp_path: pathlib.Path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (tmp_path / "alias").symlink_to(venv)
    root = next(venv.glob("lib/python3*/site-packages"))
    write_engine(root)
    engine = Engine(str(root))
    try:
        loaded = engine.start(IMPORT, python=str(tmp_path / "alias/bin/python"), root="")
        quiet = engine.start(NOTHING, python=str(tmp_path / "alias/bin/python"), root="")
        found = {holder.pid: holder.verdict for holder in inspect(engine.root, engine.files).holders}
    finally:
        engine.stop()
    assert found == {loaded.pid: Verdict.LOADED, quiet.pid: Verdict.NOT_LOADED}


def test_an_editable_installs_checkout_is_the_root(engine: Engine, tmp_path: pathlib.Path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "engine.pth").write_text(f"{engine.root}\n")
    code = f"import site; site.addsitedir({str(site)!r}); {IMPORT}"
    engine.start(code, root="/nowhere")
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


@pytest.mark.parametrize("path", [".", "", "engine/.."])
def test_a_relative_search_path(engine: Engine, python: str, path: str):
    engine.start(
        f"import sys; sys.path.insert(0, {path!r}); {IMPORT}", python=python, cwd=engine.root, root=""
    )
    holder = engine.look()
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


@needs_root
def test_a_file_that_is_mounted_on_another_is_that_file(engine: Engine, tmp_path: pathlib.Path):
    other = tmp_path / "other"
    shutil.copytree(engine.root, other)
    script = (
        f"mount --bind {engine.victim} {other}/{VICTIM} && PYTHONPATH={other} exec {sys.executable} -c "
        "'import time, engine.models.victim; print(1, flush=True); time.sleep(600)'"
    )
    process = engine.start("", python="unshare", arguments=("--mount", "sh", "-c", script))
    holder = engine.look(process.pid)
    assert holder is not None
    assert holder.verdict is Verdict.LOADED


@needs_root
def test_in_an_overlay_the_merged_tree_is_the_one_that_counts(engine: Engine, tmp_path: pathlib.Path):
    """A container's root. Its layers are other folders, which nobody may change under it anyway."""
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={engine.root},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, f"{tmp_path}/merged"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no overlay on this file system")
    try:
        merged = Engine(f"{tmp_path}/merged")
        process = merged.start(IMPORT)
        holder = merged.look(process.pid)
        assert holder is not None
        assert holder.verdict is Verdict.LOADED
    finally:
        merged.stop()
        subprocess.run(["umount", f"{tmp_path}/merged"], check=True)
    assert os.path.exists(engine.victim)
