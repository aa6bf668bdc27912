"""The command line's own promises: which tree is meant, what is printed where, and what the exit code says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.cli.main import cli
from tests import support
from tests.support import DEMO, Kit, Venv


def patchkit(
    *arguments: object, env: dict[str, str] | None = None, **more: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "patchkit", *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False, **more
    )


def test_options_may_stand_before_or_after_the_command(venv: Venv, patches: Path) -> None:
    options = ["--python", venv.python, "--patches", patches, "--json"]
    before, after = patchkit(*options, "check"), patchkit("check", *options)
    assert before.returncode == after.returncode == 0
    assert before.stdout == after.stdout
    assert json.loads(before.stdout)["ok"] is True


def commands(group: click.Group, context: click.Context) -> Iterator[click.Command]:
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from commands(found, context)
        elif found is not None:
            yield found


def test_no_option_of_a_command_is_lost_to_another_one() -> None:
    for one in commands(cli, click.Context(cli)):
        names = [param.name for param in one.params]
        assert len(set(names)) == len(names), one.name
        flags = [flag for param in one.params for flag in param.opts]
        assert len(set(flags)) == len(flags), one.name


def test_the_command_line_wins_over_the_environment(venv: Venv, patches: Path) -> None:
    done = patchkit(
        "--python", venv.python, "--patches", patches, "check", env={"PATCHKIT_ROOT": "/nonexistent"}
    )
    assert done.returncode == 0, done.stderr


def test_two_answers_to_which_tree_are_a_usage_error(venv: Venv) -> None:
    done = patchkit("--python", venv.python, "--root", venv.site, "check")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    done = patchkit("check", env={"PATCHKIT_ROOT": str(venv.site), "PATCHKIT_PYTHON": str(venv.python)})
    assert done.returncode == 2


def test_the_variable_for_patches_is_a_list_with_colons(venv: Venv, patches: Path, tmp_path: Path) -> None:
    spaced = tmp_path / "with space"
    support.write_patch(spaced, "other", DEMO["1.0"], {"demopkg/util.py": b"one = 2\n"})
    done = patchkit("list", "--python", venv.python, env={"PATCHKIT_PATCHES": f"{patches}:{spaced}"})
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"p1", "other"} <= set(names)


def test_json_answers_a_wrong_command_line_too(tmp_path: Path) -> None:
    for arguments in (["--json", "check", "--bogus"], ["check", "--bogus"], ["--bogus"]):
        done = patchkit(*arguments, env={"PATCHKIT_JSON": "1"}, cwd=tmp_path)
        assert done.returncode == 2
        answer = json.loads(done.stdout)
        assert answer["errors"][0]["code"] == "usage"
    done = patchkit("--json", "--root", "diff", "check", cwd=tmp_path)
    assert json.loads(done.stdout)["command"] == "check"


def test_a_full_stdout_does_not_turn_what_was_done_into_a_failure(
    kit: Kit, venv: Venv, patches: Path
) -> None:
    command = [sys.executable, "-m", "patchkit", "--python", venv.python, "--patches", patches, "apply", "p1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "could not be written" in done.stderr
    assert kit("verify", "p1").code == 0


def test_closed_standard_streams_change_nothing(kit: Kit, venv: Venv, patches: Path) -> None:
    script = (
        f'"{sys.executable}" -m patchkit --python "{venv.python}" --patches "{patches}" apply p1 >&- 2>&-'
    )
    assert subprocess.run(script, shell=True, check=False).returncode == 0
    assert kit("verify", "p1").code == 0


def test_a_reader_that_goes_away_does_not_change_the_answer(kit: Kit, venv: Venv, patches: Path) -> None:
    assert kit("apply", "p1").code == 0
    command = [sys.executable, "-m", "patchkit", "--python", venv.python, "--patches", patches, "check"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 1
    process.stderr.close()  # type: ignore[union-attr]


# -- shared roots and checkouts -------------------------------------------------------------------

NSA = {"ns/a/__init__.py": b"", "ns/a/m.py": b"x = 1\n"}
NSB = {"ns/b/__init__.py": b"", "ns/b/m.py": b"y = 1\n"}


def test_distributions_that_share_a_namespace_package_do_not_accuse_each_other(tmp_path: Path) -> None:
    venv = Venv.create(tmp_path / "venv")
    for name, tree in (("nsa", NSA), ("nsb", NSB)):
        venv.uv("install", support.build_wheel(tmp_path / "wheels", "1.0", tree, name))
    patches = tmp_path / "patches"
    support.write_patch(patches, "pa", NSA, {"ns/a/m.py": b"x = 2\n", "ns/a/new.py": b""}, distribution="nsa")
    support.write_patch(patches, "pb", NSB, {"ns/b/m.py": b"y = 2\n", "ns/b/new.py": b""}, distribution="nsb")
    support.write_patch(patches, "cross", NSB, {"ns/b/m.py": b"y = 3\n"}, distribution="nsa")
    kit = Kit(["--python", str(venv.python), "--patches", str(patches)])
    assert kit("apply", "pa").code == 0
    assert kit("apply", "pb").code == 0
    assert kit("check", "--expect", "pa", "--expect", "pb").code == 0
    assert kit("verify").code == 0
    assert kit("restore", "pb", "--verify").code == 0
    assert kit("restore", "--verify").code == 0
    kit("apply", "cross", code=4)
    assert (venv.site / "ns/b/m.py").read_bytes() == b"y = 1\n"


def editable(tmp_path: Path, distribution: str) -> tuple[Path, Venv]:
    """A git checkout with ``demopkg`` under ``python/``, installed as an editable ``distribution``."""
    checkout = tmp_path / "checkout"
    for path, data in DEMO["1.0"].items():
        (checkout / "python" / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / "python" / path).write_bytes(data)
    who = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for arguments in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", checkout, *arguments], check=True)
    venv = Venv.create(tmp_path / "venv")
    info = venv.site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (venv.site / "__editable__.demo.pth").write_text(f"{checkout}/python\n")
    (info / "direct_url.json").write_text(
        json.dumps({"url": f"file://{checkout}", "dir_info": {"editable": True}})
    )
    (info / "RECORD").write_text(f"__editable__.demo.pth,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    return checkout, venv


def test_an_editable_checkout_s_package_may_have_another_name(tmp_path: Path) -> None:
    checkout, venv = editable(tmp_path, "demo-engine")
    support.write_patch(
        tmp_path / "patches", "pe", DEMO["1.0"], {"demopkg/util.py": b"one = 9\n"}, distribution="demo-engine"
    )
    kit = Kit(["--python", str(venv.python), "--patches", str(tmp_path / "patches")])
    assert kit("apply", "pe").code == 0
    assert (checkout / "python/demopkg/util.py").read_bytes() == b"one = 9\n"
    kit("check", code=1)
    assert kit("restore", "--verify").code == 0
    assert kit("check").code == 0


def test_git_that_cannot_answer_is_not_taken_for_a_clean_tree(tmp_path: Path) -> None:
    _, venv = editable(tmp_path, "demopkg")
    support.write_patch(tmp_path / "patches", "pe", DEMO["1.0"], {"demopkg/util.py": b"one = 9\n"})
    options = ["--python", venv.python, "--patches", tmp_path / "patches"]
    assert patchkit(*options, "check").returncode == 0
    without_git = tmp_path / "bin"
    without_git.mkdir()
    done = patchkit(*options, "check", env={"PATH": str(without_git)})
    assert done.returncode == 4
    assert "git is not installed" in done.stderr
