"""The edit that the hsdump patches make in a model's source, found by syntax rather than by line.

SGLang's model classes differ between releases in many lines, but not in these: ``__init__`` calls
``super().__init__``, one loop of ``forward`` uses ``self.layers[i]``, and ``self.norm`` is used after it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class EditError(ValueError):
    """The source does not have the shape that the edit needs."""


@dataclass(frozen=True)
class Insertion:
    """``lines`` go before what is at ``line`` (from 1), ``indent`` columns to the right."""

    line: int
    indent: int
    lines: tuple[str, ...]

    @classmethod
    def before(cls, statement: ast.stmt, *lines: str) -> Insertion:
        return cls(statement.lineno, statement.col_offset, lines)


def defines_forward(source: str, class_name: str) -> bool:
    """Whether the class has a forward of its own, or leaves it to its base class."""
    return "forward" in methods(ast.parse(source), class_name)


def with_dump(source: str, class_name: str) -> str:
    """``source`` with the calls of hs_dump in the model class ``class_name``. Raises EditError."""
    module = ast.parse(source)
    found = methods(module, class_name)
    insertions = [importing(module), attaching(found["__init__"]), *capturing(found["forward"])]
    lines = source.split("\n")
    for insertion in sorted(insertions, key=lambda one: one.line, reverse=True):
        at = insertion.line - 1
        lines[at:at] = [" " * insertion.indent + line for line in insertion.lines]
    edited = "\n".join(lines)
    compile(edited, class_name, "exec")
    return edited


def methods(module: ast.Module, class_name: str) -> dict[str, ast.FunctionDef]:
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    if len(classes) != 1:
        raise EditError(f"{len(classes)} classes {class_name}, not one")
    return {node.name: node for node in classes[0].body if isinstance(node, ast.FunctionDef)}


def importing(module: ast.Module) -> Insertion:
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt."):
            return Insertion.before(node, "from sglang.srt import hs_dump")
    raise EditError("no import from sglang.srt")


def attaching(init: ast.FunctionDef) -> Insertion:
    for statement in init.body:
        if ast.unparse(statement).startswith("super().__init__("):
            after = (statement.end_lineno or statement.lineno) + 1
            line = "self.hs_dump = hs_dump.attach(config, __file__)"
            return Insertion(after, statement.col_offset, (line,))
    raise EditError("__init__ does not call super().__init__")


def capturing(forward: ast.FunctionDef) -> Iterator[Insertion]:
    """Before each layer, and after the last one, before the final norm."""
    names = {node.id for node in ast.walk(forward) if isinstance(node, ast.Name)}
    residual = "residual" if "residual" in names else "residual_batch"
    if residual not in names:
        raise EditError("neither residual nor residual_batch in forward")
    layers = [trail for trail in trails(forward.body, "self.layers[i]") if any(map(is_loop, trail))]
    norms = list(trails(forward.body, "self.norm"))
    if len({loop for trail in layers for loop in trail if is_loop(loop)}) != 1 or not norms:
        raise EditError("not exactly one loop over self.layers[i], and self.norm, in forward")
    norm = next(statement for statement in norms[0] if not is_about_pipeline(statement))
    if any(norm not in trail for trail in norms):
        raise EditError("self.norm is used in more than one place of forward")
    for k, statement in (("i", layers[0][-1]), ("len(self.layers)", norm)):
        call = f"self.hs_dump.capture({k}, hidden_states, {residual}, forward_batch)"
        yield Insertion.before(statement, "if self.hs_dump is not None:", f"    {call}")


def trails(
    block: list[ast.stmt], expression: str, above: tuple[ast.stmt, ...] = ()
) -> Iterator[tuple[ast.stmt, ...]]:
    """For each innermost statement that holds ``expression``: itself, after all those around it."""
    for statement in block:
        held = (node for node in ast.walk(statement) if isinstance(node, ast.expr))
        if not any(ast.unparse(node) == expression for node in held):
            continue
        inner = [*getattr(statement, "body", []), *getattr(statement, "orelse", [])]
        below = list(trails(inner, expression, (*above, statement)))
        yield from below or [(*above, statement)]


def is_loop(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.For)


def is_about_pipeline(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "pp_group" in ast.unparse(statement.test)
