"""Options that every command takes, before or after its name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchkit.workspace import Workspace

F = TypeVar("F", bound="Callable[..., Any]")


@dataclass
class Options:
    """The global options as given; ``workspace`` is what commands work on."""

    python: str | None = None
    root: str | None = None
    patches: tuple[str, ...] = ()
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    no_color: bool = False
    given: set[str] = field(default_factory=set)  # those that stood on the command line

    def workspace(self) -> Workspace:
        from patchkit.workspace import Workspace

        python, root = self.python, self.root
        if python is not None and root is not None:
            # Both say which tree is meant. The command line wins over the environment; else nobody guesses.
            given = self.given & {"python", "root"}
            if len(given) != 1:
                where = "--python and --root" if given else "PATCHKIT_PYTHON and PATCHKIT_ROOT"
                raise click.UsageError(f"{where} both say which tree is meant; give one")
            python, root = (python, None) if "python" in given else (None, root)
        return Workspace(python=python, root=root, patches=self.patches)


def _store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    options = ctx.ensure_object(Options)
    name = str(param.name)
    source = ctx.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE:
        options.given.add(name)
    # The group is parsed first. A command's own flag wins over it; its default or the environment does not.
    if source is ParameterSource.COMMANDLINE or (ctx.parent is None and value not in (None, (), False)):
        setattr(options, name, value)


def global_options(command: F) -> F:
    """Decorator for the group and every command."""
    for decorator in reversed(
        [
            click.option("--python", metavar="EXE", help="Interpreter whose environment is meant."),
            click.option("--root", metavar="DIR", help="Folder that holds the import package."),
            click.option(
                "--patches",
                metavar="DIR",
                multiple=True,
                type=click.Path(),  # splits PATCHKIT_PATCHES at colons
                help="Folder of patches; repeatable [default: ./patches]. Built-in patches come last.",
            ),
            click.option("--json", is_flag=True, help="Print one JSON object."),
            click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
            click.option("-v", "--verbose", is_flag=True, help="Print more."),
            click.option("--no-color", is_flag=True, help="No colours."),
        ]
    ):
        command = _as_global(decorator)(command)
    return command


def _as_global(decorator: Callable[[F], F]) -> Callable[[F], F]:
    def wrap(command: F) -> F:
        command = decorator(command)
        params = command.params if isinstance(command, click.Command) else command.__click_params__  # type: ignore[attr-defined]
        option = params[0] if isinstance(command, click.Command) else params[-1]
        option.expose_value = False
        option.is_eager = True
        option.callback = _store
        option.envvar = f"PATCHKIT_{str(option.name).upper()}"
        return command

    return wrap


def command(
    name: str, cls: type[click.Command] = click.Command
) -> Callable[[Callable[..., Any]], click.Command]:
    """``click.command`` with the global options."""

    def wrap(function: Callable[..., Any]) -> click.Command:
        return click.command(name, cls)(global_options(function))

    return wrap


class Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Seconds, from ``90``, ``90s``, ``10m`` or ``2h``."""

    name = "duration"
    _units = {"": 1, "s": 1, "m": 60, "h": 3600}  # noqa: RUF012 (click reads class attributes)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a duration; write 90s, 10m or 2h", param, ctx)
        return float(match[1]) * self._units[match[2]]
