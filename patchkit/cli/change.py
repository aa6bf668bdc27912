"""apply, restore, recover."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from patchkit.cli.options import Duration, Options, command

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchkit.commands.holding import Holding
    from patchkit.report import Result

F = TypeVar("F", bound="Callable[..., Any]")


def holding_options(function: F) -> F:
    for decorator in (
        click.option("--reason", metavar="TEXT", help="Why the guard is overridden; goes into the history."),
        click.option("--override-guard", is_flag=True, help="Go on although a process uses the tree."),
        click.option(
            "--wait",
            type=Duration(),
            default=0.0,
            metavar="TIME",
            help="Wait that long for holders, e.g. 10m.",
        ),
        _for_guard("--thorough", "Search large mappings of processes too, and not only the usual ones."),
        _for_guard("--stop-to-read", "Stop a process for a moment if it changes too fast to be read."),
    ):
        function = decorator(function)
    return function


_LOOK = "patchkit.look"  # key in click's context: how the guard is to look


def _for_guard(flag: str, text: str) -> Callable[[F], F]:
    """A flag that goes to the guard as it is; commands need not know it."""

    def keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta.setdefault(_LOOK, {})[str(param.name)] = value

    return click.option(flag, is_flag=True, help=text, expose_value=False, callback=keep)


def make_holding(options: Options, wait: float, override_guard: bool, reason: str | None) -> Holding:
    from patchkit.commands.holding import Holding

    def say(text: str) -> None:
        if not options.quiet:
            click.echo(text, err=True)

    look = click.get_current_context().meta.get(_LOOK, {})
    return Holding(wait, override_guard, reason, say, **look)


@command("apply")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@holding_options
@click.pass_obj
def apply(
    options: Options,
    names: tuple[str, ...],
    dry_run: bool,
    wait: float,
    override_guard: bool,
    reason: str | None,
) -> Result:
    """Apply patches to the installed package, all or none."""
    from patchkit.commands import change

    holding = make_holding(options, wait, override_guard, reason)
    return change.apply(options.workspace(), names, holding=holding, dry_run=dry_run)


@command("restore")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option("--all", "everything", is_flag=True, help="Every applied patch (the default without a name).")
@click.option("--verify", is_flag=True, help="Then prove the whole distribution against its RECORD or git.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option(
    "--force", is_flag=True, help="Also restore files edited since; the edits go to .patchkit/rescued."
)
@click.option("--keep-backup", is_flag=True, help="Leave the *.bak_NAME files in place.")
@holding_options
@click.pass_obj
def restore(
    options: Options,
    names: tuple[str, ...],
    everything: bool,
    verify: bool,
    dry_run: bool,
    force: bool,
    keep_backup: bool,
    wait: float,
    override_guard: bool,
    reason: str | None,
) -> Result:
    """Put the pristine files back, byte for byte as the wheel installed them."""
    from patchkit.commands import change

    if names and everything:
        raise click.UsageError("name patches or use --all, not both")
    holding = make_holding(options, wait, override_guard, reason)
    return change.restore(
        options.workspace(),
        names,
        holding=holding,
        dry_run=dry_run,
        verify=verify,
        force=force,
        keep_backup=keep_backup,
    )


@command("recover")
@click.option(
    "--force",
    is_flag=True,
    help="Also set unreadable files of .patchkit aside, in .patchkit/rescued, and prove what can be.",
)
@holding_options
@click.pass_obj
def recover(options: Options, force: bool, wait: float, override_guard: bool, reason: str | None) -> Result:
    """Finish or undo what a crash left open."""
    from patchkit.commands import change

    holding = make_holding(options, wait, override_guard, reason)
    return change.recover(options.workspace(), holding=holding, force=force)
