"""CPython of a newer Debian release, unpacked beside this system.

The interpreter runs in a root of its own (chroot), with its own C library, so that it needs nothing of
the machine. The packages come from the mirror that apt is set up with.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
from dataclasses import dataclass

SUITE = "sid"
VERSIONS = ("3.13", "3.14")
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")


class UnavailableError(Exception):
    """Why there is no such interpreter here."""


@dataclass(frozen=True)
class DebianPython:
    root: pathlib.Path
    version: str

    @property
    def command(self) -> tuple[str, ...]:
        return ("chroot", str(self.root))

    @property
    def python(self) -> str:
        return f"/usr/bin/python{self.version}"

    @classmethod
    def get(cls, version: str) -> DebianPython:
        if os.geteuid() != 0:
            raise UnavailableError("chroot needs root")
        if shutil.which("apt-get") is None:
            raise UnavailableError("not a Debian system")
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")))
        root = cache / "patchkit-tests" / f"debian-{SUITE}"
        if not (root / "usr/bin" / f"python{version}").exists():
            shutil.rmtree(root, ignore_errors=True)
            partial = root.with_name(f"{root.name}.{os.getpid()}")
            try:
                _fetch(partial)
                with contextlib.suppress(OSError):  # another worker was first
                    partial.rename(root)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return cls(root, version)


def _fetch(root: pathlib.Path) -> None:
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
    (work / "sources.list").write_text(f"deb [signed-by={keyring}] {mirror} {SUITE} main\n")
    apt = [
        "apt-get",
        "-q",
        "-o", f"Dir::Etc::sourcelist={work}/sources.list",
        "-o", "Dir::Etc::sourceparts=/nonexistent",
        "-o", f"Dir::State::lists={work}/lists",
        "-o", f"Dir::Cache={work}/cache",
        "-o", "APT::Sandbox::User=root",
    ]  # fmt: skip
    packages = ["libc6", "libexpat1", "zlib1g"]
    for version in VERSIONS:
        packages += [f"python{version}-minimal", f"libpython{version}-minimal"]
    for command in ([*apt, "update"], [*apt, "download", *(f"{name}/{SUITE}" for name in packages)]):
        done = subprocess.run(
            command, cwd=work / "debs", capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise UnavailableError(f"{SUITE} cannot be had: {done.stderr.strip().splitlines()[-1:]}")
    for package in (work / "debs").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    shutil.rmtree(work)
    for name in ("lib", "lib64"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in ("proc", "dev", "srv", "tmp"):
        (root / name).mkdir(exist_ok=True)
