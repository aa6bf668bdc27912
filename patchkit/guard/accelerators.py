"""Which processes hold an accelerator: vendors' lists and open device nodes.

A list says who uses a GPU; it never proves that nobody does. In a container it may be empty, or hold
numbers of another PID namespace; monitoring agents hold nodes and compute nothing.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import stat
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from patchkit.guard import procfs, stalls
from patchkit.guard.findings import Gpu

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

# NVIDIA; AMD; anything with a DRM render node; the kernel's accel class; Ascend; Neuron; Gaudi.
NODES = (
    "/dev/nvidia*",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/accel*",
    "/dev/davinci*",
    "/dev/neuron*",
    "/dev/hl[0-9]*",
)
NODES_VARIABLE = "PATCHKIT_DEVICE_NODES"  # more patterns, with ':' between them
KFD = "/sys/class/kfd/kfd/proc"
_DRIVER_S = 30.0  # NVML wakes each GPU that nothing keeps awake: seconds, on a large machine
# An idle driver keeps some memory of its own; a CUDA context alone takes about this much.
IDLE_MEMORY = 256 << 20


@dataclass
class Listed:
    """What the vendors' lists say: the GPUs of each pid (numbered as the list numbers them)."""

    by_pid: dict[int, list[Gpu]] = field(default_factory=dict)
    # GPUs with much more memory in use than the processes of their lists account for.
    unexplained: list[Gpu] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, pid: int, gpu: Gpu) -> None:
        self.by_pid.setdefault(pid, []).append(gpu)


def patterns() -> tuple[str, ...]:
    """Shell patterns of the device nodes that count as accelerators."""
    more = os.environ.get(NODES_VARIABLE, "")
    return NODES + tuple(item for item in more.split(":") if item)


def any_present(nodes: Iterable[str]) -> bool:
    """Whether this machine has such a node at all."""
    return any(True for pattern in nodes for _ in glob.iglob(pattern))


class NodeMatcher:
    """Picks accelerators' device nodes out of paths."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._nodes = tuple(nodes)
        self._match = re.compile(
            "|".join(fnmatch.translate(os.path.normpath(node)) for node in self._nodes)
        ).match

    @cached_property
    def _by_number(self) -> dict[int, str]:
        """The name here of each node of this machine, by its device number."""
        found: dict[int, str] = {}
        for path in (path for pattern in self._nodes for path in sorted(glob.iglob(pattern))):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                if stat.S_ISCHR(status.st_mode):
                    found.setdefault(status.st_rdev, path)
        return found

    def held(self, pid: int, mapped: Iterable[str] = ()) -> tuple[Gpu, ...]:
        """The nodes that a process has open or (paths) ``mapped``.

        A node in a root of its own has another path for us, and the same device number.
        """
        names = list(mapped)
        for descriptor, path in procfs.descriptors(pid).items():
            if self._match(path) or "/dev/" not in path:
                names.append(path)
                continue
            with contextlib.suppress(OSError):
                status = os.stat(descriptor)
                if stat.S_ISCHR(status.st_mode) and status.st_rdev in self._by_number:
                    names.append(self._by_number[status.st_rdev])
        return self.gpus(names)

    def gpus(self, paths: Iterable[str]) -> tuple[Gpu, ...]:
        """One entry a node. Control nodes (``/dev/nvidiactl``) are named only when nothing else is."""
        held = sorted({path for path in paths if path.startswith("/") and self._match(path)})
        numbered = [path for path in held if path[-1].isdigit() and "caps" not in path]
        return tuple(Gpu(path, "node") for path in numbered or held)


def listed(kfd: str = KFD) -> Listed:
    """Ask NVML and the AMD driver. Needs no GPU library where there is no GPU.

    A driver that does not answer (after some faults of a GPU it never does) is noted, not waited for.
    """
    try:
        return stalls.apart("the accelerators' lists", lambda: _ask(kfd), _DRIVER_S)
    except stalls.StalledError as error:
        note = f"the accelerators' lists were not read ({error}): open device nodes were, instead"
        return Listed(notes=[note])


def _ask(kfd: str) -> Listed:
    result = Listed()
    if os.path.exists("/dev/nvidiactl") or os.path.isdir("/proc/driver/nvidia"):
        _ask_nvml(result)
    _ask_kfd(result, kfd)
    return result


def _ask_nvml(result: Listed) -> None:
    try:
        import pynvml
    except ImportError:
        result.notes.append("NVIDIA's list was not read (no nvidia-ml-py): open device nodes were, instead")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        result.notes.append(f"NVIDIA's list was not read ({error}): open device nodes were, instead")
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):
                _ask_device(pynvml, index, result)
    except pynvml.NVMLError as error:
        result.notes.append(f"NVIDIA's list could not be read to its end: {error}")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _ask_device(pynvml: Any, index: int, result: Listed) -> None:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    instances = list(_mig_instances(pynvml, handle))
    seen: set[int] = set()
    for number, instance in instances:
        seen |= _ask_place(pynvml, instance, f"GPU {index} MIG {number}", result)
    # A divided GPU lists the processes of its instances once more, and uses the memory of all of them.
    _ask_place(pynvml, handle, f"GPU {index}", result, known=seen, divided=bool(instances))


def _ask_place(
    pynvml: Any,
    place: Any,
    name: str,
    result: Listed,
    *,
    known: Collection[int] = (),
    divided: bool = False,
) -> set[int]:
    """Add the processes of a GPU or of a MIG instance, without those ``known``; returns their pids."""
    uuid = _text(pynvml.nvmlDeviceGetUUID(place))
    used: dict[int, int] = {}  # bytes of each pid
    complete = True
    for kind, ask in (
        ("compute", "nvmlDeviceGetComputeRunningProcesses"),
        ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
        ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
    ):
        for entry in _processes(pynvml, ask, place):
            if entry.pid not in known:
                _merge(result, entry.pid, Gpu(name, kind, uuid, entry.usedGpuMemory or None))
            complete = complete and entry.usedGpuMemory is not None
            used[entry.pid] = max(used.get(entry.pid, 0), entry.usedGpuMemory or 0)
    # In a PID namespace of its own, the driver leaves out the processes that have no number there.
    excess = _memory_used(pynvml, place) - sum(used.values())
    if complete and not divided and excess > IDLE_MEMORY:
        result.unexplained.append(Gpu(name, "compute", uuid, excess))
    return set(used)


def _processes(pynvml: Any, ask: str, place: Any) -> list[Any]:
    """One list of a device; the older form of the question where the driver is older than the binding."""
    for question in (ask, f"{ask}_v2"):
        with contextlib.suppress(AttributeError, pynvml.NVMLLibraryMismatchError):
            try:
                return list(getattr(pynvml, question)(place))
            except pynvml.NVMLError:
                return []  # not for this kind of device, or not with this driver
    return []


def _merge(result: Listed, pid: int, gpu: Gpu) -> None:
    """A process may be in several lists of one GPU; the first entry that knows its memory stays."""
    known = result.by_pid.setdefault(pid, [])
    for position, other in enumerate(known):
        if other.uuid == gpu.uuid:
            if other.memory is None:
                known[position] = gpu
            return
    known.append(gpu)


def _mig_instances(pynvml: Any, handle: Any) -> Iterator[tuple[int, Any]]:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
        if not current:
            return
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return
    for number in range(count):
        with contextlib.suppress(pynvml.NVMLError):
            yield number, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


def _memory_used(pynvml: Any, handle: Any) -> int:
    """Bytes in use without what the driver reserves for itself."""
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except (AttributeError, TypeError, pynvml.NVMLError):
        return 0


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _ask_kfd(result: Listed, folder: str) -> None:
    """AMD: one folder a process, with a ``vram_<gpu>`` file for each GPU.

    A process that merely opened ``/dev/kfd`` once is there too, with nothing in use.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for entry in os.listdir(f"{folder}/{name}"):
                if entry.startswith("vram_"):
                    with open(f"{folder}/{name}/{entry}", encoding="ascii") as file:
                        used = int(file.read().strip() or 0)
                    if used:
                        gpu = entry.removeprefix("vram_")
                        result.add(int(name), Gpu(f"AMD GPU {gpu}", "compute", None, used))
