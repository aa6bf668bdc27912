"""pack, validate, vocab, report: data sets of hidden states."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from patchkit.errors import NO
from patchkit.hidden_states.dataset import PROVENANCE, RECORD, Dataset, Growing, tidy
from patchkit.hidden_states.dump import Spool
from patchkit.hidden_states.errors import DatasetError, IncompleteError, ModelError, UnknownNormError, need
from patchkit.hidden_states.files import write_json
from patchkit.hidden_states.formats import FORMATS
from patchkit.hidden_states.model import FinalNorm, ModelConfig
from patchkit.hidden_states.pack import Packer, begin, convert, missing_rows, pack_dumps, usable_cores
from patchkit.hidden_states.progress import Progress, human
from patchkit.hidden_states.resume import require_made_of, require_same
from patchkit.hidden_states.source import Source
from patchkit.hidden_states.validation import Findings, validate as validate_dataset
from patchkit.report import Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHOWN = 20


def pack(
    source: str,
    out: str,
    *,
    data: str | None,
    format_name: str,
    model: str | None,
    skip_bad: bool,
    samples: int | None,
    max_length: int | None,
    workers: int | None,
    delete_dumps: bool,
    resume: bool,
    quiet: bool,
) -> Result:
    """Pack the dumps of the folder ``source``, or convert the data set there."""
    one_thread_each()
    count = workers or usable_cores()
    if os.path.exists(os.path.join(source, RECORD)):
        return _convert(Dataset(source), out, format_name, model, workers=count, resume=resume)
    if not os.path.isdir(source):
        raise DatasetError(source, "no such folder")
    wanted = {"format": format_name, "samples": samples, "max_length": max_length}
    if model is not None:
        wanted["verifier"] = os.path.abspath(model)
    if done := finished(out, wanted, data, resume=resume):
        return done
    norm = final_norm(model, required=FORMATS[format_name].normed)
    if resume and Growing.exists(out):
        growing = Growing(out)
        require_same(out, growing.settings, {**wanted, "source": None}, data)
    else:
        if data is None:
            raise DatasetError(
                source,
                "dumps do not say which tokens count",
                "name the input that they were made from with --data",
            )
        rows = Source(data, model=model, samples=samples, max_length=max_length)
        growing = begin(out, format_name, rows, skip_bad=skip_bad, verifier=model and os.path.abspath(model))
    spool = Spool(source)
    began = time.time()
    before = len(growing.plan) - len(growing.missing)
    with Progress("pack", len(growing.plan), before, quiet=quiet) as progress:
        unwanted = pack_dumps(
            spool,
            Packer(growing, norm, delete=delete_dumps, workers=count),
            progress=lambda one: progress.add(
                samples=len(one.rows), tokens=one.tokens * len(one.rows), size=one.size
            ),
        )
    broken = missing_rows(spool)
    if missing := growing.missing:
        if broken:
            raise broken[0]
        raise IncompleteError(out, missing, len(growing.plan), f"dump them to {source}, then use --resume")
    record = growing.finish()
    write_provenance(out, "pack", began, progress, {"source": os.path.abspath(source)})
    result = dataset_result(out, record)
    if unwanted:
        result.lines = [
            *result.lines,
            ("warn", f"  {len(unwanted)} dumps there belong to no row of the input"),
        ]
    if broken:  # no row needs them: a kill in the middle of --delete-dumps leaves such, for one
        result.lines = [
            *result.lines,
            ("warn", f"  {len(broken)} prompts there are not whole, and were left alone"),
        ]
    return result


def _convert(
    source: Dataset, out: str, format_name: str, model: str | None, *, workers: int, resume: bool
) -> Result:
    if done := finished(out, {"format": format_name}, None, resume=resume):
        require_made_of(Dataset(out), source)
        return done
    needs_norm = FORMATS[format_name].normed and not source.format.normed
    model = model or source.record.get("verifier")
    norm = final_norm(model, required=needs_norm)
    began = time.time()
    record, linked = convert(
        source,
        out,
        format_name,
        norm,
        workers=workers,
        resume=resume,
        model=os.path.abspath(model) if needs_norm and model else None,
    )
    write_provenance(
        out, "convert", began, None, {"source": os.path.abspath(source.folder), "linked": linked}
    )
    result = dataset_result(out, record)
    if linked:
        result.lines = [*result.lines, f"  {linked} files are links to those of {source.folder}"]
    return result


def finished(out: str, wanted: Mapping[str, Any], data: str | None, *, resume: bool) -> Result | None:
    """The result of a run that is to be resumed and was complete. Raises DatasetError if it was another."""
    if not (resume and os.path.exists(os.path.join(out, RECORD))):
        return None
    record = Dataset(out).record
    require_same(out, record, wanted, data)
    result = dataset_result(out, record)
    tidy(out)
    result.lines = [*result.lines, "  was complete already"]
    return result


def validate(
    folder: str, *, verifier: str | None, workers: int | None, recompute: int, quiet: bool
) -> Result:
    """Every file of the data set, and with ``recompute`` so many samples against the verifier itself."""
    one_thread_each()
    dataset = Dataset(folder)
    findings = inspect(dataset, verifier, workers=workers, quiet=quiet)
    if recompute:
        from patchkit.hidden_states.recomputation import recompute as compare

        findings.errors += compare(dataset, verifier or dataset.record.get("verifier"), recompute)
    good = not findings.errors
    word, layers = ("valid" if good else "not valid"), _listed(dataset.layers)
    totals = (
        f"  {findings.samples} samples, {findings.tokens} tokens ({findings.loss_tokens} for the loss), "
        f"{human(findings.size)}, {len(findings.errors)} errors, in {findings.seconds:.1f} s"
    )
    lines: list[str | tuple[str, str]] = [
        ("good" if good else "bad", f"{word}: {folder} ({dataset.format.name}, layers {layers})"),
        totals,
    ]
    if not findings.normed_checked:
        lines.append(
            ("warn", "  no verifier whose norm is known: the side of the last state was not checked")
        )
    lines += [("bad", f"  {error}") for error in findings.errors[:SHOWN]]
    if len(findings.errors) > SHOWN:
        lines.append(("bad", f"  and {len(findings.errors) - SHOWN} more; --json has all"))
    data = {"dataset": folder, "format": dataset.format.name, **findings.to_json()}
    return Result(data, lines, exit_code=0 if good else NO, json_errors=findings.errors)


def inspect(dataset: Dataset, verifier: str | None, *, workers: int | None, quiet: bool) -> Findings:
    """The findings of a validation, with the verifier that the data set names if it is there."""
    model = verifier or dataset.record.get("verifier")
    try:
        norm = final_norm(model, required=bool(verifier))
    except UnknownNormError:
        norm = None
    config = model_config(model)
    with Progress("validate", dataset.samples, quiet=quiet) as progress:

        def show(findings: Findings) -> None:
            counts = progress.counts
            progress.add(
                samples=1,
                tokens=findings.tokens - counts.tokens,
                size=findings.size - counts.size,
                errors=len(findings.errors) - counts.errors,
            )

        return validate_dataset(dataset, norm, config, workers=workers or usable_cores(), progress=show)


def model_config(model: str | None) -> ModelConfig | None:
    """The sizes of the checkpoint at ``model``; None where they are not to be had."""
    try:
        return ModelConfig.read(model) if model is not None else None
    except ModelError:
        return None


def final_norm(model: str | None, *, required: bool = False) -> FinalNorm | None:
    """The final norm of the checkpoint at ``model``; None where it is not required and not to be had."""
    if model is None:
        if required:
            raise ModelError(
                "specforge", "keeps the last state after the verifier's norm", "name the model with --model"
            )
        return None
    try:
        return FinalNorm.read(ModelConfig.read(model))
    except ModelError:
        if required:
            raise
        return None


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def dataset_result(folder: str, record: dict[str, Any]) -> Result:
    lines: list[str | tuple[str, str]] = [
        ("good", f"packed {record['samples']} samples into {folder}"),
        f"  {record['format']}: layers {_listed(record['layers'])}, last state {record['last_state']}",
        f"  {record['tokens']} tokens ({record['loss_tokens']} for the loss), {human(record['bytes'])}",
    ]
    if skipped := record["input"]["skipped"]:
        lines.append(("warn", f"  {len(skipped)} bad rows of the input were left out"))
        lines += [("warn", f"    line {one['line']}: {one['reason']}") for one in skipped[:SHOWN]]
    return Result({"dataset": folder, **record}, lines)


def write_provenance(
    folder: str, verb: str, began: float, progress: Progress | None, more: dict[str, Any]
) -> str:
    """One file for this run beside the data set; the only place that has times. Returns its path."""
    import socket

    name = f"{verb}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(began))}-{os.getpid()}.json"
    path = os.path.join(folder, PROVENANCE, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    value: dict[str, Any] = {
        "schema": 1,
        "command": verb,
        "began": began,
        "ended": time.time(),
        "host": socket.gethostname(),
        **more,
    }
    if progress is not None:
        value["totals"] = vars(progress.counts)
        value["marks"] = progress.marks
    write_json(path, value)
    return path


def one_thread_each() -> None:
    """Torch must not take all cores in each of our threads."""
    need("torch").set_num_threads(1)


def vocab_build(folder: str, *, draft: int, target: int | None, verifier: str | None) -> Result:
    from patchkit.hidden_states.vocabulary import Mapping, count_tokens

    dataset = Dataset(folder)
    counts = count_tokens(dataset)
    mapping = Mapping.build(counts, draft, _target_size(dataset, target, verifier))
    return _vocab_result(dataset, mapping, mapping.save(dataset), mapping.coverage(counts))


def vocab_copy(source: str, folder: str, *, target: int | None, verifier: str | None) -> Result:
    from patchkit.hidden_states.vocabulary import Mapping, count_tokens

    dataset = Dataset(folder)
    mapping = Mapping.load(source)
    mapping.check(_target_size(dataset, target, verifier))
    return _vocab_result(dataset, mapping, mapping.save(dataset), mapping.coverage(count_tokens(dataset)))


def vocab_check(folder: str, *, target: int | None, verifier: str | None) -> Result:
    from patchkit.hidden_states.vocabulary import Mapping, count_tokens

    dataset = Dataset(folder)
    mapping = Mapping.of(dataset, _target_size(dataset, target, verifier))
    return _vocab_result(dataset, mapping, [], mapping.coverage(count_tokens(dataset)))


def _target_size(dataset: Dataset, target: int | None, verifier: str | None) -> int:
    if target is not None:
        return target
    model = verifier or dataset.record.get("verifier")
    if model is None:
        raise ModelError(dataset.folder, "names no verifier", "give --target-size or --verifier")
    return ModelConfig.read(model).vocab_size


def _vocab_result(dataset: Dataset, mapping: Any, paths: Sequence[str], coverage: float) -> Result:
    draft, target = len(mapping.d2t), len(mapping.t2d)
    share = f"{coverage:.2%} of those that count"
    lines: list[str | tuple[str, str]] = [
        ("good", f"{dataset.folder}: {draft} of the target's {target} tokens, {share}")
    ]
    lines += [f"  wrote {path}" for path in paths]
    data = {
        "dataset": dataset.folder,
        "draft": draft,
        "target": target,
        "coverage": coverage,
        "files": list(paths),
    }
    return Result(data, lines)


def report(folder: str, out: str | None) -> Result:
    """Write the report page of a data set."""
    from patchkit.hidden_states.page import write_page

    path = out or os.path.join(folder, "report.html")
    write_page(Dataset(folder), path)
    return Result({"dataset": folder, "report": path}, [("good", f"wrote {path}")])
