"""Old bytecode cannot run: not of the same second and size, not unchecked, not of another tag or level."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit import bytecode, transaction
from patchkit.history import record
from patchkit.journal import Journal
from patchkit.recovery import recover
from patchkit.state import prepare
from patchkit.tree import Meta, Tree
from tests import support
from tests.support import DEMO, P1, Done, Kit, Venv, files, patched, snapshot

CORE = "demopkg/core.py"
ASK = "import demopkg.core as c; print(c.answer())"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="owners and chattr need root")

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
        "core.cpython-311-pytest-8.3.4.pyc", "core.cpython-311-pytest-8.3.4.pyo",
    ]  # fmt: skip
    others = [
        "core2.cpython-39.pyc", "notcore.cpython-39.pyc", "core.txt", "core.pyc-notes.txt",
        "core.cpython-39.pyc.orig", "core.pyc", "core.one.cpython-39.pyc", "core.one.cpython-39-pytest-8.3.4.pyc",
    ]  # fmt: skip
    for name in (*ours, *others):
        (cache / name).write_bytes(b"")
    assert bytecode.purge(Tree(str(tmp_path)), ["core.py"]) == []
    assert sorted(path.name for path in cache.iterdir()) == sorted(others)


def test_a_file_that_is_no_module_has_no_bytecode(tmp_path):
    (tmp_path / "data.pyc").touch()
    assert bytecode.find(Tree(str(tmp_path)), ["data.txt"]) == ([], [])


def test_a_cache_prefix_is_cleaned_under_every_path_that_leads_to_the_tree(
    venv, patches, tmp_path, monkeypatch
):
    """CPython mirrors the path as it was told it, links and all."""
    (tmp_path / "link").symlink_to(venv.prefix)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "lib").symlink_to(venv.site.parent)
    through = tmp_path / "link" / "bin" / "python"
    prefix = str(tmp_path / "cache")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", prefix)
    kit = kit_of(venv, patches)
    far = tmp_path / "far" / "lib" / "site-packages"
    for python, path in (
        (through, "demopkg"),
        (venv.python, "demopkg"),
        (venv.python, f"{far}/demopkg"),
    ):
        ask = ASK if path == "demopkg" else f"import sys; sys.path.insert(0, {str(far)!r}); {ASK}"
        unchecked = (
            f"import py_compile; {ask}\n"
            "py_compile.compile(c.__file__, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
        )
        one = Venv(python.parent.parent, venv.cache)
        for command, answer in ((("apply", "p1"), "BBB"), (("restore",), "AAA")):
            one.run(unchecked, PYTHONPYCACHEPREFIX=prefix)
            kit(*command)
            assert one.run(ask, PYTHONPYCACHEPREFIX=prefix) == answer, (python, path)
    assert not [
        path for path in Path(prefix).rglob("core.*.pyc") if "demopkg" in str(path) and "p1" in str(path)
    ]


def test_a_cache_prefix_that_mirrors_folders_which_we_may_not_see_is_cleaned(
    site, patches, tmp_path, monkeypatch
):
    mirror = tmp_path / "cache"
    for path in ("gone/away", str(site / "demopkg").lstrip("/")):
        (mirror / path).mkdir(parents=True)
        (mirror / path / "core.cpython-311.pyc").touch()
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(mirror))
    Kit(["--root", str(site), "--patches", str(patches)])("apply", "p1")
    assert [path.parent.name for path in mirror.rglob("*.pyc")] == ["away"]


def test_a_deleted_module_does_not_live_on_as_bytecode_beside_it(venv, kit):
    compile_all = f"import compileall; compileall.compile_dir({str(venv.site)!r}, quiet=2, legacy=True)"
    can_import = "import importlib.util as u; print([u.find_spec(n) is not None for n in {!r}])"
    names = ["demopkg.core", "demopkg.old", "demopkg.util"]
    venv.run(compile_all)
    kit("apply", "p1")
    assert venv.run(can_import.format(names)) == "[True, False, True]"
    assert (venv.site / "demopkg/util.pyc").exists()
    venv.run(compile_all)
    kit("restore")
    assert not (venv.site / "demopkg/extra").exists()
    assert venv.run(can_import.format(names)) == "[True, True, True]"
    assert venv.run(ASK) == "AAA"


def test_a_deletion_that_is_adopted_takes_the_bytecode_beside_it(site, rooted):
    rooted("apply", "p1")
    for own in ("state.json", "history.jsonl"):
        (site / ".patchkit" / own).unlink()
    (site / "demopkg/old.pyc").touch()
    assert "adopted" in rooted("apply", "p1").out
    assert not (site / "demopkg/old.pyc").exists()


def test_bytecode_that_the_wheel_brought_beside_a_source_stays(tmp_path, patches):
    shipped = {**DEMO["1.0"], "demopkg/core.pyc": b"as built"}
    made = Venv.create(tmp_path / "venv")
    made.uv("install", support.build_wheel(tmp_path, "1.0", shipped))
    kit = kit_of(made, patches)
    kit("apply", "p1")
    assert (made.site / "demopkg/core.pyc").read_bytes() == b"as built"
    kit("restore", "--verify")


def test_what_pytest_compiled_is_no_stranger_and_goes(venv, kit):
    """It keeps bytecode of its own for the modules that it rewrites."""
    cache = venv.site / "demopkg/__pycache__"
    cache.mkdir(exist_ok=True)
    for stem in ("core", "util"):
        (cache / f"{stem}.cpython-311-pytest-8.3.4.pyc").touch()
    kit("check")
    kit("apply", "p1")
    assert [path.name for path in cache.glob("*-pytest-*")] == ["util.cpython-311-pytest-8.3.4.pyc"]
    kit("restore", "--verify")


def test_bytecode_that_the_patch_itself_brings_is_a_file_as_any_other(site, rooted, patches):
    before = {**DEMO["1.0"], "demopkg/core.pyc": b"theirs\0"}
    (site / "demopkg/core.pyc").write_bytes(before["demopkg/core.pyc"])
    support.write_patch(patches, "both", before, {CORE: b"new = 1\n", "demopkg/core.pyc": b"ours\0"})
    pristine = snapshot(site)
    rooted("apply", "both")
    assert (site / "demopkg/core.pyc").read_bytes() == b"ours\0"
    rooted("restore", "--verify")
    assert snapshot(site) == pristine


def test_a_cache_that_is_a_link_out_of_the_root_is_refused_and_not_touched(site, rooted, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "core.cpython-311.pyc").write_bytes(b"someone's")
    (site / "demopkg/__pycache__").symlink_to(elsewhere)
    before = snapshot(site)
    for more in ((), ("-n",)):
        done = rooted("apply", "p1", *more, code=4)
        assert f"a folder symlink leads out of the root, to {elsewhere}; nothing was changed; rem" in done.err
        assert snapshot(site) == before
    assert (elsewhere / "core.cpython-311.pyc").read_bytes() == b"someone's"
    (refused,) = bytecode.purge(Tree(str(site)), [CORE])
    assert refused.filename == str(site / "demopkg/__pycache__")
    assert (elsewhere / "core.cpython-311.pyc").read_bytes() == b"someone's"


# -- bytecode that cannot be removed --------------------------------------------------------------


@pytest.fixture
def theirs(site):
    """The tree belongs to user 65534; every folder above it is open."""
    for top in (site, *site.parents):
        if top == Path("/tmp"):
            break
        top.chmod(top.stat().st_mode | 0o055)
    for path in (site, *site.rglob("*")):
        os.chown(path, 65534, 65534)
    return site


def root_s_cache(folder, stem="core"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.cpython-311.pyc").write_bytes(b"root's")
    return folder


@needs_root
@pytest.mark.parametrize("place", ["__pycache__", "closed", "prefix"])
def test_another_user_s_bytecode_is_a_clear_error_before_anything_changes(
    theirs, rooted, tmp_path, monkeypatch, place
):
    def litter():
        if place == "prefix":
            monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "cache"))
            return root_s_cache(tmp_path / "cache" / str(theirs / "demopkg").lstrip("/"))
        folder = root_s_cache(theirs / "demopkg/__pycache__")
        folder.chmod(0o700 if place == "closed" else 0o755)
        return folder

    def run(*command):
        return support.as_user(65534, lambda: rooted(*command, code=None))

    for command in (("apply", "p1"), ("restore",)):
        before = snapshot(theirs)
        cache = litter()
        for more in ((), ("-n",)):
            done = run(*command, *more)
            assert done.code == 6, done
            assert (
                f"{cache} belongs to user id 0 and is closed to user id 65534; nothing was changed"
                in done.err
            )
            assert "mere bytecode" in done.err
            assert snapshot(theirs) == before
        assert (cache / "core.cpython-311.pyc").read_bytes() == b"root's"
        shutil.rmtree(cache)
        assert run(*command).code == 0
    assert files(theirs) == DEMO["1.0"]


@needs_root
@pytest.mark.parametrize("name", ["__pycache__/core.cpython-311.pyc", "__pycache__", "old.pyc"])
def test_immutable_bytecode_is_named_before_anything_changes(site, rooted, name):
    (site / "demopkg/__pycache__").mkdir()
    for command in (("apply", "p1"), ("restore",)):
        (site / "demopkg/__pycache__/core.cpython-311.pyc").touch()
        if name == "old.pyc" and command[0] == "restore":
            continue  # then old.py comes back, and old.pyc may stay
        target = site / "demopkg" / name
        target.touch()
        if subprocess.run(["chattr", "+i", target], check=False).returncode:
            pytest.skip("the file system has no immutable files")
        before = snapshot(site)
        try:
            for more in ((), ("-n",)):
                done = rooted(*command, *more, code=6)
                assert f"{name} is immutable; nothing was changed; 'chattr -i' it first" in done.err
                assert done.err.count("\n") == 1
                assert snapshot(site) == before
        finally:
            subprocess.run(["chattr", "-i", target], check=True)
        rooted(*command)


@needs_root
def test_bytecode_that_only_the_system_refuses_stops_the_change_before_it_begins(theirs, rooted):
    """In a sticky folder, which is open to all, each may remove only what is theirs."""
    cache = root_s_cache(theirs / "demopkg/__pycache__")
    cache.chmod(0o1777)
    before = snapshot(theirs)
    done = support.as_user(65534, lambda: rooted("apply", "p1", code=None))
    assert done.code == 6
    assert "core.cpython-311.pyc: Operation not permitted; nothing was changed" in done.err
    assert "remove this bytecode" not in done.err  # it is of the version that is there
    assert snapshot(theirs) == before
    assert Journal.load(str(theirs)) is None


@needs_root
def test_an_undo_goes_on_past_bytecode_and_the_error_names_it(site):
    """It came after the last check: the change is undone, and what it left is said."""
    cache = site / "demopkg/__pycache__"
    before = files(site)

    def compiled_meanwhile():
        for stem in ("core", "util"):
            root_s_cache(cache, stem)
        if subprocess.run(["chattr", "+i", cache / "core.cpython-311.pyc"], check=False).returncode:
            pytest.skip("the file system has no immutable files")

    operations = [
        transaction.Put(path, b"new", Meta.of(str(site / path))) for path in (CORE, "demopkg/util.py")
    ]
    prepare(str(site))
    entry = record("apply", [], mtime_ns=0, distribution="demopkg")
    try:
        with pytest.raises(transaction.TransactionFailedError) as caught:
            transaction.run(str(site), operations, entry, before_change=compiled_meanwhile)
        advice = "remove this bytecode, which may be of the other version"
        assert f"every file is as it was before; {advice}: {cache}/core.cpython-311.pyc" in str(caught.value)
        assert files(site) == before
        assert [path.name for path in cache.iterdir()] == ["core.cpython-311.pyc"]
        assert Journal.load(str(site)) is None
    finally:
        subprocess.run(["chattr", "-i", cache / "core.cpython-311.pyc"], check=True)


@needs_root
def test_a_cache_that_is_closed_does_not_keep_the_others_from_being_cleaned(theirs):
    closed = root_s_cache(theirs / "demopkg/__pycache__")
    closed.chmod(0o700)
    beside = theirs / "other/__pycache__/more.cpython-311.pyc"
    beside.parent.mkdir(parents=True)
    beside.touch()
    for path in (beside, *beside.parents[:2]):
        os.chown(path, 65534, 65534)
    (theirs / "other/more.py").touch()

    def purge():
        (refused,) = bytecode.purge(Tree(str(theirs)), [CORE, "other/more.py"])
        return Done(0, refused.filename, "")

    assert support.as_user(65534, purge).out == str(closed)
    assert not beside.exists()


@pytest.mark.parametrize("call", ["newfstatat", "fsync"])
def test_what_could_not_be_removed_is_named_and_never_a_source_or_its_folder(site, tmp_path, call):
    """The user is told to remove it."""
    (site / "demopkg/old.pyc").touch()
    (site / "demopkg/old.py").unlink()
    watched = site / "demopkg" / ("old.py" if call == "newfstatat" else "")
    strace = ["strace", "-f", "-qqq", "-o", str(tmp_path / "strace"), "-P", str(watched).rstrip("/")]
    strace += ["-e", f"trace={call}", "-e", f"inject={call}:error=EIO"]
    code = (
        "from patchkit import bytecode; from patchkit.tree import Tree\n"
        f"print([one.filename for one in bytecode.purge(Tree({str(site)!r}), ['demopkg/old.py'])])"
    )
    done = subprocess.run([*strace, sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "INJECTED" in (tmp_path / "strace").read_text()
    assert done.stdout.strip() == str([str(site / "demopkg/old.pyc")])


@needs_root
def test_a_mirror_that_is_closed_and_reached_by_a_link_is_named(theirs, rooted, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(theirs)
    mirror = tmp_path / "cache" / str(tmp_path / "link").lstrip("/")
    root_s_cache(mirror / "demopkg")
    mirror.chmod(0o700)
    strange = tmp_path / "cache/root"  # stands for a folder that has nothing to do with the tree
    strange.mkdir()
    strange.chmod(0o700)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "cache"))
    done = support.as_user(65534, lambda: rooted("apply", "p1", code=None))
    assert done.code == 6
    assert f"{mirror} belongs to user id 0 and is closed to user id 65534; nothing was changed" in done.err
    assert str(strange) not in done.err
    shutil.rmtree(mirror)
    assert support.as_user(65534, lambda: rooted("apply", "p1", code=None)).code == 0


@needs_root
@pytest.mark.parametrize("phase", ["open", "committed"])
def test_recovery_is_not_stopped_by_bytecode_and_names_it(theirs, rooted, phase):
    def die():
        """After the commit mark, or after the second removal of bytecode, the one before it."""
        place, name = (Journal, "committed") if phase == "committed" else (bytecode, "purge")
        own, calls = getattr(place, name), []

        def dying(*arguments, **more):
            own(*arguments, **more)
            calls.append(name)
            if calls in (["committed"], ["purge", "purge"]):
                os._exit(9)
            return []

        setattr(place, name, dying)
        rooted("apply", "p1")

    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            die()
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    assert Journal.load(str(theirs)) is not None
    pyc = root_s_cache(theirs / "demopkg/__pycache__") / "core.cpython-311.pyc"
    done = support.as_user(65534, lambda: Done(0, recover(str(theirs)).sentence(), ""))
    assert f"remove this bytecode, which may be of the other version: {pyc}" in done.out
    assert files(theirs) == (patched(DEMO["1.0"], P1, "p1") if phase == "committed" else DEMO["1.0"])
    assert Journal.load(str(theirs)) is None
