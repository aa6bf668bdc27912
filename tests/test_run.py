"""patchkit run through the real command line: what it refuses, shares, keeps, returns and writes down."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import DEMO, P1, Kit, files, patched, snapshot, uv, write_patch

SERVE = str(Path(__file__).with_name("serve.py"))
SAY = "import demopkg.core as c, os; print(c.answer(), os.environ.get('HS'), os.environ.get('MORE'))"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Records go to the working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def before(venv):
    return snapshot(venv.site)


@pytest.fixture
def run(kit, venv, before):
    """``run("p1", command=[...])``; the tree must be pristine after the test."""

    def start(*options, command, code=0, **more):
        command = [str(venv.python) if part == "python" else str(part) for part in command]
        args = [sys.executable, "-m", "patchkit", *kit.where, *map(str, options), "--", *command]
        process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
        if code is None:
            return process
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
        return out, err

    yield start
    assert snapshot(venv.site) == before


def _until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _record():
    (path,) = Path().glob("patchkit-run-*.json")
    return json.loads(path.read_text()), path


def test_the_command_gets_the_patch_and_its_environment_and_stdout_is_its_own(run, patches):
    write_patch(patches, "p1", DEMO["1.0"], P1, toml='[env]\nHS = "on"\n')
    out, err = run("run", "p1", "--env", "MORE=a=b", command=["python", "-B", "-c", SAY])
    assert out == "BBB on a=b\n"
    assert "restored  p1" in err
    assert "verified: demopkg 1.0" in err


def test_its_exit_code_is_returned(run):
    run("run", "p1", command=["sh", "-c", "exit 42"], code=42)
    run("run", "--clean", command=["sh", "-c", "kill -USR1 $$"], code=128 + signal.SIGUSR1)


@pytest.mark.parametrize(
    ("options", "command", "code", "says"),
    [
        (["run", "p1"], ["no-such-command"], 127, "no such command"),
        (["run", "p1"], [""], 127, "no such command"),
        (["run", "p1"], ["/"], 126, "Permission denied"),
        (["run", "p1"], ["/dev/null"], 126, "Permission denied"),
        (["run", "p1"], [], 2, "no command to run"),
        (["run"], ["true"], 2, "no patch is named"),
        (["run", "--clean", "p1"], ["true"], 2, "takes no patch"),
        (["run", "--clean", "--keep"], ["true"], 2, "--keep leaves a patch applied"),
        (["run", "p2"], ["true"], 2, "no patch named 'p2'"),
        (["run", "p1", "--env", "=x"], ["true"], 2, "not NAME=VALUE"),
        (["run", "p1", "--env", "1A=x"], ["true"], 2, "not NAME=VALUE"),
        (["run", "p1", "--env", "A"], ["true"], 2, "not NAME=VALUE"),
        (["run", "p1", "--env", "PATH=/nowhere"], ["true"], 127, "no such command"),
        (["run", "p1", "--reason", "I know"], ["true"], 2, "give --override-guard too"),
        (["run", "p1", "--override-guard"], ["true"], 2, "--override-guard needs --reason"),
        (["run", "p1", "--grace", "soon"], ["true"], 2, "not a duration"),
        (["run", "p1", "--record", "/nowhere"], ["true"], 6, "/nowhere"),
        (["run", "p1", "--output", "/nowhere/x"], ["true"], 2, "there is no folder"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(run, options, command, code, says):
    _, err = run(*options, command=command, code=code)
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"#!/no/such/interpreter\n", "the interpreter that its first line names does not exist"),
        (b"echo no first line\n", "a script needs a first line"),
        (b"\x7fELF and nothing else", "Exec format error"),
    ],
)
def test_a_script_that_cannot_start_is_told_why(run, tmp_path, text, says):
    script = tmp_path / "script"
    script.write_bytes(text)
    script.chmod(0o755)
    _, err = run("run", "p1", command=[script], code=126)
    assert says in err


def test_a_dry_run_says_all_and_touches_nothing(run, venv):
    out, _ = run("run", "p1", "--dry-run", "--env", "A=b", command=["ls", "-l"])
    assert "would apply p1" in out
    assert "would set A=b" in out
    assert "would run ls -l" in out
    assert not (venv.site / ".patchkit").exists()
    assert not list(Path().iterdir())


def test_json_is_one_object_and_the_commands_output_goes_aside(run):
    out, err = run("--json", "run", "p1", command=["sh", "-c", "echo hello; exit 3"], code=3)
    found = json.loads(out)
    assert (found["command"], found["ok"], found["data"]["command_exit_code"]) == ("run", False, 3)
    assert "hello" in err


def test_two_sessions_share_a_patch_and_the_last_one_restores(run, venv, kit, tmp_path):
    first = run("run", "p1", command=["python", "-B", SERVE, tmp_path / "r1"], code=None)
    second = run("run", "p1", command=["python", "-B", SERVE, tmp_path / "r2"], code=None)
    _until(lambda: (tmp_path / "r1").exists() and (tmp_path / "r2").exists())
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 143, err
    assert "stays for session" in err
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    assert kit.spawn("status").out.count("in use by session") == 1
    second.send_signal(signal.SIGTERM)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 143, err
    assert "restored  p1" in err


def test_sessions_that_end_together_restore_once(run, venv, tmp_path):
    processes = [run("run", "p1", command=["sleep", "2"], code=None) for _ in range(3)]
    said = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sum("restored  p1" in text for text in said) >= 1


def test_a_session_on_other_patches_is_refused_or_waits(run, patches, tmp_path):
    write_patch(patches, "p2", DEMO["1.0"], {"demopkg/util.py": b"other = 1\n"})
    first = run("run", "p1", command=["python", "-B", SERVE, tmp_path / "r1"], code=None)
    _until((tmp_path / "r1").exists)
    _, err = run("run", "p2", command=["true"], code=3)
    assert "in use by session" in err
    assert f"process {first.pid}" in err
    run("run", "--clean", command=["true"], code=3)
    waiting = run("run", "p2", "--wait", "60s", command=["true"], code=None)
    assert "waiting" in waiting.stderr.readline()
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err


def test_nested_sessions_share_and_a_nested_other_one_does_not_wait_for_ever(run, kit, patches):
    write_patch(patches, "p2", DEMO["1.0"], {"demopkg/util.py": b"other = 1\n"})
    inner = [sys.executable, "-m", "patchkit", *kit.where, "run"]
    out, err = run("run", "p1", command=[*inner, "p1", "--", "echo", "inside"])
    assert out == "inside\n"
    assert "stays for session" in err
    _, err = run("run", "p1", command=[*inner, "p2", "--wait", "10m", "--", "true"], code=3)
    assert "this command runs inside that session" in err


def test_keep_leaves_the_patch_after_success_only(run, venv, kit):
    run("run", "p1", "--keep", command=["false"], code=1)
    assert files(venv.site) == DEMO["1.0"]
    _, err = run("run", "p1", "--keep", command=["true"])
    assert "p1 is still applied" in err
    assert files(venv.site) == patched(DEMO["1.0"], P1, "p1")
    assert "abandoned" not in kit.spawn("status").out
    kit.spawn("restore", "--verify")


def test_a_clean_run_is_refused_on_a_patched_tree(run, kit):
    kit.spawn("apply", "p1")
    _, err = run("run", "--clean", command=["true"], code=1)
    assert "is not clean" in err
    kit.spawn("restore")


def test_a_clean_run_holds_a_lease_and_says_in_writing_what_it_used(run, kit, tmp_path):
    process = run("run", "--clean", command=["python", "-B", SERVE, tmp_path / "r"], code=None)
    _until((tmp_path / "r").exists)
    assert "in use by session" in kit.spawn("apply", "p1", code=3).err
    kit.spawn("check")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "this run used pristine demopkg 1.0" in err
    record, _ = _record()
    assert record["predicate"]["statement"] == "this run used pristine demopkg 1.0"
    (tree,) = record["predicate"]["trees"]
    assert tree["digest"]["before"] == tree["digest"]["after"]


def test_a_tree_that_changes_under_a_clean_run_is_not_called_pristine(run, venv):
    path = venv.site / "demopkg" / "stray.py"
    _, err = run("run", "--clean", command=["touch", path], code=125)
    assert "unexpected demopkg/stray.py" in err
    record, _ = _record()
    assert record["predicate"]["statement"] == "demopkg 1.0 changed during this run"
    path.unlink()


def test_a_process_that_uses_the_tree_refuses_the_start(run, venv, tmp_path):
    with subprocess.Popen([venv.python, "-B", SERVE, tmp_path / "r"]) as stranger:
        _until((tmp_path / "r").exists)
        _, err = run("run", "p1", command=["touch", tmp_path / "started"], code=3)
        assert f"process {stranger.pid}" in err
        assert not (tmp_path / "started").exists()
        stranger.kill()


def test_the_next_run_finishes_an_abandoned_session(run, tmp_path):
    process = run("run", "p1", command=["python", "-B", SERVE, tmp_path / "r"], code=None)
    _until((tmp_path / "r").exists)
    process.kill()
    process.communicate(timeout=60)
    _, err = run("run", "p1", "--wait", "20s", command=["true"])
    assert "finished abandoned session" in err
    assert "restored  p1" in err


def test_recover_waits_for_the_processes_of_an_abandoned_session(run, kit, tmp_path):
    process = run("run", "p1", command=["python", "-B", SERVE, tmp_path / "r", "--ignore"], code=None)
    _until((tmp_path / "r").exists)
    server = int((tmp_path / "r").read_text().split()[0])
    process.kill()
    process.wait(60)
    assert f"its processes still run: {server} " in kit.spawn("recover", code=3).err
    waiting = kit.popen("recover", "--wait", "60s")
    assert "waiting" in waiting.stderr.readline()
    os.kill(server, signal.SIGKILL)
    process.communicate(timeout=60)
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, err
    assert "restored p1" in out


# Ignores SIGTERM, leaves group and session, and is another process every few milliseconds.
RESPAWN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    end = time.monotonic() + 100
    while time.monotonic() < end:
        with open(sys.argv[1], "w") as file:
            file.write(str(time.monotonic()))
        if os.fork():
            os._exit(0)
        time.sleep(0.002)
"""


def test_a_daemon_that_is_another_process_all_the_time_is_ended(run, tmp_path):
    beat = tmp_path / "beat"
    run("run", "p1", "--grace", "0.2s", command=["python", "-c", RESPAWN, beat])
    last = beat.read_text()
    time.sleep(0.5)
    assert beat.read_text() == last


def test_a_stopped_command_is_told_to_end(run, tmp_path):
    script = f"trap 'touch {tmp_path}/told; exit 5' TERM; touch {tmp_path}/ready; kill -STOP $$; sleep 600"
    process = run("run", "p1", "--grace", "600s", command=["sh", "-c", script], code=None)
    _until((tmp_path / "ready").exists)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 5
    assert (tmp_path / "told").exists()


def test_a_signal_in_the_waiting_for_a_stubborn_rest_changes_nothing(run, tmp_path):
    ready = tmp_path / "ready"
    script = f"(trap '' TERM INT; touch {ready}; exec sleep 600) & until [ -e {ready} ]; do sleep 0.01; done"
    process = run("run", "p1", "--grace", "2s", command=["sh", "-c", script], code=None)
    _until(ready.exists)
    for _ in range(5):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "restored  p1" in err
    assert process.returncode == 0


def test_what_the_command_does_to_its_output_and_input_is_its_own(run):
    source = subprocess.Popen(["yes"], stdout=subprocess.PIPE)
    with source:
        out, _ = run("run", "p1", command=["head", "-n", "2"], stdin=source.stdout)
        source.kill()
    assert out == "y\ny\n"
    run("run", "p1", command=["sh", "-c", "exec <&- >&- 2>&-; exit 6"], code=6)


def test_a_reader_that_goes_away_ends_the_command_and_restores(run, kit, venv):
    command = [sys.executable, "-m", "patchkit", *kit.where, "run", "p1", "--", "yes"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        assert b"restored  p1" in process.stderr.read()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_works_without_the_standard_streams(kit, venv, before, tmp_path, closed):
    line = ["run", "p1", "--", "sh", "-c", f"[ -e {venv.site}/demopkg/core.py.bak_p1 ] && exit 9"]
    command = shlex.join(map(str, [sys.executable, "-m", "patchkit", *kit.where, *line]))
    assert (
        subprocess.run(["sh", "-c", f"{command} {closed}"], check=False, capture_output=True).returncode == 9
    )
    assert snapshot(venv.site) == before


def test_it_works_from_cron_without_terminal_or_environment(run, venv):
    env = {"PATH": "/usr/bin:/bin"}
    out, _ = run("run", "p1", command=["sh", "-c", "tty; exit 4"], code=4, env=env, start_new_session=True)
    assert out == "not a tty\n"


def test_a_command_that_uninstalls_the_package_leaves_nothing_applied(run, venv, kit, before, wheels):
    uninstall = [uv(), "pip", "uninstall", "--python", venv.python, "demopkg"]
    _, err = run("run", "p1", command=uninstall, code=125)
    assert "demopkg 1.0 is not as it was before the command" in err
    assert "missing demopkg" in err
    assert not (venv.site / "demopkg").exists()
    assert not (venv.site / ".patchkit" / "leases").exists()
    venv.uv("install", "--link-mode", "hardlink", wheels["1.0"])
    assert "nothing to recover" in kit.spawn("recover").out
    kit.spawn("check")
    before.clear()  # its files are new ones
    before.update(snapshot(venv.site))


def test_a_command_that_upgrades_the_package_leaves_the_new_release_alone(run, venv, kit, before, wheels):
    upgrade = [uv(), "pip", "install", "--python", venv.python, wheels["2.0"]]
    _, err = run("run", "p1", command=upgrade, code=125)
    assert "demopkg 1.0 is not as it was before the command" in err
    assert "clean: demopkg 2.0" in kit.spawn("check").out
    assert files(venv.site) == DEMO["2.0"]
    assert "nothing to recover" in kit.spawn("recover").out
    before.clear()
    before.update(snapshot(venv.site))


def test_nohup_stays_nohup(run, tmp_path):
    process = run(
        *("run", "p1", "--grace", "1s"),
        command=["python", "-B", SERVE, tmp_path / "r"],
        code=None,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    _until((tmp_path / "r").exists)
    server = int((tmp_path / "r").read_text().split()[0])
    process.send_signal(signal.SIGHUP)
    os.kill(server, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    process.communicate()


def test_a_summary_that_nobody_reads_does_not_stop_the_restore(run):
    process = run("run", "p1", command=["sh", "-c", "sleep 2; exit 5"], code=None)
    process.stderr.close()
    process.stdout.close()
    assert process.wait(60) == 5


def test_outputs_are_written_down_and_attest_verify_checks_them(run, kit, tmp_path):
    data = tmp_path / "data"
    command = ["sh", "-c", f"mkdir -p {data}/deep; echo one > {data}/a; echo two > {data}/deep/b"]
    run("run", "p1", "--output", data, command=command)
    record, path = _record()
    names = {subject["name"] for subject in record["subject"]}
    assert names == {"demopkg@1.0", "data/a", "data/deep/b"}
    assert "agrees" in kit.spawn("attest", "verify", path).out
    # Moved, it must be told where.
    data.rename(tmp_path / "moved")
    assert "missing" in kit.spawn("attest", "verify", path, code=1).out
    kit.spawn("attest", "verify", path, "--output", tmp_path / "moved")
    (tmp_path / "moved" / "a").write_text("uno\n")
    (tmp_path / "moved" / "c").write_text("new\n")
    out = kit.spawn("attest", "verify", path, "--output", tmp_path / "moved", code=1).out
    assert f"modified {tmp_path}/moved/a" in out
    assert f"unexpected {tmp_path}/moved/c" in out


def _changed(value):
    """Other values of the same shape: each leaf of a record in turn, changed."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: other} for other in _changed(item))
            yield {name: one for name, one in value.items() if name != key}
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in _changed(item))
        yield [*value, "more"]
    elif isinstance(value, str):
        yield f"{value}x"
    else:
        yield 7 if value in (None, 0) or isinstance(value, bool) else None


def test_attest_verify_sees_every_change_of_a_record(run, kit, tmp_path):
    data = tmp_path / "data"
    run("run", "p1", "--output", data, command=["sh", "-c", f"mkdir {data}; echo one > {data}/a"])
    record, path = _record()
    assert kit("attest", "verify", path).code == 0
    record["predicate"]["environment"]["names"] = record["predicate"]["environment"]["names"][:2]
    here = Kit([])  # where the record says
    tried = 0
    for changed in _changed(record):
        path.write_text(json.dumps(changed, indent=2, sort_keys=True) + "\n")
        done = here("attest", "verify", path, code=None)
        assert done.code in (1, 4), f"{changed}\n{done}"
        tried += 1
    assert tried > 100


def test_a_record_whose_tree_has_no_history_any_more_is_said_to_be_unproven(run, kit, venv):
    run("run", "p1", command=["true"])
    _, path = _record()
    (venv.site / ".patchkit" / "history.jsonl").unlink()
    assert "the record's own text is not proven" in kit.spawn("attest", "verify", path).out


def test_only_regular_files_are_outputs_and_every_one_has_a_name_of_its_own(run, kit, tmp_path):
    odd = tmp_path / "a" / "data"
    odd.mkdir(parents=True)
    os.mkfifo(odd / "fifo")
    (odd / "loop").symlink_to(".")
    (odd / "link").symlink_to("/etc/passwd")
    Path(os.fsdecode(bytes(odd) + b"/\xff\n")).touch()
    same = tmp_path / "b" / "data"
    same.mkdir(parents=True)
    (same / "file").write_text("x")
    options = ["--output", odd, "--output", same, "--output", f"{same}/.", "--output", tmp_path / "none"]
    _, err = run("run", "p1", *options, command=["true"])
    assert f"{odd}: 1 file\n" in err
    assert err.count(f"{same}: 1 file\n") == 1
    assert f"{tmp_path}/none: no file or folder is there" in err
    record, path = _record()
    names = [subject["name"] for subject in record["subject"]]
    assert names == ["demopkg@1.0", f"{odd}/\\xff\n", f"{same}/file"]
    path.read_bytes().decode("ascii")
    kit.spawn("attest", "verify", path)


def test_an_output_that_cannot_be_read_is_said_and_the_record_is_written(run, tmp_path):
    data = tmp_path / "data"
    (data / "folder").mkdir(parents=True)
    (data / "good").touch()
    # Reading this file fails for root too: nothing is mapped at its beginning.
    _, err = run("run", "p1", "--output", data, "--output", "/proc/self/mem", command=["true"], code=125)
    assert "output /proc/self/mem could not be read: Input/output error" in err
    assert "restored  p1" in err
    first, second = _record()[0]["predicate"]["outputs"]
    assert list(first["files"]) == ["good"]
    assert second["unread"] == {"": "Input/output error"}


def test_a_record_whose_folder_is_gone_is_written_elsewhere(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "records"
    folder.mkdir()
    _, err = run("run", "p1", "--record", folder, command=["rmdir", folder], code=125)
    assert f"the record had to be written to {tmp_path}/patchkit-run-" in err
    (path,) = tmp_path.glob("patchkit-run-*.json")
    assert json.loads(path.read_text())["predicate"]["restored"]


def test_attest_verify_sees_a_tree_that_changed_since(run, kit):
    run("run", "p1", command=["true"])
    _, path = _record()
    kit.spawn("attest", "verify", path)
    kit.spawn("apply", "p1")
    assert "not as it was after the run" in kit.spawn("attest", "verify", path, code=1).out
    kit.spawn("restore")


def test_a_patch_that_was_applied_before_is_restored_too(run, kit):
    kit.spawn("apply", "p1")
    run("run", "p1", command=["true"])


def test_what_is_wrong_before_is_not_blamed_on_the_run(run, venv):
    stray = venv.site / "demopkg" / "stray.py"
    stray.write_text("")
    _, err = run("run", "p1", command=["true"])
    assert "unexpected demopkg/stray.py" in err
    with contextlib.suppress(FileNotFoundError):
        stray.unlink()
