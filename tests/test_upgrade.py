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
    assert "was applied to demopkg 1.0, now demopkg 2.0" in kit("check", code=1).out
    assert "applied to 1.0, but demopkg 2.0 is there now" in kit("status").out
    kit("verify", code=1)
    done = kit("restore", "--verify")
    assert "is the file of demopkg 2.0" in done.out
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
    assert "demopkg 1.0 was patched with 'p1'; demopkg 2.0 has been installed over it" in done.out
    assert files(venv.site) == patched(clean_2, PORTED, "p1")
    kit("check", "--expect", "p1")
    kit("restore", "--verify")
    assert files(venv.site) == clean_2


def test_apply_after_an_upgrade_without_a_variant_says_both(venv, kit, wheels):
    kit("apply", "p1")
    venv.uv("install", "--upgrade", wheels["2.0"])
    before = snapshot(venv.site)
    done = kit("apply", "p1", code=4)
    assert "'p1' was applied to demopkg 1.0, and demopkg 2.0 has been installed over it" in done.err
    assert "no variant for demopkg 2.0; the nearest is for 1.0" in done.err
    assert snapshot(venv.site) == before


@pytest.mark.parametrize(
    ("installer", "arguments"), [("uv", ["--reinstall"]), ("pip", ["--force-reinstall"])]
)
def test_a_reinstall_is_named_and_can_be_restored_or_patched_again(venv, kit, wheels, installer, arguments):
    pristine = files(venv.site)
    kit("apply", "p1")
    install(venv, installer, *arguments, wheels["1.0"])
    kit("check", code=1)
    assert "pristine demopkg/core.py" in kit("status").out
    done = kit("apply", "p1")
    assert "has been installed over it" in done.out
    assert files(venv.site) == patched(pristine, P1, "p1")
    install(venv, installer, *arguments, wheels["1.0"])
    assert "already has its pristine bytes; left as it is" in kit("restore", "--verify").out
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
    assert "demopkg is gone" in kit("check", code=1).out
    assert "p1" in kit("status").out
    kit("restore")
    assert files(venv.site) == {"unrelated.py": b"x = 1\n"}
    assert not (venv.site / "demopkg").exists()


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
    usual = {".gitignore", "history.jsonl", "lock", "leases", "statcache.json"}
    return {path.name for path in folder.iterdir()} - usual if folder.is_dir() else set()


@pytest.mark.parametrize("action", ["apply", "restore"])
@pytest.mark.parametrize("call", ["rename", "linkat", "unlink"])
def test_nothing_is_left_of_an_interrupted_change_under_an_uninstall(venv, kit, patches, wheels, call, action):
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
