"""A session: apply, run commands under a lease, end them, restore, verify, write it down.

``patchkit.session("hsdump")`` is ``patchkit run`` for programs::

    with patchkit.session("hsdump", python="venv/bin/python") as session:
        done = session.run(["python", "extract.py"])

The module is not called ``session``, because importing it would then hide that function.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from patchkit import lease, processes, provenance
from patchkit.abandonment import finish
from patchkit.commands.check import Verdict, judge
from patchkit.commands.holding import LOCK_WAIT_S, Holding
from patchkit.errors import PatchkitError
from patchkit.gpu_memory import GpuMemory
from patchkit.lock import tree_lock
from patchkit.plan import CoveredError
from patchkit.provenance import Record, TreeState
from patchkit.session_errors import (
    AfterCommandError,
    NotCleanAtStartError,
    NothingToRunOnError,
    SessionInterruptedError,
    SessionUseError,
    sentence,
)
from patchkit.state import State
from patchkit.supervisor import Supervisor
from patchkit.tenancy import Tenancy

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from patchkit.catalog import Patch
    from patchkit.guard import Gpu
    from patchkit.lease import Lease
    from patchkit.processes import Ending, Process
    from patchkit.target import Target
    from patchkit.workspace import Workspace

GRACE_S = 30.0
_SETTLE_S = 15.0  # for what others started to let go of the tree, and for a driver to free its memory
_GPU_POLL_S = 0.5


class Session:
    """One session on the patches ``names``, or on the pristine tree.

    Enter it to apply and to lease, leave it to end what runs, restore, verify and write the record; ``close``
    raises AfterCommandError where that fails. ``holding`` says how long to wait for holders and other
    sessions; ``say`` gets sentences for a person while things happen.
    """

    def __init__(
        self,
        workspace: Workspace,
        names: Sequence[str] = (),
        *,
        clean: bool = False,
        env: Mapping[str, str] | None = None,
        grace_s: float = GRACE_S,
        keep: bool = False,
        outputs: Sequence[str] = (),
        record_dir: str | None = None,
        holding: Holding | None = None,
        exclusive: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if bool(names) == clean:
            raise NothingToRunOnError(
                "--clean runs on the pristine tree and takes no patch" if clean else "no patch is named"
            )
        if clean and keep:
            raise NothingToRunOnError("--keep leaves a patch applied, and --clean applies none")
        self.id = lease.new_session()
        self.workspace = workspace
        self.patches: list[Patch] = workspace.catalog.expand(names) if names else []
        self.targets: list[Target] = (
            [workspace.target_of(self.patches)] if self.patches else workspace.targets()
        )
        self.keep = keep
        self.grace_s = grace_s
        self.say = say
        self.holding = replace(
            holding or Holding(), session=self.id, lock_wait_s=LOCK_WAIT_S, say=self._say_or_stop
        )
        self.env_set = {key: value for patch in self.patches for key, value in patch.env.items()}
        self.env_set.update(env or {})
        inside = os.environ.get(processes.MARKER)
        self.env_set[processes.MARKER] = f"{inside}:{self.id}" if inside else self.id
        self.record_dir = os.path.abspath(record_dir or ".")
        self.record = Record(self.id, outputs=list(dict.fromkeys(map(provenance.check_output, outputs))))
        self.record.note_environment(self.env_set)
        self.record_path: str | None = None
        self.ending: Ending | None = None
        self.shared_with: list[Lease] = []
        self.kept = False
        self.verdicts: list[Verdict] = []
        self._exclusive = exclusive
        self._owner: int | None = None  # the process that opened it, and alone may use it
        self._tenancy = Tenancy(
            self.id, [patch.name for patch in self.patches], lease.command_line(), self.holding
        )
        self._supervisor: Supervisor | None = None
        self._before: list[Verdict] = []
        self.gpus_held: list[Gpu] = []
        self._gpu_memory: GpuMemory | None = None
        self._family: set[Process] = set()

    # -- entering -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Guard, apply, lease. Raises without a trace left in the tree."""
        if self._owner is not None:
            raise SessionUseError(
                "the session was open already", hint="make another one: patchkit.session(…)"
            )
        self._owner = os.getpid()
        if not os.access(self.record_dir, os.W_OK | os.X_OK):
            raise OSError(13, "cannot write the record there", self.record_dir)
        self._supervisor = Supervisor(
            self.id,
            grace_s=self.grace_s,
            exclusive=self._exclusive,
            raising=not self._exclusive,
            say=self.say,
            tick=self._tenancy.beat,
            on_stop=self._tenancy.stop,
        )
        try:
            for target in self.targets:
                for abandoned in lease.abandoned(target.root):
                    if abandoned.distribution == target.distribution:
                        self.say(finish(self.workspace, abandoned, self.holding))
                self._tenancy.claim(target)
            self._prepare()
            self._answer("getting ready")
        except BaseException:
            self._undo()
            raise

    def _prepare(self) -> None:
        for target in self.targets:
            # Under the lock, for a session that shares the patches may put them on or take them off.
            with tree_lock(target.root, LOCK_WAIT_S):
                state = State.load(target.root)
                self._refuse_covered(state)
                applied = {one.patch for one in state.stack}
                expect = applied if self.patches else frozenset()
                verdict = judge(target, self.workspace.catalog, expect=expect)
                if not self.patches and not verdict.clean:
                    raise NotCleanAtStartError(verdict)
                self._before.append(verdict)
                self.record.trees.append(TreeState(target, provenance.tree_digest(target)))
        self.record.machine = provenance.machine()
        self._gpu_memory = GpuMemory()
        if self.patches:
            self._tenancy.apply(self.workspace)
            stack = State.load(self.targets[0].root).stack
            names = {patch.name for patch in self.patches}
            self.record.patches = [one.manifest for one in stack if one.patch in names]
            self.record.trees[0].during = provenance.tree_digest(self.targets[0])

    def _refuse_covered(self, state: State) -> None:
        """Raise CoveredError if a patch could not be taken off at the end, because others lie on it."""
        names = {patch.name for patch in self.patches}
        for one in state.stack:
            above = [other.patch for other in state.above(one) if other.patch not in names]
            if one.patch in names and above:
                raise CoveredError(one.patch, above)

    def _undo(self) -> None:
        """The command was never started: put back what was done, and go."""
        if self._supervisor is not None:
            self._supervisor.quiet()
            self._supervisor.answered = len(self._supervisor.received)
        try:
            if self._tenancy.claims and self.patches:
                self._tenancy.restore(self.workspace, self.targets[0], _SETTLE_S, but=self._tenancy.found)
            self._tenancy.release()
        except (PatchkitError, OSError) as error:
            self.say(f"{sentence(error)}; 'patchkit recover' finishes it")
            self._tenancy.abandon()
        finally:
            self._leave()

    # -- while it is open ---------------------------------------------------------------------------

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a command: this process's, the patches' ``[env]``, what was asked for."""
        return {**os.environ, **self.env_set, **(more or {})}

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> int:
        """Run ``command`` and return its exit code, 128+n if signal n ended it.

        Signals that reach this process meanwhile are passed on to it, and end it when the grace is over.
        Raises CommandNotFoundError, CommandNotStartedError.
        """
        child = self.start(
            command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, foreground=True
        )
        code = self._running().wait(child)
        self.record.exit_code = code
        self.record.exit_signal = -child.returncode if child.returncode < 0 else None
        self.record.ended = time.time()
        if not self._exclusive:
            self._answer(None)
        return code

    def start(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        foreground: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start ``command``, a server say, and return at once; it is ended with the session at the latest."""
        supervisor = self._running()
        if isinstance(command, (str, bytes)):
            raise TypeError("a command is a list of its arguments, not one text")
        arguments = [os.fspath(part) for part in command]
        if not self.record.command:
            self.record.begun = time.time()
        self.record.command.append(arguments)
        if env:
            self.record.note_environment(env)
        return supervisor.start(
            arguments,
            env=self.environment(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            foreground=foreground,
        )

    def stop(self) -> Ending:
        """End everything that the session started and keep it open."""
        supervisor = self._running()
        ending = supervisor.end()
        self._family |= supervisor.family.known
        return ending

    @property
    def signals(self) -> list[int]:
        """Signals so far that end the session."""
        return self._running().received if self._supervisor else self.record.signals

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise SessionUseError("the session is not open", hint="enter it: with patchkit.session(…) as s")
        if self._owner != os.getpid():
            hint = "use it there, and give the child what it needs in another way"
            raise SessionUseError(
                f"the session belongs to process {self._owner}, which forked this", hint=hint
            )
        return self._supervisor

    def _say_or_stop(self, text: str) -> None:
        """Called while something is waited for: the moment to see that a signal came."""
        self._tenancy.beat()
        self._answer(text)
        self.say(text)

    def _answer(self, doing: str | None) -> None:
        """Raise for a signal that came and was not answered yet."""
        number = self._unanswered()
        if number is None:
            return
        if doing is not None:
            raise SessionInterruptedError(number, doing)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _unanswered(self) -> int | None:
        """The last signal that came and was not answered yet, which is then answered."""
        supervisor = self._supervisor
        if supervisor is None or len(supervisor.received) <= supervisor.answered:
            return None
        supervisor.answered = len(supervisor.received)
        return supervisor.received[-1]

    # -- leaving ------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(good=kind is None)

    def close(self, *, good: bool = True) -> None:
        """End, restore, verify, write. ``good``: the run is a success, so that ``keep`` counts.

        Raises AfterCommandError; the tree is then marked as an abandoned session. In a forked child this does
        nothing: the session goes on in the process that opened it.
        """
        if self._supervisor is None or self._owner != os.getpid():
            return
        supervisor = self._supervisor
        supervisor.quiet()
        try:
            self.ending = self.stop()
            self.record.ended = self.record.ended or time.time()
            supervisor.answered = len(supervisor.received)
            self.record.signals = list(supervisor.received)
            failure = self._finish(keep=self.keep and good)
        finally:
            self._leave()
        # Hashing outputs may take long; the tree is safe by now, and signals do what they always do.
        failure = self._write_record() or failure
        if failure is not None:
            raise failure

    def _finish(self, *, keep: bool) -> AfterCommandError | None:
        """Put the tree back and prove it; returns what went wrong."""
        what = "the tree could not be verified"
        try:
            self._await_gpus()
            self._compare()
            if self.patches and keep:
                self.shared_with = self._tenancy.keep(self.targets[0])
                self.kept = not self.shared_with
            elif self.patches:
                what = f"{' '.join(patch.name for patch in self.patches)} could not be restored"
                self._restore()
            what = "the tree could not be verified"
            self._verify()
            self._tenancy.release()
        except (PatchkitError, OSError) as error:
            self._tenancy.abandon()
            left = self.patches and not self.record.restored
            self.record.restored = bool(self.record.restored)
            self.record.statement = what
            hint = "the patch is still applied; 'patchkit recover' finishes the session" if left else None
            return AfterCommandError(what, error, path=self.targets[0].root, hint=hint)
        bad = [verdict for verdict in self.verdicts if verdict.worse_than(self._before)]
        if bad:
            return AfterCommandError(
                f"{bad[0].target.label} is not as it was before the command",
                NotCleanAtStartError(bad[0]),
                path=bad[0].target.root,
                hint=None,
            )
        if any(tree.changed for tree in self.record.trees):
            return AfterCommandError(self.record.statement, None, path=self.targets[0].root, hint=None)
        return None

    def _compare(self) -> None:
        """See whether the patched tree is still what the command was given."""
        for target, tree in zip(self.targets, self.record.trees, strict=True):
            if tree.during is not None:
                # What cannot be read is said by the verification, and does not stop the restoring.
                with contextlib.suppress(OSError), tree_lock(target.root, LOCK_WAIT_S):
                    tree.changed = provenance.tree_digest(target) != tree.during

    def _await_gpus(self) -> None:
        """Wait until the drivers have freed what our processes held; a signal ends the waiting, no more.

        What is held after that is reported: memory alone does not keep files from being put back.
        """
        if self._gpu_memory is None:
            return
        deadline = time.monotonic() + _SETTLE_S
        said = False
        while held := self._gpu_memory.held(self._family):
            if time.monotonic() >= deadline or self._unanswered() is not None:
                break
            if not said:
                self.say(f"waiting for {held[0].name} to be released")
            said = True
            self._tenancy.beat()
            time.sleep(_GPU_POLL_S)
        self.gpus_held = held
        self.record.gpus_held = sorted({gpu.name for gpu in held})

    def _restore(self) -> None:
        self.shared_with = self._tenancy.restore(self.workspace, self.targets[0], _SETTLE_S)
        self.record.restored = not self.shared_with

    def _verify(self) -> None:
        for target, tree in zip(self.targets, self.record.trees, strict=True):
            # Under the lock, for a session that shares the patches may come at any moment.
            with tree_lock(target.root, LOCK_WAIT_S):
                still = {one.patch for one in State.load(target.root).stack}
                expect = still if self.patches else frozenset()
                verdict = judge(target, self.workspace.catalog, expect=expect)
                tree.after = provenance.tree_digest(target)
            self.verdicts.append(verdict)
            tree.clean, tree.witness = verdict.clean, verdict.testimony.witness
        self.record.statement = self.statement()

    def statement(self) -> str:
        """One sentence about what was run on what."""
        labels = ", ".join(target.label for target in self.targets)
        if not self.patches:
            good = all(verdict.clean for verdict in self.verdicts)
            return f"this run used pristine {labels}" if good else f"{labels} changed during this run"
        names = ", ".join(patch.name for patch in self.patches)
        end = "kept" if self.kept else "in use by another session" if self.shared_with else "restored"
        if any(tree.changed for tree in self.record.trees):
            return f"{labels} with {names} changed during this run, {end} afterwards"
        return f"this run used {labels} with {names}, {end} afterwards"

    def _write_record(self) -> AfterCommandError | None:
        failure = None
        try:
            self.record_path = self.record.write(self.record_dir)
        except OSError as error:
            what = "the record could not be written"
            with contextlib.suppress(OSError):  # the folder was removed meanwhile, or its disk is full
                self.record_path = self.record.write(tempfile.gettempdir())
                what = f"the record had to be written to {self.record_path}"
            failure = AfterCommandError(what, error, path=self.record_dir, hint=None)
        for output in self.record.written:
            for name, reason in output["unread"].items():
                what = f"output {provenance.place(output['path'], name)} could not be read: {reason}"
                return failure or AfterCommandError(what, None, path=output["path"], hint=None)
        return failure

    def _leave(self) -> None:
        if self._supervisor is not None:
            self.record.signals = list(self._supervisor.received)
            self._supervisor.close()
            self._supervisor = None


def session(
    *names: str,
    python: str | None = None,
    root: str | None = None,
    patches: Sequence[str] = (),
    clean: bool = False,
    env: Mapping[str, str] | None = None,
    grace: float = GRACE_S,
    keep: bool = False,
    outputs: Sequence[str] = (),
    record_dir: str | None = None,
    wait: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> Session:
    """A session on the named patches, or with ``clean`` on the pristine tree; use it in a ``with`` statement.

    ``python``, ``root`` and ``patches`` (folders) choose the tree and the patches as the options of the same
    name do. ``grace`` and ``wait`` are in seconds. ``outputs`` are files and folders whose sha256 go into the
    record, which is written to ``record_dir`` (by default the working directory).

    Inside, SIGTERM and SIGHUP raise SystemExit, so that the ``with`` statement is left and the tree restored.
    Raises what ``patchkit run`` refuses for: a ``PatchkitError`` with its exit code.
    """
    from patchkit.workspace import Workspace

    return Session(
        Workspace(python=python, root=root, patches=tuple(patches)),
        names,
        clean=clean,
        env=env,
        grace_s=grace,
        keep=keep,
        outputs=outputs,
        record_dir=record_dir,
        holding=Holding(wait_s=wait),
        say=say,
    )
