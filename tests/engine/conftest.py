from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from examples.cpu_engine import tiny_model, venv
from tests.engine.harness import COMPARED, Engine, patchkit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# PATCHKIT_TEST_RELEASES names the releases to prove: "all" (the ten that are known to serve on a CPU), or a list.
# By default the first, a middle and the last one, with what takes longest on the middle one only: each release
# costs an environment of 1.5 GB and minutes of servers.
MAIN = "0.5.9"
ERAS = ("0.4.6.post5", MAIN, "0.5.23")
ALL = ("0.4.6.post5", "0.4.10", "0.5.2", "0.5.4", "0.5.6", "0.5.8", "0.5.9", "0.5.15", "0.5.19", "0.5.23")
OLD_ROPE = ("0.4.6",)  # these do not know yarn for this model


def releases(default: tuple[str, ...]) -> tuple[str, ...]:
    wanted = os.environ.get("PATCHKIT_TEST_RELEASES", "")
    named = {"": default, "all": ALL}
    return named[wanted] if wanted in named else tuple(wanted.split(","))


def build(release: str) -> Engine:
    python = venv.ensure(release)
    shape = tiny_model.Shape(yarn=not release.startswith(OLD_ROPE))
    return Engine(release, python, tiny_model.ensure(python, venv.cache_root(), shape))


@pytest.fixture(autouse=True)
def worst_error(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """For ``--junitxml``, of which ``tests/engine/table.py`` makes a table."""
    COMPARED.clear()
    yield
    if COMPARED:
        record_property("worst_error", max(COMPARED))


@pytest.fixture(scope="session", params=releases(ERAS))
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each release in turn."""
    return build(request.param)


@pytest.fixture(scope="session", params=releases((MAIN,)))
def thorough_engine(request: pytest.FixtureRequest) -> Engine:
    """The releases on which every family of models is tried."""
    return build(request.param)


@pytest.fixture(scope="session")
def apply_hsdump(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Engine], Path]:
    """For an engine, a root of its own with hsdump applied. Shared: do not write to it."""
    made: dict[str, Path] = {}

    def root(engine: Engine) -> Path:
        if engine.release not in made:
            made[engine.release] = engine.copy_tree(tmp_path_factory.mktemp("patched") / "root")
            patchkit("--root", made[engine.release], "apply", "hsdump")
        return made[engine.release]

    return root


@pytest.fixture(scope="session")
def patched(engine: Engine, apply_hsdump: Callable[[Engine], Path]) -> Path:
    return apply_hsdump(engine)


@pytest.fixture(scope="session")
def engine_0_5_9() -> Engine:
    return build(MAIN)


@pytest.fixture(scope="session")
def pristine_0_5_9(engine_0_5_9: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of its own, as the wheel has it. Shared: do not write to it."""
    return engine_0_5_9.copy_tree(tmp_path_factory.mktemp("pristine") / "root")
