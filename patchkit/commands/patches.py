"""list, show, diff: what patches there are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from patchkit.errors import PatchkitError
from patchkit.overlay import Overlay
from patchkit.report import Result
from patchkit.selection import choose, public
from patchkit.state import State
from patchkit.takeover import find_takeover

if TYPE_CHECKING:
    from patchkit.catalog import Patch, Variant
    from patchkit.target import Target
    from patchkit.workspace import Workspace


def list_(workspace: Workspace) -> Result:
    """Every patch, with what it is for and whether it fits or is applied here."""
    rows: list[dict[str, Any]] = []
    errors: list[PatchkitError] = []
    for name in workspace.catalog.names():
        try:
            patch = workspace.catalog[name]
            rows.append({**_summary(patch), "state": _state(workspace, patch)})
        except PatchkitError as error:
            errors.append(error)
    width = max((len(row["name"]) for row in rows), default=0)
    states = max((len(row["state"]) for row in rows), default=0)
    lines = [f"{row['name']:<{width}}  {row['state']:<{states}}  {row['summary']}" for row in rows]
    code = errors[0].exit_code if errors else 0
    return Result({"patches": rows}, lines or ["no patches"], errors=errors, exit_code=code)


def show(workspace: Workspace, name: str) -> Result:
    """One patch whole: its releases, its files, what it stands on."""
    patch = workspace.catalog[name]
    data = {
        **_summary(patch),
        "state": _state(workspace, patch),
        "env": patch.env,
        "variants": [
            {"diff": variant.diff_path, **json.loads(variant.manifest.to_json())}
            for variant in patch.variants
        ],
    }
    lines: list[str | tuple[str, str]] = [
        ("title", f"{patch.name}: {patch.summary}"),
        f"  state     {data['state']}",
    ]
    lines.append(f"  for       {patch.distribution} {', '.join(patch.releases)}")
    for key in ("members", "after", "conflicts"):
        if data[key]:
            lines.append(f"  {key:<9} {', '.join(data[key])}")
    lines += [f"  env       {key}={value}" for key, value in patch.env.items()]
    lines.append(f"  folder    {patch.folder}{' (built in)' if patch.builtin else ''}")
    for variant in patch.variants:
        on = f" on {', '.join(variant.manifest.on)}" if variant.manifest.on else ""
        lines.append(f"  variant   {', '.join(variant.manifest.releases)}{on}")
        lines += [f"    {pin.change:<6} {pin.path}" for pin in variant.manifest.files]
    return Result(data, lines)


def diff(workspace: Workspace, name: str) -> Result:
    """The diff that is applied, or that would be, byte for byte."""
    patch = workspace.catalog[name]
    data = b"".join(_diff(workspace, one) for one in workspace.catalog.expand([patch.name]))
    return Result({"patch": name, "diff": data.decode("utf-8", "surrogateescape")}, raw=data)


def _diff(workspace: Workspace, patch: Patch) -> bytes:
    import os

    target = workspace.target(patch.distribution)
    state = State.load(target.root)
    applied = state.find(patch.name)
    if applied is not None:
        with open(os.path.join(target.root, applied.diff_path), "rb") as file:
            return file.read()
    return _variant(workspace, patch, target, state).diff_bytes()


def _variant(workspace: Workspace, patch: Patch, target: Target, state: State) -> Variant:
    from patchkit.plan import Plan

    return choose(patch, target, state.stack, Plan(target, workspace.catalog, state, 0).read)


def _summary(patch: Patch) -> dict[str, Any]:
    return {
        "name": patch.name,
        "distribution": patch.distribution,
        "summary": patch.summary,
        "releases": list(patch.releases),
        "after": list(patch.after),
        "conflicts": list(patch.conflicts),
        "members": list(patch.members),
        "builtin": patch.builtin,
        "folder": patch.folder,
    }


def _state(workspace: Workspace, patch: Patch) -> str:
    """applied, available, or why not."""
    try:
        target = workspace.target(patch.distribution)
    except PatchkitError:
        return f"{patch.distribution} not installed"
    state = State.load(target.root)
    applied = {one.patch: one for one in state.stack}
    if patch.name in applied:
        takeover = find_takeover(target, state, applied[patch.name], Overlay(target.root, 0).read)
        return "applied" if takeover is None else f"applied, then {takeover.what}"
    if patch.members and set(patch.members) <= applied.keys():
        return "applied"
    if patch.members:
        return "available"
    known = {public(release) for release in patch.releases}
    if target.release is not None and public(target.release) not in known:
        return f"no variant for {target.release}"
    return "available"
