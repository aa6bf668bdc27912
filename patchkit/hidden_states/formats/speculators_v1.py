"""The older format of ``speculators`` (0.3, 0.4; ``--legacy-data`` to 0.7): one ``.pt`` a sample."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import BadSampleError, need
from patchkit.hidden_states.files import durable, parsed
from patchkit.hidden_states.formats.torch_file import load, save
from patchkit.hidden_states.sample import Sample, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from patchkit.hidden_states.direct import DirectFile
    from patchkit.hidden_states.plan import Plan

LENGTHS = "sample_lengths.json"


class SpeculatorsV1:
    """``data_<row>.pt``: ``input_ids``, ``loss_mask`` and a list of states, the last before the norm.

    Its reader takes every file of the tree whose name ends in "pt", so nothing else may.
    """

    name = "speculators-v1"
    normed = False

    def path(self, row: int) -> str:
        return f"data_{row}.pt"

    def size(self, tokens: int, states: int, hidden: int) -> int:
        return tokens * (states * hidden * 2 + 16)

    def write(self, file: DirectFile, sample: Sample) -> None:
        values = {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "hidden_states": sample.states,
        }
        save(values, file)

    def read(self, path: str, layers: tuple[int, ...], tokens: Any) -> Sample:  # noqa: ARG002
        loaded = load(path, ("input_ids", "loss_mask", "hidden_states"))
        states = loaded["hidden_states"]
        if not isinstance(states, list):
            raise BadSampleError(path, "shape", "hidden_states is no list of [T, H]")
        states = [tensor(path, f"hidden_states[{at}]", state, 2) for at, state in enumerate(states)]
        ids, mask = (tensor(path, name, loaded[name], 1) for name in ("input_ids", "loss_mask"))
        return Sample(ids, mask, states, layers)

    def tokens(self, folder: str) -> Plan | None:  # noqa: ARG002
        return None

    def finish(self, folder: str, plan: Plan) -> None:
        need("torch")
        with durable(os.path.join(folder, LENGTHS)) as file:
            file.write(b"{")
            for row in range(len(plan)):
                separator = b", " if row else b""
                file.write(separator + json.dumps(str(row)).encode() + b": " + str(plan.length(row)).encode())
            file.write(b"}\n")

    def faults(self, folder: str, lengths: Sequence[int]) -> Iterator[tuple[str, str]]:
        path = os.path.join(folder, LENGTHS)
        found, reason = parsed(path)
        if reason is not None:
            yield path, reason
            return
        if len(found) != len(lengths):
            yield path, f"has {len(found)} lengths for {len(lengths)} samples"
        for row, tokens in enumerate(lengths):
            if found.get(str(row)) != tokens:
                yield path, f"says {found.get(str(row))!r} for row {row}, its sample has {tokens} tokens"
                return
