"""The whole job, start to end, on the real SGLang and the real trainer: `make demo`.

First the engine is patched, served, refused and put back by hand; then patchkit extracts a data set and
trains a drafter on it. Prints an account and ends non-zero at the first step that is not as it should be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from examples.cpu_engine import tiny_model, venv as engines
from examples.demo import drafting, patching
from examples.demo.account import Account, StepFailedError
from examples.trainers import venv as trainers

RELEASE = "0.5.9"


def main() -> int:
    print(f"patchkit demo: SGLang {RELEASE} and {drafting.TRAINER}, on this machine's CPU")
    print("   building their environments if they are not there (3 GB, some minutes) …", flush=True)
    python = engines.ensure(RELEASE)
    trainers.ensure(drafting.TRAINER)
    model = tiny_model.ensure(python, engines.cache_root())
    print(f"   engine {python}\n   model  {model}")
    work = Path(tempfile.mkdtemp(prefix="patchkit-demo-"))
    started = time.monotonic()
    try:
        with engines.locked(engines.cache_root() / "in-use.lock"):
            put_back(python)  # an earlier demo may have been killed
            try:
                account = Account(python)
                patching.show(account, model, work)
                drafting.show(account, model, work)
            finally:
                put_back(python)
    except StepFailedError as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\nAll as it should be, in {time.monotonic() - started:.0f} s.")
    return 0


def put_back(python: Path) -> None:
    """Whatever happened, the shared engine is left pristine."""
    command = [sys.executable, "-m", "patchkit", "--python", str(python), "-q", "restore"]
    subprocess.run(command, check=False)


if __name__ == "__main__":
    os.environ.pop("VIRTUAL_ENV", None)
    sys.exit(main())
