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
# What makes a folder of these files a root that patchkit knows.
ALSO = ("sglang/__init__.py",)


def sources(release: str) -> dict[str, bytes]:
    """Path relative to the root -> bytes as pip would install them; fetched once."""
    root = folder(release)
    return {path: (root / path).read_bytes() for path in PATHS}


def folder(release: str, *, fetch: bool = True) -> Path:
    """A root with the release's model files and its metadata; do not write to it."""
    found = cache_root() / "sources" / f"sglang-{release}"
    if fetch and not found.exists():
        extract(release, found)
    return found


def extract(release: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = download(release, Path(scratch))
        fresh = Path(scratch) / "sources"
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if (
                    name in PATHS
                    or name in ALSO
                    or name.endswith((".dist-info/METADATA", ".dist-info/RECORD"))
                ):
                    archive.extract(name, fresh)
        if not target.exists():
            os.rename(fresh, target)


def download(release: str, target: Path) -> Path:
    """The release's wheel for this interpreter, at most 130 MB, in ``target``."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*pip, "--only-binary=:all:", f"--dest={target}", f"sglang=={release}"],
        check=True,
        env={**os.environ, "PIP_NO_CACHE_DIR": "1"},
    )
    (wheel,) = target.glob("*.whl")
    return wheel
