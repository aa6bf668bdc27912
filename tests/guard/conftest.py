from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.guard.debian import DebianPython, UnavailableError
from tests.guard.processes import INTERPRETERS, Engine, write_engine

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


@pytest.fixture(
    params=INTERPRETERS, ids=lambda path: re.sub(r"^/|/bin(?=/)", "", path).replace("/", "-")[-24:]
)
def python(request: pytest.FixtureRequest) -> str:
    """Each CPython 3.9 to 3.13 that this machine has."""
    return request.param


@pytest.fixture
def engine(tmp_path: pathlib.Path) -> Iterator[Engine]:
    root = tmp_path / "tree"
    root.mkdir()
    write_engine(root)
    tree = Engine(str(root))
    yield tree
    tree.stop()


@pytest.fixture(scope="session", params=["3.13", "3.14"])
def debian_python(request: pytest.FixtureRequest) -> DebianPython:
    """An interpreter of a newer Debian, in a root of its own; needs root, apt and its mirror."""
    try:
        return DebianPython.get(request.param)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["3.9", "3.11", "3.13", "3.14"])
def aarch64_python(request: pytest.FixtureRequest) -> DebianPython:
    """An interpreter for aarch64, emulated; needs apt and its mirror."""
    try:
        return DebianPython.get_aarch64(request.param)
    except UnavailableError as error:
        pytest.skip(str(error))
