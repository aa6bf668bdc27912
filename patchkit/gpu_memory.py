"""Whether the GPUs have let go of what a session's processes held.

A driver frees memory when the last descriptor is closed, which may be a moment after the process is gone;
the next server would then find a GPU that is not empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkit import processes
from patchkit.guard import accelerators

if TYPE_CHECKING:
    from collections.abc import Collection

    from patchkit.guard import Gpu
    from patchkit.processes import Process


class GpuMemory:
    """The GPUs as they were before a session, so that what it left can be told from what others hold."""

    def __init__(self) -> None:
        self._before = {gpu.uuid: gpu.memory or 0 for gpu in accelerators.listed().unexplained}

    def held(self, family: Collection[Process]) -> list[Gpu]:
        """GPUs that still list a process of ``family``, or have much more memory in use than before that no
        process accounts for: in a container the lists may be empty.
        """
        listed = accelerators.listed()
        ours = {process.pid: process for process in family}
        found = [
            gpu for pid, gpus in listed.by_pid.items() if pid in ours and _is_same(ours[pid]) for gpu in gpus
        ]
        found += [
            gpu
            for gpu in listed.unexplained
            if (gpu.memory or 0) - self._before.get(gpu.uuid, 0) > accelerators.IDLE_MEMORY
        ]
        return found


def _is_same(process: Process) -> bool:
    """Whether its pid has not passed to another process."""
    return processes.look(process.pid) in (None, process)
