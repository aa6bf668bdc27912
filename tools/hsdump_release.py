"""Pin the hsdump patches to releases of SGLang.

    python -m tools.hsdump_release 0.5.24      # add a release: fetches its wheel
    python -m tools.hsdump_release --all       # write every variant again, after a change of hs_dump.py

A release whose model file equals another's joins that variant. The dump's code itself is
``tools/hsdump/hs_dump.py``, which each patch adds to the tree.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

from patchkit.catalog import load_patch, release_key
from patchkit.diff import Content, Diff, compare, parse, render
from patchkit.manifest import Manifest
from tools.hsdump import wheels
from tools.hsdump.models import MODELS, Model

CHECKOUT = Path(__file__).resolve().parent.parent
DUMP_SOURCE = CHECKOUT / "tools" / "hsdump" / "hs_dump.py"
DUMP_PATH = "sglang/srt/hs_dump.py"
MODE = 0o644  # of every plain file that pip installs

PATCH_TOML = """\
schema = 1
name = "{name}"
distribution = "sglang"
summary = "{summary}"
after = []
conflicts = [{conflicts}]

[env]
SGLANG_HS_DUMP_DIR = "/dev/shm/hsdump"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--all", action="store_true", help="write the pinned releases again too")
    parser.add_argument("--patches", type=Path, default=CHECKOUT / "patches")
    options = parser.parse_args()
    for model in MODELS:
        folder = options.patches / model.patch
        pinned = set(load_patch(str(folder)).releases) if (folder / "patch.toml").exists() else set()
        if not options.all and set(options.releases) <= pinned:
            continue
        releases = sorted(pinned | set(options.releases), key=release_key)
        print(f"{model.patch}: {len(releases)} releases in {pin(model, releases, folder)} variants")


def pin(model: Model, releases: list[str], folder: Path) -> int:
    """Write the patch folder of ``model`` for exactly these releases; returns the number of variants."""
    dump = DUMP_SOURCE.read_bytes()
    variants: dict[str, tuple[list[str], dict[str, bytes], dict[str, bytes]]] = {}
    for release in releases:
        sources = wheels.sources(release)
        path, edited = model.edit(sources)
        key = hashlib.sha256(path.encode() + sources[path]).hexdigest()
        variant = variants.setdefault(key, ([], {path: sources[path]}, {DUMP_PATH: dump, path: edited}))
        variant[0].append(release)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "patch.toml").write_text(patch_toml(model), encoding="utf-8")
    wanted = {"patch.toml"}
    for served, before, after in variants.values():
        stem = f"sglang-{served[0]}"
        patch, manifest = render_variant(model.patch, served, before, after)
        (folder / f"{stem}.patch").write_bytes(patch)
        (folder / f"{stem}.manifest.json").write_bytes(manifest)
        wanted |= {f"{stem}.patch", f"{stem}.manifest.json"}
    for name in os.listdir(folder):
        if name not in wanted:
            (folder / name).unlink()
    return len(variants)


def render_variant(
    patch: str, releases: list[str], before: dict[str, bytes], after: dict[str, bytes]
) -> tuple[bytes, bytes]:
    """The bytes of the diff and of its manifest, from file contents by path."""
    sections = []
    for path in sorted(after):
        old = Content(before[path], MODE) if path in before else None
        section = compare(path, old, Content(after[path], MODE))
        if section is not None:
            sections.append(section)
    diff_bytes = render(Diff(patch, tuple(sections)))
    manifest = Manifest.build(
        parse(diff_bytes, name=patch),
        lambda path: Content(before[path], MODE) if path in before else None,
        patch=patch,
        distribution="sglang",
        releases=releases,
        on=(),
        diff_bytes=diff_bytes,
    )
    return diff_bytes, manifest.to_json()


def patch_toml(model: Model) -> str:
    """Each hsdump patch adds the same hs_dump.py, so no two of them fit in one stack."""
    others = sorted(other.patch for other in MODELS if other is not model)
    summary = f"Dump chosen layers' hidden states during prefill ({model.title})"
    return PATCH_TOML.format(
        name=model.patch, summary=summary, conflicts=", ".join(f'"{name}"' for name in others)
    )


if __name__ == "__main__":
    main()
