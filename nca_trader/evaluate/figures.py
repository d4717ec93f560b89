"""Draws lines of equity, for Python, notebooks and the plots of a page.

Equity, drawdown and exposure are drawn by one function each. On a page they have its light or dark
colours, see `report.plots`, and `PRINTED` ones in a figure that stands alone. matplotlib is used
without pyplot: no global state, no display, the same bytes every time.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from nca_trader.evaluate import metrics

# matplotlib draws with placeholder colours. The page's style sheet sets the real ones, one set for
# light and one for dark. No placeholder may occur in another place.
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
# Colours of a figure that stands alone, by placeholder.
PRINTED: dict[str, str] = dict(
    zip(
        (INK, MUTED, GRID, SEED, AGENT, *BASELINES),
        ("#000000", "#555555", "#dddddd", "#c25e00", "#1f5fa8", "#c25e00", "#2e7d32", "#7b3fa0",
         "#777777"),
        strict=True,
    )
)  # fmt: skip
# Drawn over the agent's broad line, so that both show where an agent copies a baseline.
DASHES = ((0, (5, 2)), (0, (6, 2, 1.5, 2)), (0, (1.5, 1.5)), (0, (3, 1)))
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: a screen reader reads it, and it can be searched
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


def settings(colours: Mapping[str, str]) -> dict[Any, Any]:
    """Return matplotlib's settings in `colours`; without colours, those of a page."""
    found = {key: colours.get(x, x) if isinstance(x, str) else x for key, x in SETTINGS.items()}
    return found | ({"figure.facecolor": "white"} if colours else {})


class Curve(NamedTuple):
    """One curve.

    Attributes:
      label: as in the legend.
      values: `[N]` on a time axis.
      role: "agent", "baseline", "seed", or "frame" for the edge of an area.
    """

    label: str
    values: pd.Series
    role: str


POINTS = 1600  # of a line at most; more than a screen has columns of
OF_A_PHONE = 700


def thinned(values: pd.Series, points: int = POINTS) -> pd.Series:
    """Keep the first, last, lowest and highest value of each stretch of a long line."""
    if len(values) <= points:
        return values
    numbers = values.to_numpy()
    # Four values of each stretch, so `points` in all.
    edges = np.linspace(0, len(values), points // 4 + 1).astype(int)
    # Extremes are kept, so that no drawdown disappears between two pixels.
    kept = {0, len(values) - 1}
    for first, last in itertools.pairwise(edges):
        stretch = numbers[first:last]
        # NaN, where a line begins later, is neither the lowest nor the highest.
        known = np.nan_to_num(stretch, nan=0.0)
        kept |= {first, last - 1, first + int(known.argmin()), first + int(known.argmax())}
    return values.iloc[sorted(kept)]


def is_narrow(axes: Axes) -> bool:
    """Return whether a plot is the one for narrow screens."""
    figure = axes.figure
    return isinstance(figure, Figure) and figure.get_figwidth() < 6


def times(values: pd.Series) -> np.ndarray:
    """Return the time axis of a line, as matplotlib takes it."""
    return pd.DatetimeIndex(values.index).tz_localize(None).to_numpy()


Span = tuple[pd.Timestamp, pd.Timestamp]


def account_figure(
    lines: Sequence[Curve], seen: Collection[Span], exposure: pd.DataFrame | None = None
) -> Figure:
    """Draw equity on a log scale, drawdown and exposure.

    Args:
      lines: of equity.
      seen: first and last bar of each in-sample span, which is shaded and named.
      exposure: `Result.exposure`; None draws none, as that of several accounts would be a tangle.
    """
    heights = (3, 1.6) if exposure is None else (3, 1.4, 1)
    with matplotlib.rc_context(settings(PRINTED)):
        figure = Figure(figsize=(9, 2.1 * sum(heights) / 1.8), layout="constrained")
        panels = figure.subplots(len(heights), sharex=True, height_ratios=heights)
        draw_equity(panels[0], lines, PRINTED)
        draw_drawdown(panels[1], lines, PRINTED)
        if exposure is not None:
            draw_exposure(panels[2], exposure, PRINTED)
        shade(panels, seen, PRINTED)
        time_axis(panels[-1])
        legend(panels[0], 4)
    return figure


def stress_figure(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the tables of a stress, see `draw_stress`."""
    with matplotlib.rc_context(settings(PRINTED)):
        figure = Figure(figsize=(3.2 * len(tables), 2.8), layout="constrained")
        draw_stress(figure, tables, PRINTED[AGENT])
    return figure


def draw_lines(axes: Axes, lines: Sequence[Curve], colours: Mapping[str, str]) -> None:
    """Draw lines over time: baselines in dashes over the agent's broad line.

    Args:
      axes: of the plot.
      lines: the curves.
      colours: by placeholder; one that is not among them stays, for `svg`.
    """
    baseline = 0
    for line in lines:
        # The edge of an area is drawn in the muted colour of text.
        colour = SEED if line.role == "seed" else MUTED
        dash, width, order, alpha = "-", 0.9, 1, 0.8
        if line.role == "agent":
            # Above the other seeds, below the dashes of the baselines.
            colour, width, order, alpha = AGENT, 2.6, 2, 1.0
        elif line.role == "baseline":
            colour = BASELINES[baseline % len(BASELINES)]
            dash, width, order, alpha = DASHES[baseline % len(DASHES)], 1.4, 3, 1.0
            baseline += 1
        values = thinned(line.values, OF_A_PHONE if is_narrow(axes) else POINTS)
        axes.plot(
            times(values),
            values.to_numpy(),
            color=colours.get(colour, colour),
            linestyle=dash,
            linewidth=width,
            zorder=order,
            alpha=alpha,
            label=line.label.lstrip("_"),  # matplotlib hides labels that begin with it
        )


def draw_equity(axes: Axes, lines: Sequence[Curve], colours: Mapping[str, str]) -> None:
    """Draw equity on a log scale, see `draw_lines`."""
    draw_lines(axes, lines, colours)
    scale_equity(axes)
    axes.set_ylabel("equity, start = 1 (log scale)")


def draw_drawdown(axes: Axes, lines: Sequence[Curve], colours: Mapping[str, str]) -> None:
    """Draw drawdowns, each `fallen` of a line of equity; see `draw_lines`."""
    draw_lines(axes, lines, colours)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(top=0.0)
    axes.set_ylabel("drawdown")


def draw_years(axes: Axes, years: Mapping[str, pd.Series]) -> None:
    """Draw the return of each year as bars, side by side: the first filled, the second empty."""
    for number, (name, values) in enumerate(years.items()):
        # In the middle of each year, on an axis of dates.
        middle = pd.to_datetime([f"{year}-07-01" for year in values.index]).to_numpy()
        shift = np.timedelta64(75 if number else -75, "D")
        look: dict[str, Any] = {"color": AGENT}
        if number:
            look = {"facecolor": "none", "edgecolor": BASELINES[0], "linewidth": 1.4}
        axes.bar(middle + shift, values.to_numpy(), np.timedelta64(140, "D"), label=name, **look)
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel("return of the year")


def draw_exposure(axes: Axes, exposure: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Draw long and short exposure as areas, as fractions of equity."""
    for name, colour in (("long", AGENT), ("short", BASELINES[0])):
        kept = thinned(exposure[name], OF_A_PHONE)
        if kept.any():
            axes.fill_between(
                times(kept), 0.0, kept.to_numpy(), color=colours.get(colour, colour), alpha=0.55,
                lw=0, step="mid",
            )  # fmt: skip
    axes.axhline(0.0, color=colours.get(MUTED, MUTED), linewidth=0.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_ylabel("exposure")


def fallen(line: Curve) -> Curve:
    """Return the drawdown of a line of equity from its highest value so far."""
    depth = metrics.drawdown_series(metrics.simple_returns(line.values))
    return line._replace(values=pd.Series(depth, line.values.index))


def shade(panels: Sequence[Axes], spans: Collection[Span], colours: Mapping[str, str]) -> None:
    """Shade the bars that an agent was trained or selected on, and name them."""
    for first, last in sorted(spans):
        for number, axes in enumerate(panels):
            # One entry in the legend, whatever the number of panels and spans.
            label = None if number or (first, last) != min(spans) else "in sample"
            ends: Any = [time.tz_localize(None).to_datetime64() for time in (first, last)]
            colour = colours.get(SEED, SEED)
            axes.axvspan(*ends, color=colour, alpha=0.2, linewidth=0, label=label)


def mark_starts(panels: Sequence[Axes], starts: Mapping[str, pd.Timestamp]) -> None:
    """Draw a line where each fold of a walk-forward begins, with its number at the top."""
    for name, start in starts.items():
        at: Any = start.tz_localize(None).to_datetime64()
        for axes in panels:
            axes.axvline(at, color=MUTED, linewidth=0.8, linestyle=":")
        narrow = is_narrow(panels[0])
        if len(starts) <= 24:
            panels[0].annotate(
                name if narrow else f"fold {name}",
                xy=(at, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(2, -2),
                textcoords="offset points",
                color=MUTED,
                fontsize=9,
                va="top",
            )


def time_axis(axes: Axes) -> None:
    """Write dates along the axis of time; fewer where it is narrow."""
    narrow = is_narrow(axes)
    # With 5 ticks at most, no interval of months fits two to three years: 2 ticks must do.
    locator = AutoDateLocator(minticks=2 if narrow else 3, maxticks=5 if narrow else 9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.margins(x=0.01)


def legend(axes: Axes, columns: int) -> int:
    """Name the lines above the plot, each once, in at most `columns` columns; return its rows."""
    handles, labels = axes.get_legend_handles_labels()
    once: dict[str, Any] = {}  # one entry for all seeds
    # A row of long names would leave no width for the plot itself. Eight more characters stand for
    # the handle and the gap.
    room = 24 * columns
    for label, handle in zip(labels, handles, strict=True):
        once.setdefault(textwrap.fill(label, room - 8), handle)
    longest = max((len(line) for label in once for line in label.split("\n")), default=0)
    fits = max(1, room // (longest + 8))
    axes.legend(
        list(once.values()),
        list(once),
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=min(fits, columns),
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=2.4,
    )
    columns = min(fits, columns)
    rows = [list(once)[i::columns] for i in range(columns)]
    return max(sum(1 + label.count("\n") for label in column) for column in rows)


def scale_equity(axes: Axes) -> None:
    """Give equity a log scale with ticks that a reader can use."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Beyond a decade the ticks 1, 2 and 5 are enough to read.
    if high / low > 20:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    else:  # a log scale's own ticks leave most of one decade blank
        ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        axes.set_yticks([tick for tick in ticks if low <= tick <= high and tick > 0])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_stress(figure: Figure, tables: Mapping[str, pd.DataFrame], colour: str) -> None:
    """Draw the Sharpe ratio of each table of `Stress.tables` side by side."""
    panels = np.atleast_1d(figure.subplots(1, len(tables), sharey=True))
    for axes, (label, table) in zip(panels, tables.items(), strict=True):
        axes.plot(table.index, table["sharpe"], color=colour, marker="o", markersize=4)
        axes.axhline(0.0, color="#999999", linewidth=0.6)
        axes.set_xlabel(label)
        if label == "capital":
            axes.set_xscale("log")
        else:
            axes.set_xticks(table.index)
    panels[0].set_ylabel("Sharpe ratio")
