"""The Python interface: ``with patchkit.session(...)``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import patchkit
from patchkit import processes
from patchkit.errors import PatchkitError
from patchkit.supervisor import CommandNotFoundError
from tests.support import DEMO, P1, Kit, files, patched, snapshot

SERVE = str(Path(__file__).with_name("serve.py"))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def before(venv):
    return snapshot(venv.site)


@pytest.fixture
def session(venv, patches, before):
    """``patchkit.session`` on this test's tree, which must be pristine afterwards."""

    def make(*names, **more):
        return patchkit.session(*names, python=str(venv.python), patches=[str(patches)], grace=0.5, **more)

    yield make
    assert snapshot(venv.site) == before
    assert not (venv.site / ".patchkit" / "leases").exists()


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _gone(pid):
    process = processes.look(pid)
    return process is None or process.ended


def test_importing_patchkit_loads_none_of_it():
    code = "import sys, patchkit; sys.exit(any(name.startswith('patchkit.') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_session_applies_runs_and_restores(session, venv):
    with session("p1", env={"MORE": "1"}) as one:
        assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
        code = "import demopkg.core as c, os; assert c.answer() == 'BBB' and os.environ['MORE'] == '1'"
        assert one.run([venv.python, "-B", "-c", code]) == 0
        assert one.run(["sh", "-c", "exit 9"]) == 9
    assert one.record.restored
    assert one.record_path is not None


def test_an_exception_inside_restores_and_is_raised(session):
    with pytest.raises(ZeroDivisionError), session("p1"):
        _ = 1 // 0


def test_a_server_is_ended_with_the_session(session, venv, tmp_path):
    ready = tmp_path / "ready"
    with session("p1") as one:
        child = one.start([venv.python, "-B", SERVE, ready], stdin=subprocess.DEVNULL)
        _until(ready.exists)
        assert child.poll() is None
    assert _gone(child.pid)


def test_a_daemon_is_ended_and_the_programs_own_children_are_not(session, venv, tmp_path):
    daemon = tmp_path / "daemon"
    with subprocess.Popen(["sleep", "600"]) as earlier:
        with session("p1") as one:
            later = subprocess.Popen(["sleep", "600"], start_new_session=True)
            code = one.run([venv.python, "-B", SERVE, tmp_path / "r", "--daemon", daemon, "--exit"])
            assert code == 0
            _until(daemon.exists)
        assert _gone(int(daemon.read_text().split()[0]))
        assert earlier.poll() is None
        assert later.poll() is None
        for process in (earlier, later):
            process.kill()
            process.wait()


# Forks twice, and gives up session, group, environment and parent: nothing that it can drop still tells.
ESCAPE = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.execve("/bin/sh", ["sh", "-c", 'echo $$ >"$0.tmp"; mv "$0.tmp" "$0"; exec sleep 600', sys.argv[1]], {})
    os._exit(0)
"""


def _pid(path):
    _until(path.exists)
    return int(path.read_text())


def test_a_daemon_without_environment_is_ended_and_the_programs_own_one_is_not(session, venv, tmp_path):
    ours, own = tmp_path / "ours", tmp_path / "own"
    with session("p1") as one:
        assert one.run([venv.python, "-c", ESCAPE, ours]) == 0
        subprocess.run([venv.python, "-c", ESCAPE, own], check=True)
        daemon, later = _pid(ours), _pid(own)
        assert not _gone(daemon)
    assert _gone(daemon)
    assert not _gone(later)
    os.kill(later, signal.SIGKILL)
    os.waitpid(later, 0)  # it was handed to us


def test_recover_waits_for_a_daemon_without_environment(venv, patches, before, tmp_path):
    kit = Kit(["--python", str(venv.python), "--patches", str(patches)])
    code = f"{ESCAPE}\nimport time; time.sleep(600)"
    command = [*kit.where, "run", "p1", "--", venv.python, "-c", code, tmp_path / "d"]
    run = subprocess.Popen([sys.executable, "-m", "patchkit", *command], stderr=subprocess.DEVNULL)
    daemon = _pid(tmp_path / "d")
    run.kill()
    run.wait(60)
    assert f" {daemon} " in kit.spawn("recover", code=3).err
    os.kill(daemon, signal.SIGKILL)
    kit.spawn("recover", "--wait", "20s")
    assert snapshot(venv.site) == before


def test_a_server_outlives_the_thread_that_started_it(session, venv, tmp_path):
    ready, children = tmp_path / "ready", []
    with session("p1") as one:
        thread = threading.Thread(
            target=lambda: children.append(one.start([venv.python, "-B", SERVE, ready]))
        )
        thread.start()
        thread.join(60)
        _until(ready.exists)
        time.sleep(0.2)
        assert children[0].poll() is None


def test_signal_handlers_and_orphans_are_given_back(session):
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGTTOU, signal.SIGWINCH]
    handlers = [signal.getsignal(number) for number in numbers]
    with session("p1"):
        assert signal.getsignal(signal.SIGTERM) != handlers[1]
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert not processes.become_subreaper(False)


def test_an_interrupt_inside_restores_and_is_raised(session):
    def work():
        with session("p1"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_termination_while_a_command_runs_ends_it_and_the_program(session):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as caught, session("p1") as one:
        one.run(["sleep", "600"])
    assert caught.value.code == 143


def test_it_works_in_a_thread_that_cannot_handle_signals(session, venv):
    codes = []

    def work():
        with session("p1") as one:
            codes.append(one.run([venv.python, "-B", "-c", "raise SystemExit(4)"]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert codes == [4]


def test_refusals_are_typed_errors(session, venv, tmp_path):
    with pytest.raises(CommandNotFoundError), session("p1") as one:
        one.run(["no-such-command"])
    with pytest.raises(TypeError, match="a list of its arguments"), session("p1") as one:
        one.run("echo one")
    with pytest.raises(PatchkitError) as caught:
        session("nope")
    assert caught.value.code == "unknown-patch"
    with subprocess.Popen([venv.python, "-B", SERVE, tmp_path / "r"]) as stranger:
        _until((tmp_path / "r").exists)
        with pytest.raises(PatchkitError) as caught, session("p1"):
            pass
        stranger.kill()
    assert caught.value.exit_code == 3


def test_a_program_that_imported_the_patched_module_itself_is_told_so(venv, patches, before, tmp_path):
    code = (
        "import sys, patchkit\n"
        f"with patchkit.session('p1', python={str(venv.python)!r}, patches=[{str(patches)!r}]) as one:\n"
        f"    sys.path.insert(0, {str(venv.site)!r})\n"
        "    import demopkg.core\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=False)
    assert "this process itself has imported" in done.stderr
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    subprocess.run(
        [sys.executable, "-m", "patchkit", "--python", venv.python, "--patches", patches, "recover"],
        check=True,
    )
    assert snapshot(venv.site) == before


def _forked(function):
    """The exit code of a fork of this process that calls ``function``, as ``multiprocessing`` makes them."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            function()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_that_leaves_the_session_does_not_end_it(session, venv):
    with session("p1") as one:

        def leave():
            with pytest.raises(PatchkitError, match="belongs to process"):
                one.run(["true"])
            one.close()
            sys.exit(5)

        assert _forked(leave) == 5
        assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
        code = "import demopkg.core as c; assert c.answer() == 'BBB'"
        assert one.run([venv.python, "-B", "-c", code]) == 0
    assert one.record.restored


def test_a_signal_ends_a_forked_child_as_if_there_was_no_session(session):
    with session("p1") as one:
        assert _forked(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
        assert one.run(["true"]) == 0


def test_a_forked_child_has_sessions_of_its_own(session):
    def work():
        with session("p1") as own:
            assert own.run(["sh", "-c", "exit 3"]) == 3
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with session("p1"):
        assert _forked(work) == 0


def test_a_killed_program_leaves_no_lease_to_a_child_that_it_forked(venv, patches, before):
    where = f"python={str(venv.python)!r}, patches=[{str(patches)!r}]"
    code = (
        "import os, time, patchkit\n"
        f"with patchkit.session('p1', {where}):\n"
        "    child = os.fork()\n"
        "    if child == 0: time.sleep(600)\n"
        "    print(child, flush=True); time.sleep(600)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(program.stdout.readline())
    program.kill()
    with program:
        program.wait()
    try:
        kit = Kit(["--python", str(venv.python), "--patches", str(patches)])
        status = kit.spawn("status").out
        assert "abandoned session" in status
        assert "in use" not in status
        assert "restored p1" in kit.spawn("recover").out
    finally:
        os.kill(child, signal.SIGKILL)
    assert snapshot(venv.site) == before


def test_a_tree_that_changed_meanwhile_is_not_called_patched(session, venv):
    stray = venv.site / "demopkg" / "data" / "blob.bin"
    text = stray.read_bytes()
    info = stray.stat()
    one = session("p1")
    one.open()
    stray.write_bytes(text + b"x")
    with pytest.raises(PatchkitError, match="is not as it was before the command"):
        one.close()
    assert "changed during this run" in one.record.statement
    assert one.record.restored
    stray.write_bytes(text)
    os.utime(stray, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_what_a_command_merely_inherits_is_recorded_by_name_only(session, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")
    with session("p1", env={**os.environ, "MORE": "given-1"}) as one:
        one.run(["true"], env={**os.environ, "PORT": "given-2"})
    text = Path(one.record_path).read_text()
    assert "s3cr3t-value" not in text
    assert '"MY_TOKEN"' in text
    assert "given-1" in text
    assert "given-2" in text


def test_a_session_is_opened_once(session):
    one = session("p1")
    with pytest.raises(PatchkitError, match="not open"):
        one.run(["true"])
    with one:
        pass
    with pytest.raises(PatchkitError, match="was open already"), one:
        pass


def test_sessions_that_end_in_the_order_of_their_beginning_give_all_back(session):
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGTTOU, signal.SIGWINCH]
    handlers = [signal.getsignal(number) for number in numbers]
    first, second = session("p1"), session("p1")
    first.open()
    second.open()
    first.close()
    assert signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    second.close()
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert not processes.become_subreaper(False)


def test_an_orphan_without_any_mark_is_known_by_the_commands_group(venv, patches, before, tmp_path):
    # Under a limit of the user the mark cannot be set; `env -i` drops the other one.
    where = f"python={str(venv.python)!r}, patches=[{str(patches)!r}]"
    pid = tmp_path / "pid"
    orphan = f"sleep 1; env -i sh -c 'echo $$ >{pid}; exec sleep 600' & exit 0"
    program = (
        "import os, resource, time, patchkit\n"
        "resource.setrlimit(resource.RLIMIT_RTTIME, (5000000, 5000000))\n"
        f"with patchkit.session('p1', {where}) as one:\n"
        f"    assert one.run(['sh', '-c', {orphan!r}]) == 0\n"
        f"    while not os.path.exists({str(pid)!r}): time.sleep(0.02)\n"
        "assert one.ending.found >= 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert _gone(_pid(pid))
    assert snapshot(venv.site) == before
