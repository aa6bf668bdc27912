"""Virtual environments that hold one real SGLang release each and can serve on a CPU.

A build takes about a minute and 1.5 GB, so it is kept outside the checkout, under a name that holds
the release and a digest of the recipe: a changed recipe is another folder, never a stale one. The shim
is no part of the recipe: each use puts the present one in.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TORCH = "torch==2.13.0"
SHIM = Path(__file__).parent / "shim" / "sitecustomize.py"

# What the server imports and the releases agree on. SGLang itself goes in without its dependencies:
# most of them are CUDA wheels that no CPU needs.
COMMON = (
    "aiohttp",
    "anthropic",
    "compressed-tensors==0.12.2",
    "dill",
    "einops",
    "fastapi",
    "gguf",
    "interegular",
    "ipython",
    "jsonschema",
    "msgspec",
    "numpy",
    "openai-harmony==0.0.4",
    "openai==2.6.1",
    "orjson",
    "packaging",
    "partial_json_parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "requests",
    "sentencepiece",
    "setproctitle",
    "tqdm",
    "uvicorn",
    "uvloop",
)

# (first release, transformers, xgrammar): each line holds until the next one.
ERAS = (
    ((0, 0, 0), "transformers==4.57.1", "xgrammar==0.1.27"),
    ((0, 5, 10), "transformers==5.12.1", "xgrammar==0.2.1"),
    ((0, 5, 20), "transformers==5.19.0", "xgrammar==0.2.7"),
)
FFI = "apache-tvm-ffi==0.1.11"


class EngineBuildError(RuntimeError):
    """An engine environment could not be built; the message ends with pip's own last words."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the content of one environment."""

    release: str
    python: tuple[int, int]
    with_dependencies: tuple[str, ...]
    without_dependencies: tuple[str, ...]

    @classmethod
    def of(cls, release: str) -> Recipe:
        numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:3])
        transformers, xgrammar = next(
            (tf, grammar) for first, tf, grammar in reversed(ERAS) if numbers >= first
        )
        return cls(
            release=release,
            python=sys.version_info[:2],
            with_dependencies=(transformers, *COMMON),
            without_dependencies=(xgrammar, FFI, f"sglang=={release}"),
        )

    @property
    def digest(self) -> str:
        """Ten hex digits over the whole recipe."""
        text = repr((self.python, TORCH, self.with_dependencies, self.without_dependencies))
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def cache_root() -> Path:
    """``$PATCHKIT_ENGINE_CACHE``, else the user's cache folder; never inside a checkout."""
    named = os.environ.get("PATCHKIT_ENGINE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "patchkit" / "engines"


def ensure(release: str) -> Path:
    """The interpreter of an environment with the real ``sglang==release``, built on first use.

    Safe to call from several processes at once. A folder without its ``ready`` mark is the rest of an
    interrupted build, one whose interpreter does not run or that lacks files has been broken since:
    both are built again. Raises EngineBuildError.
    """
    recipe = Recipe.of(release)
    folder = cache_root() / f"sglang-{release}-{recipe.digest}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    with locked(folder.with_name(folder.name + ".lock")):
        if not ready.exists() or broken(python):
            build(recipe, folder)
            ready.write_text(recipe.release + "\n", encoding="utf-8")
        put_shim(recipe, folder)
    return python


# Every file that every installed package recorded is there. Byte code is not asked for: it makes itself.
WHOLE = """
import importlib.metadata as metadata, os, sys
packages = {package.metadata["Name"]: package.files or () for package in metadata.distributions()}
paths = [path for files in packages.values() for path in files if path.suffix != ".pyc"]
sys.exit(not {"sglang", "torch"} <= set(packages) or not all(os.path.exists(path.locate()) for path in paths))
"""


def broken(python: Path) -> bool:
    """Whether the environment of this interpreter has lost something since it was built."""
    try:
        return subprocess.run([str(python), "-c", WHOLE], check=False, capture_output=True).returncode != 0
    except OSError:
        return True


def build(recipe: Recipe, folder: Path) -> None:
    """Build ``recipe`` at ``folder``: an environment's paths are absolute, so it cannot be moved there."""
    if folder.exists():
        shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*pip, TORCH])  # first, so that nothing below brings another build of it
    run([*pip, *recipe.with_dependencies])
    run([*pip, "--no-deps", *recipe.without_dependencies])


def put_shim(recipe: Recipe, folder: Path) -> None:
    """Python imports ``sitecustomize`` at start-up. Replaced whole: a server may be starting right now."""
    major, minor = recipe.python
    place = folder / "lib" / f"python{major}.{minor}" / "site-packages" / SHIM.name
    content = SHIM.read_bytes()
    if not place.exists() or place.read_bytes() != content:
        fresh = place.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(content)
        os.replace(fresh, place)


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise EngineBuildError(f"{' '.join(command)} ended with {done.returncode}: {' / '.join(tail)}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it when this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    with ThreadPoolExecutor() as builders:
        for built in builders.map(ensure, sys.argv[1:]):
            print(built)
