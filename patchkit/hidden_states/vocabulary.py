"""The drafter's vocabulary: ``d2t`` and ``t2d``, built from token frequencies, copied and checked."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.errors import NO, USAGE, PatchkitError
from patchkit.hidden_states.dataset import VOCABULARY, Dataset
from patchkit.hidden_states.errors import BadSampleError, need
from patchkit.hidden_states.files import durable

if TYPE_CHECKING:
    from collections.abc import Iterator

SPECFORGE_FILE = os.path.join("vocab_mapping", "vocab_mapping.pt")


class VocabularyError(PatchkitError):
    code = "bad-vocabulary"
    exit_code = NO

    def __init__(self, path: str, reason: str, hint: str | None = None) -> None:
        super().__init__(f"{path}: {reason}", path=path, hint=hint)


class DraftSizeError(PatchkitError):
    code = "bad-draft-size"
    exit_code = USAGE

    def __init__(self, draft: int, target: int) -> None:
        super().__init__(f"a drafter's vocabulary of {draft} tokens does not fit a target's of {target}")


class TargetSizeError(PatchkitError):
    """The data have tokens that the named target does not know."""

    code = "bad-target-size"
    exit_code = USAGE

    def __init__(self, token: int, target: int) -> None:
        super().__init__(
            f"the data set has token {token}, a target of {target} tokens ends at {target - 1}",
            hint="give the size of the model that the data were made with, or its folder with --verifier",
        )


@dataclass(frozen=True)
class Mapping:
    """``d2t`` int64 [draft]: the target's token of draft token i is i + d2t[i]. ``t2d`` bool [target]."""

    folder: str
    d2t: Any
    t2d: Any

    @classmethod
    def load(cls, folder: str) -> Mapping:
        """Raises VocabularyError when a file is missing or unreadable."""
        numpy = need("numpy")
        arrays = []
        for name in VOCABULARY:
            path = os.path.join(folder, name)
            try:
                loaded = numpy.load(path, allow_pickle=False)
            except FileNotFoundError:
                raise VocabularyError(path, "no such file", "patchkit vocab build makes it") from None
            except (ValueError, EOFError, OSError) as error:
                raise VocabularyError(path, f"no numpy array ({error})") from None
            if not isinstance(loaded, numpy.ndarray):
                raise VocabularyError(path, "an archive of arrays, not one array")
            arrays.append(loaded)
        return cls(folder, *arrays)

    @classmethod
    def of(cls, dataset: Dataset, target: int | None = None) -> Mapping:
        """The mapping in the data set, checked, for a target of ``target`` tokens.

        SpecForge reads a file of its own, which must say the same. Raises VocabularyError.
        """
        mapping = cls.load(dataset.folder)
        mapping.check(target)
        if dataset.format.name == "specforge":
            _check_specforge(os.path.join(dataset.folder, SPECFORGE_FILE), mapping)
        return mapping

    @classmethod
    def build(cls, counts: Counter[int], draft: int, target: int) -> Mapping:
        """The ``draft`` most frequent tokens, of equally frequent ones the lower; filled up from 0.

        Raises DraftSizeError, TargetSizeError.
        """
        numpy = need("numpy")
        if not 0 < draft <= target:
            raise DraftSizeError(draft, target)
        if counts and max(counts) >= target:
            raise TargetSizeError(max(counts), target)
        chosen = [token for token, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:draft]]
        if len(chosen) < draft:
            have = set(chosen)
            chosen += [token for token in range(target) if token not in have][: draft - len(chosen)]
        ordered = numpy.array(sorted(chosen), dtype=numpy.int64)
        t2d = numpy.zeros(target, dtype=numpy.bool_)
        t2d[ordered] = True
        return cls("", ordered - numpy.arange(draft, dtype=numpy.int64), t2d)

    @property
    def tokens(self) -> Any:
        """The target's tokens that the drafter knows, int64 [draft]."""
        numpy = need("numpy")
        return self.d2t + numpy.arange(len(self.d2t), dtype=numpy.int64)

    def check(self, target: int | None = None) -> None:
        """Raises VocabularyError unless both arrays say the same, for a target of ``target`` tokens."""
        numpy = need("numpy")
        d2t, t2d = (os.path.join(self.folder, name) for name in VOCABULARY)
        if self.d2t.dtype != numpy.int64 or self.d2t.ndim != 1 or len(self.d2t) == 0:
            raise VocabularyError(d2t, f"is {self.d2t.dtype} {list(self.d2t.shape)}, not int64 [draft]")
        if self.t2d.dtype != numpy.bool_ or self.t2d.ndim != 1:
            raise VocabularyError(t2d, f"is {self.t2d.dtype} {list(self.t2d.shape)}, not bool [target]")
        if target is not None and len(self.t2d) != target:
            raise VocabularyError(t2d, f"is for {len(self.t2d)} tokens, the target has {target}")
        tokens = self.tokens
        if int(tokens.min()) < 0 or int(tokens.max()) >= len(self.t2d):
            raise VocabularyError(d2t, f"leads outside the target's {len(self.t2d)} tokens: not offsets?")
        if bool((numpy.diff(tokens) <= 0).any()):
            raise VocabularyError(d2t, "its tokens do not ascend: not offsets?")
        if int(self.t2d.sum()) != len(tokens) or not bool(self.t2d[tokens].all()):
            raise VocabularyError(t2d, f"does not mark exactly the {len(tokens)} tokens of d2t.npy")

    def coverage(self, counts: Counter[int]) -> float:
        """The share of the counted tokens that the drafter can say."""
        total = sum(counts.values())
        known = sum(count for token, count in counts.items() if token < len(self.t2d) and self.t2d[token])
        return known / total if total else 0.0

    def save(self, dataset: Dataset) -> list[str]:
        """Write the files into the data set, for SpecForge its own one as well; returns the paths."""
        numpy = need("numpy")
        paths = []
        for name, values in zip(VOCABULARY, (self.d2t, self.t2d), strict=True):
            paths.append(os.path.join(dataset.folder, name))
            with durable(paths[-1]) as file:
                numpy.save(file, values, allow_pickle=False)
        if dataset.format.name == "specforge":
            torch = need("torch")
            paths.append(os.path.join(dataset.folder, SPECFORGE_FILE))
            os.makedirs(os.path.dirname(paths[-1]), exist_ok=True)
            with durable(paths[-1]) as file:
                values = {"d2t": torch.from_numpy(self.d2t), "t2d": torch.from_numpy(self.t2d)}
                torch.save(values, file)
        return paths


def has_mapping(dataset: Dataset) -> bool:
    """Whether there is a mapping, or a part of one, that a trainer could be given."""
    own = dataset.format.name == "specforge" and os.path.exists(os.path.join(dataset.folder, SPECFORGE_FILE))
    return own or dataset.vocabulary() is not None


def _check_specforge(path: str, mapping: Mapping) -> None:
    torch = need("torch")
    again = "patchkit vocab build or copy writes it anew"
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise VocabularyError(path, "no such file", again) from None
    except Exception as error:  # noqa: BLE001 (unpickling raises anything)
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise VocabularyError(path, f"cannot be loaded ({reason[0]})", again) from None
    for name, wanted in (("d2t", mapping.d2t), ("t2d", mapping.t2d)):
        found = loaded.get(name) if isinstance(loaded, dict) else None
        expected = torch.from_numpy(wanted)
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype
        if not same or not torch.equal(found, expected):
            raise VocabularyError(path, f"its {name} is not that of {name}.npy", again)


def count_tokens(dataset: Dataset) -> Counter[int]:
    """How often each token counts for the loss."""
    numpy = need("numpy")
    counts: Counter[int] = Counter()
    for ids, mask in _token_rows(dataset):
        tokens, times = numpy.unique(ids[mask.astype(bool)], return_counts=True)
        counts.update(dict(zip(tokens.tolist(), times.tolist(), strict=True)))
    return counts


def _token_rows(dataset: Dataset) -> Iterator[tuple[Any, Any]]:
    for row in range(dataset.samples):
        tokens = dataset.row_tokens(row)
        if tokens is None:
            sample = dataset.read(row)
            tokens = sample.input_ids, sample.loss_mask
        ids, mask = tokens
        if ids.shape != mask.shape or (len(ids) and int(ids.min()) < 0):
            raise BadSampleError(dataset.path(row), "tokens", "its ids are none, or not as many as its mask")
        yield ids.numpy(), mask.numpy()
