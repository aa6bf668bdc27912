"""list, show, diff."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from patchkit.cli.options import Options, command

if TYPE_CHECKING:
    from patchkit.report import Result


@command("list")
@click.pass_obj
def list_(options: Options) -> Result:
    """List the patches that there are."""
    from patchkit.commands import patches

    return patches.list_(options.workspace())


@command("show")
@click.argument("name")
@click.pass_obj
def show(options: Options, name: str) -> Result:
    """Show one patch: releases, files, environment."""
    from patchkit.commands import patches

    return patches.show(options.workspace(), name)


@command("diff")
@click.argument("name")
@click.pass_obj
def diff(options: Options, name: str) -> Result:
    """Print the diff that is applied, or that would be."""
    from patchkit.commands import patches

    return patches.diff(options.workspace(), name)
