"""The edit that hsdump makes in a model's source, found by syntax rather than by line.

The model classes of SGLang's releases differ in many lines, but not in these: ``__init__`` begins with
``super().__init__()``, the layer loop of ``forward`` has one ``layer = self.layers[i]``, and one ``if``
that asks ``is_idle()`` holds the final norm.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass


class EditError(ValueError):
    """The source does not have the shape that the edit needs."""


@dataclass(frozen=True)
class Insertion:
    """``text`` goes before ``line`` (from 1), indented by ``indent`` columns."""

    line: int
    indent: int
    text: str


def dumping(source: str, class_name: str) -> str:
    """``source`` with the calls of hs_dump in the model class ``class_name``. Raises EditError."""
    module = ast.parse(source)
    model = only([n for n in module.body if isinstance(n, ast.ClassDef) and n.name == class_name], class_name)
    methods = {n.name: n for n in model.body if isinstance(n, ast.FunctionDef)}
    insertions = [
        import_before_first(module),
        attach_after_super(methods["__init__"]),
        *captures(methods["forward"]),
    ]
    lines = source.split("\n")
    for insertion in sorted(insertions, key=lambda it: it.line, reverse=True):
        pad = " " * insertion.indent
        lines[insertion.line - 1 : insertion.line - 1] = [pad + text for text in insertion.text.split("\n")]
    edited = "\n".join(lines)
    compile(edited, class_name, "exec")
    return edited


def only(found: list[ast.AST], what: str) -> ast.AST:
    if len(found) != 1:
        raise EditError(f"{len(found)} places for {what}, not one")
    return found[0]


def import_before_first(module: ast.Module) -> Insertion:
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt."):
            return Insertion(node.lineno, 0, "from sglang.srt import hs_dump")
    raise EditError("no import from sglang.srt")


def attach_after_super(init: ast.FunctionDef) -> Insertion:
    for first, after in zip(init.body, init.body[1:], strict=False):
        if ast.unparse(first) == "super().__init__()":
            return Insertion(
                after.lineno, after.col_offset, "self.hs_dump = hs_dump.attach(config, __file__)"
            )
    raise EditError("no super().__init__() in __init__")


def captures(forward: ast.FunctionDef) -> list[Insertion]:
    names = {node.id for node in ast.walk(forward) if isinstance(node, ast.Name)}
    residual = "residual" if "residual" in names else "residual_batch"
    if residual not in names:
        raise EditError("neither residual nor residual_batch in forward")
    layer = only(
        [
            node
            for node in ast.walk(forward)
            if isinstance(node, ast.Assign) and ast.unparse(node) == "layer = self.layers[i]"
        ],
        "layer = self.layers[i]",
    )
    norm = only(
        [
            node
            for node in ast.walk(forward)
            if isinstance(node, ast.If)
            and ast.unparse(node.test) == "not forward_batch.forward_mode.is_idle()"
            and "norm" in ast.unparse(node)
        ],
        "the final norm",
    )
    return [
        Insertion(node.lineno, node.col_offset, call(k, residual))
        for node, k in ((layer, "i"), (norm, "len(self.layers)"))
    ]


def call(k: str, residual: str) -> str:
    return (
        f"if self.hs_dump is not None:\n"
        f"    self.hs_dump.capture({k}, hidden_states, {residual}, forward_batch)"
    )
