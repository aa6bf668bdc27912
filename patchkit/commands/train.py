"""train and drafter config: valid data, a clean tree under a lease, the trainer's own environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from patchkit.commands.check import check
from patchkit.commands.data import inspect, one_thread_each, write_provenance
from patchkit.drafter import rewrite
from patchkit.errors import NO, PatchkitError
from patchkit.hidden_states.dataset import PROVENANCE, Dataset
from patchkit.processes import ends_with_us
from patchkit.report import Result
from patchkit.signals import ENDING
from patchkit.training import Training

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from patchkit.workspace import Workspace


class RefusedError(PatchkitError):
    code = "not-valid"
    exit_code = NO

    def __init__(self, folder: str, errors: Sequence[PatchkitError]) -> None:
        super().__init__(
            f"{folder} does not validate: {errors[0].message}"
            + (f", and {len(errors) - 1} more errors" if len(errors) > 1 else ""),
            path=folder,
            hint="patchkit validate lists them",
        )


def train(
    workspace: Workspace,
    *,
    dataset: str,
    verifier: str,
    save_path: str,
    trainer: str,
    trainer_python: str | None,
    trainer_entry: str | None,
    extra: Sequence[str],
    quiet: bool,
) -> Result:
    """Run the trainer; the result's exit code is the trainer's own."""
    one_thread_each()
    source = Dataset(dataset)
    training = Training(
        source,
        os.path.abspath(verifier) if os.path.exists(verifier) else verifier,
        save_path,
        trainer,
        trainer_python or sys.executable,
        os.path.abspath(trainer_entry) if trainer_entry else None,
        extra,
    )
    command = training.command()
    release = training.release()
    clean = check(workspace)
    if not clean.ok:
        return clean
    findings = inspect(source, verifier if os.path.isdir(verifier) else None, workers=None, quiet=quiet)
    if findings.errors:
        raise RefusedError(dataset, findings.errors)
    records = os.path.join(os.path.abspath(save_path), PROVENANCE)
    os.makedirs(records, exist_ok=True)
    own = ["--python", os.path.abspath(workspace.python)] if workspace.python else []
    own += ["--root", os.path.abspath(workspace.root)] if workspace.root else []
    for folder in workspace.patches:
        own += ["--patches", os.path.abspath(folder)]
    began = time.time()
    code = _run(
        [sys.executable, "-m", "patchkit", *own, "run", "--clean", "--record", records, "--", *command]
    )
    path = write_provenance(
        save_path,
        "train",
        began,
        None,
        {
            "trainer": {"name": trainer, "release": release, "python": training.python},
            "arguments": command,
            "dataset": {
                "folder": os.path.abspath(dataset),
                "samples_sha256": source.record["samples_sha256"],
                "layers": list(source.layers),
                "origin": source.record["origin"],
            },
            "verifier": training.verifier,
            "exit_code": code,
        },
    )
    data = {"command": command, "exit_code": code, "provenance": path, "release": release}
    style = "bad" if code else "good"
    lines: list[str | tuple[str, str]] = [
        (style, f"{trainer} {release} ended with {code}; its drafter is in {save_path}"),
        f"  record {path}",
    ]
    return Result(data, lines, exit_code=code)


def _run(command: Sequence[str]) -> int:
    """The session's exit code; what it and the trainer print goes to stderr, so that stdout stays ours.

    What would end us is passed on to the session, which stops the trainer and checks the tree; we wait for
    it, and so write the record. If we are killed, the session is told.
    """
    early: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    before = {
        number: signal.signal(number, pass_on)
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup's wish
    }
    try:
        process = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=ends_with_us())  # noqa: PLW1509
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def drafter_config(folder: str, *, serve: str, layers: tuple[int, ...], architecture: str | None) -> Result:
    """Name the layer ids as the serving release reads them."""
    named, changed = rewrite(folder, serve, layers, architecture)
    ids = list(named.ids)
    data: dict[str, Any] = {
        "drafter": folder,
        "serve": serve,
        "ids": ids,
        "reason": named.reason,
        "changed": changed,
        "release_checked": named.checked,
    }
    lines: list[str | tuple[str, str]] = [
        ("good", f"{folder}: eagle_config names the layers {ids} ({'written' if changed else 'as it was'})"),
        f"  {named.reason}",
        "  sglang reads them from eagle_config only; those that speculators wrote at the top level stay",
    ]
    if not named.checked:
        lines.append(
            ("warn", "  that release is newer than those looked at: see its set_eagle3_layers_to_capture")
        )
    return Result(data, lines)
