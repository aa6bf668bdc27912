"""The distribution is upgraded, reinstalled or removed while it is patched: the next command says so, no byte
of the old release lands on the new one, and only what patchkit left is cleaned up.
"""

from __future__ import annotations

import os

import pytest

from tests import support
from tests.support import DEMO, P1, files, patched, snapshot

PORTED = {"demopkg/core.py": DEMO["2.0"]["demopkg/core.py"].replace(b"CCC", b"DDD")}


def installers():
    return pytest.mark.parametrize("installer", ["uv", "pip"])


def install(venv, installer, *arguments):
    getattr(venv, installer)("install", *arguments)


def says_exactly(kit, what, sentence, replaced):
    """Every command that looks names what happened, in words and in JSON, and no file as edited by someone."""
    for command in (["status"], ["check"], ["check", "--expect", "p1"], ["verify"], ["verify", "p1"]):
        done = kit(*command, code=None)
        assert sentence in done.out, str(done)
        assert not {"drifted", "modified", "unexpected"} & set(done.out.split()), str(done)
        found = kit(*command, "--json", code=done.code).json
        target = found["data"]["targets"][0]
        if command == ["status"]:
            takeovers = [applied["takeover"] for applied in target["stack"]]
        else:
            assert done.code == 1
            takeovers = target["takeovers"]
            assert sentence in found["errors"][0]["message"]
        assert [one["what"] for one in takeovers] == [what]
        assert sentence in takeovers[0]["message"]
        if command in (["verify"], ["check", "--expect", "p1"]):
            assert {one["path"] for one in target["offenders"]} == replaced
            assert {one["kind"] for one in target["offenders"]} <= {"replaced", "missing"}
        if command == ["check"]:  # the new release's own files are no offenders, only what we left is
            assert not {one["path"] for one in target["offenders"]} & replaced


@pytest.fixture
def clean_2(tmp_path, wheels):
    """What 2.0 looks like where nobody ever patched."""
    other = support.Venv.create(tmp_path / "other")
    other.uv("install", wheels["2.0"])
    return files(other.site)


@installers()
def test_an_upgrade_is_named_and_restore_leaves_the_new_release_as_installed(
    venv, kit, wheels, clean_2, installer
):
    kit("apply", "p1")
    install(venv, installer, "--upgrade", wheels["2.0"])
    says_exactly(kit, "replaced", "demopkg 1.0 was replaced by demopkg 2.0", {"demopkg/core.py"})
    done = kit("restore", "--verify")
    assert "cleaned up after p1" in done.out
    assert "demopkg/core.py is the file of demopkg 2.0, installed after 'p1'; left as it is" in done.out
    assert "M demopkg/core.py" not in done.out
    assert files(venv.site) == clean_2
    kit("check")
    assert not (venv.site / ".patchkit" / "state.json").exists()


@installers()
def test_apply_after_an_upgrade_takes_the_new_release_s_variant(
    venv, kit, patches, wheels, clean_2, installer
):
    support.write_patch(patches, "p1", DEMO["2.0"], PORTED, releases=("2.0",))
    kit("apply", "p1")
    install(venv, installer, "--upgrade", wheels["2.0"])
    done = kit("apply", "p1")
    assert "cleaned up after p1" in done.out
    assert "demopkg 1.0 was replaced by demopkg 2.0" in done.out
    assert files(venv.site) == patched(clean_2, PORTED, "p1")
    kit("check", "--expect", "p1")
    kit("restore", "--verify")
    assert files(venv.site) == clean_2


def test_apply_after_an_upgrade_without_a_variant_says_both(venv, kit, wheels):
    kit("apply", "p1")
    venv.uv("install", "--upgrade", wheels["2.0"])
    before = snapshot(venv.site)
    done = kit("apply", "p1", code=4)
    assert "demopkg 1.0 was replaced by demopkg 2.0" in done.err
    assert "'patchkit restore p1' clears what is left of it" in done.err
    assert "no variant for demopkg 2.0; the nearest is for 1.0" in done.err
    assert snapshot(venv.site) == before


@pytest.mark.parametrize(
    ("installer", "arguments"), [("uv", ["--reinstall"]), ("pip", ["--force-reinstall"])]
)
def test_a_reinstall_is_named_and_can_be_restored_or_patched_again(venv, kit, wheels, installer, arguments):
    pristine = files(venv.site)
    kit("apply", "p1")
    install(venv, installer, *arguments, wheels["1.0"])
    says_exactly(kit, "reinstalled", "demopkg 1.0 was reinstalled", {"demopkg/core.py", "demopkg/old.py"})
    assert "applied, then reinstalled" in kit("list").out
    done = kit("apply", "p1")
    assert "cleaned up after p1" in done.out
    assert files(venv.site) == patched(pristine, P1, "p1")
    install(venv, installer, *arguments, wheels["1.0"])
    assert "core.py is the file of demopkg 1.0 again; left as it is" in kit("restore", "--verify").out
    assert files(venv.site) == pristine


@installers()
def test_what_an_uninstall_leaves_is_found_and_cleaned(venv, kit, installer):
    kit("apply", "p1")
    (venv.site / "unrelated.py").write_text("x = 1\n")
    if installer == "pip":
        venv.pip("uninstall", "--yes", "demopkg")
    else:
        venv.uv("uninstall", "demopkg")
    assert (venv.site / "demopkg/core.py.bak_p1").exists()
    says_exactly(kit, "uninstalled", "demopkg 1.0 was uninstalled", {"demopkg/core.py"})
    assert "demopkg 1.0 was uninstalled with 'p1' applied" in kit("apply", "p1", code=4).err
    done = kit("restore", "--verify")
    assert "demopkg 1.0 was uninstalled" in done.out
    assert "(nothing that patchkit put there is left)" in done.out
    assert files(venv.site) == {"unrelated.py": b"x = 1\n"}
    assert not (venv.site / "demopkg").exists()


def test_an_uninstall_is_named_where_only_the_folder_is_given(venv, kit, patches):
    kit("apply", "p1")
    venv.uv("uninstall", "demopkg")
    bare = support.Kit(["--root", str(venv.site), "--patches", str(patches)])
    says_exactly(bare, "uninstalled", "demopkg 1.0 was uninstalled", {"demopkg/core.py"})
    assert "demopkg 1.0 was uninstalled with 'p1' applied" in bare("apply", "p1", code=4).err
    bare("restore", "--verify")
    assert not (venv.site / "demopkg").exists()


def test_files_put_back_by_hand_are_no_reinstall(venv, kit):
    kit("apply", "p1")
    (venv.site / "demopkg/core.py").write_bytes(DEMO["1.0"]["demopkg/core.py"])
    assert "files of 'p1' were put back without patchkit" in kit("status").out
    assert "files of 'p1' were put back without patchkit" in kit("verify", code=1).out
    kit("apply", "p1")
    kit("check", "--expect", "p1")


def test_an_added_file_that_someone_deleted_is_no_reinstall(venv, kit):
    kit("apply", "p1")
    (venv.site / "demopkg/extra/dump.py").unlink()
    assert "installed" not in kit("status").out
    assert "was removed after 'p1' was applied" in kit("apply", "p1", code=4).err
    kit("restore", "--verify")


def test_an_edit_after_a_reinstall_is_named_beside_it(venv, kit, wheels):
    kit("apply", "p1")
    venv.uv("install", "--reinstall", wheels["1.0"])
    (venv.site / "demopkg/core.py").write_bytes(b"mine = 1\n")
    said = kit("status").out
    assert "demopkg 1.0 was reinstalled" in said
    assert "drifted demopkg/core.py" in said
    assert "was changed after 'p1' was applied" in kit("restore", code=4).err


def test_an_uninstall_leaves_foreign_files_of_the_package_alone(venv, kit):
    kit("apply", "p1")
    (venv.site / "demopkg/mine.txt").write_text("keep me")
    venv.uv("uninstall", "demopkg")
    kit("restore")
    assert files(venv.site) == {"demopkg/mine.txt": b"keep me"}


def test_a_release_that_ships_the_patched_bytes_is_left_alone(venv, kit, patches, tmp_path):
    """Upstream took the patch: the same bytes, but the installer's."""
    merged = {path: data for path, data in {**DEMO["1.0"], **P1}.items() if data is not None}
    wheel = support.build_wheel(tmp_path / "merged", "1.1", merged)
    kit("apply", "p1")
    venv.uv("install", "--upgrade", wheel)
    assert "is the file of demopkg 1.1" in kit("restore", "--verify").out
    assert files(venv.site) == merged


def test_a_stack_on_one_file_survives_a_reinstall(venv, kit, patches, wheels):
    p2 = {"demopkg/core.py": P1["demopkg/core.py"] + b"\n\nmore = 1\n"}
    support.write_patch(patches, "p2", {**DEMO["1.0"], **P1}, p2, on=("p1",))
    pristine = files(venv.site)
    kit("apply", "p1", "p2")
    venv.uv("install", "--reinstall", wheels["1.0"])
    kit("apply", "p1")
    assert files(venv.site) == patched(pristine, P1, "p1")
    kit("apply", "p2")
    venv.uv("install", "--reinstall", wheels["1.0"])
    kit("restore", "--verify")
    assert files(venv.site) == pristine


@pytest.mark.parametrize("call", ["rename", "linkat", "unlink"])
def test_an_interrupted_apply_does_not_come_back_over_an_upgrade(venv, kit, wheels, clean_2, call):
    """Killed, then upgraded, and only then recovered."""
    for count in range(1, 60, 5 if call == "unlink" else 1):
        strace = ["strace", "-f", "-qqq", "-o", os.devnull, "-e", f"trace={call}"]
        inject = ["-e", f"inject={call}:signal=SIGKILL:when={count}"]
        process = kit.popen("apply", "p1", prefix=[*strace, *inject])
        process.communicate()
        if process.returncode == 0:
            break
        venv.uv("install", "--reinstall", wheels["2.0"])
        kit("recover")
        kit("restore", "--verify")
        assert files(venv.site) == clean_2, f"killed at {call} {count}"
        venv.uv("install", "--reinstall", wheels["1.0"])
    assert 2 < count < 59  # killed at least twice, and in the end not any more


@installers()
def test_a_folder_that_the_new_release_dropped_does_not_stay_for_our_files(
    venv, kit, patches, tmp_path, installer
):
    slim = {path: data for path, data in DEMO["2.0"].items() if "/sub/" not in path}
    wheel = support.build_wheel(tmp_path / "slim", "2.0", slim)
    changes = {"demopkg/sub/deep.py": b"depth = 3\n", "demopkg/sub/new.py": b"x = 1\n"}
    support.write_patch(patches, "deep", DEMO["1.0"], changes)
    kit("apply", "deep")
    venv.run("import demopkg.sub.deep, demopkg.sub.new")
    (venv.site / "demopkg/mine").mkdir()
    install(venv, installer, "--upgrade", wheel)
    kit("restore", "--verify")
    assert files(venv.site) == slim
    assert not (venv.site / "demopkg/sub").exists()
    assert (venv.site / "demopkg/mine").is_dir()


def left_in(folder):
    """What patchkit keeps beside its history, its lock and its lists of digests and leases."""
    usual = {".gitignore", "history.jsonl", "history.head", "lock", "leases", "statcache.json"}
    return {path.name for path in folder.iterdir()} - usual if folder.is_dir() else set()


@pytest.mark.parametrize("action", ["apply", "restore"])
@pytest.mark.parametrize("call", ["rename", "linkat", "unlink"])
def test_nothing_is_left_of_an_interrupted_change_under_an_uninstall(
    venv, kit, patches, wheels, call, action
):
    changes = {**P1, "demopkg/sub/deep.py": b"depth = 3\n"}
    support.write_patch(patches, "deep", DEMO["1.0"], changes)
    for count in range(2 if call == "rename" else 1, 60, 5 if call == "unlink" else 1):
        if action == "restore":
            kit("apply", "deep")
        strace = ["strace", "-f", "-qqq", "-o", os.devnull, "-e", f"trace={call}"]
        inject = ["-e", f"inject={call}:signal=SIGKILL:when={count}"]
        process = kit.popen(action, "deep", prefix=[*strace, *inject])
        process.communicate()
        if process.returncode == 0:
            break
        venv.uv("uninstall", "demopkg")
        kit("restore", "--verify")
        assert not (venv.site / "demopkg").exists(), f"killed at {call} {count}"
        assert not left_in(venv.site / ".patchkit"), f"killed at {call} {count}"
        venv.uv("install", wheels["1.0"])
    assert 2 < count < 59  # killed at least twice, and in the end not any more
