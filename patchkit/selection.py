"""Which variant of a patch fits this tree: by release, by what lies below it, and by the files' digests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from patchkit.catalog import release_key
from patchkit.diff import Content
from patchkit.errors import REFUSED, PatchkitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.catalog import Catalog, Patch, Variant
    from patchkit.diff import Diff
    from patchkit.manifest import FilePin
    from patchkit.state import Applied
    from patchkit.target import Target

Reader = Callable[[str], Content | None]


class UnknownReleaseError(PatchkitError):
    """No variant serves the installed release."""

    code = "unknown-release"
    exit_code = REFUSED

    def __init__(self, patch: Patch, target: Target) -> None:
        nearest = nearest_release(target.release, patch.releases)
        self.nearest = nearest
        if nearest is None:
            message, hint = "no variant at all", "run 'patchkit lint' on its folder"
        else:
            message = f"no variant for {target.label}; the nearest is for {nearest}"
            hint = f"make one with 'patchkit port {patch.name} --to {target.release}'"
        super().__init__(f"'{patch.name}' has {message}", path=target.root, hint=hint)


class NoVariantOnStackError(PatchkitError):
    """No variant was made for what lies below it in the stack."""

    code = "no-variant-on-stack"
    exit_code = REFUSED

    def __init__(self, patch: str, below: Sequence[str]) -> None:
        on = " ".join(f"--on {name}" for name in below)
        if below:
            message = f"'{patch}' has no variant on top of {', '.join(below)}, which changes the same files"
            hint = f"restore {' '.join(below)} first, or add one with 'patchkit import {on}'"
        else:
            message, hint = (
                f"'{patch}' has no variant for the pristine files",
                "apply the patches that it stands on first",
            )
        super().__init__(message, hint=hint)


class WrongFileError(PatchkitError):
    """A file that is not what the variant was pinned to."""

    code = "wrong-file"
    exit_code = REFUSED

    def __init__(self, path: str, reason: str, target: Target) -> None:
        super().__init__(
            f"{path} {reason}",
            path=path,
            hint=f"reinstall {target.distribution}, or see 'patchkit check' for what differs",
        )


class OutsideDistributionError(PatchkitError):
    """The diff touches a path outside the distribution."""

    code = "outside-distribution"
    exit_code = REFUSED

    def __init__(self, where: str, path: str, target: Target) -> None:
        super().__init__(
            f"{path} is outside {target.distribution} ({', '.join(target.packages)})",
            path=where,
            hint="'patchkit import --only-package' leaves such files out",
        )


class OrderError(PatchkitError):
    """``after`` or ``conflicts`` of a patch forbids this stack."""

    code = "patch-order"
    exit_code = REFUSED


def choose(patch: Patch, target: Target, below: Sequence[Applied], read: Reader) -> Variant:
    """The one variant that fits; raises the error that says best why none does."""
    fitting = [variant for variant in patch.variants if _serves(variant, target)]
    if not fitting:
        raise UnknownReleaseError(patch, target)
    stacked = [variant for variant in fitting if set(variant.manifest.on) == _overlapping(variant, below)]
    if not stacked:
        raise NoVariantOnStackError(
            patch.name, sorted(set().union(*(_overlapping(one, below) for one in fitting)))
        )
    wrong = {variant.manifest_path: _first_wrong(variant, read) for variant in stacked}
    for variant in stacked:
        if wrong[variant.manifest_path] is None:
            return variant
    # A tree that was patched by hand has none of the files from before but all of those from after.
    for variant in stacked:
        if all(_is_after(pin, read) for pin in variant.manifest.files):
            return variant
    path, reason = wrong[stacked[0].manifest_path] or ("", "")
    known = target.release or ", ".join(stacked[0].manifest.releases)
    raise WrongFileError(path, reason.format(f"{target.distribution} {known}"), target)


def _serves(variant: Variant, target: Target) -> bool:
    # A folder that does not say its release is identified by the digests alone; a local version label
    # (0.5.9+cu124) names another build of the same sources, which the digests then prove.
    return target.release is None or public(target.release) in {
        public(one) for one in variant.manifest.releases
    }


def public(release: str) -> str:
    return release.split("+", 1)[0].lower()


def _overlapping(variant: Variant, below: Sequence[Applied]) -> set[str]:
    own = {path for pin in variant.manifest.files for path in (pin.path, pin.source)}
    return {applied.patch for applied in below if applied.touched() & own}


def is_before(pin: FilePin, read: Reader) -> bool:
    """Whether the file of ``pin`` is as before the patch."""
    content = read(pin.source or pin.path)
    return content is None if pin.before is None else content is not None and pin.before.matches(content)


def _first_wrong(variant: Variant, read: Reader) -> tuple[str, str] | None:
    for pin in variant.manifest.files:
        path = pin.source or pin.path
        content = read(path)
        if pin.before is None:
            if content is not None:
                return path, "exists, and the patch creates it"
        elif content is None:
            return path, "is missing from {}"
        elif not pin.before.matches(content):
            return path, "is not the file of {}"
    return None


def _is_after(pin: FilePin, read: Reader) -> bool:
    content = read(pin.path)
    if pin.after is None or content is None:
        return pin.after is None and content is None
    return pin.after.matches(content)


def check_order(patch: Patch, stack: Sequence[str], catalog: Catalog) -> None:
    """``after`` must lie below, ``conflicts`` nowhere; a conflict named by either side counts."""
    missing = [name for name in patch.after if name not in stack]
    if missing:
        raise OrderError(
            f"'{patch.name}' must be applied after {', '.join(missing)}",
            hint=f"run 'patchkit apply {' '.join(missing)} {patch.name}'",
        )
    for name in stack:
        if name in patch.conflicts or (name in catalog and patch.name in catalog[name].conflicts):
            raise OrderError(
                f"'{patch.name}' conflicts with '{name}', which is applied", hint=f"restore {name} first"
            )


def check_inside(parsed: Diff, target: Target) -> None:
    for file in parsed.files:
        for path in (file.path, file.source):
            if path is not None and not target.owns(path):
                raise OutsideDistributionError(f"{parsed.name}:{file.line}", path, target)


def nearest_release(release: str | None, known: Sequence[str]) -> str | None:
    """The newest known release not after ``release``, else the oldest."""
    if not known:
        return None
    ordered = sorted(known, key=release_key)
    if release is None:
        return ordered[-1]
    below = [one for one in ordered if release_key(one) <= release_key(release)]
    return below[-1] if below else ordered[0]
