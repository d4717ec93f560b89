"""The report's plots, as inline SVG that follows the page's light or dark colours.

matplotlib is used without pyplot: no global state, no display, the same bytes every time.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from nca_trader.evaluate import metrics
from nca_trader.evaluate.report.html import Html, join, tag

# matplotlib draws with stand-in colours; the page's style sheet says what each is, by day and
# by night. None of them may occur otherwise.
INK, MUTED, GRID, SEED = "#010101", "#020202", "#030303", "#040404"
AGENT, *BASELINES = "#050505", "#060606", "#070707", "#080808", "#090909"
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SEED: "--seed",
    AGENT: "--agent",
    **{colour: f"--baseline-{k}" for k, colour in enumerate(BASELINES)},
}
# Dashes, drawn over the agent's broad line: an agent that copies a baseline shows both.
DASHES = ((0, (5, 2)), (0, (6, 2, 1.5, 2)), (0, (1.5, 1.5)), (0, (3, 1)))
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and restyled
    "text.parse_math": False,  # a "$" in a name is a dollar
    "font.size": 10.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


class Line(NamedTuple):
    """One curve: `label` as in the legend, `values` on a time axis, `role` agent|baseline|seed."""

    label: str
    values: pd.Series
    role: str


def svg(figure: Figure, name: str, description: str) -> Html:
    """The figure as an `<svg>` element that scales with its container.

    Args:
      figure: drawn with the stand-in colours.
      name: of the plot, unique in the page, so that no id in it meets another plot's.
      description: what a reader who cannot see it should be told.
    """
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]  # no XML prolog inside HTML
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    used = set(re.findall(r"#([\w.-]+)[\")]", text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
    text = (
        re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", text[: text.index(">")])
        + (text[text.index(">") :])
    )
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    label = tag("svg", role="img", aria_label=description).removesuffix("></svg>")
    return Html(label + text.removeprefix("<svg").strip())


def _both_widths(draw, name: str, description: str) -> Html:
    """A wide drawing and a narrow one: scaled down, a wide one's text could not be read."""
    drawn = []
    for kind, size in (("wide", (11.6, 4.2)), ("narrow", (4.6, 3.7))):
        with matplotlib.rc_context(SETTINGS):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure.add_subplot(), narrow=kind == "narrow")
        image = svg(figure, f"{name}-{kind}", description)
        drawn.append(tag("div", image, class_=kind))
    return join(drawn)


def _draw_lines(axes: Axes, lines: Sequence[Line], narrow: bool) -> None:
    baseline = 0
    for line in lines:
        colour, dash, width, order, alpha = SEED, "-", 0.9, 1, 0.8
        if line.role == "agent":
            colour, width, order, alpha = AGENT, 2.6, 2, 1.0
        elif line.role == "baseline":
            colour = BASELINES[baseline % len(BASELINES)]
            dash, width, order, alpha = DASHES[baseline % len(DASHES)], 1.4, 3, 1.0
            baseline += 1
        axes.plot(
            line.values.index.tz_localize(None).to_numpy(),  # type: ignore[attr-defined]
            line.values.to_numpy(),
            color=colour,
            linestyle=dash,
            linewidth=width,
            zorder=order,
            alpha=alpha,
            label=line.label.lstrip("_"),  # matplotlib hides labels that begin with it
        )
    locator = AutoDateLocator(minticks=3, maxticks=5 if narrow else 9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.margins(x=0.01)
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(reversed(labels), reversed(handles), strict=True))  # one entry for all seeds
    order = [label for label in dict.fromkeys(labels)]
    axes.legend(
        [first[label] for label in order],
        order,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=2 if narrow else len(order),
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=2.4,
    )


def equity_plot(lines: Sequence[Line], standing: str = "") -> Html:
    """Equity on a log scale, capital before the first bar = 1; `standing` as of `Evidence`."""

    def draw(axes: Axes, narrow: bool) -> None:
        _draw_lines(axes, lines, narrow)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high / low > 20:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        else:  # a log scale's own ticks leave most of one decade blank
            ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
            axes.set_yticks([tick for tick in ticks if low <= tick <= high and tick > 0])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylabel("equity, start = 1 (log scale)")

    ends = "; ".join(
        f"{line.label} ends at {line.values.iloc[-1]:.2f}" for line in lines if line.role != "seed"
    )
    told = f"Equity {standing}".rstrip()
    return _both_widths(draw, "equity", f"{told} on a log scale. {ends}.")


def drawdown_plot(lines: Sequence[Line], standing: str = "") -> Html:
    """Drawdown from the highest equity so far; `values` of the lines are equity."""
    fallen = []
    for line in lines:
        depth = metrics.drawdown_series(metrics.simple_returns(line.values))
        fallen.append(line._replace(values=pd.Series(depth, line.values.index)))

    def draw(axes: Axes, narrow: bool) -> None:
        _draw_lines(axes, fallen, narrow)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(top=0.0)
        axes.set_ylabel("drawdown")

    ends = "; ".join(
        f"{line.label} {line.values.min():.1%}" for line in fallen if line.role != "seed"
    )
    told = f"Drawdown {standing}".rstrip()
    return _both_widths(draw, "drawdown", f"{told}. Deepest: {ends}.")


def per_seed(rows: Sequence[Mapping[str, object]], key: str) -> np.ndarray:
    """`[U, S]` one metric of `metrics.jsonl`: a number is one seed, a list one number a seed."""
    return np.stack([np.atleast_1d(np.asarray(row[key], np.float64)) for row in rows])


def training_plot(
    rows: Sequence[Mapping[str, object]], key: str, label: str, seed: int, who: str
) -> Html:
    """One metric over updates: the seed that acts, and the band between all seeds' extremes.

    Args:
      rows: of `metrics.jsonl`, each with `update`.
      key: the metric. label: its name for readers.
      seed: column of the seed that acts. who: what to call it, e.g. "the selected seed".
    """
    values = per_seed(rows, key)
    chosen = values[:, min(seed, values.shape[1] - 1)]
    updates = np.array([row["update"] for row in rows], np.float64)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(4.4, 2.6), layout="constrained")
        axes = figure.add_subplot()
        if values.shape[1] > 1:
            # A row of NaN (a metric not yet defined) leaves a gap and no warning.
            low = np.fmin.reduce(values, axis=1)
            high = np.fmax.reduce(values, axis=1)
            axes.fill_between(updates, low, high, color=SEED, alpha=0.35, linewidth=0)
        axes.plot(updates, chosen, color=AGENT, linewidth=1.8)
        axes.set_title(label, loc="left", fontsize=10.5, color=INK)
        axes.set_xlabel("update")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.margins(x=0.01)
    told = f"{label} over {len(rows)} updates: from {chosen[0]:.3g} to {chosen[-1]:.3g}"
    return svg(figure, f"training-{key}", f"{told} for {who}.")
