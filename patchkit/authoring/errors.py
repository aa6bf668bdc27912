"""What stops an author, each with the next thing to do. All are raised before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkit.diff.names import show
from patchkit.errors import REFUSED, USAGE, PatchkitError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}" + "s" * (len(items) != 1)


class ReleaseMismatchError(PatchkitError):
    """Another release is installed than the one named."""

    code = "release-mismatch"
    exit_code = REFUSED

    def __init__(self, distribution: str, wanted: str, installed: str | None) -> None:
        self.wanted = wanted
        self.installed = installed
        super().__init__(
            f"{distribution} {installed or '(release unknown)'} is installed, not {wanted}",
            hint=f"name an environment that has {distribution}=={wanted} with --python or --root",
        )


class ReleaseUnknownError(PatchkitError):
    """The folder does not say its release, and no ``--release`` was given."""

    code = "release-unknown"
    exit_code = USAGE

    def __init__(self, distribution: str, root: str) -> None:
        super().__init__(
            f"nothing in {root} says which release of {distribution} it is", path=root, hint="give --release"
        )


class NotPristineError(PatchkitError):
    """A file that the patch is made against is not the one that the wheel installed."""

    code = "not-pristine"
    exit_code = REFUSED

    def __init__(self, path: str, root: str) -> None:
        super().__init__(
            f"{show(path)} in {root} is not the file that the wheel installed",
            path=path,
            hint="restore the tree or reinstall the distribution first",
        )


class StripLevelError(PatchkitError):
    """No strip level, or more than one, makes the diff's paths those of the tree."""

    code = "strip-level"
    exit_code = REFUSED

    def __init__(self, name: str, fits: Sequence[tuple[str, str]], distribution: str, first: str) -> None:
        self.fits = list(fits)
        if fits:
            readings = ", ".join(f"{level} ({path})" for level, path in fits)
            super().__init__(
                f"{name}: {len(fits)} ways to read its paths fit {distribution}: {readings}",
                path=name,
                hint="choose one with -p, and with --prefix where it says so",
            )
        else:
            super().__init__(
                f"{name}: no strip level makes its paths those of {distribution} (first path: {first})",
                path=name,
                hint="is it for this distribution and release?",
            )


class OutsidePackageError(PatchkitError):
    """Paths that the installed tree does not have: tests, docs, other packages of the repository."""

    code = "outside-package"
    exit_code = REFUSED

    def __init__(self, name: str, paths: Sequence[str], distribution: str) -> None:
        self.paths = list(paths)
        super().__init__(
            f"{name}: changes {_count(paths, 'path')} that an installed {distribution} does not have: "
            + ", ".join(show(path) for path in paths),
            path=name,
            hint="--only-package leaves them out and records it",
        )


class HunksMovedError(PatchkitError):
    """Hunks whose old lines stand at another line; ``moved`` are (path, from line, to line)."""

    code = "hunks-moved"
    exit_code = REFUSED

    def __init__(self, name: str, moved: Sequence[tuple[str, int, int]]) -> None:
        self.moved = list(moved)
        places = ", ".join(f"{show(path)}:{old} stands at {new}" for path, old, new in moved)
        super().__init__(
            f"{name}: {_count(moved, 'hunk')} not where the header says: {places}",
            path=name,
            hint="--rebase rewrites the headers",
        )


class VariantExistsError(PatchkitError):
    """Another variant has that file name."""

    code = "variant-exists"
    exit_code = REFUSED

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} exists and says something else", path=path, hint="move it away first")


class OtherDistributionError(PatchkitError):
    """The patch belongs to another distribution."""

    code = "other-distribution"
    exit_code = REFUSED

    def __init__(self, patch: str, has: str, asked: str, path: str) -> None:
        super().__init__(
            f"patch '{patch}' is for {has}, not {asked}", path=path, hint="choose another name for the patch"
        )


class NoDistributionError(PatchkitError):
    """A new patch needs to know which distribution it is for."""

    code = "no-distribution"
    exit_code = USAGE

    def __init__(self, patch: str) -> None:
        super().__init__(
            f"patch '{patch}' does not exist yet", hint="'new' and 'import' make one, with --dist"
        )


class BadNameError(PatchkitError):
    """A patch name that could not be a folder's name."""

    code = "bad-patch-name"
    exit_code = USAGE

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} is no name for a patch",
            hint="letters, digits, '.', '_' and '-', a letter or digit first",
        )


class NotInTreeError(PatchkitError):
    """A file to be opened is not in the installed tree."""

    code = "not-in-tree"
    exit_code = USAGE

    def __init__(self, path: str, root: str) -> None:
        super().__init__(
            f"{show(path)} is no file below {root}", path=path, hint="name files as root-relative paths"
        )


class NothingChangedError(PatchkitError):
    """The scratch copy has no edit."""

    code = "nothing-changed"
    exit_code = REFUSED

    def __init__(self, patch: str, scratch: str) -> None:
        super().__init__(
            f"nothing is changed in the scratch copy of '{patch}'",
            path=scratch,
            hint=f"edit the files in {scratch}",
        )


class ScratchError(PatchkitError):
    """A scratch copy that cannot be read back."""

    code = "bad-scratch"
    exit_code = REFUSED

    def __init__(self, path: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{path}: {reason}", path=path, hint=hint)


class NoDiffsError(PatchkitError):
    """What was to be imported holds no diff."""

    code = "no-diffs"
    exit_code = USAGE

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}", path=path, hint="name a diff, or a folder of .patch or .diff files"
        )


class SeriesError(PatchkitError):
    """A series has no diff of its own."""

    code = "series"
    exit_code = USAGE

    def __init__(self, patch: str, members: Sequence[str]) -> None:
        super().__init__(
            f"'{patch}' is a series and has no diff of its own", hint=f"name one of {', '.join(members)}"
        )
