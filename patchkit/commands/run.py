"""run: a command under a lease, on patched or proven pristine files."""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

from patchkit.commands import change
from patchkit.errors import AFTER_COMMAND, USAGE, PatchkitError
from patchkit.report import Result
from patchkit.session_errors import AfterCommandError, NotCleanAtStartError
from patchkit.supervisor import CommandNotFoundError, is_there

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.sessions import Session
    from patchkit.workspace import Workspace


class NoCommandError(PatchkitError):
    """No command stands after ``--``."""

    code = "usage"
    exit_code = USAGE

    def __init__(self) -> None:
        super().__init__("no command to run", hint="write it after '--': patchkit run NAME... -- CMD...")


def run(session: Session, command: Sequence[str], *, stdout: int | None = None) -> Result:
    """Run ``command`` in ``session`` and return its exit code, or 125 if patchkit failed after it."""
    if not command:
        raise NoCommandError
    if not is_there(command[0], session.environment().get("PATH")):
        raise CommandNotFoundError(command[0])
    code: int | None = None
    failure: AfterCommandError | None = None
    session.open()
    try:
        code = session.run(command, stdout=stdout)
    finally:
        try:
            session.close(good=code == 0)
        except AfterCommandError as error:
            if code is None:
                raise
            failure = error
    return _result(session, command, code, failure)


def plan(workspace: Workspace, session: Session, command: Sequence[str]) -> Result:
    """What ``run`` would do."""
    lines: list[str | tuple[str, str]] = []
    data: dict[str, Any] = {"dry_run": True, "command": list(command), "environment": session.env_set}
    if session.patches:
        applied = change.apply(
            workspace, [patch.name for patch in session.patches], holding=session.holding, dry_run=True
        )
        lines += applied.lines
        data["apply"] = applied.data
    else:
        from patchkit.commands.check import judge

        for target in session.targets:
            verdict = judge(target, workspace.catalog)
            if not verdict.clean:
                raise NotCleanAtStartError(verdict)
            lines += verdict.lines()
    lines += [f"would set {name}={value}" for name, value in sorted(session.env_set.items())]
    lines.append(f"would run {shlex.join(command)}")
    end = f"would end what is left of it (SIGTERM, SIGKILL after {session.grace_s:g} s)"
    if session.patches:
        end += "; would keep the patch on success" if session.keep else ", restore and verify"
    else:
        end += ", verify again"
    lines.append(end)
    return Result(data, lines)


def _result(session: Session, command: Sequence[str], code: int, failure: AfterCommandError | None) -> Result:
    record = session.record
    took = (record.ended or time.time()) - record.begun
    number = record.exit_signal
    how = f"ended with {code}" if number is None else f"was ended by signal {number} ({code})"
    lines: list[str | tuple[str, str]] = [
        ("title", f"session {session.id}"),
        f"  command   {shlex.join(command)[:200]}",
        f"  end       it {how} after {took:.1f} s",
    ]
    ending = session.ending
    if ending is not None and ending.found:
        killed = f", {ending.killed} of them by SIGKILL" if ending.killed else ""
        lines.append(f"  rest      {ending.found} more processes were ended{killed}")
    if ending is not None:
        lines += [("bad", f"  rest      process {one.pid} could not be ended") for one in ending.left]
    lines += [
        ("warn", f"  gpu       {gpu.name} still has {(gpu.memory or 0) >> 20} MiB in use")
        for gpu in session.gpus_held
    ]
    if session.verdicts:
        lines += _tree_lines(session)
    for output in record.written:
        count = len(output["files"])
        said = f"{count} file{'s' * (count != 1)}" if output["kind"] else "no file or folder is there"
        lines.append(("" if count else "warn", f"  output    {output['path']}: {said}"))
    if session.record_path is not None:
        lines.append(f"  record    {session.record_path}")
    return Result(
        {
            "session": session.id,
            "command": list(command),
            "command_exit_code": code,
            "command_signal": record.exit_signal,
            "signals": record.signals,
            "seconds": took,
            "ended": {"found": ending.found, "killed": ending.killed} if ending else None,
            "gpus_held": [gpu.to_json() for gpu in session.gpus_held],
            "kept": session.kept,
            "shared_with": [one.session for one in session.shared_with],
            "restored": bool(record.restored),
            "statement": record.statement,
            "verified": [verdict.to_json() for verdict in session.verdicts],
            "record": session.record_path,
        },
        lines,
        exit_code=code if failure is None else AFTER_COMMAND,
        errors=[] if failure is None else [failure],
        aside=True,
    )


def _tree_lines(session: Session) -> list[str | tuple[str, str]]:
    lines: list[str | tuple[str, str]] = []
    names = " ".join(patch.name for patch in session.patches)
    if session.kept:
        lines.append(
            ("warn", f"  kept      {names} is still applied; 'patchkit restore {names}' takes it off")
        )
    elif session.shared_with:
        other = session.shared_with[0]
        if other.is_alive():
            lines.append(("warn", f"  shared    {names} stays for {other.describe()}"))
        else:
            end = f"'patchkit recover' finishes abandoned {other.describe()}"
            lines.append(("warn", f"  shared    {names} stays for what another session started; {end}"))
        if session.keep:
            lines.append(("warn", "  not kept  whoever ends last restores; 'patchkit apply' after that"))
    elif session.patches:
        lines.append(("good", f"  restored  {names} from {session.targets[0].label}"))
    for verdict in session.verdicts:
        first, *more = verdict.lines(label="verified")
        style, text = first if isinstance(first, tuple) else ("", first)
        lines += [(style, f"  tree      {text}"), *more]
    if not session.patches and all(verdict.clean for verdict in session.verdicts):
        lines.append(("good", f"  proof     {session.record.statement}"))
    return lines


def say_safely(text: str) -> None:
    """A sentence on stderr; a terminal that is gone does not stop what is being put back."""
    try:
        sys.stderr.write(f"patchkit: {text}\n")
        sys.stderr.flush()
    except OSError:
        return
