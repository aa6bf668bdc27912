"""status, verify, check, log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from patchkit.cli.options import Options, command

if TYPE_CHECKING:
    from patchkit.report import Result


@command("status")
@click.pass_obj
def status(options: Options) -> Result:
    """Show which patches are applied and the state of each of their files."""
    from patchkit.commands import status as commands

    return commands.status(options.workspace())


@command("verify")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.pass_obj
def verify(options: Options, names: tuple[str, ...]) -> Result:
    """Prove that the tree is exactly patched as the stack says; exit 1 if not."""
    from patchkit.commands import check as commands

    return commands.verify(options.workspace(), names)


@command("check")
@click.option("--expect", multiple=True, metavar="NAME", help="A patch that must be applied; repeatable.")
@click.pass_obj
def check(options: Options, expect: tuple[str, ...]) -> Result:
    """Exit 0 only if the installed tree is clean; name each file that is not."""
    from patchkit.commands import check as commands

    return commands.check(options.workspace(), expect)


@command("log")
@click.option("--verify", is_flag=True, help="Check the chain of hashes; exit 1 if it is broken.")
@click.pass_obj
def log(options: Options, verify: bool) -> Result:
    """Show what was done to the tree, by whom and when."""
    from patchkit.commands import status as commands

    return commands.log(options.workspace(), verify=verify)
