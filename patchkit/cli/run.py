"""run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from patchkit.cli.change import holding_options, make_holding
from patchkit.cli.options import Duration, Options, command

if TYPE_CHECKING:
    from patchkit.report import Result

_STDERR = 2


class _Assignment(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "K=V"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        key, equals, content = str(value).partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return key, content


class _Run(click.Command):
    """Keeps what stands before ``--`` apart from the command after it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["patchkit.command"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@command("run", cls=_Run)
@click.argument("names", nargs=-1, metavar="[NAME...] -- CMD...")
@click.option("--clean", is_flag=True, help="Run on the pristine tree: check it, lease it, check it again.")
@click.option(
    "--env", "env", multiple=True, type=_Assignment(), metavar="K=V", help="Set for the command; repeatable."
)
@click.option(
    "--grace",
    type=Duration(),
    default="30s",
    metavar="TIME",
    help="Between SIGTERM and SIGKILL [default: 30s].",
)
@click.option("--keep", is_flag=True, help="Leave the patch applied if the command succeeds.")
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="DIR",
    help="Folder or file whose sha256 go into the record; repeatable.",
)
@click.option(
    "--record", "record_dir", metavar="DIR", help="Where patchkit-run-ID.json goes [default: here]."
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@holding_options
@click.pass_context
def run(
    ctx: click.Context,
    names: tuple[str, ...],
    clean: bool,
    env: tuple[tuple[str, str], ...],
    grace: float,
    keep: bool,
    outputs: tuple[str, ...],
    record_dir: str | None,
    dry_run: bool,
    wait: float,
    override_guard: bool,
    reason: str | None,
) -> Result:
    """Apply patches, run CMD, end what it leaves, restore, verify.

    The exit code is CMD's own, 128+n if signal n ended it, and 125 if the tree could not be put back.
    """
    from patchkit.commands import run as commands
    from patchkit.sessions import Session

    options: Options = ctx.obj
    argv: tuple[str, ...] = ctx.meta["patchkit.command"]
    if not argv:
        raise commands.NoCommandError
    say = (lambda _: None) if options.quiet else commands.say_safely
    workspace = options.workspace()
    session = Session(
        workspace,
        names,
        clean=clean,
        env=dict(env),
        grace_s=grace,
        keep=keep,
        outputs=outputs,
        record_dir=record_dir,
        holding=make_holding(options, wait, override_guard, reason),
        exclusive=True,
        say=say,
    )
    if dry_run:
        return commands.plan(workspace, session, argv)
    return commands.run(session, argv, stdout=_STDERR if options.json else None)
