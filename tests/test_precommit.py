"""The hook ``patchkit-clean``, run by the real pre-commit from a real repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import Kit, Venv

PROJECT = Path(__file__).resolve().parents[1]
CONFIG = """\
repos:
  - repo: {repository}
    rev: {revision}
    hooks:
      - id: patchkit-clean
        args: [--python, {python}, --patches, {patches}]
"""


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    """A repository with this project's files as they are in the working tree."""
    repository = tmp_path / "hooks"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in names.split("\0")[:-1]:
        if (PROJECT / name).is_file():
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_bytes((PROJECT / name).read_bytes())
    git(repository.parent, "init", "-q", str(repository))
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "hooks")
    return repository


def test_the_hook_passes_a_clean_tree_and_names_the_file_of_a_patched_one(
    tmp_path: Path, hooks: Path, kit: Kit, venv: Venv, patches: Path
) -> None:
    project = tmp_path / "project"
    git(tmp_path, "init", "-q", str(project))
    config = CONFIG.format(
        repository=hooks, revision=git(hooks, "rev-parse", "HEAD"), python=venv.python, patches=patches
    )
    (project / ".pre-commit-config.yaml").write_text(config)
    (project / "file.txt").write_text("x\n")
    git(project, "add", "-A")
    pre_commit = [sys.executable, "-m", "pre_commit"]
    env = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "pre-commit-home")}
    subprocess.run([*pre_commit, "install"], cwd=project, env=env, check=True, capture_output=True)

    def commit(message: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-m", message]
        return subprocess.run(
            [*command, "--allow-empty"], cwd=project, env=env, capture_output=True, text=True, check=False
        )

    clean = commit("clean")
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert kit("apply", "p1").code == 0
    patched = commit("patched")
    assert patched.returncode == 1
    assert "demopkg/core.py" in patched.stdout + patched.stderr
    assert kit("restore", "--verify").code == 0
    again = commit("clean again")
    assert again.returncode == 0, again.stdout + again.stderr
