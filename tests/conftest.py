"""Fixtures: wheels built once, and for each test an environment of its own with ``demopkg`` in it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import support
from tests.support import DEMO, P1, Kit, Venv

if TYPE_CHECKING:
    from collections.abc import Iterator


# A test run started in the background or by nohup ignores ^C and hang-ups, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _no_steering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the developer's shell decide nothing."""
    for name in list(os.environ):
        if name.startswith(("PATCHKIT_", "GIT_")) or name in (
            "VIRTUAL_ENV",
            "PYTHONPYCACHEPREFIX",
            "NO_COLOR",
        ):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Release -> wheel of ``demopkg``."""
    folder = tmp_path_factory.mktemp("wheels")
    return {release: support.build_wheel(folder, release) for release in DEMO}


@pytest.fixture
def venv(tmp_path: Path, wheels: dict[str, Path]) -> Venv:
    """An environment with demopkg 1.0, installed by uv with hard links into its cache."""
    made = Venv.create(tmp_path / "venv")
    made.uv("install", "--link-mode", "hardlink", wheels["1.0"])
    return made


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A plain folder with the files of demopkg 1.0, no metadata: for ``--root``."""
    root = tmp_path / "site"
    for path, data in DEMO["1.0"].items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        os.utime(file, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A patches folder with ``p1`` for 1.0."""
    folder = tmp_path / "patches"
    support.write_patch(folder, "p1", DEMO["1.0"], P1)
    return folder


@pytest.fixture
def kit(venv: Venv, patches: Path) -> Kit:
    """patchkit on ``venv``."""
    return Kit(["--python", str(venv.python), "--patches", str(patches)])


@pytest.fixture
def guarded(kit: Kit) -> Kit:
    """patchkit on ``venv``, with its guard."""
    return Kit(kit.where, guard=True)


@pytest.fixture
def rooted(site: Path, patches: Path) -> Kit:
    """patchkit on ``site``."""
    return Kit(["--root", str(site), "--patches", str(patches)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many deaths were died, and what they left."""
    deaths = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "death" and report.when == "call"
    ]
    if deaths:
        marked = deaths.count("marked")
        terminalreporter.write_line(
            f"deaths: {len(deaths)}; the tree was pristine after {len(deaths) - marked}, "
            f"plainly marked and then recovered after {marked}"
        )
