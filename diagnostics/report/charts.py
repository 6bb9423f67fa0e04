"""Figures of the report as SVG text, by matplotlib.

The colours are variables of the page's style sheet, so that one plot serves a light page, a dark one and paper.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

# Colours that occur nowhere else stand for the page's variables until the SVG is written.
SERIES = ("#0000a1", "#0000a2", "#0000a3", "#0000a4", "#0000a5")
INK, MUTED, GRID, CLOSED = "#0000b1", "#0000b2", "#0000b3", "#0000b4"
VARIABLES = {
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)},
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    CLOSED: "var(--closed)",
}
# Told apart without colour as well.
LINES = tuple(zip(SERIES, "os^Dv", ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (3, 1))), strict=True))

STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
}

Point = tuple[float, float, float, float]
"""x, median, least and greatest value."""


def _svg(draw: Callable[[Axes], None], salt: object, height: float = 2.6) -> str:
    """The SVG's text of what *draw* draws; *salt* tells the ids inside it from those of other plots on a page."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": repr(salt)}):  # type: ignore[dict-item]
        # Of a phone's width: text keeps its size there, and on a desk plots stand side by side.
        figure = Figure(figsize=(4.4, height), layout="constrained")
        draw(figure.add_subplot())
        target = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(target, format="svg", transparent=True, metadata=nothing)
    return _inline(target.getvalue())


def _inline(svg: str) -> str:
    """The element to put into a page: no prolog, the page's colours and font, no ids that two plots could share."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def over_concurrency(arms: Mapping[str, Sequence[Point]], unit: str) -> str:
    """One line an arm over the concurrency, with bars from the least to the greatest of the rounds."""

    def draw(axes: Axes) -> None:
        for (name, points), (colour, marker, dash) in zip(arms.items(), itertools.cycle(LINES), strict=False):
            axes.errorbar(
                [point[0] for point in points],
                [point[1] for point in points],
                [[point[1] - point[2] for point in points], [point[3] - point[1] for point in points]],
                label=name,
                color=colour,
                marker=marker,
                linestyle=dash,
                capsize=2.5,
                elinewidth=1,
            )
        _levels_axis(axes, sorted({point[0] for points in arms.values() for point in points}))
        axes.set_xlabel("concurrency (requests in flight)")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        _legend(axes, 2)

    return _svg(draw, (unit, arms))


def gate_over_time(samples: Sequence[Mapping[str, Any]], threshold: int | None) -> str:
    """The requests that run over the time of the load; shaded where the gate was closed."""
    times = [sample["t_s"] for sample in samples]
    running = [sample["running"] for sample in samples]

    def draw(axes: Axes) -> None:
        axes.step(times, running, where="post", color=SERIES[0], label="running requests")
        for begin, end in closed_spans(samples):
            axes.axvspan(begin, end, color=CLOSED, linewidth=0)
        shown = [*axes.get_lines(), Patch(color=CLOSED, label="gate closed")]
        if threshold:
            shown.append(
                axes.axhline(threshold, color=MUTED, linestyle="--", linewidth=1.2, label=f"threshold {threshold}")
            )
        axes.set_xlim(min(times), max(times))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("time since the load began [s]")
        axes.set_ylabel("requests")
        _legend(axes, 3, shown)

    return _svg(draw, (threshold, samples), height=2.3)


def closed_spans(samples: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Stretches of time [s] in which more steps were closed than open; without any step the mode seen decides."""
    spans: list[tuple[float, float]] = []
    for before, after in itertools.pairwise(samples):
        opened = after["open_steps"] - before["open_steps"]
        closed = after["closed_steps"] - before["closed_steps"]
        if closed > opened or (closed == opened and after["mode"] == "closed"):
            if spans and spans[-1][1] == before["t_s"]:
                spans[-1] = (spans[-1][0], after["t_s"])
            else:
                spans.append((before["t_s"], after["t_s"]))
    return spans


def break_even(cells: Sequence[Mapping[str, Any]], acceptance: float | None) -> str:
    """The accept length from which speculation pays, over the batch, a line for each length of context."""

    def draw(axes: Axes) -> None:
        contexts = sorted({cell["context"] for cell in cells})
        for context, (colour, marker, dash) in zip(contexts, itertools.cycle(LINES), strict=False):
            points = sorted((cell["batch"], cell["break_even"]) for cell in cells if cell["context"] == context)
            axes.plot(
                [batch for batch, _ in points],
                [value for _, value in points],
                label=f"context {context}",
                color=colour,
                marker=marker,
                linestyle=dash,
            )
        if acceptance:
            axes.axhline(acceptance, color=INK, linewidth=1.2, linestyle=":", label=f"seen: {acceptance:.2f}")
        _levels_axis(axes, sorted({cell["batch"] for cell in cells}))
        axes.set_xlabel("batch (running requests)")
        axes.set_ylabel("tokens per verify step")
        axes.set_ylim(bottom=0)
        _legend(axes, 2)

    return _svg(draw, (acceptance, cells), height=2.8)


def _levels_axis(axes: Axes, levels: Sequence[float]) -> None:
    """An axis that names the levels measured and no others."""
    if levels[-1] >= 8 * levels[0]:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(levels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _legend(axes: Axes, columns: int, handles: Sequence[Artist] | None = None) -> None:
    axes.figure.legend(
        handles=handles or axes.get_legend_handles_labels()[0], loc="outside lower center", ncols=columns
    )
