"""Processes that can be seen only in part, or from another place: users, namespaces, roots."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

import patchkit
from patchkit.guard import Verdict, inspect, procfs
from patchkit.guard.environment import may_read
from tests.guard.debian import DebianPython
from tests.guard.processes import (
    IMPORT,
    INTERPRETERS,
    NOTHING,
    VICTIM,
    WAIT,
    Engine,
    needs_root,
    write_engine,
)

SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(patchkit.__file__)))


# -- an interpreter that is not known --------------------------------------------------------------------


def unknown_interpreter() -> str:
    root = pathlib.Path(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")))
    for path in sorted(root.glob("versions/3.[678].*/bin/python3")):
        return str(path)
    pytest.skip("no CPython older than 3.9 here")


def test_an_unknown_interpreter_of_the_tree_cannot_be_told(engine: Engine):
    engine.start(IMPORT, python=unknown_interpreter())
    holder = engine.look()
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.CANNOT_TELL, True)


def test_an_unknown_interpreter_elsewhere_does_not_block(engine: Engine):
    engine.start(WAIT, python=unknown_interpreter(), root="/nowhere")
    assert engine.look() is None


# -- other users, namespaces, roots ------------------------------------------------------------------------

AS_NOBODY = """
    import os, sys
    sys.path.insert(0, {source!r})
    from patchkit.guard import inspect
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    for holder in inspect({root!r}, [{file!r}], prefix={prefix!r}).holders:
        if holder.pid == {pid}:
            print(holder.verdict.value, holder.blocks, holder.evidence)
"""


def as_nobody(engine: Engine, pid: int, prefix: str | None = None) -> str:
    """What an unprivileged user's guard says of ``pid``."""
    code = AS_NOBODY.format(source=SOURCE, root=engine.root, file=VICTIM, pid=pid, prefix=prefix)
    done = subprocess.run(
        ["/usr/bin/env", "-i", sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


# An interpreter that a user without rights may run.
PUBLIC = next(
    (path for path in INTERPRETERS if may_read(65534, os.path.dirname(os.path.realpath(path)))), None
)
needs_public_python = pytest.mark.skipif(
    PUBLIC is None, reason="no interpreter here is readable for everybody"
)


@pytest.fixture
def public_venv(tmp_path: pathlib.Path) -> Engine:
    """A venv that every user may read, with the tree in its site-packages."""
    folder = tmp_path
    while folder != folder.parent:
        if os.stat(folder).st_uid == os.geteuid():
            folder.chmod(0o755)
        folder = folder.parent
    venv = tmp_path / "venv"
    subprocess.run([PUBLIC or sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    root = next(venv.glob("lib/python3*/site-packages"))
    write_engine(root)
    return Engine(str(root))


@needs_root
def test_another_users_process_of_the_environment_cannot_be_told(public_venv: Engine):
    prefix = str(pathlib.Path(public_venv.root).parents[2])
    try:
        process = public_venv.start(IMPORT, python=f"{prefix}/bin/python", root="")
        said = as_nobody(public_venv, process.pid, prefix)
    finally:
        public_venv.stop()
    assert said.startswith("cannot-tell True no permission"), said


@needs_root
def test_another_users_service_of_another_python_does_not_refuse_for_ever(public_venv: Engine):
    """A stock system runs /usr/bin/python3 services as root, which nobody else may read."""
    prefix = str(pathlib.Path(public_venv.root).parents[2])
    service = next(path for path in INTERPRETERS if not path.startswith(prefix))
    try:
        process = public_venv.start(WAIT, python=service, root="/nowhere")
        said = as_nobody(public_venv, process.pid, prefix)
    finally:
        public_venv.stop()
    assert said == ""


@needs_root
def test_another_users_retitled_process_is_known_by_the_packages_name(public_venv: Engine):
    prefix = str(pathlib.Path(public_venv.root).parents[2])
    try:
        script = pathlib.Path(prefix) / "script"
        script.write_text("import time; print('ready', flush=True); time.sleep(600)")
        with script.open() as text:
            process = public_venv.start(
                "",
                python="engine::scheduler",
                before=(),
                arguments=None,
                executable=sys.executable,
                stdin=text,
            )
        said = as_nobody(public_venv, process.pid, prefix)
    finally:
        public_venv.stop()
    assert said.startswith("cannot-tell True"), said


AS_ITSELF = """
    import os, subprocess, sys
    sys.path.insert(0, {source!r})
    from patchkit.guard import inspect
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    code = {code!r}
    child = subprocess.Popen([{python!r}, "-c", code], env={{"PYTHONPATH": {root!r}}}, stdin=-1, stdout=-1)
    child.stdout.readline()
    for holder in inspect({root!r}, [{file!r}], prefix={prefix!r}).holders:
        if holder.pid == child.pid:
            print(holder.verdict.value, holder.blocks, holder.evidence, "|", holder.hint)
    child.kill(); child.wait()
"""


def as_itself(engine: Engine, code: str, *before: str) -> str:
    """What an unprivileged user's guard says of a process of the same user."""
    prefix = str(pathlib.Path(engine.root).parents[2])
    text = AS_ITSELF.format(
        source=SOURCE, root=engine.root, file=VICTIM, prefix=prefix, code=code, python=f"{prefix}/bin/python"
    )
    command = [*before, sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_root
@needs_public_python
def test_ones_own_process_is_read_without_privileges(public_venv: Engine):
    scope = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() != "0":
        assert as_itself(public_venv, IMPORT).startswith("cannot-tell True its memory may not be read")
    else:
        assert as_itself(public_venv, IMPORT).startswith("loaded True")


@needs_root
@needs_public_python
def test_a_process_that_forbids_to_be_read_cannot_be_told(public_venv: Engine):
    """As ssh-agent and others do; prctl(PR_SET_DUMPABLE, 0)."""
    said = as_itself(public_venv, f"import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); {IMPORT}")
    assert said.startswith("cannot-tell True no permission"), said


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_root_without_the_capability_to_trace_says_so(public_venv: Engine):
    prefix = str(pathlib.Path(public_venv.root).parents[2])
    code = f"""
        import sys
        sys.path.insert(0, {SOURCE!r})
        from patchkit.guard import inspect
        for holder in inspect({public_venv.root!r}, [{VICTIM!r}], prefix={prefix!r}).holders:
            print(holder.pid, holder.verdict.value, holder.hint)
    """
    try:
        process = public_venv.start(IMPORT, python=f"{prefix}/bin/python", root="")
        command = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", sys.executable, "-c"]
        done = subprocess.run([*command, textwrap.dedent(code)], capture_output=True, text=True, check=True)
    finally:
        public_venv.stop()
    assert f"{process.pid} cannot-tell this container lacks CAP_SYS_PTRACE" in done.stdout


@needs_root
def test_from_the_host_a_process_in_a_pid_and_mount_namespace_is_read(
    engine: Engine, python: str, tmp_path: pathlib.Path
):
    """The tree is mounted elsewhere there: the path that the process names does not exist here."""
    inside = tmp_path / "inside"
    inside.mkdir()
    script = (
        f"mount --bind {engine.root} {inside} && "
        f"PYTHONPATH={inside} exec {python} -c 'import os, time, engine.models.victim; print(os.getpid(), flush=True); time.sleep(600)'"
    )
    unshare = engine.start(
        "", python="unshare", arguments=("--fork", "--pid", "--mount", "--mount-proc", "sh", "-c", script)
    )
    assert unshare.said == ["1"]  # type: ignore[attr-defined]
    assert not (inside / "engine").exists()
    (child,) = (pid for pid in procfs.pids() if (known := procfs.stat(pid)) and known.parent == unshare.pid)
    try:
        holder = engine.look(child)
        assert holder is not None
        assert holder.verdict is Verdict.LOADED
        assert f"{inside}/{VICTIM}" in holder.evidence
    finally:
        os.kill(child, signal.SIGKILL)


@needs_root
def test_a_number_that_passes_to_another_process_while_it_is_read_means_the_other(
    engine: Engine, tmp_path: pathlib.Path
):
    """In a PID namespace of its own, the next number can be chosen (``ns_last_pid``)."""
    code = f"""
        import os, subprocess, sys
        sys.path.insert(0, {SOURCE!r})
        from patchkit.guard import inspect, inspection
        def start(code):
            open("/proc/sys/kernel/ns_last_pid", "w").write("4999")
            child = subprocess.Popen([sys.executable, "-c", code], env={{"PYTHONPATH": {engine.root!r}}}, stdin=-1, stdout=-1)
            child.stdout.readline()
            return child
        first = start({NOTHING!r})
        look = inspection.Inspection._look
        def pass_on(self, pid, maps):
            answer = look(self, pid, maps)
            if pid == 5000 and first.poll() is None:
                first.kill()
                first.wait()
                global second
                second = start({IMPORT!r})
            return answer
        inspection.Inspection._look = pass_on
        found = [one for one in inspect({engine.root!r}, [{VICTIM!r}]).holders if one.pid == 5000]
        print(first.pid, second.pid, *(one.verdict.value for one in found))
        second.kill()
    """
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "5000 5000 loaded\n", done.stderr


@needs_root
def test_a_same_path_in_another_mount_namespace_may_be_another_file(engine: Engine, tmp_path: pathlib.Path):
    other = tmp_path / "other"
    shutil.copytree(engine.root, other)
    script = (
        f"mount --bind {other} {engine.root} && "
        f"exec {sys.executable} -c 'import time, engine.models.victim; print(1, flush=True); time.sleep(600)'"
    )
    process = engine.start("", python="unshare", arguments=("--mount", "sh", "-c", script))
    assert engine.look(process.pid) is None


@needs_root
def test_debians_newer_interpreters_in_a_root_of_their_own(engine: Engine, debian_python: DebianPython):
    """Also: an absolute link below another root leads inside that root."""
    tree = debian_python.root / "srv" / f"tree-{os.getpid()}"
    alias = tree.with_name(f"{tree.name}-alias")
    shutil.copytree(engine.root, tree)
    alias.symlink_to(f"/srv/{tree.name}")
    other = Engine(str(tree))
    common = {"python": debian_python.path, "before": debian_python.before, "root": f"/srv/{alias.name}"}
    try:
        loaded = other.start(IMPORT, **common)
        quiet = other.start(NOTHING, **common)
        dropped = other.start(
            f"""
            import sys, engine.models
            from engine.models.victim import work
            del sys.modules["engine.models.victim"], engine.models.victim
            {WAIT}
            """,
            **common,
        )
        verdicts = {holder.pid: holder for holder in inspect(other.root, other.files).holders}
        assert verdicts[loaded.pid].verdict is Verdict.LOADED
        assert f"CPython {debian_python.version}" in verdicts[loaded.pid].evidence
        assert verdicts[quiet.pid].verdict is Verdict.NOT_LOADED
        assert verdicts[dropped.pid].verdict is Verdict.LOADED
    finally:
        other.stop()
        alias.unlink()
        shutil.rmtree(tree)


def test_an_interpreter_that_is_too_old_is_named_as_such(engine: Engine):
    process = engine.start(IMPORT, python=_too_old())
    holder = engine.look(process.pid)
    assert holder is not None
    assert (holder.verdict, holder.blocks) == (Verdict.CANNOT_TELL, True)
    assert holder.evidence.startswith("it runs a CPython older than 3.9, which is not supported, and ")


def _too_old() -> str:
    places = pathlib.Path(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")))
    for version in ("3.8", "3.7"):
        for path in places.glob(f"versions/{version}.*/bin/python{version}"):
            return str(path)
    pytest.skip("no CPython 3.7 or 3.8 here")
