"""The cache of engine environments: one build for many callers, and never half of one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from examples.cpu_engine import venv
from examples.cpu_engine.venv import EngineBuildError, Recipe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATCHKIT_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The releases that were built, by a build that makes folders only."""
    made: list[str] = []

    def build(recipe: Recipe, folder: Path) -> None:
        assert not (folder / "ready").exists()
        major, minor = recipe.python
        (folder / "lib" / f"python{major}.{minor}" / "site-packages").mkdir(parents=True, exist_ok=True)
        time.sleep(0.2)
        made.append(recipe.release)

    monkeypatch.setattr(venv, "build", build)
    monkeypatch.setattr(venv, "broken", lambda _python: False)  # there is nothing in these to run
    return made


def test_callers_at_the_same_time_share_one_build(cache: Path, builds: list[str]) -> None:
    found: list[Path] = []
    callers = [threading.Thread(target=lambda: found.append(venv.ensure("0.5.9"))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert builds == ["0.5.9"]
    assert len(set(found)) == 1
    assert found[0].is_relative_to(cache)


def test_an_interrupted_build_is_made_again(
    cache: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = venv.build

    def interrupted(recipe: Recipe, folder: Path) -> None:
        whole(recipe, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(venv, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        venv.ensure("0.5.9")
    monkeypatch.setattr(venv, "build", whole)
    venv.ensure("0.5.9")
    venv.ensure("0.5.9")
    assert builds == ["0.5.9", "0.5.9"]


@pytest.mark.parametrize("loss", ["file", "package", "interpreter", "environment"])
def test_an_environment_that_lost_something_is_built_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    made: list[Path] = []

    def build(recipe: Recipe, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (site,) = folder.glob("lib/python3.*/site-packages")
        for name in ("sglang", "torch"):
            info = site / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "RECORD").write_text(f"{name}.py,,\n{name}.pyc,,\n{info.name}/METADATA,,\n")
            (site / f"{name}.py").touch()
        made.append(site)

    monkeypatch.setattr(venv, "build", build)
    python = venv.ensure("0.5.9")
    venv.ensure("0.5.9")
    assert len(made) == 1, "a whole one is used as it is"
    if loss == "file":
        (made[0] / "torch.py").unlink()
    elif loss == "package":
        shutil.rmtree(made[0] / "torch-1.0.dist-info")
    elif loss == "interpreter":
        python.unlink()
        python.symlink_to("/no/such/python")
    else:
        shutil.rmtree(python.parent.parent)
    assert venv.ensure("0.5.9") == python
    assert len(made) == 2


def test_each_use_puts_the_present_shim_in(cache: Path, builds: list[str]) -> None:
    python = venv.ensure("0.5.9")
    (shim,) = python.parent.parent.glob("lib/python3.*/site-packages/sitecustomize.py")
    shim.write_text("of an older checkout")
    venv.ensure("0.5.9")
    assert shim.read_bytes() == venv.SHIM.read_bytes()
    assert builds == ["0.5.9"]


def test_a_changed_recipe_is_another_folder(
    cache: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = venv.ensure("0.5.9")
    monkeypatch.setattr(venv, "COMMON", (*venv.COMMON, "one-more"))
    assert venv.ensure("0.5.9") != before
    assert len(builds) == 2


def test_a_failed_build_says_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv, "TORCH", "/no/such/wheel.whl")
    with pytest.raises(EngineBuildError, match=r"/no/such/wheel\.whl"):
        venv.ensure("0.5.9")
    assert not list(cache.glob("*/ready"))


@pytest.mark.parametrize(
    ("release", "transformers"),
    [
        ("0.4.6.post5", "transformers==4.57.1"),
        ("0.5.9", "transformers==4.57.1"),
        ("0.5.10rc0", "transformers==5.12.1"),
        ("0.5.15.post1", "transformers==5.12.1"),
        ("0.5.23", "transformers==5.19.0"),
    ],
)
def test_a_release_gets_the_transformers_of_its_era(release: str, transformers: str) -> None:
    recipe = Recipe.of(release)
    assert transformers in recipe.with_dependencies
    assert f"sglang=={release}" in recipe.without_dependencies
    assert recipe.python == sys.version_info[:2]
