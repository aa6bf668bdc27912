"""All of a transaction or none of it: metadata, links, full and read-only disks, signals, races, durability."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import struct
import subprocess
import threading
from pathlib import Path

import pytest

from patchkit import transaction
from patchkit.history import record
from patchkit.journal import Journal
from patchkit.state import prepare
from patchkit.transaction import MakeFolder, Put, Refresh, Remove, RemoveFolder
from patchkit.tree import Fingerprint, Meta
from tests import support
from tests.support import DEMO, P1, Kit, Venv, files, patched, snapshot

CORE = "demopkg/core.py"
META = Meta(0o644, os.getuid(), os.getgid(), 1_700_000_000_000_000_000)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, owners and chattr need root")


def run(root, operations, **more):
    prepare(str(root))
    transaction.run(str(root), operations, record("apply", [], mtime_ns=0, distribution="demopkg"), **more)


# -- what a file has beside its bytes -------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o444, 0o4755])
def test_mode_owner_attributes_and_time_are_kept_and_come_back(site, rooted, mode):
    core = site / CORE
    os.setxattr(core, "user.note", b"kept")
    if os.geteuid() == 0:
        os.chown(core, 1234, 1235)
    core.chmod(mode)
    before = snapshot(site)
    rooted("apply", "p1")
    now = core.stat()
    assert (now.st_mode & 0o7777, os.getxattr(core, "user.note")) == (mode, b"kept")
    if os.geteuid() == 0:
        assert (now.st_uid, now.st_gid) == (1234, 1235)
        assert (site / f"{CORE}.bak_p1").stat().st_uid == 1234
    rooted("restore", "--verify")
    assert snapshot(site) == before


@needs_root
def test_a_default_acl_of_the_folder_opens_no_file_that_was_closed(site, rooted):
    core = site / CORE
    core.chmod(0o640)
    everybody, nobody = 0xFFFFFFFF, 65534
    entries = [(1, 7, everybody), (2, 7, nobody), (4, 5, everybody), (16, 7, everybody), (32, 5, everybody)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(core.parent, "system.posix_acl_default", acl)
    before = snapshot(site)
    rooted("apply", "p1")
    assert os.listxattr(core) == []
    assert "system.posix_acl_access" in os.listxattr(
        site / "demopkg/extra/dump.py"
    )  # a new file is as its folder says
    rooted("restore", "--verify")
    assert snapshot(site) == before
    assert os.listxattr(core) == []


def test_a_link_to_a_file_of_the_same_patch_comes_back_as_a_link(site, rooted, patches):
    (site / "demopkg/alias.py").symlink_to("core.py")
    base = {**DEMO["1.0"], "demopkg/alias.py": DEMO["1.0"][CORE]}
    support.write_patch(patches, "both", base, {CORE: P1[CORE], "demopkg/alias.py": P1[CORE]})
    support.write_patch(patches, "alias", base, {"demopkg/alias.py": P1[CORE]})
    support.write_patch(patches, "core", base, {CORE: P1[CORE]})
    before = snapshot(site)
    for names in (("both",), ("alias", "core")):
        rooted("apply", *names)
        assert not (site / "demopkg/alias.py").is_symlink()
        rooted("restore", "--verify")
        assert snapshot(site) == before


@needs_root
def test_a_link_keeps_its_owner(site, rooted):
    (site / CORE).rename(site / "demopkg/real.txt")
    (site / CORE).symlink_to("real.txt")
    for path in (CORE, "demopkg/real.txt"):
        os.chown(site / path, 1234, 1235, follow_symlinks=False)
    before = snapshot(site)
    rooted("apply", "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == before


@needs_root
@pytest.mark.parametrize(
    ("owner", "group", "who"), [(1234, 1235, "user id 1234"), (65534, 1235, "group id 1235")]
)
def test_an_owner_that_could_not_be_kept_is_a_clear_error(site, patches, owner, group, who):
    kit = Kit(["--root", str(site), "--patches", str(patches)])
    for top in (site, *site.parents):
        top.chmod(top.stat().st_mode | 0o055)
        if top == Path("/tmp"):
            break
    for folder, _, names in os.walk(site):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chmod(path, 0o777)
    os.chown(site / CORE, owner, group)
    before = snapshot(site)
    done = support.as_user(65534, lambda: kit("apply", "p1", code=None))
    assert done.code == 6
    assert f"{CORE} belongs to {who}" in done.err
    assert "could not keep; nothing was changed; run as its owner or as root" in done.err
    assert snapshot(site) == before


@needs_root
def test_new_files_and_folders_belong_to_the_root_s_owner_and_are_as_open_as_their_neighbours(site, rooted):
    for path in (site, site / "demopkg"):
        os.chown(path, 1234, 1235)
        path.chmod(0o775)
    rooted("apply", "p1")
    for path in ("demopkg/extra", "demopkg/extra/dump.py", ".patchkit", ".patchkit/state.json"):
        assert (site / path).stat().st_uid == 1234, path
    assert (site / "demopkg/extra").stat().st_mode & 0o777 == 0o775


def test_a_patch_may_change_no_more_than_the_mode(site, rooted, patches):
    script = support.Content(DEMO["1.0"][CORE], 0o755)
    support.write_patch(patches, "exec", DEMO["1.0"], {CORE: script})
    before = snapshot(site)
    rooted("apply", "exec")
    assert (site / CORE).stat().st_mode & 0o777 == 0o755
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_a_rename_goes_there_and_back(site, rooted, patches):
    new = {"demopkg/core.py": None, "demopkg/kernel.py": DEMO["1.0"][CORE] + b"more = 1\n"}
    support.write_patch(
        patches, "move", DEMO["1.0"], {"demopkg/kernel.py": new["demopkg/kernel.py"]},
        renames={"demopkg/kernel.py": CORE},
    )  # fmt: skip
    before = snapshot(site)
    rooted("apply", "move")
    assert files(site) == patched(DEMO["1.0"], new, "move")
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_names_that_are_not_utf8_go_there_and_back(site, rooted, patches):
    before = {**DEMO["1.0"], support.LATIN1: b"caf\xe9\n"}
    (site / support.LATIN1).write_bytes(b"caf\xe9\n")
    support.write_patch(patches, "latin", before, {support.LATIN1: b"th\xe9\n"})
    pristine = snapshot(site)
    rooted("apply", "latin")
    assert (site / support.LATIN1).read_bytes() == b"th\xe9\n"
    assert rooted("status", "--json").json["ok"]
    rooted("restore", "--verify")
    assert snapshot(site) == pristine


def test_two_patches_that_share_a_new_folder_leave_none(site, rooted, patches):
    support.write_patch(patches, "p2", DEMO["1.0"], {"demopkg/extra/second.py": b"2\n"})
    before = snapshot(site)
    rooted("apply", "p1", "p2")
    rooted("restore", "p1")
    assert (site / "demopkg/extra/second.py").exists()
    rooted("restore", "--verify")
    assert snapshot(site) == before


def test_a_patch_below_another_on_the_same_file_is_not_restored_alone(site, rooted, patches):
    p2 = {CORE: P1[CORE] + b"more = 1\n"}
    support.write_patch(patches, "p2", {**DEMO["1.0"], **P1}, p2, on=("p1",))
    before = snapshot(site)
    rooted("apply", "p1", "p2")
    assert "'p1' lies below 'p2'" in rooted("restore", "p1", code=4).err
    rooted("restore", "p2")
    assert files(site) == patched(DEMO["1.0"], P1, "p1")
    rooted("apply", "p2")
    rooted("restore", "--all", "--verify")
    assert snapshot(site) == before


# -- links ----------------------------------------------------------------------------------------


def tree_digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


@pytest.mark.parametrize("mode", ["hardlink", "symlink", "copy"])
def test_the_uv_cache_and_its_other_environments_never_change(tmp_path, wheels, patches, mode):
    cache = tmp_path / "cache"
    one, other = (Venv.create(tmp_path / name, cache=cache) for name in ("one", "other"))
    for venv in (one, other):
        venv.uv("install", "--link-mode", mode, wheels["1.0"])
    if mode == "hardlink":
        assert (one.site / CORE).stat().st_nlink > 2
    before, cached, others = snapshot(one.site), tree_digests(cache), snapshot(other.site)
    kit = Kit(["--python", str(one.python), "--patches", str(patches)])
    kit("apply", "p1")
    assert not (one.site / CORE).is_symlink()
    assert (one.site / CORE).stat().st_nlink == 1
    assert files(one.site) == patched(DEMO["1.0"], P1, "p1")
    assert (tree_digests(cache), snapshot(other.site)) == (cached, others)
    kit("restore", "--verify")
    assert (tree_digests(cache), snapshot(other.site)) == (cached, others)
    assert snapshot(one.site) == before


def test_a_refusal_leaves_the_very_inodes_hard_links_included(site, rooted, tmp_path):
    os.link(site / CORE, tmp_path / "second name")
    inode = (site / CORE).stat().st_ino
    with pytest.raises(RuntimeError, match="refused"):
        run(site, [Put(CORE, b"new\n", META)], before_change=refuse)
    now = (site / CORE).stat()
    assert (now.st_ino, now.st_nlink) == (inode, 2)


def refuse() -> None:
    raise RuntimeError("refused")


def test_a_link_whose_target_changed_becomes_a_real_file_with_the_pristine_bytes(site, rooted, tmp_path):
    real = tmp_path / "real.py"
    os.rename(site / CORE, real)
    (site / CORE).symlink_to(real)
    rooted("apply", "p1")
    real.write_bytes(b"another\n")
    done = rooted("restore")
    assert "no longer holds the pristine bytes" in done.out
    assert not (site / CORE).is_symlink()
    assert files(site) == DEMO["1.0"]


def test_a_folder_symlink_out_of_the_root_is_refused(site, rooted, tmp_path):
    outside = tmp_path / "outside"
    os.rename(site / "demopkg", outside)
    (site / "demopkg").symlink_to(outside)
    before = snapshot(outside)
    assert "leads out of the root" in rooted("apply", "p1", code=4).err
    assert snapshot(outside) == before
    assert not (site / ".patchkit").exists()


def test_a_folder_that_becomes_a_symlink_out_of_the_root_at_the_last_moment_is_refused(site, tmp_path):
    outside = tmp_path / "outside"

    def swap() -> None:
        os.rename(site / "demopkg", outside)
        (site / "demopkg").symlink_to(outside)

    before = files(site)
    with pytest.raises(transaction.PatchkitError, match="out of the root"):
        run(site, [Put(CORE, b"new\n", META)], before_change=swap)
    assert {
        f"demopkg/{path}": data for path, data in files(outside).items() if not path.endswith(".tmp")
    } == before


# -- disks that refuse ----------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize(
    "name",
    [CORE, "demopkg/old.py", "demopkg", ".patchkit", ".patchkit/history.jsonl", ".patchkit/history.head"],
)
@pytest.mark.parametrize(("letter", "word"), [("i", "immutable"), ("a", "append-only")])
def test_an_attribute_that_forbids_the_change_is_named_and_nothing_changes(site, rooted, name, letter, word):
    rooted("apply", "p1")
    rooted("restore")
    target = site / name
    if subprocess.run(["chattr", f"+{letter}", target], check=False).returncode:
        pytest.skip("this file system knows no such attributes")
    before = snapshot(site)
    try:
        done = rooted("apply", "p1", code=6)
        assert f"{target.resolve()} is {word}; nothing was changed; 'chattr -{letter}' it first" in done.err
        assert done.err.count("\n") == 1
        assert snapshot(site) == before
    finally:
        subprocess.run(["chattr", f"-{letter}", target], check=True)
    rooted("apply", "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == before


@pytest.fixture
def mounted(tmp_path, site):
    """``site`` on a file system of its own, of 1 MiB."""
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=True)
    shutil.copytree(site, mount / "site", symlinks=True)
    yield mount / "site"
    subprocess.run(["umount", "-l", str(mount)], check=True)


@needs_root
@pytest.mark.parametrize("applied", [False, True])
def test_a_read_only_mount_is_a_clear_error(mounted, patches, applied):
    kit = Kit(["--root", str(mounted), "--patches", str(patches)])
    if applied:
        kit("apply", "p1")
    before = snapshot(mounted)
    remount = ["mount", "-o", "remount,ro", str(mounted.parent)]
    subprocess.run(remount, check=True)
    for dry in ([], ["--dry-run"]):  # which tells the truth about it
        done = kit("restore" if applied else "apply", *([] if applied else ["p1"]), *dry, code=6)
        assert (
            f"{mounted}{'/.patchkit' if applied else ''} is on a read-only file system; nothing" in done.err
        )
        assert done.err.count("\n") == 1
        assert snapshot(mounted) == before
    kit("status")
    kit("check", code=1 if applied else 0)


@needs_root
def test_a_full_disk_is_a_clear_error_at_whatever_point_it_fills(mounted, patches):
    kit = Kit(["--root", str(mounted), "--patches", str(patches)])
    before = snapshot(mounted)
    codes = set()
    for free in range(0, 80, 4):
        filler = mounted.parent / "filler"
        fill(filler, leave=free * 1024)
        done = kit("apply", "p1", code=None)
        codes.add(done.code)
        if done.code:
            assert done.err.count("\n") == 1, done
            assert "No space left" in done.err
            assert snapshot(mounted) == before
        filler.unlink()
        kit("restore", "--verify")
        assert snapshot(mounted) == before
    assert codes == {0, 6}


def fill(path: Path, leave: int) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave))


@needs_root
def test_another_user_s_folder_is_a_clear_error(site, patches):
    kit = Kit(["--root", str(site), "--patches", str(patches)])
    for top in (site, *site.parents):
        top.chmod(top.stat().st_mode | 0o055)
        if top == Path("/tmp"):
            break
    before = snapshot(site)
    done = support.as_user(65534, lambda: kit("apply", "p1", code=None))
    assert done.code == 6
    assert f"{site} belongs to user id 0 and is closed to user id 65534; nothing was changed" in done.err
    assert done.err.count("\n") == 1
    assert snapshot(site) == before
    assert not (site / ".patchkit").exists()


def test_a_file_system_without_hard_links_is_patched_by_copies(site, rooted):
    before = snapshot(site)
    strace = [
        "strace",
        "-f",
        "-qqq",
        "-o",
        os.devnull,
        "-e",
        "trace=linkat",
        "-e",
        "inject=linkat:error=EPERM",
    ]
    rooted.spawn("apply", "p1", prefix=strace)
    assert files(site) == patched(DEMO["1.0"], P1, "p1")
    rooted("restore", "--verify")
    assert snapshot(site) == before


# -- signals and races ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_undoes_at_once(site, rooted, number):
    before = snapshot(site)
    for count in (1, 3, 6):
        strace = ["strace", "-f", "-qqq", "-o", os.devnull, "-e", "trace=linkat"]
        inject = ["-e", f"inject=linkat:signal={number.name}:when={count}"]
        done = rooted.spawn("apply", "p1", prefix=[*strace, *inject], code=None)
        assert done.code in (130, -number, 128 + number), done
        assert "Traceback" not in done.err
        assert snapshot(site) == before
        assert not (site / ".patchkit/journal.json").exists()
    rooted("apply", "p1")


def test_nohup_keeps_its_meaning(site):
    seen = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(
            site,
            [Put(CORE, b"new\n", META)],
            before_change=lambda: seen.append(signal.raise_signal(signal.SIGHUP)),
        )
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (site / CORE).read_bytes() == b"new\n"


def test_a_transaction_also_runs_outside_the_main_thread(site):
    thread = threading.Thread(target=lambda: run(site, [Put(CORE, b"new\n", META)]))
    thread.start()
    thread.join()
    assert (site / CORE).read_bytes() == b"new\n"


def edit_in_place(site):
    with open(site / CORE, "ab") as file:
        file.write(b"# edited\n")


def edit_by_replacing(site):
    (site / "new").write_bytes(b"# edited\n")
    os.rename(site / "new", site / CORE)


@pytest.mark.parametrize("edit", [edit_in_place, edit_by_replacing])
def test_an_edit_between_planning_and_writing_wins(site, edit):
    prepare(str(site))
    with pytest.raises(transaction.ChangedMeanwhileError):
        run(
            site,
            [Put("demopkg/util.py", b"1\n", META), Put(CORE, b"new\n", META)],
            before_change=lambda: edit(site),
        )
    assert b"# edited" in (site / CORE).read_bytes()
    assert (site / "demopkg/util.py").read_bytes() == DEMO["1.0"]["demopkg/util.py"]
    assert not Journal.load(str(site))


def test_an_edit_through_a_descriptor_that_was_open_all_the_time_wins(site, monkeypatch):
    """The write comes after the rename, to the old file that has only its second name by then."""
    descriptor = os.open(site / CORE, os.O_WRONLY | os.O_APPEND)
    purge = transaction.purge_bytecode

    def late(tree, steps):
        if (site / CORE).read_bytes() == b"new\n":
            os.write(descriptor, b"# late\n")
        return purge(tree, steps)

    monkeypatch.setattr(transaction, "purge_bytecode", late)
    with pytest.raises(transaction.ChangedMeanwhileError):
        run(site, [Put(CORE, b"new\n", META)])
    os.close(descriptor)
    assert (site / CORE).read_bytes() == DEMO["1.0"][CORE] + b"# late\n"


def test_a_file_that_appears_where_one_is_added_is_not_overwritten(site):
    with pytest.raises(transaction.ChangedMeanwhileError):
        run(
            site,
            [Put("demopkg/new.py", b"ours\n", META)],
            before_change=lambda: (site / "demopkg/new.py").write_bytes(b"theirs\n"),
        )
    assert (site / "demopkg/new.py").read_bytes() == b"theirs\n"


def test_a_plan_made_from_other_bytes_is_refused_before_the_journal(site):
    expected = {CORE: Fingerprint.of_data(b"what the plan saw\n")}
    with pytest.raises(transaction.ChangedMeanwhileError):
        run(site, [Put(CORE, b"new\n", META)], expected=expected)
    assert files(site) == DEMO["1.0"]


def test_undo_brings_a_removed_folder_back_with_its_mode(site):
    folder = site / "demopkg/sub"
    folder.chmod(0o751)
    before = snapshot(site)
    operations = [
        Remove("demopkg/sub/deep.py"),
        Remove("demopkg/sub/__init__.py"),
        RemoveFolder("demopkg/sub"),
    ]

    with pytest.raises(transaction.ChangedMeanwhileError):
        # The last operation finds a file in its way only when the folder is gone.
        run(
            site,
            [*operations, Put("demopkg/new.py", b"1\n", META)],
            before_change=lambda: (site / "demopkg/new.py").write_bytes(b"theirs\n"),
        )
    (site / "demopkg/new.py").unlink()
    assert snapshot(site) == before


def test_a_refreshed_file_keeps_its_inode_and_loses_its_bytecode(site):
    cache = site / "demopkg/__pycache__"
    cache.mkdir()
    (cache / "core.cpython-311.pyc").write_bytes(b"stale")
    inode = (site / CORE).stat().st_ino
    run(site, [Refresh(CORE)])
    assert (site / CORE).stat().st_ino == inode
    assert not list(cache.iterdir())


def test_a_new_folder_is_gone_again_when_the_change_is_refused(site):
    before = snapshot(site)
    with pytest.raises(RuntimeError):
        run(
            site,
            [MakeFolder("demopkg/a"), MakeFolder("demopkg/a/b"), Put("demopkg/a/b/c.py", b"1\n", META)],
            before_change=refuse,
        )
    assert snapshot(site) == before


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_one_that_is_not_there(site, rooted):
    """EIO at each look at a file in turn: whatever `apply` says, its mode, attributes and link come back."""
    core, old = site / CORE, site / "demopkg/old.py"
    os.setxattr(core, "user.note", b"kept")
    core.chmod(0o640)
    old.rename(site / "demopkg/real.txt")
    old.symlink_to("real.txt")
    before = snapshot(site)
    for path in (core, old):
        for count in range(1, 200):
            strace = ["strace", "-f", "-qqq", "-o", str(site.parent / "strace"), "-P", str(path)]
            strace += ["-e", "trace=newfstatat", "-e", f"inject=newfstatat:error=EIO:when={count}"]
            done = rooted.spawn("apply", "p1", prefix=strace, code=None)
            if "INJECTED" not in (site.parent / "strace").read_text():
                break
            assert done.code in (0, 6), str(done)
            if done.code == 6:
                assert snapshot(site) == before
            else:
                assert core.stat().st_mode & 0o7777 == 0o640
                assert os.getxattr(core, "user.note") == b"kept"
            rooted("restore", "--verify")
            assert snapshot(site) == before, (path, count)
        assert 5 < count < 199
        rooted("restore")
