"""What the tests are made of: real wheels, real environments, patch folders, and snapshots of trees."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit import diff
from patchkit.diff import Content
from patchkit.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# A name that is not UTF-8, as Python spells it.
LATIN1 = os.fsdecode(b"demopkg/data/caf\xe9.txt")

#: Two releases of one small distribution: modules, a package, data, a name with a space.
DEMO: dict[str, dict[str, bytes]] = {
    "1.0": {
        "demopkg/__init__.py": b'__version__ = "1.0"\n',
        "demopkg/core.py": b'import os\n\n\ndef answer():\n    return "AAA"\n',
        "demopkg/util.py": b"one = 1\ntwo = 2\nthree = 3\nfour = 4\nfive = 5\n",
        "demopkg/old.py": b"gone = True\n",
        "demopkg/sub/__init__.py": b"",
        "demopkg/sub/deep.py": b"depth = 2\n",
        "demopkg/data/with space.txt": b"a file\r\nwith CRLF\r\n",
        "demopkg/data/blob.bin": bytes(range(256)),
    },
    "2.0": {
        "demopkg/__init__.py": b'__version__ = "2.0"\n',
        "demopkg/core.py": b'import os\nimport sys\n\n\ndef answer():\n    return "CCC"\n',
        "demopkg/util.py": b"one = 1\ntwo = 22\nthree = 3\nfour = 4\nfive = 5\n",
        "demopkg/sub/__init__.py": b"",
        "demopkg/sub/deep.py": b"depth = 2\n",
        "demopkg/data/with space.txt": b"a file\r\nwith CRLF\r\n",
        "demopkg/data/blob.bin": bytes(range(256)),
    },
}

#: A change of the same size (so that stale bytecode would be trusted), an added package and a deletion.
P1: dict[str, bytes | None] = {
    "demopkg/core.py": b'import os\n\n\ndef answer():\n    return "BBB"\n',
    "demopkg/extra/__init__.py": b"",
    "demopkg/extra/dump.py": b"dumped = []\n",
    "demopkg/old.py": None,
}


# -- wheels and environments ----------------------------------------------------------------------


def build_wheel(
    folder: Path, version: str, files: Mapping[str, bytes] | None = None, name: str = "demopkg"
) -> Path:
    """A real wheel of ``files`` (default: ``DEMO[version]``) in ``folder``."""
    files = DEMO[version] if files is None else files
    info = f"{name}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    path = folder / f"{name}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in {**files, **metadata}.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f'"{entry}",sha256={digest},{len(data)}\n')
            _zip(archive, entry, data)
        _zip(archive, f"{info}/RECORD", ("".join(rows) + f"{info}/RECORD,,\n").encode())
    return path


def _zip(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10))
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    archive.writestr(entry, data)


def uv() -> str:
    """The uv that is installed beside the tests."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else "uv"


@dataclass
class Venv:
    """A virtual environment without pip; ``cache`` is the uv cache that it was installed from."""

    prefix: Path
    cache: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def site(self) -> Path:
        return next((self.prefix / "lib").glob("python3*")) / "site-packages"

    @classmethod
    def create(cls, prefix: Path, base: str = sys.executable, cache: Path | None = None) -> Venv:
        subprocess.run([base, "-m", "venv", "--without-pip", str(prefix)], check=True)
        return cls(prefix, cache or prefix.parent / "uv-cache")

    def uv(self, *arguments: object) -> None:
        command = [uv(), "pip", *arguments[:1], "-q", "--no-config", "--offline", "--cache-dir", self.cache]
        command += ["--python", self.python, *arguments[1:]]
        subprocess.run([str(part) for part in command], check=True, env=bare())

    def pip(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input"]
        command += ["--python", self.python, *arguments]
        env = {**bare(), "PIP_NO_INDEX": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        subprocess.run([str(part) for part in command], check=True, env=env)

    def run(self, code: str, *flags: str, **env: str) -> str:
        """What the environment's own interpreter prints."""
        command = [str(self.python), *flags, "-c", code]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**bare(), **env}, cwd="/"
        )
        return done.stdout.strip()


def nvml_stand_in(folder: Path) -> Path:
    """Build ``tests/nvml.c`` into the folder, for LD_LIBRARY_PATH; returns the folder."""
    source = Path(__file__).with_name("nvml.c")
    command = ["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source]
    subprocess.run([*command, "-o", folder / "libnvidia-ml.so.1"], check=True)
    return folder


def bare() -> dict[str, str]:
    """The environment variables without those that steer Python, pip, uv or patchkit."""
    steering = ("PYTHON", "PIP_", "UV_", "PATCHKIT_", "VIRTUAL_ENV", "GIT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(steering)}


# -- patches --------------------------------------------------------------------------------------


def write_patch(
    patches: Path,
    name: str,
    before: Mapping[str, bytes],
    changes: Mapping[str, bytes | Content | None],
    *,
    releases: Iterable[str] = ("1.0",),
    on: Iterable[str] = (),
    renames: Mapping[str, str] | None = None,
    toml: str = "",
    distribution: str = "demopkg",
) -> Path:
    """The folder of a patch with one variant, which makes ``changes`` (path -> bytes, or None to delete).

    ``renames`` maps a new path of ``changes`` to its old one. Called again with other ``releases`` it adds a
    variant.
    """
    sources = dict(renames or {})

    def read(path: str) -> Content | None:
        return Content(before[path], 0o644) if path in before else None

    sections = []
    for path, change in changes.items():
        new = Content(change, 0o644) if isinstance(change, bytes) else change
        section = diff.compare(path, read(sources.get(path, path)), new, source=sources.get(path))
        if section is not None:
            sections.append(section)
    releases = tuple(releases)
    folder = patches / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "patch.toml").write_text(
        f'schema = 1\nname = "{name}"\ndistribution = "{distribution}"\nsummary = "for a test"\n{toml}'
    )
    suffix = "".join(f"-on-{one}" for one in on)
    stem = folder / f"{distribution}-{releases[0]}{suffix}"
    data = diff.render(diff.Diff(name, tuple(sections)))
    parsed = diff.parse(data, name=f"{stem}.patch")
    manifest = Manifest.build(
        parsed, read, patch=name, distribution=distribution, releases=releases, on=on, diff_bytes=data
    )
    Path(f"{stem}.patch").write_bytes(data)
    Path(f"{stem}.manifest.json").write_bytes(manifest.to_json())
    return folder


# -- the command line -----------------------------------------------------------------------------


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


@dataclass
class Kit:
    """patchkit on one tree. ``kit("apply", "p1")`` runs in this process, ``kit.spawn`` in one of its own.

    Unless ``guard``, apply and restore override the guard: it reads every process of the machine, and most
    tests are not about it.
    """

    where: list[str]
    env: dict[str, str] = field(default_factory=dict)
    guard: bool = False

    def command(self, *arguments: object) -> list[str]:
        more = ["--override-guard", "--reason", "a test"] if not self.guard else []
        more = more if arguments[0] in ("apply", "restore") else []
        return [str(part) for part in (*arguments, *more, *self.where)]

    def __call__(self, *arguments: object, code: int | None = 0) -> Done:
        from patchkit.cli.main import run

        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = run(self.command(*arguments))
        out.flush()
        done = Done(found, out.buffer.getvalue().decode(), err.getvalue())
        assert code is None or found == code, str(done)
        return done

    def popen(self, *arguments: object, prefix: Iterable[str] = (), **more: Any) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-m", "patchkit", *self.command(*arguments)]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**bare(), **self.env},
            **more,
        )

    def session(self, *options: object, command: Iterable[object], **more: Any) -> subprocess.Popen[str]:
        """``patchkit run OPTIONS -- COMMAND``."""
        line = [sys.executable, "-m", "patchkit", *self.where, "run", *options, "--", *command]
        return subprocess.Popen(
            [str(part) for part in line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
        )

    def spawn(self, *arguments: object, code: int | None = 0, **more: Any) -> Done:
        process = self.popen(*arguments, **more)
        out, err = process.communicate(timeout=300)
        done = Done(process.returncode, out, err)
        assert code is None or process.returncode == code, str(done)
        return done


def as_user(uid: int, function: Callable[[], Done]) -> Done:
    """What ``function`` returns in a fork that runs as user and group ``uid``, with no other group."""
    import filelock  # noqa: F401 (patchkit imports it late; that user may not see this interpreter's library)

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            done = function()
            os.write(writer, json.dumps([done.code, done.out, done.err]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    return Done(*json.loads(said))


# -- trees ----------------------------------------------------------------------------------------


def snapshot(root: Path, *, times: bool = True) -> dict[str, tuple[Any, ...]]:
    """Everything below ``root`` but ``.patchkit`` and bytecode: kind, bytes, mode, owner, mtime, xattrs."""
    found: dict[str, tuple[Any, ...]] = {}
    for top, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in (".patchkit", "__pycache__")]
        for name in (*folders, *files):
            path = os.path.join(top, name)
            found[os.path.relpath(path, root)] = _describe(path, times=times)
    return found


def _describe(path: str, *, times: bool) -> tuple[Any, ...]:
    info = os.lstat(path)
    own = (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid)
    if stat.S_ISDIR(info.st_mode):
        return ("folder", *own)
    mtime = info.st_mtime_ns if times else None
    if stat.S_ISLNK(info.st_mode):
        return ("link", os.readlink(path), mtime)
    xattrs = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return ("file", Path(path).read_bytes(), *own, mtime, tuple(sorted(xattrs.items())))


def files(root: Path) -> dict[str, bytes]:
    """The bytes of every file below ``root`` but ``.patchkit``, bytecode and metadata."""
    return {
        path: entry[1] if entry[0] == "file" else (root / path).read_bytes()
        for path, entry in snapshot(root).items()
        if entry[0] != "folder" and ".dist-info/" not in path
    }


def patched(before: Mapping[str, bytes], changes: Mapping[str, bytes | None], patch: str) -> dict[str, bytes]:
    """The files that a tree of ``before`` has with ``changes`` on it, backups included."""
    result = dict(before)
    for path, data in changes.items():
        if path in before:
            result[f"{path}.bak_{patch}"] = before[path]
        result.pop(path, None)
        if data is not None:
            result[path] = data
    return result


def replace_diff(folder: Path, data: bytes) -> None:
    """Give the one variant in ``folder`` other diff bytes, and pin them."""
    (manifest,) = folder.glob("*.manifest.json")
    entry = json.loads(manifest.read_text())
    entry["diff_sha256"] = hashlib.sha256(data).hexdigest()
    manifest.write_text(json.dumps(entry))
    Path(str(manifest).removesuffix(".manifest.json") + ".patch").write_bytes(data)
