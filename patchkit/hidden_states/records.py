"""What ``dataset.json`` and a line of ``samples.jsonl`` must have: anybody may have edited them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Checks = dict[str, tuple[str, "Callable[[Any], bool]"]]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _some(value: Any) -> bool:
    return type(value) is int and value > 0


def _ascending(value: Any) -> bool:
    """At least two k, since the last one is the last state."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(_count(one) for one in value)
        and all(one < other for one, other in itertools.pairwise(value))
    )


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _skipped(value: Any) -> bool:
    return isinstance(value, list) and all(
        _object(one) and "line" in one and _text(one.get("reason")) for one in value
    )


_RECORD: Checks = {
    "layers": ("a list of at least two layers that ascend", _ascending),
    "hidden_size": ("a positive number", _some),
    "samples": ("a positive number", _some),
    "tokens": ("a positive number", _some),
    "loss_tokens": ("a number", _count),
    "bytes": ("a positive number", _some),
    "samples_sha256": ("a digest", _text),
    "last_state": ("a text", _text),
    "origin": ("an object", _object),
    "input": ("an object", _object),
    "verifier": ("a path or null", lambda one: one is None or _text(one)),
    "patchkit": ("a version", _text),
}
_INPUT: Checks = {
    "files": ("an object", _object),
    "skipped": ("a list of lines with their reasons", _skipped),
    "cut": ("a number", _count),
    "max_length": ("a number or null", lambda one: one is None or _count(one)),
}
_ENTRY: Checks = {
    "row": ("a number", _count),
    "line": ("a number", _count),
    "bytes": ("a number", _count),
    "tokens": ("a positive number", _some),
    "loss_tokens": ("a number", _count),
    "sequence_sha256": ("a digest", _text),
    "mask_xxh3": ("a digest", _text),
    "layers": ("a list of states", lambda one: isinstance(one, list) and all(_state(each) for each in one)),
    "statistics": ("an object", _object),
}


def check_record(path: str, record: dict[str, Any]) -> None:
    """Raise DatasetError unless ``dataset.json`` at ``path`` has all that is read of it."""
    _require(path, record, _RECORD)
    _require(path, record["input"], _INPUT, "input.")


def check_entry(label: str, entry: Any, row: int, layers: Sequence[int]) -> None:
    """Raise DatasetError unless ``entry`` is the line of ``row``, with R(k) for each k of ``layers``."""
    if not isinstance(entry, dict):
        raise DatasetError(label, "no JSON object")
    _require(label, entry, _ENTRY)
    if entry["row"] != row:
        raise DatasetError(label, f"is row {entry['row']}, row {row} should be there")
    packed = [one["k"] for one in entry["layers"]]
    if packed != list(layers):
        raise DatasetError(label, f"the states of {packed} were packed, dataset.json says {list(layers)}")
    for name in ("norm", "std"):
        numbers = entry["statistics"].get(name)
        good = isinstance(numbers, list) and all(type(one) in (int, float) for one in numbers)
        if not good or len(numbers) != len(layers):
            raise DatasetError(label, f"'statistics.{name}' is missing or has no number for each state")


def _state(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _count(value.get("k"))
        and _text(value.get("xxh3"))
        and isinstance(value.get("edges"), list)
        and len(value["edges"]) == 4
    )


def _require(label: str, values: dict[str, Any], checks: Checks, prefix: str = "") -> None:
    for key, (what, good) in checks.items():
        if key not in values or not good(values[key]):
            raise DatasetError(label, f"'{prefix}{key}' is missing or not {what}")
