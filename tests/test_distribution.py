"""What a user installs: the wheel carries the built-in patches, and every supported Python runs it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "-w", str(out), str(PROJECT)], check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an otherwise empty venv into which the wheel was installed."""
    venv = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, check=True)
    return python


def test_wheel_holds_exactly_the_patches_of_the_checkout(wheel: Path) -> None:
    inside = {
        name.removeprefix("patchkit/_patches/"): zipfile.ZipFile(wheel).read(name)
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith("patchkit/_patches/")
    }
    folder = PROJECT / "patches"
    outside = {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    assert inside == outside
    assert "hsdump/patch.toml" in inside


def test_installed_wheel_lists_its_built_in_patches_anywhere(installed: Path, tmp_path: Path) -> None:
    patchkit = installed.with_name("patchkit")
    done = subprocess.run(
        [patchkit, "list", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["data"]["patches"]}
    assert rows["hsdump"]["builtin"]
    assert "0.5.9" in rows["hsdump"]["releases"]


def test_core_dependencies_stay_few(installed: Path) -> None:
    done = subprocess.run(
        [installed, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {entry["name"].lower() for entry in json.loads(done.stdout)}
    # rich brings markdown-it-py, mdurl and pygments; nothing else comes along.
    assert names - {"pip", "setuptools"} <= {
        "sgl-patchkit", "click", "filelock", "psutil", "nvidia-ml-py", "rich", "tomli",
        "markdown-it-py", "mdurl", "pygments", "typing-extensions",
    }  # fmt: skip


def test_check_imports_neither_rich_nor_psutil_nor_nvml(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from patchkit.cli.main import run; run(['check', '--root', sys.argv[1]]);"
        "print(sorted({'rich', 'psutil', 'pynvml', 'torch'} & set(sys.modules)))"
    )
    (tmp_path / "sglang").mkdir()
    done = subprocess.run([installed, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_text_tells_people_to_install_the_other_patchkit() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, check=True).stdout
    words = "pip install " + "patchkit"
    for name in tracked.decode().split("\0")[:-1]:
        path = PROJECT / name
        if path.is_file() and path.suffix in {".md", ".py", ".toml", ".yaml", ""}:
            assert words not in path.read_text(encoding="utf-8", errors="replace"), name
