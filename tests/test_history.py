"""The history: a chain of hashes in which a changed, added or missing line shows, and a torn one does not hurt."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.history import History, record
from patchkit.state import prepare


@pytest.fixture
def history(site):
    prepare(str(site))
    made = History(str(site))
    for number in range(4):
        made.append({**record("apply", [], mtime_ns=number), "id": str(number)})
    return made


def rewrite(history, change):
    lines = history.lines()
    change(lines)
    with open(history.path, "wb") as file:
        file.write(b"".join(line + b"\n" for line in lines))


def test_an_unbroken_chain_holds(history):
    assert history.verify() is None
    assert [entry["id"] for entry in history.records()] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: lines.__setitem__(1, lines[1].replace(b'"apply"', b'"maybe"')), 3),
        (lambda lines: lines.pop(1), 2),
        (lambda lines: lines.insert(2, lines[1]), 3),
        (lambda lines: lines.reverse(), 1),
        (lambda lines: lines.__setitem__(2, b"not json"), 3),
        (lambda lines: lines.__setitem__(2, b"[]"), 3),
        (lambda lines: lines.pop(0), 1),
    ],
    ids=["changed", "missing", "twice", "reversed", "no JSON", "no object", "first missing"],
)
def test_any_other_line_is_named(history, change, line):
    rewrite(history, change)
    broken = history.verify()
    assert broken is not None
    assert broken.line == line


@pytest.mark.parametrize(
    ("change", "line", "reason"),
    [
        (lambda lines: lines.__setitem__(3, lines[3].replace(b'"apply"', b'"maybe"')), 4, "was changed, or"),
        (lambda lines: lines.pop(), 3, "others after it removed"),
        (lambda lines: lines.__delitem__(slice(1, None)), 1, "others after it removed"),
        (lambda lines: lines.clear(), 1, "others after it removed"),
        (lambda lines: lines.append(follower(lines)), 5, "was added"),
    ],
    ids=["last changed", "last missing", "all but one missing", "all missing", "one more"],
)
def test_the_end_of_the_history_is_proven_and_going_on_does_not_heal_it(history, change, line, reason):
    rewrite(history, change)
    broken = history.verify()
    assert broken is not None
    assert broken.line == line
    assert reason in broken.reason
    length = len(history.lines())
    history.append({**record("restore", [], mtime_ns=9), "id": "9"})
    again = history.verify()
    assert again is not None
    assert again.line == length + 1
    history.append({**record("apply", [], mtime_ns=10), "id": "10"})
    assert history.verify() == again


def follower(lines):
    entry = {**json.loads(lines[-1]), "id": "4", "previous": hashlib.sha256(lines[-1]).hexdigest()}
    return json.dumps(entry, sort_keys=True).encode()


def test_a_last_line_without_its_newline_is_not_torn_but_cut(history):
    os.truncate(history.path, os.path.getsize(history.path) - 1)
    assert history.verify() is not None


@pytest.mark.parametrize("data", [None, b"", b"[]", b'{"schema": 1, "sha256": 3}', b'{"schema": 2}'])
def test_a_head_that_is_lost_or_damaged_is_told_for_good_and_blocks_nothing(history, data):
    head = history.root + "/.patchkit/history.head"
    os.unlink(head)
    if data is not None:
        Path(head).write_bytes(data)
    assert "history.head" in history.verify().reason
    history.append({**record("restore", [], mtime_ns=9), "id": "9"})
    broken = history.verify()
    assert broken.line == 5
    assert "history.head" in broken.reason


def test_a_history_from_before_there_were_heads_verifies_and_gets_one(history):
    lines, previous = [], None
    for line in history.lines():
        entry = {**json.loads(line), "previous": previous}
        del entry["head"]
        lines.append(json.dumps(entry, sort_keys=True).encode())
        previous = hashlib.sha256(lines[-1]).hexdigest()
    rewrite(history, lambda found: found.__setitem__(slice(None), lines))
    os.unlink(history.root + "/.patchkit/history.head")
    assert history.verify() is None
    history.append({**record("restore", [], mtime_ns=9), "id": "9"})
    assert history.verify() is None
    rewrite(history, lambda found: found.pop())
    assert history.verify() is not None


@pytest.mark.parametrize("call", ["openat", "write", "fsync", "rename"])
def test_a_kill_at_any_step_of_an_append_is_no_false_alarm(history, call):
    """Neither before the record is appended again, nor after another one is."""
    code = (
        "import sys; from patchkit.history import History\n"
        "who = {'user': 'u', 'host': 'h', 'action': 'apply', 'patches': []}\n"
        "History(sys.argv[1]).append({'schema': 1, 'time': 1, 'id': sys.argv[2], **who})"
    )
    kills = 0
    for count in range(1, 500):
        number = f"{call}{count}"
        command = [sys.executable, "-c", code, history.root, number]
        strace = ["strace", "-f", "-qqq", "-o", os.devnull, "-e", f"trace={call}"]
        if call == "openat":  # the interpreter opens many files before
            strace += ["-P", history.root + "/.patchkit", "-P", history.path]
        killed = subprocess.run(
            [*strace, "-e", f"inject={call}:signal=SIGKILL:when={count}", *command],
            check=False,
        ).returncode
        assert history.verify() is None
        if killed == 0:
            break
        kills += 1
        if count % 2:
            subprocess.run(command, check=True)
            assert json.loads(history.lines()[-1])["id"] == number
            assert history.verify() is None
    assert kills >= 2


def test_a_torn_last_line_was_never_written_and_the_next_takes_its_place(history):
    with open(history.path, "ab") as file:
        file.write(b'{"action": "res')
    assert history.verify() is None
    history.append({**record("restore", [], mtime_ns=9), "id": "9"})
    assert history.verify() is None
    assert len(history.records()) == 5
    assert history.last_mtime_ns() == 9


def test_the_same_record_is_appended_once(history):
    before = history.lines()
    history.append({**record("apply", [], mtime_ns=3), "id": "3"})
    assert history.lines() == before


def test_log_shows_what_was_done_and_verify_proves_it(site, rooted):
    rooted("apply", "p1")
    rooted("restore")
    done = rooted("log", "--verify")
    assert "apply p1" in done.out
    assert "restore p1" in done.out
    assert "2 records, the chain holds" in done.out
    records = rooted("log", "--json").json["data"]["roots"][0]["records"]
    pins = {one["path"]: one for one in records[0]["patches"][0]["files"]}
    assert pins["demopkg/core.py"]["before"] != pins["demopkg/core.py"]["after"]
    assert {"user", "host", "time", "previous"} <= set(records[0])


def test_log_verify_names_the_broken_line(site, rooted):
    rooted("apply", "p1")
    rooted("restore")
    path = site / ".patchkit/history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    entry = json.loads(lines[0])
    path.write_text(json.dumps({**entry, "user": "nobody"}) + "\n" + lines[1])
    done = rooted("log", "--verify", code=1)
    assert "history.jsonl:2: does not follow the line before" in done.out


def test_log_verify_names_a_history_that_ends_too_early(site, rooted):
    rooted("apply", "p1")
    rooted("restore")
    path = site / ".patchkit/history.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    done = rooted("log", "--verify", code=1)
    assert "history.jsonl:1: is not the last line" in done.out


def test_an_override_and_its_reason_are_written_down(site, rooted):
    rooted("apply", "p1")
    assert "guard overridden: a test" in rooted("log").out


def test_the_history_outlives_the_patch_and_the_distribution(venv, kit):
    kit("apply", "p1")
    kit("restore")
    assert os.listdir(venv.site / ".patchkit").count("history.jsonl") == 1
    assert "2 records" in kit("log", "--verify").out


def test_a_history_that_cannot_be_written_is_told_and_finished_later(site, rooted):
    rooted("apply", "p1")
    rooted("restore")
    strace = ["strace", "-f", "-qqq", "-o", os.devnull, "-e", "trace=ftruncate"]
    # The lock signs with the first one; the history is cut to its complete lines with the second.
    inject = ["-e", "inject=ftruncate:error=EIO:when=2"]
    done = rooted.spawn("apply", "p1", prefix=[*strace, *inject], code=5)
    assert "the change is made and whole" in done.err
    assert "was interrupted" in rooted("status").out
    assert "finished an interrupted apply of p1" in rooted("recover").out
    assert "3 records, the chain holds" in rooted("log", "--verify").out
    rooted("verify")


def test_a_first_line_that_does_not_say_what_it_follows_is_named(history):
    """Of a history without a head, whose only line nothing follows."""
    entry = json.loads(history.lines()[0])
    del entry["previous"], entry["head"]
    rewrite(history, lambda lines: lines.__setitem__(slice(None), [json.dumps(entry).encode()]))
    os.unlink(f"{history.root}/.patchkit/history.head")
    broken = history.verify()
    assert broken is not None
    assert (broken.line, broken.reason) == (1, "not a history record (it lacks 'previous')")
