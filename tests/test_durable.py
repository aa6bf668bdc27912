"""What is on the disk when the power goes: the order in which patchkit writes, syncs and renames."""

from __future__ import annotations

import os
import re
import time

import pytest

from patchkit.durable import write_durably, write_new
from patchkit.state import prepare
from patchkit.tree import Meta

CORE = "demopkg/core.py"
META = Meta(0o644, os.getuid(), os.getgid(), 1_700_000_000_000_000_000)


def calls(site, kit, *arguments):
    """The changing system calls of a command, in order, as (name, text)."""
    log = site.parent / "strace"
    names = "fsync,rename,linkat,unlink,mkdir,rmdir"
    strace = ["strace", "-f", "-y", "-qqq", "-s", "400", "-o", str(log), "-e", f"trace={names}"]
    process = kit.popen(*arguments, prefix=strace)
    process.communicate()
    assert process.returncode == 0
    found = re.findall(r"^\d+ +(\w+)\((.*)\) += 0$", log.read_text(), re.MULTILINE)
    return [(name, text) for name, text in found if str(site) in text]


def test_after_a_power_cut_at_any_moment_enough_is_on_the_disk(site, rooted):
    """The order of fsync and rename: journal and second names before the first change, everything before the
    commit mark, the journal's end last.
    """
    done = calls(site, rooted, "apply", "p1")
    texts = [f"{name} {text}" for name, text in done]

    def at(pattern, start=0):
        found = [n for n, text in enumerate(texts) if n >= start and re.search(pattern, text)]
        assert found, (pattern, texts)
        return found

    package = f"{site}/demopkg"
    journal, committed = at(r"rename .*journal\.json\"$")
    changes = [n for n in at(rf'rename .*"{package}/[^"]*"$|linkat .*"{package}/(?!.*undo)|unlink "{package}/old.py"')
               if "undo" not in texts[n]]  # fmt: skip
    first, last = changes[0], changes[-1]
    assert at(r"fsync .*journal\.json\.\w+\.tmp>")[0] < journal
    assert any(journal < n < first for n in at(rf"fsync .*<{site}/\.patchkit>"))
    undo = at(r"linkat .*/undo\.")
    assert journal < undo[0]
    assert undo[-1] < first
    assert any(undo[-1] < n < first for n in at(r"fsync .*/undo\.\w+>"))
    assert any(at(r"mkdir .*/undo\.")[0] < n < first for n in at(rf"fsync .*<{site}/\.patchkit>"))
    for temp in re.findall(rf'"({package}/[^"]*\.tmp)"', "\n".join(texts[first : last + 1])):
        assert at(rf"fsync .*<{re.escape(temp)}>")[0] < first
    assert any(last < n < committed for n in at(rf"fsync .*<{package}>"))
    assert at(r"fsync .*history\.jsonl>")[-1] > committed
    assert at(r'unlink .*journal\.json"')[-1] > at(r"fsync .*history\.jsonl>")[-1]


def test_stale_bytecode_does_not_come_back_with_a_power_cut(venv, kit):
    venv.run("import demopkg.core")
    texts = [f"{name} {text}" for name, text in calls(venv.site, kit, "apply", "p1")]
    gone = next(n for n, text in enumerate(texts) if re.search(r"unlink .*core\.cpython-\d+\.pyc", text))
    assert any("fsync" in text and "__pycache__>" in text for text in texts[gone:])


def test_the_time_of_a_change_is_never_that_of_an_earlier_one(site, rooted):
    seconds = []
    for _ in range(3):
        rooted("apply", "p1")
        seconds.append((site / CORE).stat().st_mtime_ns // 10**9)
        rooted("restore")
    assert len(set(seconds)) == 3
    assert min(seconds) >= int(time.time()) - 600


def test_a_new_file_never_replaces_one(site):
    with pytest.raises(FileExistsError):
        write_new(str(site / CORE), b"x", META)
    assert (site / CORE).read_bytes() != b"x"


def test_a_new_file_that_could_not_be_completed_is_gone(site):
    with pytest.raises(OSError, match=r"argument|supported"):
        write_new(
            str(site / "new"), b"x", Meta(0o644, META.uid, META.gid, 0, (("user.", b""), ("nospace.x", b"")))
        )
    assert not (site / "new").exists()


def test_a_replaced_file_is_old_or_new_and_leaves_no_temporary(site):
    prepare(str(site))
    for data in (b"1\n", b"2\n"):
        write_durably(str(site), ".patchkit/file", data)
        assert (site / ".patchkit/file").read_bytes() == data
    assert sorted(os.listdir(site / ".patchkit")) == [".gitignore", "file"]
