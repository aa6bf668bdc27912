"""check and verify: is the tree what it should be, and which file is not."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit import lease
from patchkit.errors import NO, PatchkitError
from patchkit.journal import Journal
from patchkit.lock import holder, is_locked
from patchkit.overlay import Overlay
from patchkit.plan import expectations
from patchkit.report import Result
from patchkit.selection import public
from patchkit.state import State
from patchkit.takeover import PUT_BACK, find_takeover
from patchkit.tree import info
from patchkit.witness import ABSENT, MANIFESTS, NOTHING, Offender, Testimony, examine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence, Set as AbstractSet

    from patchkit.catalog import Catalog, Variant
    from patchkit.state import Applied
    from patchkit.takeover import Takeover
    from patchkit.target import Target
    from patchkit.workspace import Workspace


@dataclass
class Verdict:
    """The answer for one target: ``offenders`` are files, ``complaints`` all else that is wrong."""

    target: Target
    testimony: Testimony
    applied: list[str] = field(default_factory=list)
    offenders: list[Offender] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    takeovers: list[Takeover] = field(default_factory=list)

    def _proof(self) -> str:
        pins = " and the pinned digests" if self.applied else ""
        return f"{self.testimony.checked} files equal {self.testimony.witness}{pins}"

    @property
    def clean(self) -> bool:
        return not self.offenders and not self.complaints

    def worse_than(self, before: Iterable[Verdict]) -> bool:
        """Whether something is wrong that was not in ``before``."""
        known = {(one.path, one.kind) for earlier in before for one in earlier.offenders}
        said = {text for earlier in before for text in earlier.complaints}
        return any((one.path, one.kind) not in known for one in self.offenders) or any(
            text not in said for text in self.complaints
        )

    def lines(self, *, label: str = "clean") -> list[str | tuple[str, str]]:
        where = f"{self.target.label} in {self.target.root}"
        on = f" with {', '.join(self.applied)} applied" if self.applied else ""
        proof = {
            ABSENT: "nothing that patchkit put there is left",
            MANIFESTS: "no RECORD and no git here: only the files that patches are pinned to were compared",
            NOTHING: "no RECORD, no git and no pinned file: nothing to compare with",
        }.get(self.testimony.witness, self._proof())
        if self.clean:
            return [("good", f"{label}: {where}{on} ({proof})")]
        lines: list[str | tuple[str, str]] = [("bad", f"not {label}: {where}")]
        lines += [f"  {complaint}" for complaint in self.complaints]
        lines += [
            f"  {offender.kind} {offender.path}" + (f" ({offender.detail})" if offender.detail else "")
            for offender in self.offenders
        ]
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "distribution": self.target.distribution,
            "release": self.target.release,
            "root": self.target.root,
            "clean": self.clean,
            "witness": self.testimony.witness,
            "checked": self.testimony.checked,
            "applied": self.applied,
            "offenders": [offender.to_json() for offender in self.offenders],
            "complaints": self.complaints,
            "takeovers": [takeover.to_json() for takeover in self.takeovers],
        }


class NotCleanError(PatchkitError):
    """A file of the distribution is not as its witness or the stack says."""

    code = "not-clean"
    exit_code = NO


def check(workspace: Workspace, expect: Iterable[str] = ()) -> Result:
    """Exit 0 only if every file equals its witness and exactly the expected patches are applied."""
    wanted = {patch.name for patch in workspace.catalog.expand(list(expect))} if expect else set()
    verdicts = []
    for target in workspace.targets():
        own = {name for name in wanted if workspace.catalog[name].distribution == target.distribution}
        verdicts.append(judge(target, workspace.catalog, expect=own, exactly=True))
    return _result(verdicts, label="clean")


def verify(workspace: Workspace, names: Sequence[str] = ()) -> Result:
    """Exit 0 only if the tree is exactly patched with the named patches, by default all applied ones."""
    wanted = {patch.name for patch in workspace.catalog.expand(list(names))} if names else set()
    verdicts = []
    for target in workspace.targets():
        state = State.load(target.root)
        applied = {one.patch for one in state.stack if one.distribution == target.distribution}
        own = {name for name in wanted if workspace.catalog[name].distribution == target.distribution}
        if names and not own:
            continue
        verdict = judge(target, workspace.catalog, expect=applied)
        verdict.complaints += [f"{name} is not applied" for name in sorted(own - applied)]
        verdicts.append(verdict)
    return _result(verdicts, label="verified")


def _undone_modes(
    target: Target, state: State, own: Sequence[Applied], taken: AbstractSet[str]
) -> Iterator[Offender]:
    """Files that a patch made executable, or not, and that are no more; not those in ``taken``."""
    for applied in own:
        for pin in applied.manifest.files:
            if pin.path in taken:
                continue
            top = state.top(pin.path)
            found = info(os.path.join(target.root, pin.path))
            if top is None or top[0] is not applied or found is None or pin.mode_holds(found.st_mode):
                continue
            now = "executable" if found.st_mode & 0o100 else "not executable"
            yield Offender(pin.path, "modified", f"is {now}, unlike what '{applied.patch}' makes it")


def judge(
    target: Target, catalog: Catalog, *, expect: AbstractSet[str] = frozenset(), exactly: bool = False
) -> Verdict:
    """Compare ``target`` with its witness, with the patches in ``expect`` allowed (``exactly``: required)."""
    state = State.load(target.root)
    own = [applied for applied in state.stack if applied.distribution == target.distribution]
    expected: dict[str, str | None] = {}
    patched: dict[str, str] = {}
    wanting: list[Offender] = []
    takeovers: dict[str, Takeover] = {}
    taken: dict[str, str] = {}
    for applied in own:
        takeover = find_takeover(target, state, applied, Overlay(target.root, 0).read)
        if takeover is not None:
            takeovers[applied.patch] = takeover
            taken.update(takeover.files)
        pins = expectations(applied, state)
        # What an installer put there since is for the witness to judge.
        expected.update((path, sha256) for path, sha256 in pins.items() if path not in taken)
        for backup, pin in applied.backups().items():
            expected[backup] = pin.before.sha256 if pin.before else None
        if applied.patch not in expect:
            how = f"by {applied.patch}" if takeover is None else f"left of {applied.patch}"
            patched.update(dict.fromkeys((applied.touched() - taken.keys()) | set(applied.backups()), how))
        elif takeover is not None:
            wanting += _wanting(target, pins, takeover)
    for kept in state.kept:
        if os.path.lexists(os.path.join(target.root, kept.path)):  # whoever kept it may also delete it
            expected.setdefault(kept.path, kept.sha256)
    others = [applied for applied in state.stack if applied.distribution != target.distribution]
    foreign = {path for applied in others for path in (*applied.touched(), *applied.backups())}
    testimony = examine(target, expected, lambda: _pinned(target, catalog), foreign)
    names = [applied.patch for applied in own]
    verdict = Verdict(target, testimony, names, takeovers=list(takeovers.values()))
    verdict.offenders = [_recognised(target, catalog, offender) for offender in testimony.offenders]
    named = {offender.path for offender in verdict.offenders}
    by_hand = {path for one in takeovers.values() if one.what == PUT_BACK for path in one.files}
    modes = list(_undone_modes(target, state, own, taken.keys() - by_hand))
    named |= {offender.path for offender in modes}
    verdict.offenders += modes + [one for one in wanting if one.path not in named]
    drifted = {offender.path for offender in verdict.offenders}
    verdict.offenders += [
        Offender(path, "patched", how)
        for path, how in sorted(patched.items())
        if path not in drifted and os.path.lexists(os.path.join(target.root, path))
    ]
    verdict.offenders.sort(key=lambda offender: offender.path)
    unexpected = [name for name in names if name not in expect and name not in takeovers]
    if unexpected:
        verdict.complaints.append(
            f"applied: {', '.join(unexpected)} (patchkit restore {' '.join(unexpected)})"
        )
    if exactly:
        verdict.complaints += [f"{name} is expected but not applied" for name in sorted(expect - set(names))]
    verdict.complaints += [f"{one.sentence()}; {one.advice()}" for one in takeovers.values()]
    journal = Journal.load(target.root)
    if journal is not None:
        verdict.complaints.append(
            f"{holder(target.root)} is changing it at this moment"
            if is_locked(target.root)
            else "a transaction was interrupted (patchkit recover)"
        )
    verdict.complaints += [
        f"abandoned {one.describe()} (patchkit recover)"
        for one in lease.abandoned(target.root)
        if one.distribution == target.distribution
    ]
    return verdict


def _wanting(target: Target, pins: dict[str, str | None], takeover: Takeover) -> Iterator[Offender]:
    """The files that should be as patched, and are an installer's now."""
    for path, reason in takeover.files.items():
        there = os.path.lexists(os.path.join(target.root, path))
        if path in pins and (there or pins[path] is not None):
            yield Offender(path, "replaced" if there else "missing", reason.removeprefix("is "))


def _pinned(target: Target, catalog: Catalog) -> dict[str, set[str]]:
    """Path -> pristine digests, from the manifests that serve this release."""
    found: dict[str, set[str]] = {}
    for variant in _variants(target, catalog):
        if not variant.manifest.on:
            for pin in variant.manifest.files:
                if pin.before is not None:
                    found.setdefault(pin.source or pin.path, set()).add(pin.before.sha256)
    return found


def _variants(target: Target, catalog: Catalog) -> list[Variant]:
    found = []
    for name in catalog.names():
        try:
            patch = catalog[name]
            variants = patch.variants if patch.distribution == target.distribution else ()
        except PatchkitError:
            continue  # broken patches are the business of `list` and `lint`
        for variant in variants:
            releases = {public(release) for release in variant.manifest.releases}
            if target.release is None or public(target.release) in releases:
                found.append(variant)
    return found


def _recognised(target: Target, catalog: Catalog, offender: Offender) -> Offender:
    """Say so when a changed file is what a known patch makes of it: someone patched by hand."""
    if offender.kind not in ("modified", "unexpected") or offender.detail:
        return offender
    from patchkit.tree import sha256_file

    try:
        digest, _ = sha256_file(os.path.join(target.root, offender.path))
    except OSError:
        return offender
    for variant in _variants(target, catalog):
        for pin in variant.manifest.files:
            if pin.path == offender.path and pin.after is not None and pin.after.sha256 == digest:
                detail = f"equals {variant.manifest.patch}, applied by hand; 'patchkit apply' adopts it"
                return Offender(offender.path, offender.kind, detail)
    return offender


def _result(verdicts: Sequence[Verdict], *, label: str) -> Result:
    clean = all(verdict.clean for verdict in verdicts)
    errors = [NotCleanError(complaint) for verdict in verdicts for complaint in verdict.complaints]
    errors += [
        NotCleanError(f"{one.path} is {one.kind}" + (f" ({one.detail})" if one.detail else ""), path=one.path)
        for verdict in verdicts
        for one in verdict.offenders
    ]
    data = {"clean": clean, "targets": [verdict.to_json() for verdict in verdicts]}
    lines = [line for verdict in verdicts for line in verdict.lines(label=label)]
    return Result(data, lines, exit_code=0 if clean else NO, json_errors=errors)
