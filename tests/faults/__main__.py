"""Crash and fail patchkit at every step: ``python -m tests.faults [--sample N --seed S] [--jobs N]``.

Ends with 1 if any fault leaves a tree that one more command does not make pristine or patched.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.faults import injection
from tests.faults.injection import CALLS, KILL, Fault
from tests.faults.scenarios import Scenario, Scenarios, judge

ERRORS = ("ENOSPC", "EIO", "EACCES")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="only so many faults, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    children = []
    for share in range(options.jobs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as report:
                _share(options, share, report)
            os._exit(0)
        os.close(writer)
        children.append((pid, os.fdopen(reader)))
    injected, bad = Counter[str](), []
    failed = False
    for pid, reader in children:
        for line in reader:
            kind, _, text = line.rstrip("\n").partition(" ")
            if kind == "bad":
                bad.append(text)
            else:
                injected[text] += int(kind)
        failed |= os.waitpid(pid, 0)[1] != 0
    for line in bad:
        print(f"BAD {line}")
    for name in sorted(injected):
        print(f"{injected[name]:6} {name}")
    print(f"faults injected: {sum(injected.values())}")
    print(f"bad trees: {len(bad)}")
    return 1 if bad or failed or not injected else 0


def _share(options: argparse.Namespace, share: int, report) -> None:
    # Memory, where fsync costs nothing: what a killed process wrote is in the kernel either way.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="patchkit-faults-", dir=memory))
    try:
        scenarios = Scenarios(folder)
        every = []
        for scenario in scenarios:
            scenarios.reset(scenario.start)
            counts = injection.count_calls(scenario.command, folder)
            every += [(scenario, fault) for fault in _faults(counts)]
            if share == 0 and options.sample is None:
                _check_complete(scenarios, scenario, counts, report)
        if options.sample is not None:
            every = random.Random(options.seed).sample(every, options.sample)
        for scenario, fault in every[share :: options.jobs]:
            _one(scenarios, scenario, fault, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _faults(counts: Counter[str]) -> list[Fault]:
    found = []
    for call in CALLS:
        for count in range(1, counts[call] + 1):
            found.append(Fault(call, count, KILL))
            found += [Fault(call, count, error) for error in ERRORS]
            # A disk that stays full, or a folder that stays closed: the undoing meets it too.
            found.append(Fault(call, count, "EACCES" if call == "openat" else "ENOSPC", lasting=True))
    return found


def _check_complete(scenarios: Scenarios, scenario: Scenario, counts: Counter[str], report) -> None:
    """One past the last call of each kind nothing is hit: every call had its turn."""
    for call in CALLS:
        scenarios.reset(scenario.start)
        outcome = injection.run_with(Fault(call, counts[call] + 1, KILL), scenario.command, scenarios.folder)
        if outcome.code != 0:
            report.write(f"bad {scenario.name}: more {call} calls than were counted\n")


def _one(scenarios: Scenarios, scenario: Scenario, fault: Fault, report) -> None:
    scenarios.reset(scenario.start)
    outcome = injection.run_with(fault, scenario.command, scenarios.folder)
    if not outcome.hit:
        report.write(f"bad {scenario.name}: {fault}: was not hit, exit code {outcome.code}\n")
        return
    lasting = ", lasting" if fault.lasting else ""
    report.write(f"1 {scenario.name}: {fault.effect}{lasting}\n")
    for problem in judge(scenarios, scenario, outcome):
        report.write(f"bad {scenario.name}: {fault}: {' '.join(problem.split())[:400]}\n")
    report.flush()


if __name__ == "__main__":
    sys.exit(main())
