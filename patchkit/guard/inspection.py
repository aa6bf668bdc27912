"""Ask every process of the machine whether it has loaded a file that is about to change.

Who blocks: a process that has loaded one of the files; one of which that cannot be told, if it belongs
to the environment or may; and one of the environment that holds a GPU and has not loaded the file yet,
since it may at any moment. Others of the environment do not block: whatever they import later, they
import from a tree that is whole.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from patchkit.guard import accelerators, procfs, stalls
from patchkit.guard.cpython import Interpreter, Snapshot, TornError
from patchkit.guard.environment import Environment
from patchkit.guard.findings import Findings, Gpu, Holder, Verdict
from patchkit.guard.interpreters import Finder
from patchkit.guard.layout import UnsupportedInterpreterError
from patchkit.guard.matches import Matches
from patchkit.guard.memory import ProcessMemory, UnreadableError
from patchkit.guard.places import Tree, Views
from patchkit.guard.scan import scan

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEVICE = re.compile(rb"\s(/dev/\S+)$", re.MULTILINE)
_PYTHONS = (b"python", b"pypy", b"graalpy")
_TRIES = 3  # a process that execs or starts while it is read gives nonsense once
_PAUSE = 0.01  # seconds
_ROUNDS = 10  # a machine that starts a process each moment must not hold the answer up


def inspect(
    root: str,
    files: Iterable[str],
    *,
    prefix: str | None = None,
    thorough: bool = False,
    stop_to_read: bool = False,
    exclude: Iterable[int] = (),
) -> Findings:
    """Find the processes that have loaded one of ``files``, or that may have.

    ``root`` is the folder that holds the import package; ``files`` are POSIX paths relative to it, also
    of files that do not exist (yet, or any more). ``prefix`` is the ``sys.prefix`` of the environment,
    where known. ``thorough`` searches large mappings too; ``stop_to_read`` lets a process that changes
    too fast be stopped (SIGSTOP) for a moment. Processes in ``exclude`` are left out.
    """
    return Inspection(Tree(root, files, prefix), thorough, stop_to_read).run(set(exclude))


@dataclass(frozen=True)
class _Answer:
    """What was found out about one process. ``relevant``: it is of the environment, or may be."""

    verdict: Verdict
    evidence: str
    relevant: bool
    files: tuple[str, ...] = ()
    hint: str | None = None


class Inspection:
    """One look at all processes."""

    def __init__(self, tree: Tree, thorough: bool = False, stop_to_read: bool = False) -> None:
        self.tree = tree
        self.thorough = thorough
        self.stop_to_read = stop_to_read
        self.environment = Environment(tree)
        self.finder = Finder()
        self.views = Views()
        nodes = accelerators.patterns()
        self._nodes = accelerators.NodeMatcher(nodes)
        self._has_nodes = accelerators.any_present(nodes)
        self._compiled = [name for name in tree.files if not name.endswith(".py")]
        self._unseen = 0
        self._silent = 0
        self._interpreters: set[int] = set()  # processes in which CPython was found

    @cached_property
    def _listed(self) -> accelerators.Listed:
        """The vendors' lists: asked only when they matter, since starting NVML takes longer than the rest."""
        return accelerators.listed()

    def run(self, exclude: set[int]) -> Findings:
        own = os.getpid()
        above = procfs.ancestors(own)
        holders = []
        if own not in exclude and self.tree.files:
            holders.append(self._self())
        if self.tree.files:
            seen = {own, *exclude}
            for _ in range(_ROUNDS):  # a look takes time: those that began meanwhile count, too
                fresh = [pid for pid in procfs.pids() if pid not in seen]
                if not fresh:
                    break
                seen.update(fresh)
                holders.extend(self._all(fresh, above))
        if procfs.hides_others() or not procfs.in_initial_pid_namespace():
            holders.extend(self._strangers(exclude))
        found = [holder for holder in holders if holder is not None]
        found.sort(key=lambda holder: (not holder.blocks, holder.verdict is not Verdict.LOADED, holder.pid))
        return Findings(tuple(found), tuple(self._notes()))

    def _all(self, pids: list[int], above: set[int]) -> list[Holder | None]:
        answers = stalls.ask_all(pids, lambda pid: self._holder(pid, ancestor=pid in above))
        holders = list(answers.values())
        for pid in pids:
            if pid not in answers:
                holders.append(self._hung(pid, ancestor=pid in above))
        return holders

    def _hung(self, pid: int, *, ancestor: bool) -> Holder | None:
        """A process about which the kernel does not answer, because it does not give its memory free."""
        procfs.resume(pid)
        try:
            known, users = procfs.stat(pid), procfs.uids(pid)
            thread = procfs.living_thread(pid, known)
            program = procfs.program(thread)
        except OSError:
            return None
        if known is None or users is None or known.ended or ancestor:
            return None
        reason = self.environment.by_program(program, known.command, users[0])
        if reason is None and self._interpreters & {pid, thread}:
            reason = "it runs a CPython, of an environment that cannot be seen"
        gpus = self._nodes.held(thread) if self._has_nodes else ()
        if reason is None and not gpus:
            self._silent += 1
            return None
        what = f"the kernel gave no answer about its memory for {stalls.STALL_S:.0f} s"
        answer = _Answer(
            Verdict.CANNOT_TELL,
            f"{what}, and {reason or f'it holds {gpus[0].name}'}",
            True,
            hint="it hangs in the kernel: end it, or what it waits for",
        )
        return self._describe(pid, answer, gpus, True)

    def _notes(self) -> list[str]:
        notes = list(self._listed.notes) if "_listed" in vars(self) else []
        if self._unseen:
            notes.append(
                f"{self._unseen} processes of other users could not be read; by their command lines "
                "they are not of this environment"
            )
        if self._silent:
            notes.append(
                f"{self._silent} processes hang in the kernel and could not be read; by their programs "
                "they are not of this environment"
            )
        if procfs.hides_others():
            notes.append("this /proc hides other users' processes (hidepid): they were not looked at")
        elif not procfs.in_initial_pid_namespace():
            notes.append("processes outside this PID namespace (container) cannot be seen from here")
        return notes

    # -- one process ---------------------------------------------------------------------------------

    def _holder(self, pid: int, *, ancestor: bool) -> Holder | None:
        before = procfs.stat(pid)
        thread = procfs.living_thread(pid, before)
        try:
            maps = procfs.maps(thread)
        except PermissionError:
            maps = None
        except OSError:
            return None
        if maps is None:
            answer = None if ancestor else self._stranger(pid)
        elif maps:
            answer = self._look(thread, maps)
        else:
            return None  # a kernel thread, or one that has ended
        if answer is None:
            return None
        after = procfs.stat(pid)
        if before is not None and after is not None and before.ticks != after.ticks:
            # It ended meanwhile, and its number already belongs to another process: look at that one.
            return self._holder(pid, ancestor=ancestor)
        gpus = self._gpus(pid, thread, maps)
        blocks = answer.verdict is Verdict.LOADED or (
            answer.relevant and not ancestor and (answer.verdict is Verdict.CANNOT_TELL or bool(gpus))
        )
        if ancestor and answer.verdict is not Verdict.LOADED:
            return None
        if not (blocks or answer.relevant or gpus):
            return None
        evidence = answer.evidence
        if blocks and answer.verdict is Verdict.NOT_LOADED:
            evidence += "; but it holds a GPU and may load it at any moment"
        return self._describe(pid, replace(answer, evidence=evidence), gpus, blocks)

    def _describe(self, pid: int, answer: _Answer, gpus: tuple[Gpu, ...], blocks: bool) -> Holder | None:
        known = procfs.stat(pid)
        users = procfs.uids(pid)
        if known is None or users is None or known.ended:
            return None
        return Holder(
            pid=pid,
            user=procfs.user_name(users[0]),
            command=procfs.title(procfs.arguments(procfs.living_thread(pid, known)), known.command),
            started=known.started,
            verdict=answer.verdict,
            evidence=answer.evidence,
            files=answer.files,
            gpus=gpus,
            blocks=blocks,
            hint=answer.hint,
        )

    def _gpus(self, pid: int, thread: int, maps: bytes | None) -> tuple[Gpu, ...]:
        """What the process holds; without its ``maps`` only the lists can say."""
        nodes: tuple[Gpu, ...] = ()
        if maps is not None:
            if not self._has_nodes:
                return ()
            nodes = self._nodes.held(thread, map(os.fsdecode, _DEVICE.findall(maps)))
            if not nodes:
                return ()
        return tuple(self._listed.by_pid.get(pid, ())) or nodes

    def _look(self, pid: int, maps: bytes) -> _Answer | None:
        """A process whose maps may be read."""
        mapped = self._mapped(pid, maps)
        if mapped is not None:
            return mapped
        trouble = ""
        hint: str | None = None
        for attempt in range(_TRIES):
            memory = ProcessMemory(pid)
            try:
                symbols = self.finder.find(memory, maps, lambda: procfs.maps(pid))
                if symbols is None:
                    if not any(word in maps for word in _PYTHONS):
                        return None  # an editor that was started from the environment, say
                    trouble = "its interpreter is not a CPython that can be read"
                    break
                self._interpreters.add(pid)
                return self._read(pid, memory, symbols, maps)
            except PermissionError:
                trouble, hint = "its memory may not be read", permission_hint()
                break
            except UnsupportedInterpreterError as error:
                trouble = f"it runs {error}"
                break
            except (TornError, UnreadableError, OverflowError) as error:
                trouble = f"it could not be read ({error})"
            except OSError:
                return None  # gone
            if attempt + 1 < _TRIES:
                time.sleep(_PAUSE)
                try:
                    maps = procfs.maps(pid)
                except OSError:
                    return None
                if not maps:
                    return None
        reason = self.environment.by_outside(pid, self.views.of(pid), maps)
        if reason is None:
            return None
        return _Answer(Verdict.CANNOT_TELL, f"{trouble}, and {reason}", True, hint=hint)

    def _mapped(self, pid: int, maps: bytes) -> _Answer | None:
        """Files that are mapped, not imported as source: extension modules and libraries."""
        if not any(os.fsencode(os.path.basename(name)) in maps for name in self._compiled):
            return None
        view = self.views.of(pid)
        hits = self.tree.matches(view, procfs.mapped_paths(maps))
        files = tuple(name for name in self.tree.files if name in hits)
        if not files:
            return None
        return _Answer(Verdict.LOADED, f"it maps {hits[files[0]]}", True, files)

    def _read(self, pid: int, memory: ProcessMemory, symbols: dict[str, int], maps: bytes) -> _Answer | None:
        """A CPython whose memory may be read."""
        interpreter = Interpreter(memory, symbols)
        view = self.views.of(pid)
        found = Matches(self.tree, view)
        snapshot = interpreter.snapshot(found.add)
        if not found.hits and not snapshot.complete and self.stop_to_read:
            with procfs.stopped(pid):
                snapshot = interpreter.snapshot(found.add)
        hits = found.hits
        what = (
            f"CPython {snapshot.version}, {snapshot.modules} modules read" if snapshot.version else "CPython"
        )
        if hits:
            files = tuple(name for name in self.tree.files if name in hits)
            return _Answer(Verdict.LOADED, f"sys.modules has {hits[files[0]]} ({what})", True, files)
        reason = self.environment.by_interpreter(view, snapshot)
        if found.unsure:
            return _Answer(
                Verdict.CANNOT_TELL,
                f"sys.modules has {found.unsure} ({what})",
                True,
            )
        if reason is None and not self._has_nodes:
            return None
        if reason is None:
            return _Answer(
                Verdict.NOT_LOADED, f"sys.modules has none of the files ({what}); another environment", False
            )
        return self._second_witness(pid, interpreter, snapshot, maps, f"{what}; {reason}")

    def _second_witness(
        self, pid: int, interpreter: Interpreter, snapshot: Snapshot, maps: bytes, what: str
    ) -> _Answer:
        """Code that ``sys.modules`` does not show any more."""
        folders = (*snapshot.search_path, snapshot.prefix, self.tree.root)
        found = scan(pid, interpreter, maps, self.tree.files, folders, thorough=self.thorough)
        matches = Matches(self.tree, self.views.of(pid))
        matches.add(found.paths)
        hits = matches.hits
        files = tuple(name for name in self.tree.files if name in hits)
        if files:
            path = hits[files[0]]
            return _Answer(
                Verdict.LOADED,
                f"code of {path} is alive, though sys.modules does not show it ({what})",
                True,
                files,
            )
        if matches.unsure:
            return _Answer(
                Verdict.CANNOT_TELL,
                f"code is alive of {matches.unsure} ({what})",
                True,
            )
        if not snapshot.complete:
            return _Answer(
                Verdict.CANNOT_TELL,
                f"its sys.modules changes faster than it can be read ({what})",
                True,
                hint="--stop-to-read stops the process for a moment",
            )
        return _Answer(
            Verdict.NOT_LOADED,
            f"neither sys.modules nor code in memory has it ({what}){found.omission}",
            True,
        )

    # -- processes that cannot be looked into ----------------------------------------------------------

    def _stranger(self, pid: int) -> _Answer | None:
        known = procfs.stat(pid)
        users = procfs.uids(pid)
        if known is None or users is None or known.ended or known.kernel:
            return None
        reason = self.environment.by_stranger(
            procfs.arguments(procfs.living_thread(pid, known)),
            known.command,
            users[0],
            on_gpu=lambda: any(gpu.kind != "graphics" for gpu in self._listed.by_pid.get(pid, ())),
        )
        if reason is None:
            self._unseen += 1
            return None
        return _Answer(
            Verdict.CANNOT_TELL,
            f"no permission to read process {pid} of {procfs.user_name(users[0])}, and {reason}",
            True,
            hint=permission_hint(procfs.user_name(users[0])),
        )

    def _strangers(self, exclude: set[int]) -> list[Holder]:
        """GPUs in use by processes that have no number here."""
        holders = []
        for pid, gpus in self._listed.by_pid.items():
            if pid in exclude or (os.path.exists(f"/proc/{pid}") and self._may_be(pid)):
                continue
            holders.append(self._invisible(tuple(gpus), f"its list names process {pid}, which is not here"))
        for gpu in self._listed.unexplained:
            used = f"{(gpu.memory or 0) >> 20} MiB of it are in use that no process here accounts for"
            holders.append(self._invisible((gpu,), used))
        return holders

    def _may_be(self, pid: int) -> bool:
        """Whether process ``pid`` may be the one that a GPU's list names: the list may count elsewhere."""
        if procfs.in_initial_pid_namespace() or not self._has_nodes:
            return True
        try:
            os.listdir(f"/proc/{pid}/fd")
        except OSError:
            return True
        return bool(self._nodes.held(pid))

    def _invisible(self, gpus: tuple[Gpu, ...], why: str) -> Holder:
        return Holder(
            pid=0,
            user="?",
            command="?",
            started=0.0,
            verdict=Verdict.CANNOT_TELL,
            evidence=f"{gpus[0].name} is used by a process that this PID namespace cannot see: {why}",
            gpus=gpus,
            blocks=True,
            hint="run patchkit on the host, or in a container with --pid=host",
        )

    def _self(self) -> Holder | None:
        """The calling process, if a program that uses patchkit as a library has loaded the file."""
        paths = {
            path
            for module in list(sys.modules.values())
            for path in (getattr(module, "__dict__", {}).get("__file__"),)
            if isinstance(path, str)
        }
        matches = Matches(self.tree, self.views.of(os.getpid()))
        matches.add(paths)
        hits = matches.hits
        files = tuple(name for name in self.tree.files if name in hits)
        if not files:
            return None
        answer = _Answer(Verdict.LOADED, f"this process itself has imported {hits[files[0]]}", True, files)
        return self._describe(os.getpid(), answer, (), True)


def permission_hint(owner: str | None = None) -> str:
    """What to change so that a process (of the user ``owner``, else one's own) may be read."""
    if os.geteuid() == 0:
        return "this container lacks CAP_SYS_PTRACE: add it, or run patchkit on the host"
    if owner is not None:
        return f"run as root or as {owner} to make it visible"
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            scope = int(file.read())
    except (OSError, ValueError):
        scope = 0
    if scope:
        return f"kernel.yama.ptrace_scope is {scope}: run as root, or start it under 'patchkit run'"
    return "run as root to make it visible"
