"""One running SGLang server: started in a process group of its own, stopped for certain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

# Without the two memory limits the server fails to start or takes 18 GB.
ARGUMENTS = (
    "--device=cpu",
    "--skip-tokenizer-init",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=8192",
    "--max-running-requests=16",
    "--host=127.0.0.1",
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
}
PLAIN = ("--disable-radix-cache", "--chunked-prefill-size=-1")  # every prompt is one whole EXTEND
NO_WARM_UP = "--skip-server-warmup"  # warm-up is a prefill of its own; 0.4.6 has no way to leave it out
STOP_SECONDS = 30.0


class ServerError(RuntimeError):
    """The server did not come up, or does not run the model's own code; holds the log's end."""

    def __init__(self, what: str, log: Path) -> None:
        self.log = log
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:] if log.exists() else []
        super().__init__("\n".join([f"{what}; the log is {log}", *tail]))


class Server:
    """``with Server(python, model, log) as server: server.generate([1, 2, 3])``.

    ``args`` come after the ones every CPU server needs, so they win; ``env`` is laid over this
    process's environment. ``served`` is the class that must serve the model: when the file of a model
    class does not import, SGLang only logs it and serves another implementation. A subclass for another
    machine replaces ``arguments`` and ``environment``.
    """

    arguments: ClassVar[tuple[str, ...]] = ARGUMENTS
    environment: ClassVar[dict[str, str]] = ENVIRONMENT

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *,
        args: Sequence[str] = PLAIN,
        env: Mapping[str, str] | None = None,
        served: str = "DeepseekV3ForCausalLM",
        start_seconds: float = 180.0,
    ) -> None:
        self.python, self.model, self.log = python, model, log
        self.args = tuple(args)
        self.env = {**os.environ, **self.environment, **(env or {})}
        self.served = served
        self.start_seconds = start_seconds
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it is healthy. Raises ServerError, with nothing left running."""
        command = [
            str(self.python),
            *("-m", "sglang.launch_server", f"--model-path={self.model}", f"--port={self.port}"),
            *self.arguments,
            *([NO_WARM_UP] if knows_option(self.python, NO_WARM_UP) else []),
            *self.args,
        ]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.log.parent,
                start_new_session=True,
            )
        try:
            self.wait_until_healthy()
            self.require_served_class()
        except BaseException:
            self.stop()
            raise

    def require_served_class(self) -> None:
        if f"type={self.served}" not in self.log.read_text(encoding="utf-8", errors="replace"):
            raise ServerError(f"the server does not serve {self.served}", self.log)

    def wait_until_healthy(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with {self.process.returncode} at start-up", self.log)
            try:
                self.request("/health", timeout=5)
            except (OSError, urllib.error.URLError):
                time.sleep(0.25)
            else:
                return
        raise ServerError(f"the server was not healthy after {self.start_seconds:g} s", self.log)

    def request(self, path: str, body: Any = None, *, timeout: float = 300) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            answer: bytes = reply.read()
        return answer

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 1,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """The server's parsed answer to ``/generate``: a dict for one prompt, a list for several."""
        sampling_params = {
            "temperature": 0,
            "ignore_eos": True,
            "max_new_tokens": max_new_tokens,
            **(sampling or {}),
        }
        body = {"input_ids": input_ids, "sampling_params": sampling_params, **fields}
        return json.loads(self.request("/generate", body))

    def stop(self) -> None:
        """SIGTERM to the whole group, then SIGKILL to what is left; returns when the group is gone.

        What is left at once is the first process, once those that compute have ended: it waits for a
        look round every five seconds, and in old releases for ever, for answers that nobody gives now.
        """
        if self.process is None:
            return
        group = self.process.pid
        deadline = time.monotonic() + STOP_SECONDS
        signal_group(group, signal.SIGTERM)
        while titles := living_titles(group):
            self.process.poll()  # reap, or the leader stays a zombie of the group for ever
            if time.monotonic() > deadline or not any(b"sglang::" in title for title in titles):
                signal_group(group, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait()
        self.process = None


def knows_option(python: Path, option: str) -> bool:
    """Whether the SGLang of this environment has the option, from the text of its source."""
    sources = python.parent.parent.glob("lib/python3.*/site-packages/sglang/srt/server_args.py")
    fields = python.parent.parent.glob("lib/python3.*/site-packages/sglang/srt/arg_groups/fields/*.py")
    name = option.lstrip("-")
    texts = [path.read_text(encoding="utf-8") for path in (*sources, *fields)]
    return any(name in text or name.replace("-", "_") in text for text in texts)


def free_port() -> int:
    """A port that is free now, below the ephemeral range.

    From a block of this process's own: SGLang also uses ports near it, and another process may be
    starting a server at the same time.
    """
    for port in range(12000 + os.getpid() % 100 * 200, 32700, 2):
        with contextlib.closing(socket.socket()) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 12000 and 32700")


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def living_titles(group: int) -> list[bytes]:
    """The command line of each process of the group that has not ended (zombies have)."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                state, _parent, owner = stat.read().rsplit(") ", 1)[1].split()[:3]
            if int(owner) == group and state not in "ZX":
                with open(f"/proc/{entry}/cmdline", "rb") as title:
                    found.append(title.read())
        except OSError:
            continue
    return found
