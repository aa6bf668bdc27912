"""What may stand in a file of ``.patchkit``, and how all else is called."""

from __future__ import annotations

import pytest

from patchkit import values


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (values.text, ""),
        (values.text, "caf\udce9"),
        (values.name, "hsdump-0.5"),
        (values.path, "demopkg/with space.txt"),
        (values.path, ".patchkit/state.json"),
        (values.link, "/cache/archive/core.py"),
        (values.mode, 0o7777),
        (values.owner, 2**32 - 2),
        (values.nanoseconds, -1),
        (values.seconds, 1.7e9),
        (values.process, 1),
    ],
)
def test_what_patchkit_writes_is_read(check, value):
    assert check(value, "it") == value


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        (values.text, 1, "it is 1, not a text"),
        (values.text, "\ud800", r"it is '\\ud800', not a text in Unicode"),
        (values.name, "a/b", "it is 'a/b', not a name"),
        (values.name, "a\0", "not a name"),
        (values.path, "../victim", "it is '../victim', not a plain path below the root"),
        (values.path, "/victim", "not a plain path below the root"),
        (values.path, "a\0b", "not a plain path below the root"),
        (values.path, "", "not a plain path below the root"),
        (values.link, "", "not the target of a link"),
        (values.mode, -1, "it is -1, not a whole number from 0 to 4095"),
        (values.mode, True, "it is True, not a whole number"),
        (values.owner, 2**32 - 1, "not a whole number"),
        (values.nanoseconds, 10**400, "it is a huge number, not a whole number"),
        (values.seconds, float("nan"), "it is nan, not a time in seconds since 1970"),
        (values.seconds, 10**400, "it is a huge number, not a time"),
        (values.seconds, 1e300, "not a time"),
        (values.sequence, {}, "it is an object, not a list"),
        (values.mapping, [[[]]], "it is a list, not an object"),
    ],
)
def test_anything_else_is_named(check, value, words):
    with pytest.raises(ValueError, match=words):
        check(value, "it")


def test_keys_that_lack_and_keys_that_are_not_known():
    assert values.keys({"a": 1, "b": 2}, "it", {"a"}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="it lacks 'a'"):
        values.keys({}, "it", {"a"}, set())
    with pytest.raises(ValueError, match="it has an unknown key 'b'"):
        values.keys({"a": 1, "b": 2}, "it", {"a"}, set())
