"""``torch.save`` files whose bytes depend on their content alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import BadSampleError, need

if TYPE_CHECKING:
    from patchkit.hidden_states.direct import DirectFile


def save(values: dict[str, Any], file: DirectFile) -> None:
    """Save to an open file: given a path, torch would put the file's own name into it."""
    torch = need("torch")
    output = _Output(file)
    try:
        # A view would be saved with all of the memory that it looks into.
        torch.save({key: _own(value) for key, value in values.items()}, output)
    except RuntimeError:
        if output.error is not None:
            raise output.error from None
        raise


class _Output:
    """The file, and the first error of writing to it: torch tells of a full disk as a fault of its own."""

    def __init__(self, file: DirectFile) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _own(value: Any) -> Any:
    if isinstance(value, list):
        return [_own(one) for one in value]
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if whole and value.is_contiguous() else value.clone()


def load(path: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The dict in the file, mapped, not read. Raises BadSampleError when it lacks one of ``keys``."""
    torch = need("torch")
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise BadSampleError(path, "missing", "no such file") from None
    except Exception as error:  # noqa: BLE001 (unpickling raises anything)
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BadSampleError(path, "unreadable", reason[0]) from None
    missing = [key for key in keys if not isinstance(loaded, dict) or key not in loaded]
    if missing:
        raise BadSampleError(path, "unreadable", f"has no {', '.join(missing)}")
    return dict(loaded)
