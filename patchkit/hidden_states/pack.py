"""Pack dumps into a data set, and turn one format into another."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import BoundedSemaphore, Lock
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.dataset import Dataset, Growing, settle, start
from patchkit.hidden_states.dump import Prompt, Spool, same_origin
from patchkit.hidden_states.errors import BadDumpError, BadSampleError, DatasetError
from patchkit.hidden_states.formats import FORMATS
from patchkit.hidden_states.plan import write_plan
from patchkit.hidden_states.resume import require_same
from patchkit.hidden_states.sample import Sample, check, fingerprint, sequence_key, statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from patchkit.hidden_states.model import FinalNorm
    from patchkit.hidden_states.source import Source


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Packed:
    """A prompt's dump: the ``rows`` that it filled now, of those that it is ``wanted`` for."""

    prompt: Prompt
    wanted: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: int
    size: int


@dataclass
class Packer:
    """Puts prompts into a growing data set; may be called from several threads.

    ``norm`` is needed by a format that keeps the last state after the norm. ``verify`` compares each dump
    with its sha256; ``delete`` removes a dump once its samples are on the disk. ``model_path`` is the model
    that the dumps have to name, where it is known. So many ``workers`` compute at the same time, and as many
    threads more may wait for the disk meanwhile: each has ``threads`` of them call ``pack``.
    """

    growing: Growing
    norm: FinalNorm | None = None
    verify: bool = True
    delete: bool = False
    model_path: str | None = None
    workers: int = field(default_factory=usable_cores)
    # Each of two dumps of equal prompts would fill all of their rows, to the same names: one after the other.
    turns: tuple[Lock, ...] = field(default_factory=lambda: tuple(Lock() for _ in range(64)), repr=False)

    def __post_init__(self) -> None:
        # Without it samples of the same size would all be computed, then all be written, in step.
        self.computing = BoundedSemaphore(self.workers)

    @property
    def threads(self) -> int:
        return 2 * self.workers

    def pack(self, prompt: Prompt) -> Packed:
        """Raises ForeignDumpError, BadDumpError, BadSampleError, OSError; then the dump is still there."""
        known = prompt.key
        if known is not None and not self.growing.plan.find(known):
            return Packed(prompt, (), (), prompt.tokens, 0)
        folder, origin = self.growing.folder, prompt.records[0].origin
        # Before it is looked at: whoever's dump is bad must be known.
        first = self.growing.known_origin() or origin
        same_origin(
            folder, first if self.model_path is None else {**first, "model_path": self.model_path}, prompt
        )
        with self.computing:
            sample = prompt.load(digest=self.verify)
            same_origin(folder, self.growing.adopt(origin, sample.hidden_size)["origin"], prompt)
            wanted = self.growing.plan.find(known or sequence_key(sample.input_ids))
            if not wanted:
                return Packed(prompt, (), (), sample.tokens, 0)
            missing = [row for row in wanted if not self.growing.has(row)]
            ready = self._ready(missing, sample, prompt.label)
        with self.turns[wanted[0] % len(self.turns)]:
            rows = [row for row in ready if not self.growing.has(row)]
            size = sum(self.growing.add(row, *ready[row]) for row in rows)
        if self.delete:
            prompt.delete()
        return Packed(prompt, tuple(wanted), tuple(rows), sample.tokens, size)

    def _ready(
        self, rows: Sequence[int], sample: Sample, label: str
    ) -> dict[int, tuple[Sample, dict[str, Any]]]:
        """The sample as it belongs into each row, and what is remembered of it."""
        if not rows:
            return {}
        masks = {}
        for row in rows:
            ids, masks[row] = self.growing.plan.row(row)
            check(replace(sample, loss_mask=masks[row]), label, ids)
        if self.norm is not None and self.norm.made(sample.states[-1]):
            raise BadSampleError(label, "post-norm", "its last state went through the final norm")
        if self.growing.format.normed:
            sample = normed(sample, self.norm)
        owns = {row: replace(sample, loss_mask=mask) for row, mask in masks.items()}
        return {row: (own, {**fingerprint(own), "statistics": statistics(own)}) for row, own in owns.items()}


def normed(sample: Sample, norm: FinalNorm | None) -> Sample:
    """The sample with the final norm applied to its last state."""
    if sample.normed:
        return sample
    if norm is None:
        raise ValueError("the final norm is needed")
    return replace(sample, states=[*sample.states[:-1], norm(sample.states[-1])], normed=True)


def begin(
    folder: str,
    format_name: str,
    source: Source,
    *,
    skip_bad: bool,
    verifier: str | None,
    layers: Sequence[int] | None = None,
) -> Growing:
    """A new growing data set with the rows of ``source``, of whatever ``layers`` the dumps have by default.

    Raises BadInputError, DatasetError.
    """
    settings: dict[str, Any] = {"format": format_name, "verifier": verifier, "layers": layers}
    path = start(folder, settings)
    write_plan(path, source.rows(skip_bad=skip_bad))
    settle(folder, {**settings, "input": {**source.record(), "samples": source.samples}})
    return Growing(folder)


def pack_dumps(
    spool: Spool,
    packer: Packer,
    *,
    progress: Callable[[Packed], None] | None = None,
) -> list[Packed]:
    """Pack every complete prompt of the folder; returns those that the data set does not want."""
    unwanted = []
    wanted = packer.growing.plan.find
    for packed in in_parallel(packer.pack, spool.prompts(wanted), packer.threads):
        if not packed.wanted:
            unwanted.append(packed)
        if progress is not None:
            progress(packed)
    return unwanted


def in_parallel(work: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[Any]:
    """Results of ``work`` as they come, never more than twice ``workers`` items ahead."""
    with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
        running = set()
        try:
            for item in items:
                running.add(pool.submit(work, item))
                if len(running) >= 2 * workers:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for one in done:
                        yield one.result()
            for one in running:
                yield one.result()
        finally:
            for one in running:
                one.cancel()


# What differs when a value of the fingerprint does; the others are of the token ids.
_PARTS = {"layers": "states", "mask_xxh3": "loss masks", "loss_tokens": "loss masks"}


def convert(
    source: Dataset,
    folder: str,
    format_name: str,
    norm: FinalNorm | None,
    *,
    workers: int,
    resume: bool,
    model: str | None = None,
) -> tuple[dict[str, Any], int]:
    """Write ``source`` again as ``format_name``; returns the new record and how many files were linked.

    ``model`` says where the norm is from. Samples of an unchanged format are linked where the file system
    allows it. Every sample must be what it was when it was packed: raises BadSampleError otherwise. What was
    begun otherwise is not gone on with: raises DatasetError.
    """
    target = FORMATS[format_name]
    if source.format.normed and not target.normed:
        raise DatasetError(
            source.folder,
            f"has the last state after the final norm, {format_name} needs it before: that cannot be undone",
            "convert from the data set that this one was made of",
        )
    settings = {
        "format": format_name,
        "verifier": source.record.get("verifier"),
        "source": source.record["samples_sha256"],
        "norm": model,
    }
    if resume and Growing.exists(folder):
        growing = Growing(folder)
        require_same(folder, growing.settings, settings, None)
    else:
        path = start(folder, settings)
        write_plan(path, _tokens_of(source))
        settle(folder, {**settings, "input": source.record["input"]})
        growing = Growing(folder)
    growing.adopt(source.record["origin"], source.hidden_size)
    linked = 0

    def one(entry: dict[str, Any]) -> int:
        row = int(entry["row"])
        if growing.has(row):
            return 0
        sample = source.read(row)
        check(sample, source.path(row), hidden_size=source.hidden_size)
        found = fingerprint(sample)
        for key, value in found.items():
            if entry[key] != value:
                what = _PARTS.get(key, "token ids")
                raise BadSampleError(
                    source.path(row), "changed", f"its {what} are not those that were packed"
                )
        own = normed(sample, norm) if target.normed else sample
        known = {**(found if own is sample else fingerprint(own)), "statistics": statistics(own)}
        if source.format is target and growing.link(row, source.path(row), known):
            return 1
        growing.add(row, own, known)
        return 0

    try:
        for count in in_parallel(one, source.entries(), workers):
            linked += count
        return growing.finish(), linked
    finally:
        growing.close()


def _tokens_of(source: Dataset) -> Iterator[tuple[Any, Any, int]]:
    for entry in source.entries():
        row = int(entry["row"])
        tokens = source.row_tokens(row)
        if tokens is None:
            sample = source.read(row)
            tokens = sample.input_ids, sample.loss_mask
        if sequence_key(tokens[0]) != entry["sequence_sha256"]:
            raise BadSampleError(source.path(row), "tokens", "its token ids are not those that were packed")
        yield tokens[0].numpy(), tokens[1].numpy(), int(entry["line"])


def missing_rows(spool: Spool) -> list[BadDumpError]:
    """An error for each prompt whose last piece never came."""
    return [
        BadDumpError(chain[-1].json_path, "more pieces of this prompt should follow, and none is there")
        for chain in spool.unfinished()
    ]
