"""Entry point: finds the command, renders its result, maps every error to its exit code."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from patchkit import __version__, report
from patchkit.cli.options import Options, global_options
from patchkit.errors import IO_FAILED, USAGE, PatchkitError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Command name -> "module:attribute"; imported only when asked for, so that `check` starts fast.
COMMANDS = {
    "apply": "patchkit.cli.change:apply",
    "restore": "patchkit.cli.change:restore",
    "recover": "patchkit.cli.change:recover",
    "run": "patchkit.cli.run:run",
    "attest": "patchkit.cli.attest:attest",
    "status": "patchkit.cli.inspect:status",
    "verify": "patchkit.cli.inspect:verify",
    "check": "patchkit.cli.inspect:check",
    "log": "patchkit.cli.inspect:log",
    "ps": "patchkit.cli.ps:ps",
    "list": "patchkit.cli.patches:list_",
    "show": "patchkit.cli.patches:show",
    "diff": "patchkit.cli.patches:diff",
    "import": "patchkit.cli.authoring:import_",
    "port": "patchkit.cli.authoring:port",
    "pin": "patchkit.cli.authoring:pin",
    "new": "patchkit.cli.authoring:new",
    "refresh": "patchkit.cli.authoring:refresh",
    "lint": "patchkit.cli.authoring:lint",
    "extract": "patchkit.cli.data:extract",
    "pack": "patchkit.cli.data:pack",
    "validate": "patchkit.cli.data:validate",
    "vocab": "patchkit.cli.data:vocab",
    "report": "patchkit.cli.data:report",
    "train": "patchkit.cli.data:train",
    "drafter": "patchkit.cli.data:drafter",
}


class _Usage(PatchkitError):
    """The command line is not one that patchkit knows."""

    code = "usage"
    exit_code = USAGE


class _Internal(PatchkitError):
    """A bug in patchkit."""

    code = "internal"
    exit_code = 70  # EX_SOFTWARE of sysexits.h


class _Interrupted(PatchkitError):
    """Ended by ^C; an open transaction was undone."""

    code = "interrupted"
    exit_code = 130


class _Untold(PatchkitError):
    """The command did its work, but its result could not be written to stdout."""

    code = "untold"
    exit_code = IO_FAILED

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"done, but the result could not be written: {cause.strerror or cause}")


class _IoFailed(PatchkitError):
    """The operating system refused; everything is as it was before."""

    code = "io-error"
    exit_code = IO_FAILED


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        return cast("click.Command", getattr(import_module(module), attribute))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            hint = f"did you mean '{near[0]}'?" if near else "'patchkit --help' lists them"
            raise click.UsageError(f"no such command '{args[0]}'; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@global_options
@click.version_option(__version__, prog_name="patchkit")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Source patches for installed Python packages.

    The tree is exactly pristine or exactly patched, you can prove which, and it never changes under a
    process that uses it.
    """
    ctx.ensure_object(Options)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    options = Options()
    command = _command_of(argv)
    # Started with a closed stdout or stderr (`>&-`): what is done must not depend on being told.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        outcome: Any = cli.main(args=argv, prog_name="patchkit", standalone_mode=False, obj=options)
        if not isinstance(outcome, report.Result):
            return int(outcome or 0)
        return _render(outcome, command, options)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except click.ClickException as error:
        return _fail(_Usage(error.format_message()), command, argv, options)
    except PatchkitError as error:
        return _fail(error, command, argv, options)
    except (KeyboardInterrupt, click.exceptions.Abort):
        return _fail(_Interrupted("interrupted"), command, argv, options)
    except OSError as error:
        name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else None
        reason = error.strerror or str(error)
        if name is None and error.errno == errno.ENOENT:  # getcwd's
            reason = "the working directory does not exist any more"
        full = error.errno in (errno.EMFILE, errno.ENFILE)
        hint = "raise the limit of open files (ulimit -n), or use fewer --workers" if full else None
        said = f"{name}: {reason}" if name else reason
        return _fail(_IoFailed(said, path=name, hint=hint), command, argv, options)
    except UnicodeEncodeError as error:
        message = f"a name that the locale's encoding ({error.encoding}) cannot spell; set PYTHONUTF8=1"
        return _fail(_Usage(message), command, argv, options)
    except Exception as error:
        if options.verbose:
            raise
        message = f"internal error: {type(error).__name__}: {error}"
        return _fail(
            _Internal(message, hint="this is a bug; run again with -v and report it"), command, argv, options
        )


def _command_of(argv: Sequence[str]) -> str:
    """The command's name, also when the command line does not parse."""
    rest = iter(argv)
    for arg in rest:
        if arg in ("--python", "--root", "--patches"):
            next(rest, None)
        elif not arg.startswith("-"):
            return arg if arg in COMMANDS else ""
    return ""


def _render(outcome: report.Result, command: str, options: Options) -> int:
    try:
        report.render(
            outcome,
            command,
            as_json=options.json,
            quiet=options.quiet,
            verbose=options.verbose,
            color=_color(options),
        )
    except OSError as error:
        # What was done stands and the exit code says it, also where nobody can be told: the reader went away
        # (`patchkit log | head`, a closed terminal), or the disk that the output goes to is full.
        _mute()
        if error.errno not in (errno.EPIPE, errno.EIO):
            _tell(_Untold(error), command, as_json=False, color=False)
    return outcome.exit_code


def _fail(error: PatchkitError, command: str, argv: Sequence[str], options: Options) -> int:
    # A usage error may be raised before --json was parsed.
    own = argv[: argv.index("--")] if "--" in argv else argv
    as_json = (
        options.json or "--json" in own or os.environ.get("PATCHKIT_JSON", "0") not in ("", "0", "false")
    )
    _tell(error, command, as_json=as_json, color=_color(options))
    return error.exit_code


def _tell(error: PatchkitError, command: str, *, as_json: bool, color: bool) -> None:
    try:
        report.render_error(error, command, as_json=as_json, color=color)
    except OSError:
        _mute()  # nobody can be told, on a full disk say; the exit code still says it


def _mute() -> None:
    """Send what a stream cannot write to nowhere: Python's flush at exit would make the exit code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _color(options: Options) -> bool:
    return not options.no_color and "NO_COLOR" not in os.environ and sys.stdout.isatty()
