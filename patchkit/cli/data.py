"""extract, pack, validate, vocab, report, train, drafter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from patchkit.cli.options import Duration, Options, command, global_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchkit.report import Result

FORMATS = ("speculators", "speculators-v1", "specforge")


class _Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Bytes, from ``32GB``, ``4GiB`` or a number."""

    name = "size"
    _units = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}  # noqa: RUF012

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a size; write 32GB or 4GiB", param, ctx)
        unit = self._units[match[2].upper()]
        if match[3] and unit > 1:
            unit = 1024 ** ("KMGT".index(match[2].upper()) + 1)
        return int(float(match[1]) * unit)


class _Layers(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "layers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers; write 3,31,59,61", param, ctx)


def _input_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How rows of the input become rows of the data set; shared by extract and pack."""
    for option in reversed(
        [
            click.option(
                "--format",
                "format_name",
                type=click.Choice(FORMATS),
                default=FORMATS[0],
                show_default=True,
                help="What the trainer reads.",
            ),
            click.option("--samples", type=click.IntRange(min=1), help="Take so many good rows."),
            click.option("--max-length", type=click.IntRange(min=1), help="Cut rows to so many tokens."),
            click.option("--skip-bad", is_flag=True, help="Leave bad rows out; they are listed."),
            click.option("--workers", type=click.IntRange(min=1), help="Samples at once [default: cores]."),
            click.option("--resume", is_flag=True, help="Go on where an earlier run ended."),
        ]
    ):
        function = option(function)
    return function


@command("extract")
@click.option("--model", required=True, metavar="PATH", help="Folder of the verifier's checkpoint.")
@click.option("--data", required=True, metavar="FILE", help="JSON lines, Parquet or an Arrow folder.")
@click.option("--out", required=True, metavar="DIR", help="Folder of the data set.")
@_input_options
@click.option("--layers", type=_Layers(), default=(), help="Which R(k) [default: 3, n//2+1, n-2, n].")
@click.option("--concurrency", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--url", "urls", multiple=True, metavar="URL", help="A patched server that runs; repeatable.")
@click.option("--spool", metavar="DIR", help="Where the servers dump to; our own one to a new folder in it.")
@click.option("--spool-limit", type=_Size(), default="32GB", show_default=True, help="Most bytes of dumps.")
@click.option("--server-arg", "server_args", multiple=True, metavar="ARG", help="For the server; repeatable.")
@click.option("--patch", "names", multiple=True, metavar="NAME", help="Patch [default: by architecture].")
@click.option("--trust-remote-code", is_flag=True, help="Run the tokenizer's own code.")
@click.option("--start-timeout", type=Duration(), default="30m", show_default=True)
@click.option("--stall", type=Duration(), default="2m", show_default=True, help="Wait for a dump so long.")
@click.pass_obj
def extract(options: Options, /, **values: Any) -> Result:
    """Extract hidden states for the samples in FILE and pack them for a trainer.

    The engine is patched only while its server runs. Each step can be resumed.
    """
    from patchkit.commands.extract import Request, extract as run

    urls = tuple(url.rstrip("/") for url in values.pop("urls"))
    patches = values.pop("names")  # "patches" is the global option
    return run(options.workspace(), Request(**values, patches=patches, urls=urls, quiet=options.quiet))


@command("pack")
@click.argument("source", metavar="DUMPS|DATASET")
@click.option("--out", required=True, metavar="DIR", help="Folder of the new data set.")
@click.option("--data", metavar="FILE", help="The input that the dumps were made from.")
@click.option("--model", metavar="PATH", help="The verifier; specforge needs its final norm.")
@_input_options
@click.option("--delete-dumps", is_flag=True, help="Delete each dump once its sample is on the disk.")
@click.pass_obj
def pack(options: Options, /, **values: Any) -> Result:
    """Pack dumps into a data set, or write a data set again in another format."""
    from patchkit.commands import data as commands

    return commands.pack(**values, quiet=options.quiet)


@command("validate")
@click.argument("folder", metavar="DATASET")
@click.option("--verifier", metavar="PATH", help="The verifier [default: the one the data set names].")
@click.option("--workers", type=click.IntRange(min=1), help="Threads [default: cores].")
@click.option(
    "--recompute",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Run the verifier on N samples and compare.",
)
@click.pass_obj
def validate(options: Options, /, **values: Any) -> Result:
    """Check every file of a data set; exit 1 and name each that is wrong."""
    from patchkit.commands import data as commands

    return commands.validate(**values, quiet=options.quiet)


@click.group("vocab")
def vocab() -> None:
    """Build, copy and check the drafter's vocabulary."""


def _target_options(function: Callable[..., Any]) -> Callable[..., Any]:
    size = click.option("--target-size", "target", type=click.IntRange(min=1), help="Tokens of the target.")
    return size(
        click.option("--verifier", metavar="PATH", help="Model to take the target's size from.")(function)
    )


@command("build")
@click.argument("folder", metavar="DATASET")
@click.option(
    "--draft-size", "draft", type=click.IntRange(min=1), required=True, help="Tokens of the drafter."
)
@_target_options
@click.pass_obj
def vocab_build(_options: Options, /, **values: Any) -> Result:
    """Choose the tokens that count most often in DATASET, and write d2t.npy and t2d.npy there."""
    from patchkit.commands import data as commands

    return commands.vocab_build(**values)


@command("copy")
@click.argument("source", metavar="FROM")
@click.argument("folder", metavar="DATASET")
@_target_options
@click.pass_obj
def vocab_copy(_options: Options, /, **values: Any) -> Result:
    """Copy the mapping in the folder FROM to DATASET, once it is proven sound."""
    from patchkit.commands import data as commands

    return commands.vocab_copy(**values)


@command("check")
@click.argument("folder", metavar="DATASET")
@_target_options
@click.pass_obj
def vocab_check(_options: Options, /, **values: Any) -> Result:
    """Check the mapping of DATASET; exit 1 if it is wrong."""
    from patchkit.commands import data as commands

    return commands.vocab_check(**values)


for one in (vocab_build, vocab_copy, vocab_check):
    vocab.add_command(one)


class _Train(click.Command):
    """Keeps the trainer's arguments after ``--`` apart."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["patchkit.trainer"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command("train", cls=_Train, epilog="Arguments after '--' go to the trainer.")
@global_options
@click.option("--dataset", required=True, metavar="DIR", help="The data set; it must validate.")
@click.option("--verifier", required=True, metavar="MODEL", help="The model that the drafter is for.")
@click.option("--save-path", required=True, metavar="DIR", help="Where the trainer saves.")
@click.option("--trainer", type=click.Choice(("speculators", "specforge")), default="speculators")
@click.option("--trainer-python", metavar="EXE", help="Interpreter of the trainer's environment.")
@click.option("--trainer-entry", metavar="FILE", help="A script in place of the trainer's own module.")
@click.pass_context
def train(ctx: click.Context, /, **values: Any) -> Result:
    """Train a drafter on a valid data set, with the engine's tree proven clean and kept so."""
    from patchkit.commands.train import train as run

    options: Options = ctx.obj
    extra = ctx.meta["patchkit.trainer"]
    return run(options.workspace(), **values, extra=extra, quiet=options.quiet)


@click.group("drafter")
def drafter() -> None:
    """Work on a trained drafter."""


@command("config")
@click.argument("folder", metavar="DIR")
@click.option("--serve", required=True, metavar="sglang==R", help="The release that will serve it.")
@click.option("--layers", type=_Layers(), default=(), help="The k it was trained on [default: its config's].")
@click.option("--architecture", metavar="NAME", help="The verifier's [default: its config's].")
@click.pass_obj
def drafter_config(_options: Options, /, **values: Any) -> Result:
    """Name the drafter's layers as the serving release reads them, and say why."""
    from patchkit.commands.train import drafter_config as run

    return run(**values)


drafter.add_command(drafter_config)


@command("report")
@click.argument("folder", metavar="DATASET")
@click.option("-o", "--out", metavar="FILE", help="The page [default: report.html in DATASET].")
@click.pass_obj
def report(_options: Options, /, **values: Any) -> Result:
    """Write one HTML page about a data set: what it holds, and how it came to be."""
    from patchkit.commands import data as commands

    return commands.report(**values)
