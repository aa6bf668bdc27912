"""What can be wrong with dumps, input rows and data sets."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from patchkit.errors import IO_FAILED, NO, REFUSED, USAGE, PatchkitError

if TYPE_CHECKING:
    from collections.abc import Sequence


class MissingExtraError(PatchkitError):
    code = "missing-extra"
    exit_code = USAGE

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"this command needs '{module}', which is not installed",
            hint=f"pip install 'sgl-patchkit[{extra}]'",
        )


def need(module: str, extra: str = "extract") -> Any:
    """The imported ``module``; raises MissingExtraError with the name of the extra that brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".", maxsplit=1)[0]:
            raise
        raise MissingExtraError(module.split(".", maxsplit=1)[0], extra) from None


class BadRowError(PatchkitError):
    """One row of the input that cannot become a sample; ``line`` counts from 1."""

    code = "bad-row"

    def __init__(self, path: str, line: int, reason: str) -> None:
        self.line = line
        self.reason = reason
        super().__init__(f"{path}:{line}: {reason}", path=f"{path}:{line}")


class BadInputError(PatchkitError):
    """The input file, or too many of its rows, cannot be used."""

    code = "bad-input"

    def __init__(self, path: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{path}: {reason}", path=path, hint=hint)


class BadDumpError(PatchkitError):
    """A dump's file does not hold what its ``.json`` says, or its rows are incomplete."""

    code = "bad-dump"

    def __init__(self, path: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{path}: {reason}", path=path, hint=hint)


class ForeignDumpError(BadDumpError):
    """A dump of another server than the one whose states the data set has."""

    code = "foreign-dump"


class SpoolFolderError(PatchkitError):
    """The folder that our own server would dump into is not ours."""

    code = "spool-folder"
    exit_code = REFUSED

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(f"{folder}: {reason}", path=folder, hint="name another folder with --spool")


class BadSampleError(PatchkitError):
    """States that do not belong to their tokens; ``kind`` is stable and says what is wrong."""

    code = "bad-sample"
    exit_code = NO

    def __init__(self, path: str, kind: str, reason: str) -> None:
        self.kind = kind
        self.reason = reason
        super().__init__(f"{path}: {kind}: {reason}", path=path)


class DatasetError(PatchkitError):
    """The folder is no data set, or not one that this command can use."""

    code = "bad-dataset"

    def __init__(self, folder: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{folder}: {reason}", path=folder, hint=hint)


class IncompleteError(PatchkitError):
    """Rows of the data set for which there is no dump."""

    code = "incomplete-dataset"
    exit_code = NO

    def __init__(self, folder: str, missing: Sequence[int], total: int, hint: str) -> None:
        self.missing = list(missing)
        some = ", ".join(str(row) for row in self.missing[:8]) + (", …" if len(self.missing) > 8 else "")
        super().__init__(
            f"{folder}: {len(self.missing)} of {total} rows have no states (rows {some})",
            path=folder,
            hint=hint,
        )


class ModelError(PatchkitError):
    """A checkpoint folder that does not say what we need of it."""

    code = "bad-model"
    exit_code = USAGE

    def __init__(self, path: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{path}: {reason}", path=path, hint=hint)


class UnknownNormError(ModelError):
    """A checkpoint whose final norm is none that patchkit can compute."""

    code = "unknown-norm"

    def __init__(self, path: str, model_type: str) -> None:
        self.model_type = model_type
        super().__init__(
            path,
            f"how models of the type {model_type!r} compute their final norm is not known here",
            "use a format that keeps the last state before the norm",
        )


class ServerError(PatchkitError):
    """The engine's server did not start, or ended, or answered with an error."""

    code = "server-failed"
    exit_code = IO_FAILED

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason, hint=hint)


class SpoolLimitError(PatchkitError):
    code = "spool-limit"
    exit_code = REFUSED

    def __init__(self, row: int, needed: int, limit: int) -> None:
        super().__init__(
            f"row {row} alone needs {needed} bytes of dumps, over the limit of {limit}",
            hint="raise --spool-limit, or cut long samples with --max-length",
        )
