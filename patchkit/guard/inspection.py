"""Ask every process on the machine whether it has loaded a file that is about to change."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from patchkit.guard.findings import Findings, Holder, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable


def inspect(
    root: str,
    files: Iterable[str],
    *,
    prefix: str | None = None,
    thorough: bool = False,
    stop_to_read: bool = False,
    exclude: Iterable[int] = (),
) -> Findings:
    """Find the processes that have loaded one of ``files`` (POSIX paths relative to ``root``)."""
    del files, thorough, stop_to_read
    places = tuple(os.path.realpath(place) + "/" for place in (root, prefix) if place)
    left_out = {os.getpid(), *exclude}
    holders = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in left_out:
            continue
        try:
            with open(f"/proc/{name}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                mapped = any(place in line for line in maps for place in places)
            with open(f"/proc/{name}/cmdline", encoding="utf-8", errors="replace") as cmdline:
                command = cmdline.read().replace("\0", " ").strip()
            started = os.stat(f"/proc/{name}").st_mtime
        except OSError:
            continue
        if mapped:
            holders.append(
                Holder(
                    int(name), "", command, started, Verdict.CANNOT_TELL, "maps a file of it", blocks=True
                )
            )
    return Findings(tuple(holders))
