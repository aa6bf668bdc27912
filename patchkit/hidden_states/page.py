"""The report: one self-contained HTML page about a data set, readable in light and dark."""

from __future__ import annotations

import glob
import html
import json
import os
import time
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.dataset import PROVENANCE, Dataset
from patchkit.hidden_states.errors import need
from patchkit.hidden_states.files import durable
from patchkit.hidden_states.plots import Plots
from patchkit.hidden_states.progress import duration, human

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OUTLIERS = 20
FAR = 6.0  # median absolute deviations, of the logarithm of a sample's norm

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #626a73; --line: #d9dde2;
  --paper: #ffffff; --card: #f6f7f9; --a: #1769aa; --b: #b3540a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #3a4149;
  --paper: #14171a; --card: #1d2125; --a: #6db3f2; --b: #f0a35e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
figcaption { color: var(--soft); font-size: .9rem; padding: 0 .3rem; } svg { width: 100%; height: auto; }
svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
"""


class Summary:
    """Numbers of every sample, as arrays; 24 bytes and two floats a state for each."""

    def __init__(self, dataset: Dataset) -> None:
        numpy = need("numpy")
        count, states = dataset.samples, len(dataset.layers)
        self.dataset = dataset
        self.lengths = numpy.zeros(count, dtype=numpy.int64)
        self.loss = numpy.zeros(count, dtype=numpy.int64)
        self.lines = numpy.zeros(count, dtype=numpy.int64)
        self.norms = numpy.zeros((count, states))
        self.deviations = numpy.zeros((count, states))
        for entry in dataset.entries():
            row = entry["row"]
            self.lengths[row], self.loss[row], self.lines[row] = (
                entry["tokens"],
                entry["loss_tokens"],
                entry["line"],
            )
            self.norms[row] = entry["statistics"]["norm"]
            self.deviations[row] = entry["statistics"]["std"]

    def outliers(self) -> list[tuple[int, int, float, float]]:
        """(row, k, norm, how many deviations away) of the farthest samples, each with its worst state."""
        numpy = need("numpy")
        logs = numpy.log(numpy.maximum(self.norms, 1e-30))
        middle = numpy.median(logs, axis=0)
        spread = numpy.maximum(numpy.median(numpy.abs(logs - middle), axis=0) * 1.4826, 1e-3)
        far = numpy.abs(logs - middle) / spread
        worst = far.argmax(axis=1)
        amount = far[numpy.arange(len(far)), worst]
        rows = [int(row) for row in numpy.argsort(-amount, kind="stable")[:OUTLIERS] if amount[row] > FAR]
        return [
            (row, self.dataset.layers[worst[row]], float(self.norms[row, worst[row]]), float(amount[row]))
            for row in rows
        ]


def write_page(dataset: Dataset, path: str) -> None:
    """Write the report of ``dataset`` to ``path``."""
    with durable(path) as file:
        file.write(page(dataset).encode("utf-8"))


def page(dataset: Dataset) -> str:
    summary = Summary(dataset)
    plots = Plots()
    runs = _runs(dataset)
    record = dataset.record
    name = os.path.basename(os.path.abspath(dataset.folder))
    theory = 2 * dataset.hidden_size * len(dataset.layers)
    per_token = record["bytes"] / record["tokens"]
    tiles = [
        ("samples", f"{record['samples']:,}"),
        ("tokens", f"{record['tokens']:,}"),
        ("count for the loss", f"{record['loss_tokens'] / record['tokens']:.1%}"),
        ("size", human(record["bytes"])),
        ("bytes a token", f"{per_token:,.0f}"),
        ("over 2·H·states", f"{per_token / theory - 1:+.2%}"),
    ]
    figures = [
        (plots.histogram(summary.lengths, "tokens", "samples"), "Lengths of the samples."),
        (
            plots.histogram(summary.loss / summary.lengths, "share", "samples", share=True),
            "Share of a sample's tokens that count for the loss.",
        ),
        (
            plots.boxes(dataset.layers, summary.norms, "norm of a row"),
            "Mean Euclidean norm of a row, for each state; the middle half of the samples, and 1 to 99 %.",
        ),
        (
            plots.boxes(dataset.layers, summary.deviations, "standard deviation"),
            "Standard deviation of the elements.",
        ),
        *(
            (plots.rate(run["marks"]), f"{_when(run['began'])}: samples a second, and tokens so far.")
            for run in runs
            if len(run["marks"]) > 1
        ),
    ]
    subtitle = (
        f"Hidden states of {record['origin'].get('model_path')} in the format {dataset.format.name}; "
        f"the last state is {record['last_state']}."
    )
    sizes = (
        f"2·H·states is {theory:,} bytes: bf16, H = {dataset.hidden_size:,}, {len(dataset.layers)} states; "
        "the rest is token ids and headers."
    )
    body = [
        f"<h1>{html.escape(name)}</h1>",
        f"<p class=soft>{html.escape(subtitle)}</p>",
        "<div class=tiles>",
        *(f"<div class=tile><b>{value}</b>{label}</div>" for label, value in tiles),
        "</div>",
        f"<p class=soft>{sizes}</p>",
        "<h2>What there is</h2><div class=pair>",
        *(f"<figure>{svg}<figcaption>{html.escape(text)}</figcaption></figure>" for svg, text in figures),
        "</div>",
        "<h2>Outliers</h2>",
        _outlier_table(summary),
        "<h2>Where it comes from</h2>",
        _table((), _origin(dataset)),
        *_skipped(record),
        "<h2>Runs</h2>",
        _table(("began", "command", "outcome", "samples", "took"), [_run(run) for run in runs]),
    ]
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(name)}: hidden states</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _origin(dataset: Dataset) -> Iterable[Sequence[str]]:
    record = dataset.record
    origin = record["origin"]
    yield "model", str(origin.get("model_path"))
    yield "engine", f"sglang {origin.get('release')}, tensor parallel {origin.get('tp_size')}"
    yield "patch digest", str(origin.get("patch_digest"))
    yield "layers", ", ".join(f"R({k})" for k in dataset.layers)
    for name, digest in record["input"]["files"].items():
        yield "input", f"{name}, sha256 {digest}"
    if record["input"]["max_length"] is not None:
        yield "cut", f"{record['input']['cut']} rows were longer than {record['input']['max_length']} tokens"
    yield "samples.jsonl", f"sha256 {record['samples_sha256']}"
    yield "packed by", f"patchkit {record['patchkit']}"


def _skipped(record: dict[str, Any]) -> list[str]:
    skipped = record["input"]["skipped"]
    if not skipped:
        return ["<p>No row of the input was left out.</p>"]
    rows = [(str(one["line"]), one["reason"]) for one in skipped[:OUTLIERS]]
    return [f"<p>{len(skipped)} bad rows of the input were left out:</p>", _table(("line", "reason"), rows)]


def _outlier_table(summary: Summary) -> str:
    found = summary.outliers()
    if not found:
        return f"<p>No sample's norms are more than {FAR:g} deviations from the others'.</p>"
    rows = [
        (
            str(row),
            str(int(summary.lines[row])),
            str(int(summary.lengths[row])),
            f"R({k})",
            f"{norm:.4g}",
            f"{far:.1f}",
        )
        for row, k, norm, far in found
    ]
    return _table(("row", "input line", "tokens", "state", "norm", "deviations away"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = f"<tr>{''.join(f'<th>{html.escape(one)}</th>' for one in head)}</tr>" if head else ""
    lines = []
    for row in rows:
        first = f"<th>{html.escape(row[0])}</th>" if not head else f"<td>{html.escape(row[0])}</td>"
        lines.append(f"<tr>{first}{''.join(f'<td>{html.escape(one)}</td>' for one in row[1:])}</tr>")
    return f"<div class=scroll><table>{top}{''.join(lines)}</table></div>"


def _runs(dataset: Dataset) -> list[dict[str, Any]]:
    runs = []
    for path in glob.glob(os.path.join(glob.escape(os.path.join(dataset.folder, PROVENANCE)), "*.json")):
        try:
            with open(path, "rb") as file:
                run = json.loads(file.read())
        except (OSError, ValueError, RecursionError):
            continue
        # Other records lie there too, and times in other words.
        if isinstance(run, dict) and "command" in run and _is_time(run.get("began")):
            runs.append(
                {
                    "began": run["began"],
                    "ended": run["ended"] if _is_time(run.get("ended")) else run["began"],
                    "command": run["command"],
                    "outcome": run.get("outcome", "finished"),
                    "totals": run["totals"] if isinstance(run.get("totals"), dict) else {},
                    "marks": run["marks"] if _are_marks(run.get("marks")) else [],
                }
            )
    return sorted(runs, key=lambda run: float(run["began"]))


def _is_time(value: Any) -> bool:
    """Whether it is in seconds since 1970, before the year 5138."""
    return type(value) in (int, float) and 0 <= value < 1e11


def _are_marks(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(mark, list) and len(mark) >= 3 and all(_is_finite(one) for one in mark) for mark in value
    )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _run(run: dict[str, Any]) -> Sequence[str]:
    samples = run["totals"].get("samples")
    return (
        _when(run["began"]),
        str(run["command"]),
        str(run["outcome"]),
        "" if samples is None else str(samples),
        duration(run["ended"] - run["began"]),
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
