"""attest verify: does a record still agree with the tree and the outputs?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from patchkit import provenance
from patchkit.errors import NO
from patchkit.history import History
from patchkit.report import Result
from patchkit.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.workspace import Workspace


def verify(workspace: Workspace, path: str, outputs: Sequence[str] = ()) -> Result:
    """Compare the record at ``path`` with what is there now.

    The tree is the recorded one, or that of the environment that ``workspace`` names; ``outputs`` are where
    the recorded outputs lie now, in their order.
    """
    predicate = provenance.load(path)
    wrong: list[dict[str, str]] = []
    good: list[str] = []
    elsewhere = workspace.python is not None or workspace.root is not None
    notes: list[str | tuple[str, str]] = []
    for tree in predicate["trees"]:
        root = workspace.target(tree["distribution"]).root if elsewhere else tree["root"]
        known = provenance.witnessed(path, predicate["session"], root)
        if known:
            good.append("the record is as it was written")
        elif known is None and (elsewhere or not History(root).lines()):
            notes.append(
                ("warn", f"  {root} has no history of this run: the record's own text is not proven")
            )
        else:
            wrong.append(
                {"path": root, "problem": "the record is not the one that is known to the history of"}
            )
        _compare_tree(tree, root, wrong, good)
    for number, output in enumerate(predicate["outputs"]):
        folder = outputs[number] if number < len(outputs) else output["path"]
        found = provenance.differences(output, folder)
        wrong += [{"path": name, "problem": problem} for name, problem in found]
        if not found:
            good.append(f"{folder}: as it was written ({len(output['files'])} files)")
    lines: list[str | tuple[str, str]] = []
    if wrong:
        lines.append(("bad", f"does not agree: {path}"))
        lines += [f"  {one['problem']} {one['path']}" for one in wrong]
    else:
        lines.append(("good", f"agrees: {path}: {predicate.get('statement')}"))
    lines += [f"  {text}" for text in good]
    lines += notes
    data: dict[str, Any] = {"record": os.path.abspath(path), "agrees": not wrong, "problems": wrong}
    return Result(data, lines, exit_code=NO if wrong else 0)


def _compare_tree(tree: dict[str, Any], root: str, wrong: list[dict[str, str]], good: list[str]) -> None:
    label = f"{tree['distribution']} {tree.get('release')} in {root}"
    after = tree["digest"].get("after")
    if after is None:
        wrong.append({"path": root, "problem": "the record has no digest after the run of"})
        return
    target = Target(tree["distribution"], tree.get("release"), root, tuple(tree["packages"]), None, None)
    if provenance.tree_digest(target) == after["dirHash"]:
        good.append(f"{label} is as it was after the run")
    else:
        wrong.append({"path": label, "problem": "not as it was after the run:"})
