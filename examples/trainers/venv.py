"""Virtual environments with one real trainer release each, built on first use and kept outside the checkout.

What the trainers share (torch and all that is large) is one environment; each trainer's own small one
sees it through a ``.pth`` file. The names hold a digest of the recipe: a changed recipe is another folder.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from typing import TYPE_CHECKING

from examples.cpu_engine.venv import TORCH, cache_root, locked, run

if TYPE_CHECKING:
    from pathlib import Path

SHARED = (
    "transformers>=5.0,<=5.19",
    "datasets>=4,<=5.1",
    *("openai", "pydantic", "pydantic-settings", "rich", "typer>=0.12", "loguru<=0.7.3", "numpy", "tqdm"),
    *("psutil", "protobuf", "safetensors", "click", "httpx", "aiohttp", "huggingface-hub", "accelerate"),
    *("pyyaml", "requests", "packaging", "setproctitle", "xxhash"),
)
# Without their dependencies: torchvision, torchaudio and CUDA wheels are not needed to read data or to
# train on a CPU, and clash with the CPU build of torch.
TRAINERS = {
    "speculators-0.9.0": ("speculators==0.9.0", "hs-connectors==0.9.0"),
    "speculators-0.7.0.2": ("speculators==0.7.0.2",),
    "specforge-0.2.0": ("specforge==0.2.0",),
}


def ensure(trainer: str) -> Path:
    """The interpreter of an environment with ``trainer`` (a name of ``TRAINERS``)."""
    base = _ensure("base", (TORCH, *SHARED), _build_base)
    site = _site(base)
    return _python(
        _ensure(trainer, TRAINERS[trainer], lambda folder: _build(folder, site, TRAINERS[trainer]))
    )


def _ensure(name: str, recipe: tuple[str, ...], build: object) -> Path:
    digest = hashlib.sha256(repr((sys.version_info[:2], TORCH, SHARED, recipe)).encode()).hexdigest()[:10]
    folder = cache_root().with_name("trainers") / f"{name}-{digest}"
    ready = folder / "ready"
    if not ready.exists():
        with locked(folder.with_name(folder.name + ".lock")):
            if not ready.exists():
                shutil.rmtree(folder, ignore_errors=True)
                assert callable(build)
                build(folder)
                ready.write_text(name + "\n", encoding="utf-8")
    return folder


def _build_base(folder: Path) -> None:
    run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(_python(folder)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*pip, TORCH])  # first, so that nothing below brings another build of it
    run([*pip, *SHARED])


def _build(folder: Path, shared_site: Path, packages: tuple[str, ...]) -> None:
    run([sys.executable, "-m", "venv", str(folder)])
    run([str(_python(folder)), "-m", "pip", "install", "-q", "--no-deps", *packages])
    (_site(folder) / "shared.pth").write_text(f"{shared_site}\n", encoding="utf-8")


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _site(folder: Path) -> Path:
    major, minor = sys.version_info[:2]
    return folder / "lib" / f"python{major}.{minor}" / "site-packages"


if __name__ == "__main__":
    for wanted in sys.argv[1:] or TRAINERS:
        print(ensure(wanted))
