"""Check every sample of a data set, and say what became of one that is wrong."""

from __future__ import annotations

import os
import re
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit.errors import PatchkitError
from patchkit.hidden_states.dataset import SAMPLES
from patchkit.hidden_states.errors import BadSampleError, DatasetError
from patchkit.hidden_states.pack import in_parallel
from patchkit.hidden_states.sample import check, fingerprint, state_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from patchkit.hidden_states.dataset import Dataset
    from patchkit.hidden_states.model import FinalNorm, ModelConfig
    from patchkit.hidden_states.sample import Sample

_SUFFIXES = {"speculators": (".safetensors",), "speculators-v1": ("pt",), "specforge": (".ckpt", ".ckpt.gz")}


@dataclass
class Findings:
    """The totals, and an error for each thing that is wrong."""

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    size: int = 0
    seconds: float = 0.0
    normed_checked: bool = False
    errors: list[PatchkitError] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "loss_tokens": self.loss_tokens,
            "bytes": self.size,
            "seconds": round(self.seconds, 3),
            "errors": len(self.errors),
            "norm_checked": self.normed_checked,
        }


def validate(
    dataset: Dataset,
    norm: FinalNorm | None,
    config: ModelConfig | None = None,
    *,
    workers: int,
    progress: Callable[[Findings], None] | None = None,
) -> Findings:
    """Look at every file.

    ``norm`` and ``config`` are the verifier's: with them, a last state on the wrong side of its norm is
    found, and layers, widths and a vocabulary that are not the verifier's.
    """
    began = time.monotonic()
    findings = Findings(normed_checked=norm is not None)
    findings.errors += _check_whole(dataset, config)
    lengths = array("q")
    fits = config is None or config.hidden_size == dataset.hidden_size
    judge = _Judge(dataset, norm if fits else None)
    try:
        for entry, size, error in in_parallel(judge, dataset.entries(), workers):
            findings.samples += 1
            lengths.extend([0] * (entry["row"] + 1 - len(lengths)))  # they come out of order
            lengths[entry["row"]] = entry["tokens"]
            findings.tokens += entry["tokens"]
            findings.loss_tokens += entry["loss_tokens"]
            findings.size += size
            if error is not None:
                findings.errors.append(error)
            if progress is not None:
                progress(findings)
        for path, reason in dataset.format.faults(dataset.folder, lengths):
            findings.errors.append(DatasetError(path, reason))
        findings.errors += _check_totals(dataset, findings)
    except DatasetError as error:
        # Its lines or its Arrow file: without them there is nothing to compare the other samples with.
        findings.errors.append(error)
    findings.seconds = time.monotonic() - began
    return findings


class _Judge:
    """Judges one line of ``samples.jsonl`` and the file that belongs to it."""

    def __init__(self, dataset: Dataset, norm: FinalNorm | None) -> None:
        self.dataset = dataset
        self.norm = norm

    def __call__(self, entry: dict[str, Any]) -> tuple[dict[str, Any], int, PatchkitError | None]:
        row = int(entry["row"])
        path = self.dataset.path(row)
        size = 0
        try:
            size = os.stat(path).st_size
        except OSError:
            return entry, 0, BadSampleError(path, "missing", "no such file")
        try:
            self._judge(entry, path)
        except BadSampleError as error:
            return entry, size, error
        return entry, size, None

    def _judge(self, entry: dict[str, Any], path: str) -> None:
        row = int(entry["row"])
        sample = self.dataset.read(row)
        tokens = self.dataset.row_tokens(row)
        try:
            check(sample, path, None if tokens is None else tokens[0], self.dataset.hidden_size)
        except BadSampleError as error:
            if error.kind == "rows":
                self._accuse_other(sample, entry, path)
            raise
        self._check_norm(sample, path)
        found = fingerprint(sample)
        if found["sequence_sha256"] != entry["sequence_sha256"]:
            raise BadSampleError(path, "tokens", "its token ids are not those that were packed")
        if found["mask_xxh3"] != entry["mask_xxh3"]:
            raise BadSampleError(path, "loss-mask", "its loss mask is not the one that was packed")
        if found["layers"] != entry["layers"]:
            self._explain(sample, found, entry, path)

    def _check_norm(self, sample: Sample, path: str) -> None:
        if self.norm is None:
            return
        made = self.norm.made(sample.states[-1])
        if made and not self.dataset.format.normed:
            raise BadSampleError(
                path, "post-norm", "its last state went through the final norm; it must be before"
            )
        if not made and self.dataset.format.normed:
            raise BadSampleError(
                path, "pre-norm", "its last state did not go through the verifier's final norm"
            )

    def _explain(self, sample: Sample, found: dict[str, Any], entry: dict[str, Any], path: str) -> None:
        """Raise the BadSampleError that says best how the states differ from those that were packed."""
        before = entry["layers"]
        names = [f"R({k})" for k in sample.layers]
        changed = [place for place, one in enumerate(found["layers"]) if one != before[place]]
        for place in changed:
            for other, one in enumerate(before):
                if other != place and one["xxh3"] == found["layers"][place]["xxh3"]:
                    raise BadSampleError(
                        path, "swapped-layers", f"{names[place]} holds the state {names[other]}"
                    )
        self._accuse_other(sample, entry, path)
        for place in changed:
            new, old = found["layers"][place]["edges"], before[place]["edges"]
            if sample.tokens > 2 and (new[0] == old[1] or new[2] == old[3]):
                raise BadSampleError(path, "shifted", f"row t of {names[place]} holds the state of token t+1")
            if sample.tokens > 2 and (new[1] == old[0] or new[3] == old[2]):
                raise BadSampleError(path, "shifted", f"row t of {names[place]} holds the state of token t-1")
        raise BadSampleError(
            path, "changed", f"{', '.join(names[place] for place in changed)} is not what was packed"
        )

    def _accuse_other(self, sample: Sample, entry: dict[str, Any], path: str) -> None:
        """Raise when a state is one that was packed for another row. Reads all lines: only for bad ones."""
        own = {one["xxh3"] for one in entry["layers"]}
        found = {state_digest(state): k for state, k in zip(sample.states, sample.layers, strict=False)}
        for other in self.dataset.entries():
            if other["row"] == entry["row"] or other["sequence_sha256"] == entry["sequence_sha256"]:
                continue
            for one in other["layers"]:
                if one["xxh3"] in found and one["xxh3"] not in own:
                    raise BadSampleError(
                        path, "other-sample", f"R({found[one['xxh3']]}) holds the state of row {other['row']}"
                    )


def _check_whole(dataset: Dataset, config: ModelConfig | None) -> list[PatchkitError]:
    """Errors of the data set as a whole: provenance, its list of samples, files that should not be there."""
    errors: list[PatchkitError] = []
    folder, record = dataset.folder, dataset.record
    if dataset.samples_digest() != record.get("samples_sha256"):
        errors.append(DatasetError(folder, f"{SAMPLES} is not the one that dataset.json was written for"))
    origin = record.get("origin") or {}
    errors += [
        DatasetError(folder, f"its provenance does not say the {name.replace('_', ' ')}")
        for name in ("model_path", "release", "patch_digest", "layers")
        if not origin.get(name)
    ]
    if origin.get("layers") and list(origin["layers"]) != list(dataset.layers):
        errors.append(
            DatasetError(folder, f"says layers {list(dataset.layers)}, its origin layers {origin['layers']}")
        )
    side = "after the final norm" if dataset.format.normed else "before the final norm"
    if record["last_state"] != side:
        reason = f"says that the last state is {record['last_state']}, in its format it is {side}"
        errors.append(DatasetError(folder, reason))
    if config is not None:
        errors += _check_sizes(dataset, config)
    suffix = _SUFFIXES[dataset.format.name]
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(root, name)
            if not name.endswith(suffix) or _is_sample(dataset, path):
                continue
            errors.append(DatasetError(path, "is no sample of this data set, but its readers would take it"))
    return [*errors, *_check_vocabulary(dataset, config)]


def _is_sample(dataset: Dataset, path: str) -> bool:
    number = re.search(r"_(\d{1,18})\.", os.path.basename(path))
    return number is not None and int(number[1]) < dataset.samples and dataset.path(int(number[1])) == path


def _check_sizes(dataset: Dataset, config: ModelConfig) -> list[PatchkitError]:
    """Errors of a data set whose states cannot be the verifier's."""
    errors: list[PatchkitError] = []
    if dataset.hidden_size != config.hidden_size:
        reason = f"its states are {dataset.hidden_size} wide, those of {config.path} {config.hidden_size}"
        errors.append(DatasetError(dataset.folder, reason, "name the model that they came from"))
    if dataset.layers[-1] != config.layers:
        reason = f"its last state is R({dataset.layers[-1]}), that of {config.path} is R({config.layers})"
        errors.append(DatasetError(dataset.folder, reason, "name the model that the states came from"))
    return errors


def _check_vocabulary(dataset: Dataset, config: ModelConfig | None) -> list[PatchkitError]:
    from patchkit.hidden_states.vocabulary import Mapping, has_mapping

    if not has_mapping(dataset):
        return []
    try:
        Mapping.of(dataset, config.vocab_size if config else None)
    except PatchkitError as error:
        return [error]
    return []


def _check_totals(dataset: Dataset, findings: Findings) -> list[PatchkitError]:
    errors: list[PatchkitError] = []
    for name, found in (
        ("samples", findings.samples),
        ("tokens", findings.tokens),
        ("loss_tokens", findings.loss_tokens),
        ("bytes", findings.size),
    ):
        if dataset.record.get(name) != found:
            errors.append(
                DatasetError(
                    dataset.folder, f"dataset.json says {dataset.record.get(name)} {name}, found {found}"
                )
            )
    return errors
