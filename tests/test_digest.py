"""The stat cache: it may be late, absent or broken, but never wrong."""

from __future__ import annotations

import hashlib
import os
import time

import pytest

from patchkit import digest
from patchkit.digest import StatCache
from tests import support

CORE = "demopkg/core.py"


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def old(monkeypatch):
    """Files count as settled at once."""
    monkeypatch.setattr(digest, "_RACY_NS", -1)


def test_a_settled_file_is_hashed_once(site, old, monkeypatch):
    cache = StatCache(str(site))
    assert cache.sha256(CORE) == sha((site / CORE).read_bytes())
    cache.save()

    def fail(_):
        raise AssertionError("read again")

    monkeypatch.setattr(digest, "sha256_file", fail)
    assert StatCache(str(site)).sha256(CORE) == sha((site / CORE).read_bytes())


def test_a_file_changed_just_now_is_not_remembered(site):
    """Another change within the clock's grain would leave the same stamp."""
    (site / CORE).write_bytes(b"new\n")
    cache = StatCache(str(site))
    cache.sha256(CORE)
    assert cache.entries == {}


def test_a_change_of_the_same_size_with_the_old_mtime_is_seen(site, old):
    cache = StatCache(str(site))
    first = cache.sha256(CORE)
    stamp = (site / CORE).stat().st_mtime_ns
    time.sleep(0.02)  # ctime has the grain of the kernel's tick
    data = (site / CORE).read_bytes().replace(b"AAA", b"EEE")
    with open(site / CORE, "r+b") as file:
        file.write(data)
    os.utime(site / CORE, ns=(stamp, stamp))
    assert cache.sha256(CORE) == sha(data) != first


def test_a_file_put_in_its_place_with_all_its_times_is_seen(site, old):
    cache = StatCache(str(site))
    cache.sha256(CORE)
    info = (site / CORE).stat()
    other = site / "other"
    other.write_bytes(b"x" * info.st_size)
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.rename(other, site / CORE)
    assert cache.sha256(CORE) == sha(b"x" * info.st_size)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"schema": 9, "files": {}}', b'{"schema": 1, "files": 3}']
)
def test_a_cache_that_cannot_be_read_is_thrown_away(site, old, data):
    cache = StatCache(str(site))
    cache.sha256(CORE)
    cache.save()
    (site / ".patchkit/statcache.json").write_bytes(data)
    assert StatCache(str(site)).sha256(CORE) == sha((site / CORE).read_bytes())


def test_no_file_has_no_digest(site):
    cache = StatCache(str(site))
    assert cache.sha256("demopkg") is None
    with pytest.raises(FileNotFoundError):
        cache.sha256("demopkg/nothing.py")


def test_a_cache_that_cannot_be_written_is_done_without(site, old):
    (site / ".patchkit").write_bytes(b"in the way")
    cache = StatCache(str(site))
    cache.sha256(CORE)
    cache.save()
    assert (site / ".patchkit").read_bytes() == b"in the way"


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_check_works_where_nothing_may_be_written(site, rooted):
    for top in (site, *site.parents):
        top.chmod(top.stat().st_mode | 0o055)
        if top.name.startswith("pytest-of"):
            break
    done = support.as_user(65534, lambda: rooted("check", code=None))
    assert done.code == 0, done
    assert not (site / ".patchkit").exists()
