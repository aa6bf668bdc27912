"""CPython of another Debian release or machine, unpacked beside this system.

The interpreter runs in a root of its own (chroot, or qemu's), with its own C library, so that it needs nothing
of the machine. The packages come from the mirror that apt is set up with.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SUITES = {"3.9": "bullseye", "3.11": "bookworm", "3.13": "sid", "3.14": "sid"}
EMULATOR_SUITE = "bookworm"  # where qemu-user-static is the programs themselves
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")


class UnavailableError(Exception):
    """Why there is no such interpreter here."""


@dataclass(frozen=True)
class DebianPython:
    """``before`` goes before the interpreter's ``path`` on a command line."""

    root: pathlib.Path
    version: str
    before: tuple[str, ...]
    path: str

    @classmethod
    def get(cls, version: str) -> DebianPython:
        """For this machine, in a root of its own."""
        if os.geteuid() != 0:
            raise UnavailableError("chroot needs root")
        suite = SUITES[version]
        versions = [name for name, other in SUITES.items() if other == suite]
        root = _cached(f"debian-{suite}", lambda root: _fetch(root, suite, _packages(versions), None))
        return cls(root, version, ("chroot", str(root)), f"/usr/bin/python{version}")

    @classmethod
    def get_aarch64(cls, version: str) -> DebianPython:
        """For aarch64, run by qemu (user mode): the guest's memory lies in the emulator's own."""
        suite = SUITES[version]
        versions = [name for name, other in SUITES.items() if other == suite]
        emulator = _cached("qemu-user", lambda root: _fetch(root, EMULATOR_SUITE, ["qemu-user-static"], None))
        root = _cached(
            f"debian-{suite}-arm64", lambda root: _fetch(root, suite, _packages(versions), "arm64")
        )
        before = (str(emulator / "usr/bin/qemu-aarch64-static"), "-L", str(root))
        return cls(root, version, before, f"{root}/usr/bin/python{version}")


def _packages(versions: list[str]) -> list[str]:
    names = ["libc6", "libexpat1", "zlib1g"]
    for version in versions:
        names += [f"python{version}-minimal", f"libpython{version}-minimal"]
    return names


def _cached(name: str, fetch: Callable[[pathlib.Path], None]) -> pathlib.Path:
    if shutil.which("apt-get") is None:
        raise UnavailableError("not a Debian system")
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")))
    root = cache / "patchkit-tests" / name
    if not root.exists():
        partial = root.with_name(f"{root.name}.{os.getpid()}")
        try:
            fetch(partial)
            with contextlib.suppress(OSError):  # another worker was first
                partial.rename(root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return root


def _fetch(root: pathlib.Path, suite: str, packages: list[str], architecture: str | None) -> None:
    mirror = next(
        (
            found[0]
            for path in SOURCES
            if os.path.exists(path)
            for found in re.finditer(r"https?://\S+/debian/?(?=\s)", pathlib.Path(path).read_text())
        ),
        None,
    )
    if mirror is None:
        raise UnavailableError("apt has no Debian mirror")
    work = root / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (work / folder).mkdir(parents=True)
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (work / "sources.list").write_text(f"deb [signed-by={keyring}] {mirror} {suite} main\n")
    apt = [
        "apt-get",
        "-q",
        "-o", f"Dir::Etc::sourcelist={work}/sources.list",
        "-o", "Dir::Etc::sourceparts=/nonexistent",
        "-o", f"Dir::State::lists={work}/lists",
        "-o", f"Dir::Cache={work}/cache",
        "-o", "APT::Sandbox::User=root",
    ]  # fmt: skip
    if architecture is not None:
        apt += ["-o", f"APT::Architecture={architecture}", "-o", f"APT::Architectures={architecture}"]
    for command in ([*apt, "update"], [*apt, "download", *(f"{name}/{suite}" for name in packages)]):
        done = subprocess.run(
            command, cwd=work / "debs", capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise UnavailableError(f"{suite} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    for package in (work / "debs").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    shutil.rmtree(work)
    for name in ("lib", "lib64"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in ("proc", "dev", "srv", "tmp"):
        (root / name).mkdir(exist_ok=True)
