"""A session around real CUDA processes: it ends them all, sees the GPU emptied, and only then puts the tree back.

    python bench/gpu/session_on_gpu.py

Needs an NVIDIA GPU, torch, and patchkit importable in this interpreter. The session's command leaves two daemons
behind that have loaded the patched file and hold GPU memory. Prints each command and what it answered.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from bench.gpu.guard_on_gpu import Machine, expect

# The command: daemons of another process group, another parent and an empty environment, then its own end.
COMMAND = """
import os, sys, time
from pathlib import Path
here = Path(__file__).parent
for number in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, str(here / "holder.py"), str(number)], {})
        os._exit(0)
    os.wait()
while len(list(here.glob("holds-*"))) < 2:
    time.sleep(0.1)
print("the command ends; two daemons hold the GPU:", *(path.read_text() for path in here.glob("holds-*")))
"""
HOLDER = """
import os, sys, time
from pathlib import Path
sys.path.append({torch!r})
import torch
import tinyengine.model
assert hasattr(tinyengine.model, "trace"), "not the patched file"
data = torch.ones(1 << 29, device="cuda")
torch.cuda.synchronize()
path = Path(__file__).with_name("holds-" + sys.argv[1])
path.with_name("." + path.name).write_text(str(os.getpid()))
path.with_name("." + path.name).rename(path)
time.sleep(600)
"""


def used() -> int:
    """MiB of GPU memory in use."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) for line in subprocess.check_output(query, text=True).split())


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        machine = Machine(folder)
        (folder / "command.py").write_text(COMMAND)
        (folder / "holder.py").write_text(HOLDER.format(torch=machine.torch))
        before = used()
        print(f"GPU memory in use: {before} MiB")
        command = [machine.python, str(folder / "command.py")]
        code = machine.patchkit("run", "trace", "--grace", "5s", "--record", name, "--", *command)
        after = used()
        print(f"GPU memory in use: {after} MiB")
        expect(code == 0, "the session ends with its command's exit code")
        expect(after <= before, "the GPU holds nothing of the session any more")
        (record,) = folder.glob("patchkit-run-*.json")
        run = json.loads(record.read_text())["predicate"]
        print(f"recorded: gpus_held {run['gpus_held']}, driver {run['machine']['driver']}")
        expect(run["gpus_held"] == [], "and its record says so")
        expect(machine.patchkit("check") == 0, "the tree is pristine")


if __name__ == "__main__":
    main()
