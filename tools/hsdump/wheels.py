"""The model sources of a release, out of its wheel, kept outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from examples.cpu_engine.venv import cache_root
from tools.hsdump.models import MODELS

PATHS = tuple(sorted({path for model in MODELS for path in model.paths}))
PREFIX = "sglang/srt/models/"


def sources(release: str) -> dict[str, bytes]:
    """Path relative to the root -> bytes as pip would install them; fetched once."""
    folder = cache_root() / "sources" / f"sglang-{release}"
    if not folder.exists():
        extract(release, folder)
    return {path: (folder / path).read_bytes() for path in PATHS}


def extract(release: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = download(release, Path(scratch))
        fresh = Path(scratch) / "sources"
        with zipfile.ZipFile(wheel) as archive:
            for path in PATHS:
                archive.extract(path, fresh)
        if not folder.exists():
            os.rename(fresh, folder)


def download(release: str, folder: Path) -> Path:
    """The release's wheel for this interpreter, at most 130 MB, in ``folder``."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*pip, "--only-binary=:all:", f"--dest={folder}", f"sglang=={release}"],
        check=True,
        env={**os.environ, "PIP_NO_CACHE_DIR": "1"},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel
