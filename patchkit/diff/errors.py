"""Why a diff is refused: each error names the patch, the line in it, and what is wrong there."""

from __future__ import annotations

from patchkit.errors import PatchkitError


class DiffError(PatchkitError):
    """A diff that is not applied. ``patch`` and ``line`` (1-based) say where; ``file`` is the target."""

    code = "diff"

    def __init__(
        self, message: str, *, patch: str, line: int, file: str | None = None, hint: str | None = None
    ) -> None:
        self.patch = patch
        self.line = line
        self.file = file
        where = f"{patch}:{line}"
        super().__init__(f"{where}: {message}", path=where, hint=hint)


class NotADiffError(DiffError):
    """Empty, or text without a single file section."""

    code = "not-a-diff"


class MalformedDiffError(DiffError):
    """A header or a line that no diff has at this place."""

    code = "diff-malformed"


class MiscountedHunkError(DiffError):
    """The numbers of a hunk's header are not those of its body, or of the hunks around it."""

    code = "diff-miscounted"


class OverlappingHunksError(DiffError):
    """Two hunks change the same lines."""

    code = "diff-overlap"


class ConflictMarkersError(DiffError):
    """The diff adds unresolved conflict markers."""

    code = "conflict-markers"


class UnsupportedDiffError(DiffError):
    """Well formed, but nothing that is ever applied: symbolic links, copies, binary without data."""

    code = "diff-unsupported"


class UnsafePathError(DiffError):
    """A path that is not a plain one below the root."""

    code = "unsafe-path"


class PathCollisionError(DiffError):
    """Two paths of one diff that are the same file, on some file system or on all of them."""

    code = "path-collision"


class DiffTooLargeError(DiffError):
    """The diff is larger than any that is read."""

    code = "diff-too-large"


class MismatchError(DiffError):
    """The present content is not what the diff changes. ``target_line`` is 1-based, 0 for the whole file."""

    code = "diff-mismatch"

    def __init__(
        self,
        message: str,
        *,
        patch: str,
        line: int,
        file: str,
        target_line: int = 0,
        hint: str | None = None,
    ) -> None:
        self.target_line = target_line
        super().__init__(message, patch=patch, line=line, file=file, hint=hint)


class TargetMissingError(MismatchError):
    """The diff changes, renames or deletes a file that is not there."""

    code = "file-missing"


class TargetExistsError(MismatchError):
    """The diff creates a file where one is."""

    code = "file-exists"


class NotReversibleError(DiffError):
    """The diff does not hold the old bytes (git binary without its second half)."""

    code = "diff-not-reversible"
