"""Plots as inline SVG in the page's light or dark colours.

matplotlib is used without pyplot: no global state, no display, the same bytes every time.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from nca_trader.evaluate import metrics

if TYPE_CHECKING:
    from markupsafe import Markup

    from nca_trader.evaluate.prove import Proof
    from nca_trader.evaluate.stress import Stress

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
# Colours of a picture that stands alone.
PRINTED = {AGENT: "#1f5fa8", MUTED: "#555555"} | dict(
    zip(BASELINES, ("#c25e00", "#2e7d32", "#7b3fa0", "#777777"), strict=True)
)
# Drawn over the agent's broad line: an agent that copies a baseline shows both.
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


class Line(NamedTuple):
    """One curve.

    Attributes:
      label: as in the legend.
      values: `[N]` on a time axis.
      role: "agent", "baseline", "seed", or "frame" for the edge of an area.
    """

    label: str
    values: pd.Series
    role: str


POINTS = 2400  # of a line at most; more than the widest screen has columns of


def thinned(values: pd.Series) -> pd.Series:
    """Keep the first, last, lowest and highest value of each stretch of a long line."""
    if len(values) <= POINTS:
        return values
    numbers = values.to_numpy()
    # Four values of each stretch, so POINTS in all.
    edges = np.linspace(0, len(values), POINTS // 4 + 1).astype(int)
    # Extremes are kept, so that no drawdown disappears between two pixels.
    kept = {0, len(values) - 1}
    for first, last in itertools.pairwise(edges):
        stretch = numbers[first:last]
        # NaN, where a line begins later, is neither the lowest nor the highest.
        known = np.nan_to_num(stretch, nan=0.0)
        kept |= {first, last - 1, first + int(known.argmin()), first + int(known.argmax())}
    return values.iloc[sorted(kept)]


def times(values: pd.Series) -> np.ndarray:
    """Return the time axis of a line, as matplotlib takes it."""
    return pd.DatetimeIndex(values.index).tz_localize(None).to_numpy()


def svg(
    draw: Callable[[Figure], None], size: tuple[float, float] | None, name: str, description: str
) -> Markup:
    """Draw an `<svg>` element that scales with its container.

    Args:
      draw: draws on the figure, in placeholder colours.
      size: of the figure in inches; None where `draw` sets it.
      name: of the plot, unique in the page, so that its ids are unique too.
      description: what a reader who cannot see the plot needs to know.
    """
    from markupsafe import Markup

    # Ids are hashes. Without a salt of our own they are random, and without the plot's name in it
    # those of two plots could be the same.
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        out = io.StringIO()
        # The date of writing would make every page different.
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]  # no XML prolog inside HTML
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # matplotlib numbers its groups alike in every plot: ids without a reference would repeat.
    used = set(re.findall(r"#([\w.-]+)[\")]", text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
    opening, rest = text.removeprefix("<svg").split(">", 1)
    # Without a size of its own the drawing takes the width of its container.
    opening = re.sub(r' (xmlns(:\w+)?|width|height|version)="[^"]*"', "", opening).strip()
    for colour, variable in VARIABLES.items():
        rest = rest.replace(colour, f"var({variable})")
    label = Markup('<svg role="img" aria-label="{}" ').format(description)
    return label + Markup(f"{opening}>{rest}".strip())


def curves_over_time(
    lines: Sequence[Line],
    name: str,
    description: str,
    finish: Callable[[Axes], None],
    seen: pd.Timestamp | None = None,
    height: float = 1.0,
) -> Markup:
    """Draw lines over time, see `in_both_widths`.

    Args:
      lines: the curves.
      name: of the plot, unique in the page.
      description: for readers who cannot see it.
      finish: sets scales and labels.
      seen: the last bar that an agent was trained or selected on; what is not later is shaded and
        named.
      height: relative to the usual one.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        narrow = figure.get_figwidth() < 6
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
            values = thinned(line.values)
            axes.plot(
                times(values),
                values.to_numpy(),
                color=colour,
                linestyle=dash,
                linewidth=width,
                zorder=order,
                alpha=alpha,
                label=line.label.lstrip("_"),  # matplotlib hides labels that begin with it
            )
        if seen is not None:
            ends: list[Any] = list(times(lines[0].values[:seen])[[0, -1]])
            axes.axvspan(*ends, color=SEED, alpha=0.25, linewidth=0, label="in sample")
        # With 5 ticks at most, no interval of months fits two to three years: 2 ticks must do.
        locator = AutoDateLocator(minticks=2 if narrow else 3, maxticks=5 if narrow else 9)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.margins(x=0.01)
        handles, labels = axes.get_legend_handles_labels()
        once: dict[str, Any] = {}  # one entry for all seeds
        for label, handle in zip(labels, handles, strict=True):
            once.setdefault(label, handle)
        # A row of long names would leave no width for the plot itself.
        room = 48 if narrow else 120
        # Eight more characters stand for the handle and the gap.
        fits = max(1, room // (max(map(len, once)) + 8))
        axes.legend(
            list(once.values()),
            list(once),
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=min(fits, 2 if narrow else len(once)),
            borderaxespad=0.2,
            columnspacing=1.4,
            handlelength=2.4,
        )
        finish(axes)

    if seen is not None:
        description += f" Bars up to {seen.date()} are in sample."
    return in_both_widths(draw, name, description, height)


def in_both_widths(
    draw: Callable[[Figure], None], name: str, description: str, height: float = 1.0
) -> Markup:
    """Draw once wide and once narrow, as text of a scaled plot is too small; see `svg`."""
    from markupsafe import Markup

    # The style sheet shows one of them, by the width of the screen.
    both = {"wide": (11.6, 4.2 * height), "narrow": (4.6, 3.7 * height)}
    images = {kind: svg(draw, size, f"{name}-{kind}", description) for kind, size in both.items()}
    return Markup("").join(
        Markup('<div class="{}">{}</div>').format(kind, image) for kind, image in images.items()
    )


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


def equity_plot(
    lines: Sequence[Line], standing: str = "", seen: pd.Timestamp | None = None
) -> Markup:
    """Draw equity on a log scale; capital before the first bar is 1.

    Args:
      lines: of equity.
      standing: as of `Evidence`.
      seen: the last in-sample bar, see `curves_over_time`.
    """

    def finish(axes: Axes) -> None:
        scale_equity(axes)
        axes.set_ylabel("equity, start = 1 (log scale)")

    ends = "; ".join(
        f"{line.label} ends at {line.values.iloc[-1]:.2f}" for line in lines if line.role != "seed"
    )
    title = f"Equity {standing}".rstrip()
    return curves_over_time(lines, "equity", f"{title} on a log scale. {ends}.", finish, seen)


def drawdown_plot(
    lines: Sequence[Line], standing: str = "", seen: pd.Timestamp | None = None
) -> Markup:
    """Draw the drawdown from the highest equity so far, with lines as in `equity_plot`."""
    fallen = []
    for line in lines:
        depth = metrics.drawdown_series(metrics.simple_returns(line.values))
        fallen.append(line._replace(values=pd.Series(depth, line.values.index)))

    def finish(axes: Axes) -> None:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(top=0.0)
        axes.set_ylabel("drawdown")

    ends = "; ".join(
        f"{line.label} {line.values.min():.1%}" for line in fallen if line.role != "seed"
    )
    title = f"Drawdown {standing}".rstrip()
    return curves_over_time(fallen, "drawdown", f"{title}. Deepest: {ends}.", finish, seen)


def per_seed(rows: Sequence[Mapping[str, object]], key: str) -> np.ndarray:
    """Return `[U, S]` of one metric of `metrics.jsonl`: a number is one seed, a list all seeds."""
    return np.stack([np.atleast_1d(np.asarray(row[key], np.float64)) for row in rows])


def training_plot(
    rows: Sequence[Mapping[str, object]], key: str, label: str, seed: int | None, seed_name: str
) -> Markup:
    """Draw one metric over updates: the seed that acts, and the band between all seeds' extremes.

    Args:
      rows: of `metrics.jsonl`, each with `update`.
      key: the metric.
      label: its name for readers.
      seed: column of the seed that acts; None draws the mean of all.
      seed_name: for readers, e.g. "the selected seed".
    """
    values = per_seed(rows, key)
    chosen = values.mean(1) if seed is None else values[:, min(seed, values.shape[1] - 1)]
    updates = np.array([row["update"] for row in rows], np.float64)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        if values.shape[1] > 1:
            # fmin and fmax: a row of NaN (a metric not yet defined) leaves a gap and no warning.
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

    ends = f"{label} over {len(rows)} updates: from {chosen[0]:.3g} to {chosen[-1]:.3g}"
    return svg(draw, (4.4, 2.6), f"training-{key}", f"{ends} for {seed_name}.")


def draw_proofs(figure: Figure, proofs: Sequence[Proof], colours: Mapping[str, str]) -> None:
    """Draw a small plot per market: a line per seed, and dashed lines for its controls."""
    markets = list(dict.fromkeys(proof.market for proof in proofs))
    across = min(3, len(markets))
    down = math.ceil(len(markets) / across)
    figure.set_size_inches(3.9 * across, 2.6 * down)
    for place, market in enumerate(markets):
        axes = figure.add_subplot(down, across, place + 1)
        axes.set_title(market, loc="left", fontsize=10)
        runs = [proof for proof in proofs if proof.market == market]
        # All proofs of a market share its controls.
        lines = [
            (curve, BASELINES[number], DASHES[number], 1.2)
            for number, curve in enumerate(runs[0].controls.values())
        ]
        lines += [(proof.curve, AGENT, "-", 1.6) for proof in runs]
        for curve, colour, dash, width in lines:
            x, y = [point.seconds for point in curve], [point.height for point in curve]
            axes.plot(x, y, color=colours.get(colour, colour), linestyle=dash, linewidth=width)
        axes.axhline(runs[0].goal, color=colours.get(MUTED, MUTED), linewidth=0.8)
        axes.set_ylabel("of the optimum" if runs[0].earns else "turnover per step")
        if runs[0].earns:
            axes.set_ylim(-0.05, 1.05)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("seconds of training")


def proofs_picture(proofs: Sequence[Proof], kind: str) -> bytes:
    """Draw the curves of `prove` as a picture of this kind, e.g. "png" or "svg"."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "prove", "axes.grid": True}):
        figure = Figure(layout="constrained")
        draw_proofs(figure, proofs, PRINTED)
        figure.savefig(out, format=kind, dpi=110)
    return out.getvalue()


def draw_stress(figure: Figure, stress: Stress, colour: str) -> None:
    """Draw the Sharpe ratio by costs, by delay, and by capital where volume is known."""
    tables = {
        "costs, times those given": stress.costs,
        "bars late": stress.delays,
        "capital": stress.capacity,
    }
    tables = {label: table for label, table in tables.items() if len(table)}
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
