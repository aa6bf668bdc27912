"""One sample: its checks, its fingerprint and what the report shows of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from patchkit.hidden_states.errors import BadSampleError, need

MEASURED_ROWS = 64  # rows of a sample that the statistics look at, evenly spread


@dataclass
class Sample:
    """``input_ids`` and ``loss_mask`` int64 [T]; ``states`` one bf16 [T, H] for each k of ``layers``.

    The last state is before the final norm unless ``normed`` says otherwise.
    """

    input_ids: Any
    loss_mask: Any
    states: list[Any]
    layers: tuple[int, ...]
    normed: bool = False

    @property
    def tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.states[0].shape[1])


def sequence_key(input_ids: Any) -> str:
    """sha256 in hex of the token ids as little-endian int64: how a sample is found again."""
    numpy = need("numpy")
    return hashlib.sha256(numpy.ascontiguousarray(input_ids, dtype="<i8").tobytes()).hexdigest()


def tensor(label: str, name: str, value: Any, dimensions: int) -> Any:
    """``value``, which must be a plain tensor of so many dimensions. Raises BadSampleError."""
    torch = need("torch")
    if not isinstance(value, torch.Tensor):
        raise BadSampleError(label, "shape", f"{name} is of the type {type(value).__name__}, not a tensor")
    if value.layout != torch.strided or value.device.type != "cpu":
        raise BadSampleError(label, "shape", f"{name} is a {value.layout} tensor on {value.device}")
    if value.dim() != dimensions:
        raise BadSampleError(
            label, "shape", f"{name} is {list(value.shape)}, it must have {dimensions} dimensions"
        )
    return value.detach()


def check(sample: Sample, label: str, expected_ids: Any = None, hidden_size: int | None = None) -> None:
    """Raise BadSampleError unless the states can belong to the tokens.

    These must be ``expected_ids`` and the states ``hidden_size`` wide, where they are given.
    """
    torch = need("torch")
    if sample.tokens == 0:
        raise BadSampleError(label, "empty", "no tokens")
    if sample.input_ids.dtype != torch.int64:
        raise BadSampleError(label, "dtype", f"token ids are {sample.input_ids.dtype}, not int64")
    if expected_ids is not None and not torch.equal(sample.input_ids, expected_ids):
        raise BadSampleError(label, "tokens", _token_difference(sample.input_ids, expected_ids))
    if int(sample.input_ids.min()) < 0:
        raise BadSampleError(label, "tokens", f"has the token id {int(sample.input_ids.min())}")
    if sample.loss_mask is not None:
        if sample.loss_mask.dtype != torch.int64:
            raise BadSampleError(label, "dtype", f"the loss mask is {sample.loss_mask.dtype}, not int64")
        if sample.loss_mask.shape != sample.input_ids.shape:
            raise BadSampleError(
                label, "loss-mask", f"{list(sample.loss_mask.shape)} for {sample.tokens} tokens"
            )
        if not bool(((sample.loss_mask == 0) | (sample.loss_mask == 1)).all()):
            raise BadSampleError(label, "loss-mask", "has values other than 0 and 1")
    if len(sample.states) != len(sample.layers):
        raise BadSampleError(
            label, "shape", f"{len(sample.states)} states for the layers {list(sample.layers)}"
        )
    for k, state in zip(sample.layers, sample.states, strict=True):
        _check_state(label, k, state, sample, hidden_size or sample.hidden_size)


def _check_state(label: str, k: int, state: Any, sample: Sample, hidden_size: int) -> None:
    torch = need("torch")
    if state.dim() != 2 or state.shape[1] != hidden_size or hidden_size == 0:
        raise BadSampleError(label, "shape", f"R({k}) is {list(state.shape)}, not [T, {hidden_size}]")
    if state.shape[0] != sample.tokens:
        raise BadSampleError(label, "rows", f"R({k}) has {state.shape[0]} rows for {sample.tokens} tokens")
    if state.dtype != torch.bfloat16:
        raise BadSampleError(label, "dtype", f"R({k}) is {state.dtype}, not bfloat16")
    low, high = torch.aminmax(state)  # one pass; NaN wins over every number
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        bad = (~torch.isfinite(state)).any(dim=1).nonzero()
        raise BadSampleError(label, "not-finite", f"R({k}) has NaN or infinity from row {int(bad[0])} on")
    if bool(low == high):
        raise BadSampleError(label, "constant", f"R({k}) is {float(low)} everywhere")
    # A buffer that was not filled repeats a row. Equal tokens may well have equal states, others not.
    rows = state[:: max(1, sample.tokens // 8)]
    ids = sample.input_ids[:: max(1, sample.tokens // 8)]
    if len(set(ids.tolist())) > 1 and bool((rows == rows[0]).all()):
        raise BadSampleError(label, "constant", f"R({k}) is the same for different tokens")


def _token_difference(found: Any, expected: Any) -> str:
    if found.shape != expected.shape:
        return f"{found.shape[0]} token ids, expected {expected.shape[0]}"
    at = int((found != expected).nonzero()[0])
    return f"token id {int(found[at])} at {at}, expected {int(expected[at])}"


def fingerprint(sample: Sample) -> dict[str, Any]:
    """What is remembered of a packed sample, to recognise it again and to say what became of it.

    ``layers`` has for each state its ``k``, its digest (xxh3-128 of the bf16 bytes) and ``edges``, the
    digests of its first two and last two rows, by which a shift is recognised.
    """
    return {
        "tokens": sample.tokens,
        "loss_tokens": int(sample.loss_mask.sum()),
        "sequence_sha256": sequence_key(sample.input_ids),
        "mask_xxh3": state_digest(sample.loss_mask),
        "layers": [
            {"k": k, "xxh3": state_digest(state), "edges": edges(state)}
            for k, state in zip(sample.layers, sample.states, strict=True)
        ],
    }


def edges(state: Any) -> list[str]:
    last = state.shape[0] - 1
    return [state_digest(state[row])[:16] for row in (0, min(1, last), max(0, last - 1), last)]


def state_digest(tensor: Any) -> str:
    """xxh3-128 in hex of a tensor's bytes. Against accidents, not against an attacker."""
    torch, xxhash = need("torch"), need("xxhash")
    data = tensor.contiguous().view(torch.uint8).numpy()
    return str(xxhash.xxh3_128_hexdigest(data))


def statistics(sample: Sample) -> dict[str, list[float]]:
    """Per state, over evenly spread rows: the mean Euclidean ``norm`` of a row and the elements' ``std``."""
    torch = need("torch")
    norms, deviations = [], []
    for state in sample.states:
        rows = state[:: max(1, -(-sample.tokens // MEASURED_ROWS))].to(torch.float32)
        norms.append(_rounded(rows.norm(dim=1).mean()))
        deviations.append(_rounded(rows.std(correction=0)))
    return {"norm": norms, "std": deviations}


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")
