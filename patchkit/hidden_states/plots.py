"""Plots as inline SVG whose colours are the page's: drawn by matplotlib, coloured by CSS."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.errors import need

if TYPE_CHECKING:
    from collections.abc import Sequence

# Drawn in these and then replaced by the page's variables, so that one picture serves light and dark.
_COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--soft)",
    "#030303": "var(--line)",
    "#040404": "var(--a)",
    "#050505": "var(--b)",
}
INK, SOFT, LINE, FIRST, SECOND = _COLOURS


class Plots:
    """One matplotlib set up for SVG with text that stays text."""

    def __init__(self) -> None:
        matplotlib = need("matplotlib")
        self.numpy = need("numpy")
        self.style = {
            "svg.fonttype": "none",
            "svg.hashsalt": "patchkit",
            "font.family": "DejaVu Sans",  # matplotlib brings it, to measure with; the page has its own
            "font.size": 9,
            "text.color": INK,
            "axes.labelcolor": SOFT,
            "axes.edgecolor": LINE,
            "xtick.color": SOFT,
            "ytick.color": SOFT,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": LINE,
            "grid.linewidth": 0.6,
        }
        self.context = matplotlib.rc_context
        self.figure = need("matplotlib.figure").Figure

    def histogram(self, values: Any, across: str, up: str, *, share: bool = False) -> str:
        def draw(axes: Any) -> None:
            bins = self.numpy.linspace(0, 1, 21) if share else min(40, max(5, len(values) // 4))
            axes.hist(values, bins=bins, color=FIRST)
            axes.set_xlabel(across)
            axes.set_ylabel(up)

        return self._svg(draw)

    def boxes(self, layers: Sequence[int], values: Any, up: str) -> str:
        """One box for each state: the middle half, the median, whiskers from 1 to 99 %."""

        def draw(axes: Any) -> None:
            line = {"color": FIRST, "linewidth": 1.2}
            axes.boxplot(
                [values[:, place] for place in range(len(layers))],
                whis=(1, 99),
                showfliers=False,
                boxprops=line,
                whiskerprops=line,
                capprops=line,
                medianprops={"color": SECOND, "linewidth": 1.6},
            )
            axes.set_xticklabels([f"R({k})" for k in layers])
            axes.set_ylim(bottom=0)
            axes.set_ylabel(up)

        return self._svg(draw)

    def rate(self, marks: Sequence[Sequence[float]]) -> str:
        """Samples a second over equal pieces of time, and the tokens so far."""
        numpy = self.numpy
        seconds, samples, tokens = (numpy.array([mark[i] for mark in marks], dtype=float) for i in range(3))

        def draw(axes: Any) -> None:
            borders = numpy.linspace(0, max(seconds[-1], 1e-3), min(40, len(marks)) + 1)
            done = numpy.interp(borders, numpy.concatenate([[0], seconds]), numpy.concatenate([[0], samples]))
            axes.stairs(numpy.diff(done) / numpy.diff(borders), borders, color=FIRST, linewidth=1.4)
            axes.set_ylim(bottom=0)
            axes.set_xlabel("seconds")
            axes.set_ylabel("samples a second")
            second = axes.twinx()
            second.plot(seconds, tokens, color=SECOND, linewidth=1.2)
            second.set_ylim(bottom=0)
            second.set_ylabel("tokens so far", color=SECOND)
            second.grid(visible=False)

        return self._svg(draw)

    def _svg(self, draw: Any) -> str:
        with self.context(self.style):
            figure = self.figure(figsize=(5.2, 2.8), layout="constrained")
            figure.patch.set_alpha(0)
            axes = figure.add_subplot()
            axes.patch.set_alpha(0)
            draw(axes)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        text = text[text.index("<svg") :]
        for colour, variable in _COLOURS.items():
            text = text.replace(colour, variable)
        # Several pictures share a page, and an id may be there once.
        self.count = getattr(self, "count", 0) + 1
        for mark in ('id="', "url(#", 'href="#'):
            text = text.replace(mark, f"{mark}p{self.count}-")
        return text
