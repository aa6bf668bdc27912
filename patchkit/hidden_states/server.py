"""The engine's server in a session of its own: patched while it runs, restored when it ends.

The session is the command ``patchkit run``, so that it stops, waits and restores by itself when this
process dies: it gets SIGTERM then.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit.errors import AFTER_COMMAND, PatchkitError
from patchkit.hidden_states.errors import ServerError, need
from patchkit.processes import ends_with_us

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# A server that is stopped has nothing more to say: what it had not dumped is asked for again.
GRACE_SECONDS = 10
_SUMMARY = re.compile(r"session [0-9a-f]{12}")
_RAISED = re.compile(r"[\w.]*(Error|Exception)\b")
# The patch that serves an architecture.
PATCHES = {
    "DeepseekV2ForCausalLM": "hsdump",
    "DeepseekV3ForCausalLM": "hsdump",
    "DeepseekV32ForCausalLM": "hsdump",
    "KimiK25ForConditionalGeneration": "hsdump",
    "LlamaForCausalLM": "hsdump-llama",
    "Qwen2ForCausalLM": "hsdump-qwen2",
    "Qwen3ForCausalLM": "hsdump-qwen3",
    "Qwen3MoeForCausalLM": "hsdump-qwen3-moe",
}


class SessionError(PatchkitError):
    """The session around the server failed after the server had ended: the tree may not be restored."""

    code = "session-failed"
    exit_code = AFTER_COMMAND

    def __init__(self, code: int, log: str) -> None:
        super().__init__(
            f"the session around the server ended with {code}: {last_words(log, session=True)}",
            path=log,
            hint="patchkit status says how the tree is",
        )


def free_port() -> int:
    """A port below the ephemeral range that is free now."""
    for port in range(30000 + os.getpid() % 1000, 32700):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError("no port between 30000 and 32700 is free")


@dataclass
class Launched:
    """``patchkit run PATCH... -- python -m sglang.launch_server …``, with its output in ``log``.

    ``own`` are patchkit's global options (the environment and the patches meant).
    """

    python: str
    model: str
    patches: Sequence[str]
    environment: Mapping[str, str]
    arguments: Sequence[str]
    own: Sequence[str]
    log: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0  # where this run's part of the log begins

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        session = [sys.executable, "-m", "patchkit", *self.own, "run", *self.patches]
        session += [f"--grace={GRACE_SECONDS}s"]
        session += ["--record", os.path.dirname(self.log)]
        for name, value in self.environment.items():
            session += ["--env", f"{name}={value}"]
        server = [self.python, "-m", "sglang.launch_server", f"--model-path={self.model}"]
        server += ["--host=127.0.0.1", f"--port={self.port}", "--disable-radix-cache", *self.arguments]
        return [*session, "--", *server]

    def start(self, timeout: float) -> None:
        """Start it and wait until it is healthy. Raises ServerError; then nothing is left running."""
        os.makedirs(os.path.dirname(self.log), exist_ok=True)
        with open(self.log, "ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=ends_with_us(),  # noqa: PLW1509 (no threads run yet)
            )
        try:
            self._wait_until_healthy(timeout)
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self.require_alive()
            if healthy(self.url):
                return
            time.sleep(0.5)
        raise ServerError(
            f"the server was not healthy after {timeout:g} s; the log is {self.log}", "raise --start-timeout"
        )

    def require_alive(self) -> None:
        """Raises ServerError when the session has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise ServerError(
                f"the server's session ended with {self.process.returncode}: "
                f"{last_words(self.log, self.log_start)}",
                f"see {self.log}",
            )

    def stop(self) -> int:
        """Ask the session to end, and wait until it has restored the tree; returns its exit code."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # asked already; leaving now would leave the tree patched for a while


def healthy(url: str) -> bool:
    return _get(f"{url}/health") is not None


def served_model(url: str) -> str | None:
    """The ``model_path`` of the server at ``url``, which its dumps have too; None where it does not say."""
    for name in ("model_info", "get_model_info"):  # the older SGLang has the latter alone
        answer = _get(f"{url}/{name}")
        try:
            found = None if answer is None else answer.json()
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("model_path"), str):
            return str(found["model_path"])
    return None


def _get(url: str) -> Any:
    """The answer if it is 200, else None. A proxy in the environment is not for servers that dump to us."""
    httpx = need("httpx")
    try:
        answer = httpx.get(url, timeout=5, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer if answer.status_code == 200 else None


def last_words(path: str, start: int = 0, *, session: bool = False) -> str:
    """Why the server ended, by its log from byte ``start`` on: its last error, else its last line.

    What the session says at its end, after the server, begins with a line ``session ID``; with ``session``
    the very last line is meant.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "it wrote no log"
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    if not lines:
        return "its log is empty"
    if session:
        return lines[-1]
    end = next((at for at, line in enumerate(lines) if _SUMMARY.fullmatch(line)), len(lines))
    said = lines[:end] or lines
    return next((line for line in reversed(said) if _RAISED.match(line)), said[-1])
