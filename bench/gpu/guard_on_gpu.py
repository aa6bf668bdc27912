"""The guard with a real CUDA process: refusal while it lives, release after it ends, ``patchkit ps``.

    python bench/gpu/guard_on_gpu.py

Needs an NVIDIA GPU, torch, and patchkit importable in this interpreter. Makes a venv with a small
package, patches it, and runs CUDA programs from it. Prints each command and what it answered.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

SERVER = """
import ctypes, sys, time
sys.path.append({torch!r})
import torch
{load}
data = torch.ones(1 << 28, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
time.sleep(600)
"""
BEFORE = "SCALE = 1\n\n\ndef forward(x):\n    return x * SCALE\n"
AFTER = BEFORE.replace("    return", "    trace(x)\n    return").replace(
    "SCALE = 1\n", "SCALE = 1\n\n\ndef trace(x):\n    pass\n"
)
PATH = "tinyengine/model.py"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_environment(folder: pathlib.Path) -> tuple[str, str]:
    """A venv with ``tinyengine`` 1.0 and a folder of patches; returns its python and the folder."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python3*/site-packages"))
    info = site / "tinyengine-1.0.dist-info"
    rows = []
    for path, text in {
        "tinyengine/__init__.py": "",
        PATH: BEFORE,
        "tinyengine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinyengine\nVersion: 1.0\n",
    }.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
        code = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={code},{len(text)}\n")
    (info / "RECORD").write_text("".join([*rows, "tinyengine-1.0.dist-info/RECORD,,\n"]))
    patch = folder / "patches/trace"
    patch.mkdir(parents=True)
    lines = difflib.unified_diff(BEFORE.splitlines(True), AFTER.splitlines(True), f"a/{PATH}", f"b/{PATH}")
    diff = "".join(lines)
    (patch / "tinyengine-1.0.patch").write_text(diff)
    (patch / "patch.toml").write_text(
        'schema = 1\nname = "trace"\ndistribution = "tinyengine"\nsummary = "Trace"\n'
    )
    pins = [{"sha256": digest(text), "size": len(text), "mode": "0644"} for text in (BEFORE, AFTER)]
    manifest = {
        "schema": 1,
        "patch": "trace",
        "distribution": "tinyengine",
        "releases": ["1.0"],
        "on": [],
        "diff_sha256": digest(diff),
        "files": [{"path": PATH, "change": "modify", "before": pins[0], "after": pins[1]}],
    }
    (patch / "tinyengine-1.0.manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return str(venv / "bin/python"), str(folder / "patches")


class Machine:
    def __init__(self, folder: pathlib.Path) -> None:
        self.python, self.patches = make_environment(folder)
        self.torch = subprocess.run(
            [
                sys.executable,
                "-c",
                "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))",
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def patchkit(self, *arguments: str) -> int:
        command = [sys.executable, "-m", "patchkit", "--python", self.python, "--patches", self.patches]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "160"},
        )
        took = time.perf_counter() - start
        print(f"\n$ patchkit {' '.join(arguments)}    # exit {done.returncode}, {took:.2f} s")
        print((done.stdout + done.stderr).rstrip())
        return done.returncode

    def serve(self, load: str) -> subprocess.Popen[str]:
        code = SERVER.format(torch=self.torch, load=load)
        process = subprocess.Popen([self.python, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        print(f"\n# started a CUDA process {process.pid}: {load or 'has not imported the tree'}")
        return process


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()
    print(f"\n# process {process.pid} has ended")


def main() -> None:
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["nvidia-smi", "-L"], check=False)
    with tempfile.TemporaryDirectory() as name:
        machine = Machine(pathlib.Path(name))
        expect(machine.patchkit("apply", "trace") == 0, "a tree that nobody uses can be patched")
        process = machine.serve("import tinyengine.model")
        machine.patchkit("ps", "trace", "-v")
        expect(machine.patchkit("restore", "trace") == 3, "a server that runs the patched file is refused")
        end(process)
        expect(machine.patchkit("restore", "trace", "--wait", "10s") == 0, "after its end the tree is free")
        process = machine.serve("")
        machine.patchkit("ps", "trace", "-v")
        machine.patchkit("apply", "trace", "--dry-run")
        end(process)
        process = machine.serve("import tinyengine.model")
        machine.patchkit("apply", "trace", "--override-guard", "--reason", "to show old code")
        machine.patchkit("ps", "trace", "-v")
        end(process)
        expect(machine.patchkit("restore", "trace", "--verify", "--wait", "10s") == 0, "and pristine again")


def expect(fact: bool, what: str) -> None:
    print(f"{'ok' if fact else 'NOT OK'}: {what}")
    if not fact:
        sys.exit(1)


if __name__ == "__main__":
    main()
