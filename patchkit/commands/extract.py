"""extract: from a file of conversations to a data set, the engine patched only while it must be."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.commands.data import dataset_result, final_norm, finished, one_thread_each, write_provenance
from patchkit.errors import USAGE, PatchkitError
from patchkit.hidden_states.dataset import PROVENANCE, Growing
from patchkit.hidden_states.dump import Spool
from patchkit.hidden_states.errors import ModelError, ServerError
from patchkit.hidden_states.extraction import Extraction
from patchkit.hidden_states.formats import FORMATS
from patchkit.hidden_states.model import ModelConfig
from patchkit.hidden_states.pack import Packer, begin, usable_cores
from patchkit.hidden_states.progress import Progress
from patchkit.hidden_states.resume import require_same
from patchkit.hidden_states.server import PATCHES, Launched, SessionError, healthy, served_model
from patchkit.hidden_states.source import Source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from patchkit.report import Result
    from patchkit.workspace import Workspace

# Servers that somebody else started dump where the patches' own default says.
DEFAULT_SPOOL = "/dev/shm/hsdump"  # noqa: S108 (the patches' own default)


class LayersError(PatchkitError):
    code = "bad-layers"
    exit_code = USAGE

    def __init__(self, reason: str) -> None:
        super().__init__(f"--layers: {reason}")


class ServerArgumentError(PatchkitError):
    code = "bad-server-argument"
    exit_code = USAGE

    def __init__(self, argument: str) -> None:
        super().__init__(
            f"--server-arg={argument}: patchkit itself says which model is served, and where",
            hint="name the model with --model",
        )


@dataclass(frozen=True)
class Request:
    """What was asked for; ``spool_limit`` in bytes, ``start_timeout`` in seconds."""

    model: str
    data: str
    out: str
    format_name: str
    layers: tuple[int, ...]
    samples: int | None
    max_length: int | None
    concurrency: int
    workers: int | None
    urls: tuple[str, ...]
    spool: str | None
    spool_limit: int
    server_args: tuple[str, ...]
    patches: tuple[str, ...]
    resume: bool
    skip_bad: bool
    trust_remote_code: bool
    start_timeout: float
    stall: float
    quiet: bool

    def wanted(self, layers: Sequence[int]) -> dict[str, Any]:
        """What a resumed run must have in common with the first, beside its input."""
        return {
            "format": self.format_name,
            "layers": list(layers),
            "verifier": os.path.abspath(self.model),
            "samples": self.samples,
            "max_length": self.max_length,
        }

    def spool_folder(self) -> str:
        """Where other people's servers dump to; for our own one a folder made for this data set alone."""
        if self.urls:
            return os.path.abspath(self.spool or DEFAULT_SPOOL)
        own = hashlib.sha256(os.fsencode(os.path.realpath(self.out))).hexdigest()[:12]
        parent = os.path.abspath(self.spool or "/dev/shm")  # noqa: S108 (memory; the folder has mode 700)
        return os.path.join(parent, f"patchkit-{own}")


def extract(workspace: Workspace, request: Request) -> Result:
    """Extract, pack and finish the data set; the tree is as it was when this returns or raises."""
    config = ModelConfig.read(request.model)
    layers = _layers(request.layers, config)
    one_thread_each()
    norm = final_norm(request.model, required=FORMATS[request.format_name].normed)
    spool = Spool(request.spool_folder())
    if done := finished(request.out, request.wanted(layers), request.data, resume=request.resume):
        if not request.urls:
            spool.discard(records=True)  # of a run that died after its last step
        return done
    patches = () if request.urls else request.patches or (_patch_for(request.model),)
    model_path = _served(request)
    if not request.urls:
        spool.require_own()
    growing = _growing(request, config, layers)
    launched = None if request.urls else _launched(workspace, request, patches, layers, spool.folder)
    began, before = time.time(), len(growing.plan) - len(growing.missing)
    progress = Progress("extract", len(growing.plan), before, quiet=request.quiet)
    extraction = Extraction(
        Packer(
            growing,
            norm,
            delete=True,
            model_path=model_path,
            workers=request.workers or usable_cores(),
        ),
        spool,
        request.urls or (launched.url if launched else "",),
        state_bytes=len(layers) * config.hidden_size * 2,
        spool_limit=request.spool_limit,
        concurrency=request.concurrency,
        progress=progress,
        alive=launched.require_alive if launched else lambda: None,
        stall_seconds=request.stall,
    )
    outcome = "failed"
    try:
        with progress, _signals_interrupt():
            _drive(extraction, launched, request.start_timeout)
        if launched is not None:
            _require_restored(workspace, patches, launched)
        record = growing.finish()
        outcome = "finished"
    finally:
        write_provenance(
            request.out,
            "extract",
            began,
            progress,
            {
                "outcome": outcome,
                "arguments": sys.argv[1:],
                "servers": list(extraction.urls),
                "errors": [str(error) for error in extraction.errors],
                "spool": {"folder": spool.folder, "limit": request.spool_limit, "reserved": extraction.peak},
            },
        )
        if launched is not None:
            spool.discard(records=outcome == "finished")
    return dataset_result(request.out, record)


def _drive(extraction: Extraction, launched: Launched | None, start_timeout: float) -> None:
    extraction.drain()
    if not extraction.growing.missing:
        return
    if launched is None:
        extraction.run()
        return
    extraction.spool.clear()
    code: int | None = None
    say = extraction.progress.say
    try:
        say(f"starting the server, patched with {', '.join(launched.patches)}; its log is {launched.log}")
        launched.start(start_timeout)
        say("the server is healthy")
        extraction.run()
    finally:
        say("stopping the server and restoring the tree")
        code = launched.stop()
    if code == SessionError.exit_code:
        raise SessionError(code, launched.log)


def _growing(request: Request, config: ModelConfig, layers: tuple[int, ...]) -> Growing:
    if request.resume and Growing.exists(request.out):
        growing = Growing(request.out)
        require_same(request.out, growing.settings, {**request.wanted(layers), "source": None}, request.data)
        return growing
    source = Source(
        request.data,
        model=request.model,
        vocab_size=config.vocab_size,
        context=config.max_length,
        max_length=request.max_length,
        samples=request.samples,
        trust_remote_code=request.trust_remote_code,
    )
    return begin(
        request.out,
        request.format_name,
        source,
        skip_bad=request.skip_bad,
        verifier=os.path.abspath(request.model),
        layers=list(layers),
    )


def _layers(wanted: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    layers = tuple(sorted(set(wanted))) or config.default_layers()
    wrong = [k for k in layers if not 0 <= k <= config.layers]
    if wrong:
        raise LayersError(f"there is no R({wrong[0]}) in a model of {config.layers} layers")
    if len(layers) < 2 or layers[-1] != config.layers:
        raise LayersError(f"a trainer needs R({config.layers}), the last state, and at least one before it")
    return layers


def _patch_for(model: str) -> str:
    with open(os.path.join(model, "config.json"), "rb") as file:
        architectures = json.loads(file.read()).get("architectures") or []
    for name in architectures:
        if name in PATCHES:
            return PATCHES[name]
    raise ModelError(
        model,
        f"no built-in patch dumps {', '.join(map(str, architectures)) or 'an unnamed architecture'}",
        "name a patch of your own with --patch",
    )


def _served(request: Request) -> str | None:
    """The model that the dumps will name, None where no server says it. Raises ServerError, ModelError."""
    if not request.urls:
        for argument in request.server_args:
            if argument.split("=", 1)[0] in ("--model-path", "--model", "--port"):
                raise ServerArgumentError(argument)
        return os.path.abspath(request.model)
    served = None
    for url in request.urls:
        if not healthy(url):
            raise ServerError(f"no healthy server answers at {url}", "start it patched, and wait for /health")
        found = served_model(url)
        if None not in (served, found) and found != served:
            raise ServerError(f"{url} serves {found}, another server {served}", "one model makes a data set")
        served = found or served
    # Where the server has a file system of its own, its path says nothing here.
    if served is not None and os.path.isdir(served) and not os.path.samefile(served, request.model):
        raise ModelError(request.model, f"the server serves {served}", "name that one with --model")
    return served


def _launched(
    workspace: Workspace, request: Request, patches: Sequence[str], layers: Sequence[int], spool: str
) -> Launched:
    python = workspace.environment.python
    if python is None:
        raise ModelError(request.model, "a plain folder has no interpreter", "use --python, or --url")
    own = ["--python", os.path.abspath(python)]
    for folder in workspace.patches:
        own += ["--patches", os.path.abspath(folder)]
    folder = os.path.join(os.path.abspath(request.out), PROVENANCE)
    return Launched(
        python=python,
        model=os.path.abspath(request.model),
        patches=patches,
        environment={
            "SGLANG_HS_DUMP_DIR": spool,
            "SGLANG_HS_DUMP_LAYERS": ",".join(map(str, layers)),
        },
        arguments=request.server_args,
        own=own,
        log=os.path.join(folder, "server.log"),
    )


def _require_restored(workspace: Workspace, patches: Sequence[str], launched: Launched) -> None:
    """The promise, proven: none of our patches is applied and the tree equals its witness."""
    from patchkit.commands.check import judge
    from patchkit.state import State

    for target in workspace.targets():
        applied = {one.patch for one in State.load(target.root).stack}
        verdict = judge(target, workspace.catalog, expect=applied)
        if applied & set(patches) or not verdict.clean:
            raise SessionError(SessionError.exit_code, launched.log)


class _signals_interrupt:  # noqa: N801 (reads as a statement)
    """SIGTERM and a lost terminal end a run as ^C does: in order, with the tree restored."""

    def __enter__(self) -> None:
        def interrupt(_number: int, _frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        self.before = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's wish
            self.before[signal.SIGHUP] = signal.signal(signal.SIGHUP, interrupt)

    def __exit__(self, *raised: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
