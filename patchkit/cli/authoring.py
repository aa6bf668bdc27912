"""``import``, ``port``, ``pin``, ``new``, ``refresh`` and ``lint``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from patchkit.cli.options import Options, command
from patchkit.diff.names import show
from patchkit.errors import REFUSED
from patchkit.report import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.authoring.base import Base
    from patchkit.authoring.import_ import Imported
    from patchkit.catalog import Catalog
    from patchkit.manifest import Manifest

_on = click.option(
    "--on", metavar="NAME", multiple=True, help="A patch below this one; repeatable, bottom first."
)
_release = click.option(
    "--release", metavar="R", help="Release that the diff is for; refused unless it is the installed one."
)
_name = click.argument("name")


@command("import")
@click.argument("source", metavar="FILE|DIR")
@click.option("--name", required=True, help="Name of the patch to make.")
@click.option("--dist", "distribution", metavar="D", help="Distribution that the patch is for.")
@_release
@click.option(
    "-p", "--strip", type=click.IntRange(0), metavar="N", help="Leading components to cut [default: found]."
)
@click.option("--prefix", metavar="DIR", help="Folder to put before the paths [default: found].")
@_on
@click.option("--only-package", is_flag=True, help="Leave out paths that an installed tree does not have.")
@click.option("--rebase", is_flag=True, help="Accept hunks whose old lines stand, once, at another line.")
@click.pass_obj
def import_(
    options: Options,
    source: str,
    name: str,
    distribution: str | None,
    release: str | None,
    strip: int | None,
    prefix: str | None,
    on: tuple[str, ...],
    only_package: bool,
    rebase: bool,
) -> Result:
    """Take in a diff that was written elsewhere, and pin it."""
    from patchkit.authoring.import_ import import_ as run

    catalog, base = _base(options, name, distribution, release, on)
    done = run(
        source,
        name=name,
        base=base,
        catalog=catalog,
        strip=strip,
        prefix=prefix,
        only_package=only_package,
        move=rebase,
    )
    return _imported(done, [f"read with {done.placement.label}"])


@command("port")
@_name
@click.option("--to", "release", metavar="RELEASE", help="The installed release [default: whatever it is].")
@_on
@click.pass_obj
def port(options: Options, name: str, release: str | None, on: tuple[str, ...]) -> Result:
    """Make a variant for the installed release from the nearest one."""
    from patchkit.authoring.port import port as run

    catalog, base = _base(options, name, None, release, on)
    done = run(name, base=base, catalog=catalog)
    return _imported(done.imported, [f"ported from {done.source} to {base.release}"])


def _imported(done: Imported, first: Sequence[str]) -> Result:
    lines: list[str | tuple[str, str]] = [
        *first,
        *(("warn", f"left out {show(path)}") for path in done.left_out),
        *(("warn", f"moved {show(one.path)}: line {one.old_line} to {one.new_line}") for one in done.moved),
        ("good", f"{'wrote' if done.changed else 'unchanged:'} {_relative(done.stem)}.patch"),
    ]
    data = {
        **_pins(done.patch, done.manifest),
        "path": done.stem + ".patch",
        "strip": done.placement.strip,
        "prefix": done.placement.prefix,
        "left_out": list(done.left_out),
        "moved": [vars(one) for one in done.moved],
        "changed": done.changed,
    }
    return Result(data, lines, _listed(done.manifest))


@command("pin")
@_name
@_release
@_on
@click.pass_obj
def pin(options: Options, name: str, release: str | None, on: tuple[str, ...]) -> Result:
    """Work out a patch's manifest again from its diff and the installed files."""
    from patchkit.authoring.pin import pin as run

    catalog, base = _base(options, name, None, release, on)
    done = run(name, base=base, catalog=catalog)
    data = {**_pins(name, done.manifest), "path": done.manifest_path, "action": done.action}
    line = f"{done.action} {_relative(done.manifest_path)}: {', '.join(done.manifest.releases)}"
    return Result(data, [("good", line)], _listed(done.manifest))


@command("new")
@_name
@click.argument("files", nargs=-1, metavar="[FILE...]")
@click.option("--dist", "distribution", metavar="D", help="Distribution that the patch is for.")
@_on
@click.pass_obj
def new(
    options: Options, name: str, files: tuple[str, ...], distribution: str | None, on: tuple[str, ...]
) -> Result:
    """Open a scratch copy of FILEs (root-relative paths) to edit; ``refresh`` makes the patch of it."""
    from patchkit.authoring.scratch import new as run

    catalog, base = _base(options, name, distribution, None, on)
    done = run(name, files, base=base, catalog=catalog)
    lines: list[str | tuple[str, str]] = [
        *(f"opened {show(path)}" for path in done.added),
        *(("dim", f"already open {show(path)}") for path in done.kept),
        ("good", f"edit the files in {_relative(done.folder)}, then run 'patchkit refresh {name}'"),
    ]
    data = {
        "patch": name,
        "folder": done.folder,
        "files": list(done.files),
        "added": list(done.added),
        "kept": list(done.kept),
    }
    return Result(data, lines)


@command("refresh")
@_name
@_on
@click.pass_obj
def refresh(options: Options, name: str, on: tuple[str, ...]) -> Result:
    """Turn the edits in the scratch copy into the patch."""
    from patchkit.authoring.refresh import refresh as run

    catalog, base = _base(options, name, None, None, on)
    done = run(name, base=base, catalog=catalog)
    lines: list[str | tuple[str, str]] = [
        ("good", f"{'wrote' if done.changed else 'unchanged:'} {_relative(done.stem)}.patch")
    ]
    if done.dropped:
        releases = ", ".join(done.dropped)
        lines.append(("warn", f"no longer for {releases}: 'patchkit pin {name}' there, or 'patchkit port'"))
    data = {
        **_pins(name, done.manifest),
        "path": done.stem + ".patch",
        "changed": done.changed,
        "dropped": list(done.dropped),
    }
    return Result(data, lines, _listed(done.manifest))


@command("lint")
@click.argument("folders", nargs=-1, metavar="[DIR...]")
@click.pass_obj
def lint(options: Options, folders: tuple[str, ...]) -> Result:
    """Check whole folders of patches [default: --patches]."""
    from patchkit.authoring.lint import lint as run
    from patchkit.catalog import Catalog

    given = folders or options.patches
    catalog = Catalog(given)
    done = run([folder for folder in catalog.folders if os.path.isdir(folder)], catalog.names())
    data = {"patches": done.patches, "variants": done.variants, "problems": len(done.problems)}
    line = f"{len(done.patches)} patches, {done.variants} variants: "
    if done.problems:
        return Result(data, [("bad", f"{line}{len(done.problems)} problems")], (), REFUSED, done.problems)
    return Result(data, [("good", line + "nothing wrong")])


def _base(
    options: Options, name: str, distribution: str | None, release: str | None, on: Sequence[str]
) -> tuple[Catalog, Base]:
    """The catalog, and the files that the patch ``name`` is made against."""
    from patchkit.authoring import scratch, store
    from patchkit.authoring.base import Base

    for folder in options.patches[:1]:
        os.makedirs(folder, exist_ok=True)  # the first folder is where a new patch goes
    workspace = options.workspace()
    catalog = workspace.catalog
    if distribution is None and name in catalog:
        distribution = catalog[name].distribution
    target = workspace.target(store.distribution_of(catalog, name, distribution))
    below = on or scratch.below(catalog, name, release or target.release)
    return catalog, Base(target, catalog, release=release, on=below)


def _pins(name: str, manifest: Manifest) -> dict[str, object]:
    return {
        "patch": name,
        "distribution": manifest.distribution,
        "releases": list(manifest.releases),
        "on": list(manifest.on),
        "diff_sha256": manifest.diff_sha256,
        "files": [file.to_json() for file in manifest.files],
    }


def _listed(manifest: Manifest) -> list[str]:
    return [
        f"  {file.change:<7} {show(file.path)}" + (f" (from {show(file.source)})" if file.source else "")
        for file in manifest.files
    ]


def _relative(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
