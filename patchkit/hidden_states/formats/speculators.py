"""The format of ``speculators`` 0.5 to 0.9: an Arrow data set and one safetensors file for each row."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import BadSampleError, need
from patchkit.hidden_states.files import durable, parsed, write_json
from patchkit.hidden_states.plan import COLUMNS, Plan
from patchkit.hidden_states.sample import Sample, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from patchkit.hidden_states.direct import DirectFile

ARROW = "data-00000-of-00001.arrow"
BLOCK_BYTES = 1 << 20  # interleaved at a time: stays in the processor's cache until it is written
INFO = {"citation": "", "description": "", "features": None, "homepage": "", "license": ""}
STATE = {
    "_data_files": [{"filename": ARROW}],
    "_format_columns": list(COLUMNS),
    "_format_kwargs": {},
    "_format_type": "torch",
    "_output_all_columns": False,
    "_split": None,
}


class Speculators:
    """``token_ids`` int64 [T] and ``hidden_states`` bf16 [T, states, H] in ``hidden_states/hs_<row>``.

    The file is written by hand, because the states of a token lie together in it but not in the dump:
    they are interleaved block by block into the file's own buffer, with no second copy of the sample.
    """

    name = "speculators"
    normed = False

    def path(self, row: int) -> str:
        return f"hidden_states/hs_{row}.safetensors"

    def size(self, tokens: int, states: int, hidden: int) -> int:
        return tokens * (states * hidden * 2 + 8)

    def write(self, file: DirectFile, sample: Sample) -> None:
        numpy, torch = need("numpy"), need("torch")
        tokens, count, hidden = sample.tokens, len(sample.states), sample.hidden_size
        ids_end, states_size = tokens * 8, tokens * count * hidden * 2
        header = json.dumps(
            {
                "hidden_states": {
                    "dtype": "BF16",
                    "shape": [tokens, count, hidden],
                    "data_offsets": [ids_end, ids_end + states_size],
                },
                "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, ids_end]},
            },
            separators=(",", ":"),
        ).encode("ascii")
        header += b" " * (-len(header) % 8)
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(numpy.ascontiguousarray(sample.input_ids, dtype="<i8").tobytes())
        rows = max(1, BLOCK_BYTES // (count * hidden * 2))
        for start in range(0, tokens, rows):
            parts = [state[start : start + rows] for state in sample.states]
            size = parts[0].shape[0] * count * hidden * 2
            room = torch.frombuffer(file.room(size), dtype=torch.bfloat16)
            torch.stack(parts, dim=1, out=room.view(-1, count, hidden))
            file.filled(size)

    def read(self, path: str, layers: tuple[int, ...], tokens: Any) -> Sample:
        safetensors = need("safetensors")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                ids, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        except FileNotFoundError:
            raise BadSampleError(path, "missing", "no such file") from None
        except Exception as error:  # noqa: BLE001 (the library has errors of its own)
            raise BadSampleError(path, "unreadable", str(error)) from None
        ids, states = tensor(path, "token_ids", ids, 1), tensor(path, "hidden_states", states, 3)
        if states.shape[1] != len(layers):
            raise BadSampleError(
                path, "shape", f"hidden_states is {list(states.shape)}, not [T, {len(layers)}, H]"
            )
        mask = None if tokens is None else tokens[1]
        return Sample(ids, mask, list(states.unbind(1)), layers)

    def tokens(self, folder: str) -> Plan | None:
        return Plan(os.path.join(folder, ARROW))

    def finish(self, folder: str, plan: Plan) -> None:
        """Write what ``Dataset.save_to_disk`` would, without its random fingerprint."""
        with durable(os.path.join(folder, ARROW)) as file:
            plan.copy_to(file, COLUMNS)
        write_json(os.path.join(folder, "dataset_info.json"), INFO)
        state = {**STATE, "_fingerprint": plan.digest()[:16]}
        write_json(os.path.join(folder, "state.json"), state)

    def faults(self, folder: str, lengths: Sequence[int]) -> Iterator[tuple[str, str]]:
        plan = Plan(os.path.join(folder, ARROW))
        state = {**STATE, "_fingerprint": plan.digest()[:16]}
        for name, wanted in (("dataset_info.json", INFO), ("state.json", state)):
            path = os.path.join(folder, name)
            found, reason = parsed(path)
            if reason is not None:
                yield path, reason
                continue
            for key, value in wanted.items():
                if key not in found or found[key] != value:
                    yield path, f"says {found.get(key)!r} for {key}, was written with {value!r}"
        if len(plan) != len(lengths):
            yield plan.path, f"has {len(plan)} rows of tokens for {len(lengths)} samples"
        for row, (found, tokens) in enumerate(zip(plan.lengths, lengths, strict=False)):
            if found != tokens:
                yield plan.path, f"says seq_len {found} for row {row}, its sample has {tokens} tokens"
                return
