"""The guard: which processes have loaded a file that is about to change?"""

from __future__ import annotations

from patchkit.guard.census import Census, Row, census
from patchkit.guard.findings import Findings, Gpu, Holder, Verdict
from patchkit.guard.inspection import inspect

__all__ = ["Census", "Findings", "Gpu", "Holder", "Row", "Verdict", "census", "inspect"]
