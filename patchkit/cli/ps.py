"""ps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from patchkit.cli.options import Options, command

if TYPE_CHECKING:
    from patchkit.report import Result


@command("ps")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--thorough", is_flag=True, help="Search mappings over 64 MiB too.")
@click.pass_obj
def ps(options: Options, name: str | None, thorough: bool) -> Result:
    """Show which processes use the tree, on which GPU, and which version of its files each one runs."""
    from patchkit.commands import ps as commands

    return commands.ps(options.workspace(), name, thorough=thorough)
