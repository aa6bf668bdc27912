"""What is decided about processes of which only the command line can be seen."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

import pytest

from patchkit.guard import environment
from patchkit.guard.environment import Environment
from patchkit.guard.places import Tree

if TYPE_CHECKING:
    pass

OTHER = 4321  # a uid that nobody here has


@pytest.fixture
def venv(tmp_path: pathlib.Path) -> pathlib.Path:
    """A venv that everybody may enter."""
    folder = tmp_path
    while folder != folder.parent:
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o055)
        folder = folder.parent
    made = tmp_path / "engine"
    (made / "bin").mkdir(parents=True)
    (made / "bin/python").symlink_to("/usr/bin/python3")
    (made / "pyvenv.cfg").write_text("")
    (made / "lib/python3.11/site-packages/sglang").mkdir(parents=True)
    (tmp_path / "link").symlink_to("engine")
    return made


def judge(
    venv: pathlib.Path, arguments: list[str], name: str = "python", *, on_gpu: bool = False, uid: int = OTHER
) -> str | None:
    tree = Tree(str(venv / "lib/python3.11/site-packages"), ["sglang/srt/model.py"], str(venv))
    return Environment(tree).by_stranger(arguments, name, uid, on_gpu=lambda: on_gpu)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["{venv}/bin/python", "-m", "sglang.launch_server"], "python"),
        (["{venv}/bin/python", "/home/x/train.py"], "python"),
        (["{venv}/../link/bin/python", "x.py"], "python"),
        (["/usr/bin/python3", "{venv}/bin/sglang", "serve"], "sglang"),
        (
            [
                "/usr/bin/python3",
                "-c",
                "import sys; sys.path.insert(0, '{venv}/lib/python3.11/site-packages')",
            ],
            "python3",
        ),
        (["python", "train.py"], "python"),
        (["python3.11", "-m", "x"], "python3.11"),
        (["sglang::scheduler"], "sglang::schedul"),
        (["sglang::scheduler_TP0 extra words"], "python"),
        (["SGLang:server"], "x"),
        ([], "sglang::detok"),
    ],
)
def test_a_process_that_may_be_of_the_environment_counts(venv: pathlib.Path, arguments: list[str], name: str):
    assert judge(venv, [argument.replace("{venv}", str(venv)) for argument in arguments], name)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/usr/bin/python3", "/usr/bin/networkd-dispatcher", "--run-startup-triggers"], "networkd-dispat"),
        (
            [
                "/usr/bin/python3",
                "/usr/share/unattended-upgrades/unattended-upgrade-shutdown",
                "--wait-for-signal",
            ],
            "unattended-upgr",
        ),
        (["/opt/conda/envs/other/bin/python", "train.py"], "python"),
        (["{venv}-other/bin/python", "x.py"], "python"),
        (["/usr/lib/systemd/systemd", "--user"], "systemd"),
        (["vim", "{venv}/lib/python3.11/site-packages/sglang/srt/model.py"], "vim"),
        (["sshd: somebody@pts/0"], "sshd"),
        (["-bash"], "bash"),
        (["(sd-pam)"], "(sd-pam)"),
        (["nginx: worker process"], "nginx"),
        (["/usr/bin/dcgm-exporter"], "dcgm-exporter"),
        ([], "kworker/0:1"),
        (["tail", "-f", "sglang.log"], "tail"),
    ],
)
def test_other_programs_do_not_refuse_a_patch_for_ever(venv: pathlib.Path, arguments: list[str], name: str):
    assert judge(venv, [argument.replace("{venv}", str(venv)) for argument in arguments], name) is None


def test_a_user_who_cannot_enter_the_root_cannot_have_loaded_it(venv: pathlib.Path):
    assert judge(venv, ["python", "train.py"])
    venv.chmod(0o750)
    assert judge(venv, ["python", "train.py"]) is None
    assert judge(venv, ["sglang::scheduler"], on_gpu=True) is None


def test_who_computes_on_a_gpu_and_hides_what_it_runs_counts(venv: pathlib.Path):
    assert judge(venv, ["mystery::worker"], "mystery") is None
    assert judge(venv, ["mystery::worker"], "mystery", on_gpu=True)
    assert judge(venv, ["/usr/bin/ffmpeg"], "ffmpeg", on_gpu=True) is None


def test_a_colleagues_bare_python_does_not_count_against_a_tree_in_my_home(
    venv: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "_homes", lambda: ((os.geteuid(), str(venv.parent)),))
    assert judge(venv, ["python", "train.py"]) is None
    assert judge(venv, ["mystery::worker"], "mystery", on_gpu=True) is None
    assert judge(venv, ["python", "-m", "sglang.launch_server"])
    assert judge(venv, [f"{venv}/bin/python", "train.py"])


def test_a_base_installation_is_its_interpreter(tmp_path: pathlib.Path, venv: pathlib.Path):
    """Without a venv, every script of that interpreter has the tree on its path."""
    base = tmp_path / "base"
    site = base / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (base / "bin").mkdir()
    tree = Environment(Tree(str(site), ["sglang/m.py"], str(base)))

    def ask(*arguments: str) -> str | None:
        return tree.by_stranger(list(arguments), "python3", OTHER, on_gpu=lambda: False)

    assert ask(f"{base}/bin/python3.11", "/usr/bin/service")
    assert ask("/usr/bin/python3", "/usr/bin/service") is None
    assert ask(f"{base}/bin/ls") is None


def test_a_plain_folder_outside_the_prefix_is_not_every_process_of_that_prefix(
    tmp_path: pathlib.Path, venv: pathlib.Path
):
    checkout = tmp_path / "checkout/python"
    (checkout / "sglang").mkdir(parents=True)
    tree = Environment(Tree(str(checkout), ["sglang/m.py"], "/usr"))
    assert (
        tree.by_stranger(["/usr/bin/python3", "/usr/bin/service"], "service", OTHER, on_gpu=lambda: False)
        is None
    )
    assert tree.by_stranger(["/usr/bin/python3", f"{checkout}/sglang/x.py"], "x", OTHER, on_gpu=lambda: False)
