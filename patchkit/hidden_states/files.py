"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from contextlib import closing, contextmanager
from typing import IO, TYPE_CHECKING, Any

from patchkit.hidden_states.direct import DirectFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def durable(path: str, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """A file to write that gets its name when the block ends well, on the disk before that with ``sync``."""
    with _named_when_whole(path, lambda fresh: open(fresh, "wb"), sync=sync) as file:
        yield file


@contextmanager
def durable_and_large(path: str, *, sync: bool = True) -> Iterator[DirectFile]:
    """The same for a file that is not to fill the page cache."""
    with _named_when_whole(path, lambda fresh: closing(DirectFile(fresh)), sync=sync) as file:
        yield file


@contextmanager
def _named_when_whole(path: str, opened: Callable[[str], Any], *, sync: bool) -> Iterator[Any]:
    folder, name = os.path.split(path)
    fresh = os.path.join(folder, f".{name}.tmp")
    try:
        with opened(fresh) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException as error:
        try:
            os.unlink(fresh)
        except FileNotFoundError:
            pass
        if isinstance(error, OSError) and error.filename is None:
            error.filename = path  # a write to a full disk does not say where
        raise
    if sync:
        sync_folder(folder or ".")


def parsed(path: str) -> tuple[dict[str, Any], str | None]:
    """The JSON object in the file, and the reason why there is none."""
    try:
        with open(path, "rb") as file:
            loaded = json.loads(file.read())
    except FileNotFoundError:
        return {}, "no such file"
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON ({error})"
    return (loaded, None) if isinstance(loaded, dict) else ({}, "no JSON object")


def sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: str, value: Any) -> None:
    with durable(path) as file:
        file.write(json.dumps(value, indent=2, sort_keys=True).encode("ascii") + b"\n")
