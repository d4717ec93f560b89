"""The figure of one result, or of several: equity, drawdown and exposure over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from nca_trader.evaluate import metrics
from nca_trader.evaluate.report.plots import (
    BASELINES,
    DASHES,
    PRINTED,
    SETTINGS,
    draw_stress,
    scale_equity,
    thinned,
    times,
)

if TYPE_CHECKING:
    from nca_trader.evaluate.result import Result
    from nca_trader.evaluate.stress import Stress

FIRST, REFERENCE, SHADE, GRID = "#1f5fa8", "#777777", "#c25e00", "#dddddd"
INKS: dict[Any, Any] = {
    "axes.edgecolor": "#999999",
    "grid.color": GRID,
    "figure.facecolor": "white",
    **dict.fromkeys(("text.color", "axes.labelcolor"), "black"),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), "black"),
}
LINES = (FIRST, *(PRINTED[colour] for colour in BASELINES))


def result_figure(results: Sequence[Result]) -> Figure:
    """Draw equity on a log scale, drawdown and, of one result, exposure.

    In-sample bars are shaded and named. One result is drawn next to its benchmark.
    """
    alone = results[0] if len(results) == 1 else None
    with matplotlib.rc_context({**SETTINGS, **INKS}):
        # Exposure of several results would be a tangle, so only one shows it.
        heights = (3, 1.4, 1) if alone else (3, 1.6)
        figure = Figure(figsize=(9, 2.1 * sum(heights) / 1.8), layout="constrained")
        panels = figure.subplots(len(heights), sharex=True, height_ratios=heights)
        equity, drawdown = panels[:2]
        for number, result in enumerate(results):
            colour = LINES[number % len(LINES)]
            style = "-" if number == 0 else DASHES[(number - 1) % len(DASHES)]
            _draw(equity, result.equity, colour, result.name, style)
            fallen = metrics.drawdown_series(result.returns)
            _draw(drawdown, result.equity * 0.0 + fallen, colour, "", style)
        if alone and alone.hold is not None:
            held = alone.hold
            _draw(equity, held.equity, REFERENCE, "buy and hold", DASHES[0])
            fallen = metrics.drawdown_series(held.returns)
            _draw(drawdown, held.equity * 0.0 + fallen, REFERENCE, "", DASHES[0])
        if alone:
            _draw_exposure(panels[2], alone)
        shade_in_sample(panels, results, SHADE)
        scale_equity(equity)
        equity.set_ylabel("equity, start = 1")
        drawdown.set_ylabel("drawdown")
        drawdown.yaxis.set_major_formatter(PercentFormatter(1.0))
        locator = AutoDateLocator(minticks=3, maxticks=9)
        panels[-1].xaxis.set_major_locator(locator)
        panels[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))
        equity.margins(x=0.01)
        equity.legend(
            loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, borderaxespad=0.2, frameon=False
        )
    return figure


def _draw(axes: Axes, values, colour: str, label: str, style) -> None:
    kept = thinned(values)
    axes.plot(
        times(kept),
        kept.to_numpy(),
        color=colour,
        linestyle=style,
        linewidth=1.6 if style == "-" else 1.2,
        # matplotlib hides labels that begin with "_".
        label=label.lstrip("_") or None,
    )


def _draw_exposure(axes: Axes, result: Result) -> None:
    shown = result.exposure
    for name, colour in (("long", FIRST), ("short", SHADE)):
        if np.any(shown[name]):
            kept = thinned(shown[name])
            axes.fill_between(
                times(kept), 0.0, kept.to_numpy(), color=colour, alpha=0.6, step="mid", lw=0
            )
    axes.axhline(0.0, color="#999999", linewidth=0.6)
    axes.set_ylabel("exposure")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def shade_in_sample(panels: Sequence[Axes], results: Sequence[Result], colour: str) -> None:
    """Shade the bars that an agent of `results` was trained or selected on, and name them."""
    # A set, since several results of one run share their in-sample bars.
    spans = {
        (result.equity.index[0], result.equity.index[result.in_sample - 1])
        for result in results
        if result.in_sample
    }
    for first, last in sorted(spans):
        for number, axes in enumerate(panels):
            # One entry in the legend, whatever the number of panels and spans.
            label = None if number or (first, last) != min(spans) else "in sample"
            ends = (time.tz_localize(None).to_datetime64() for time in (first, last))
            axes.axvspan(*ends, color=colour, alpha=0.12, linewidth=0, label=label)


def stress_figure(stress: Stress) -> Figure:
    """Draw the Sharpe ratio by costs, by delay, and by capital where volume is known."""
    count = 3 if len(stress.capacity) else 2
    with matplotlib.rc_context({**SETTINGS, **INKS}):
        figure = Figure(figsize=(3.2 * count, 2.8), layout="constrained")
        draw_stress(figure, stress, FIRST)
    return figure
