"""The strongest check: run the verifier itself on a few samples and see whose states are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import BadSampleError, ModelError, need

if TYPE_CHECKING:
    from collections.abc import Iterator

    from patchkit.errors import PatchkitError
    from patchkit.hidden_states.dataset import Dataset
    from patchkit.hidden_states.sample import Sample

# Engines sum in another order than Transformers, in bf16; a wrong state is far outside of this.
TOLERANCE = 0.1


def recompute(dataset: Dataset, verifier: str | None, count: int) -> list[PatchkitError]:
    """Compare evenly spread samples with what Transformers computes; an error for each wrong one.

    The difference of a state is the median over rows of |found - expected| / |expected|. Raises ModelError.
    """
    if verifier is None:
        raise ModelError(dataset.folder, "names no verifier", "name it with --verifier")
    model = _Verifier(verifier)
    step = max(1, dataset.samples // count)
    errors: list[PatchkitError] = []
    for row in list(range(0, dataset.samples, step))[:count]:
        try:
            sample = dataset.read(row)
            _compare(sample, model.states(sample.input_ids), model.normed, dataset.path(row))
        except BadSampleError as error:
            errors.append(error)
    return errors


class _Verifier:
    """The verifier in Transformers, with every R(k) of a prompt."""

    def __init__(self, path: str) -> None:
        torch, transformers = need("torch"), need("transformers")
        transformers.utils.logging.disable_progress_bar()
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True
            ).eval()
        except Exception as error:  # noqa: BLE001 (whatever the model's code raises)
            reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise ModelError(path, f"Transformers cannot load it ({reason[0]})") from None
        final = getattr(self.model.get_decoder(), "norm", None)
        if final is None:
            raise ModelError(path, "its decoder has no final norm of that name")
        self.final: Any = final

    def states(self, input_ids: Any) -> list[Any]:
        """R(0) to R(n), float32 [T, H]; the last one before the final norm."""
        torch = need("torch")
        caught: list[Any] = []
        hook = self.final.register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0]))
        try:
            with torch.no_grad():
                out = self.model(input_ids=input_ids.unsqueeze(0), output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        return [*(state[0] for state in out.hidden_states[:-1]), caught[0][0]]

    def normed(self, state: Any) -> Any:
        torch = need("torch")
        with torch.no_grad():
            return self.final(state)


def _compare(sample: Sample, expected: list[Any], norm: Any, path: str) -> None:
    last = len(expected) - 1
    for k, found in zip(sample.layers, sample.states, strict=True):
        normed = sample.normed and k == last
        right = norm(expected[k]) if normed else expected[k]
        if found.shape != right.shape:
            raise BadSampleError(
                path, "shape", f"R({k}) is {list(found.shape)}, computed {list(right.shape)}"
            )
        difference = _difference(found, right)
        if difference <= TOLERANCE:
            continue
        better = [
            (value, kind, what)
            for kind, what, candidate in _candidates(expected, norm, k, normed=normed)
            if (value := _difference(found[: len(candidate)], candidate)) <= TOLERANCE
            or value < difference / 4
        ]
        if better:
            _, kind, what = min(better)
            raise BadSampleError(path, kind, f"R({k}) holds {what}, as the verifier computes it")
        raise BadSampleError(
            path, "not-computed", f"R({k}) differs by {difference:.0%} from what the verifier computes"
        )


def _candidates(expected: list[Any], norm: Any, k: int, *, normed: bool) -> Iterator[tuple[str, str, Any]]:
    """What a wrong state may be instead: (kind, words, state)."""
    last = len(expected) - 1
    if k == last:
        yield (
            ("pre-norm", "the last state before the norm", expected[k])
            if normed
            else (
                "post-norm",
                "the last state after the norm",
                norm(expected[k]),
            )
        )
    for other, state in enumerate(expected):
        if other != k:
            yield "wrong-layer", f"R({other})", state
    right = norm(expected[k]) if normed else expected[k]
    yield "shifted", "in row t the state of token t+1", right[1:]
    rolled = right.roll(1, 0)
    rolled[0] = right[0]
    yield "shifted", "in row t the state of token t-1", rolled


def _difference(found: Any, expected: Any) -> float:
    torch = need("torch")
    found = found.to(torch.float32)
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-9)).median())
