"""``patchkit lint``: check whole ``patches/`` folders without an installed distribution."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchkit import diff
from patchkit.catalog import MANIFEST_SUFFIX, Patch, load_patch
from patchkit.diff.names import show
from patchkit.errors import PatchkitError
from patchkit.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from patchkit.catalog import Variant
    from patchkit.diff.model import Content, Diff


class LintError(PatchkitError):
    """Something in a patches folder that no command can use, or that contradicts something else there."""

    code = "lint"

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}", path=path)


@dataclass
class Linted:
    """What was looked at, and all that is wrong with it."""

    patches: list[str] = field(default_factory=list)
    variants: int = 0
    problems: list[PatchkitError] = field(default_factory=list)


def lint(folders: Sequence[str], known: Iterable[str] = ()) -> Linted:
    """Check every patch in the folders. ``known`` are further names that may be referred to."""
    found = Linted()
    patches: dict[str, Patch] = {}
    for folder in folders:
        for entry in sorted(os.listdir(folder)):
            path = os.path.join(folder, entry)
            if not os.path.isdir(path):
                continue
            if not os.path.isfile(os.path.join(path, "patch.toml")):
                if any(name.endswith((".patch", MANIFEST_SUFFIX)) for name in os.listdir(path)):
                    found.problems.append(LintError(path, "holds a patch, but no patch.toml"))
                continue
            found.patches.append(entry)
            try:
                patches.setdefault(entry, load_patch(path))
            except PatchkitError as error:
                found.problems.append(error)
    for patch in patches.values():
        _check_variants(patch, found, {*patches, *known})
        _check_names(patch, found, {*patches, *known})
    _check_cycles(patches, "after", found)
    _check_cycles(patches, "members", found)
    return found


def _check_names(patch: Patch, found: Linted, known: set[str]) -> None:
    path = os.path.join(patch.folder, "patch.toml")
    for key in ("after", "conflicts", "members"):
        listed: tuple[str, ...] = getattr(patch, key)
        found.problems += [
            LintError(path, f"{key} names '{name}', which is no patch")
            for name in listed
            if name not in known
        ]
        if len(set(listed)) != len(listed):
            found.problems.append(LintError(path, f"{key} names a patch twice"))
        if patch.name in listed:
            found.problems.append(LintError(path, f"{key} names the patch itself"))
    both = sorted(set(patch.after) & set(patch.conflicts))
    found.problems += [LintError(path, f"'{name}' is in after and in conflicts") for name in both]


def _check_cycles(patches: dict[str, Patch], key: str, found: Linted) -> None:
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            loop = (*trail[trail.index(name) :], name)
            if len(loop) > 2:  # a patch that names itself is told already
                path = os.path.join(patches[name].folder, "patch.toml")
                found.problems.append(LintError(path, f"{key} goes round in a circle: {' -> '.join(loop)}"))
            return
        if name in done or name not in patches:
            return
        done.add(name)
        for other in getattr(patches[name], key):
            visit(other, (*trail, name))

    for name in sorted(patches):
        visit(name, ())


def _check_variants(patch: Patch, found: Linted, known: set[str]) -> None:
    entries = sorted(os.listdir(patch.folder))
    stems = [name.removesuffix(MANIFEST_SUFFIX) for name in entries if name.endswith(MANIFEST_SUFFIX)]
    diffs = [name.removesuffix(".patch") for name in entries if name.endswith(".patch")]
    toml = os.path.join(patch.folder, "patch.toml")
    if patch.members and (stems or diffs):
        found.problems.append(LintError(toml, "has members, and a diff of its own"))
    if not (patch.members or stems or diffs or os.path.isdir(os.path.join(patch.folder, "edit"))):
        found.problems.append(LintError(toml, "has neither a diff nor members"))
    for stem in diffs:
        if stem not in stems:
            path = os.path.join(patch.folder, stem + ".patch")
            found.problems.append(LintError(path, f"has no manifest; 'patchkit pin {patch.name}' writes it"))
    served: dict[tuple[str, tuple[str, ...]], str] = {}
    for stem in stems:
        path = os.path.join(patch.folder, stem + MANIFEST_SUFFIX)
        try:
            with open(path, "rb") as file:
                manifest = Manifest.from_json(file.read(), name=path)
        except PatchkitError as error:
            found.problems.append(error)
            continue
        found.variants += 1
        _check_manifest(patch, manifest, path, found, known)
        for release in manifest.releases:
            other = served.setdefault((release, manifest.on), path)
            if other != path:
                found.problems.append(
                    LintError(path, f"serves {release}, and so does {os.path.basename(other)}")
                )
        if stem not in diffs:
            found.problems.append(LintError(path, f"pins {stem}.patch, which is not there"))
            continue
        _check_diff(_variant(manifest, path), found)


def _variant(manifest: Manifest, path: str) -> Variant:
    from patchkit.catalog import Variant

    return Variant(manifest, path, path.removesuffix(MANIFEST_SUFFIX) + ".patch")


def _check_manifest(patch: Patch, manifest: Manifest, path: str, found: Linted, known: set[str]) -> None:
    if manifest.patch != patch.name:
        found.problems.append(LintError(path, f"is for patch '{manifest.patch}', not '{patch.name}'"))
    if manifest.distribution != patch.distribution:
        found.problems.append(
            LintError(path, f"is for {manifest.distribution}, patch.toml says {patch.distribution}")
        )
    found.problems += [
        LintError(path, f"is made on '{name}', which is no patch")
        for name in manifest.on
        if name not in known
    ]
    if manifest.to_json() != _read(path):
        found.problems.append(LintError(path, f"is not as 'patchkit pin {patch.name}' writes it"))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _check_diff(variant: Variant, found: Linted) -> None:
    try:
        parsed = diff.parse(variant.diff_bytes(), name=variant.diff_path)
    except PatchkitError as error:
        found.problems.append(error)
        return
    touched = {path for file in parsed.files for path in (file.path, file.old_path)}
    pinned = {path for pin in variant.manifest.files for path in (pin.path, pin.source or pin.path)}
    for path in sorted(touched ^ pinned):
        side = (
            "changed by the diff but not pinned" if path in touched else "pinned but not changed by the diff"
        )
        # A file that comes and goes within a diff leaves nothing to pin.
        if path in pinned or not _passes(parsed, path):
            found.problems.append(LintError(variant.manifest_path, f"{show(path)} is {side}"))
    _check_new_files(parsed, variant, found)


def _passes(parsed: Diff, path: str) -> bool:
    sections = [file for file in parsed.files if path in (file.path, file.old_path)]
    return len(sections) > 1


def _check_new_files(parsed: Diff, variant: Variant, found: Linted) -> None:
    """A created file's pins follow from the diff alone."""

    def nothing(_: str) -> Content | None:
        return None

    for pin in variant.manifest.files:
        sections = [file for file in parsed.files if pin.path in (file.path, file.old_path)]
        if pin.change != "add" or len(sections) != 1 or sections[0].change != "add":
            continue
        made = diff.apply(type(parsed)(parsed.name, tuple(sections)), nothing)[pin.path]
        if made is None or pin.after is None or not pin.after.matches(made):
            found.problems.append(
                LintError(
                    variant.manifest_path, f"{show(pin.path)} is pinned to other bytes than the diff makes"
                )
            )
