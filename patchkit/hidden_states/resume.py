"""What a resumed run must share with the run that began the data set."""

from __future__ import annotations

import os
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import BadInputError, DatasetError
from patchkit.hidden_states.source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from patchkit.hidden_states.dataset import Dataset

_HINT = "resume with the same options, or name a new folder"


def require_same(folder: str, known: Mapping[str, Any], wanted: Mapping[str, Any], data: str | None) -> None:
    """Compare what the data set remembers of its beginning with what is ``wanted`` now.

    ``known`` are its settings, or its record once it is finished. ``data`` is the input, where it is named
    again. Raises DatasetError, BadInputError.
    """
    begun = {**known, **{name: known["input"].get(name) for name in ("samples", "max_length")}}
    for name, value in wanted.items():
        found = begun.get(name)
        if found == value:
            continue
        if name == "source":
            raise DatasetError(folder, "was begun from another source", _HINT)
        raise DatasetError(folder, f"was begun with {name} {_said(found)}, not {_said(value)}", _HINT)
    if data is None:
        return
    if not os.path.exists(data):
        raise BadInputError(data, "no such file")
    if known["input"]["files"] != Source(data).record()["files"]:
        raise DatasetError(folder, f"was begun with another {data}", "resume with the same input")


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


def require_made_of(made: Dataset, source: Dataset) -> None:
    """Refuse unless the finished data set ``made`` holds the samples of ``source``. Raises DatasetError."""
    # The last states differ where the final norm was applied in between.
    end = None if made.format.normed == source.format.normed else -1
    same = made.layers == source.layers and made.record["origin"] == source.record["origin"]
    if same:
        none: dict[str, Any] = {}
        pairs = zip_longest(made.entries(), source.entries(), fillvalue=none)
        same = all(_states(one, end) == _states(other, end) for one, other in pairs)
    if not same:
        raise DatasetError(made.folder, f"was not made of {source.folder}", "name a new folder")


def _states(entry: dict[str, Any], end: int | None) -> tuple[Any, ...]:
    names = ("row", "line", "sequence_sha256", "mask_xxh3")
    return (*(entry.get(name) for name in names), (entry.get("layers") or [])[:end])
