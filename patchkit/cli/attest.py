"""attest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from patchkit.cli.options import Options, command, global_options

if TYPE_CHECKING:
    from patchkit.report import Result


@click.group("attest")
@global_options
def attest() -> None:
    """Check the records that sessions write."""


@command("verify")
@click.argument("file", type=click.Path(dir_okay=False, exists=True))
@click.option("--output", "outputs", multiple=True, metavar="DIR", help="Where an output lies now, if moved.")
@click.pass_obj
def verify(options: Options, file: str, outputs: tuple[str, ...]) -> Result:
    """Exit 0 only if FILE agrees with the tree and the outputs as they are now."""
    from patchkit.commands import attest as commands

    return commands.verify(options.workspace(), file, outputs)


attest.add_command(verify)
