"""SpecForge's offline format: one ``.ckpt`` for each sample, with the last state *after* the norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import BadSampleError, need
from patchkit.hidden_states.formats.torch_file import load, save
from patchkit.hidden_states.sample import Sample, tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from patchkit.hidden_states.direct import DirectFile
    from patchkit.hidden_states.plan import Plan

ROWS_A_FOLDER = 2000


class SpecForge:
    """``aux_hidden_state`` [1, T, 3H] and ``hidden_state`` [1, T, H] in ``rows_<a>-<b>/data_<row>.ckpt``."""

    name = "specforge"
    normed = True

    def path(self, row: int) -> str:
        first = row - row % ROWS_A_FOLDER
        return f"rows_{first}-{first + ROWS_A_FOLDER}/data_{row}.ckpt"

    def size(self, tokens: int, states: int, hidden: int) -> int:
        return tokens * (states * hidden * 2 + 16)

    def write(self, file: DirectFile, sample: Sample) -> None:
        torch = need("torch")
        if not sample.normed:
            raise ValueError("the final norm was not applied to the last state")
        values = {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "hidden_state": sample.states[-1].unsqueeze(0),
            "aux_hidden_state": torch.cat(sample.states[:-1], dim=1).unsqueeze(0),
        }
        save(values, file)

    def read(self, path: str, layers: tuple[int, ...], tokens: Any) -> Sample:  # noqa: ARG002
        loaded = load(path, ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state"))
        last, others = (tensor(path, name, loaded[name], 3) for name in ("hidden_state", "aux_hidden_state"))
        ids, mask = (tensor(path, name, loaded[name], 1) for name in ("input_ids", "loss_mask"))
        if last.shape[0] != 1 or others.shape[0] != 1:
            raise BadSampleError(path, "shape", "the states are not [1, T, …]")
        hidden = last.shape[2]
        if others.shape[2] != hidden * (len(layers) - 1):
            raise BadSampleError(
                path,
                "shape",
                f"aux_hidden_state has width {others.shape[2]}, not {len(layers) - 1} times {hidden}",
            )
        if hidden == 0:  # nothing to split by
            raise BadSampleError(path, "shape", f"hidden_state is {list(last.shape)}")
        states = [*others[0].split(hidden, dim=1), last[0]]
        return Sample(ids, mask, states, layers, normed=True)

    def tokens(self, folder: str) -> Plan | None:  # noqa: ARG002
        return None

    def finish(self, folder: str, plan: Plan) -> None:
        """Nothing beside the samples."""

    def faults(self, folder: str, lengths: Sequence[int]) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        yield from ()
