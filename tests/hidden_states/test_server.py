from __future__ import annotations

import pytest

from patchkit.hidden_states.server import last_words

SUMMARY = "session 0123456789ab\n  end       it ended with 1 after 8.8 s\n  record    /data/run.json\n"
ENGINE = (
    "Traceback (most recent call last):\n"
    '  File "server_args.py", line 852\n'
    "RuntimeError: No accelerator is available.\n"
    "Received sigquit from a child process.\n"
)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (ENGINE + SUMMARY, "RuntimeError: No accelerator is available."),
        (ENGINE, "RuntimeError: No accelerator is available."),
        ("loading\nKilled\n" + SUMMARY, "Killed"),
        ("patchkit: a process has loaded the file\n", "patchkit: a process has loaded the file"),
        (SUMMARY, "record    /data/run.json"),
        ("\n\n", "its log is empty"),
    ],
)
def test_a_server_that_ended_is_quoted_with_its_own_error(tmp_path, log, words):
    (tmp_path / "log").write_text(log)
    assert last_words(str(tmp_path / "log")) == words


def test_an_earlier_run_in_the_same_log_is_not_quoted(tmp_path):
    (tmp_path / "log").write_text(ENGINE + SUMMARY + "patchkit: refused\n")
    assert last_words(str(tmp_path / "log"), len(ENGINE + SUMMARY)) == "patchkit: refused"


def test_the_session_is_quoted_where_it_failed(tmp_path):
    (tmp_path / "log").write_text(ENGINE + SUMMARY + "patchkit: the tree is patched still\n")
    assert last_words(str(tmp_path / "log"), session=True) == "patchkit: the tree is patched still"


def test_no_log_is_said(tmp_path):
    assert last_words(str(tmp_path / "none")) == "it wrote no log"
