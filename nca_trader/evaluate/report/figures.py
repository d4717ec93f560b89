"""Draws results for Python and notebooks, and the plots of a page as inline SVG.

Equity, drawdown and exposure are drawn by one function each. On a page they have the page's light
or dark colours, and `PRINTED` ones in a figure that stands alone. matplotlib is used without
pyplot: no global state, no display, the same bytes every time.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
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
    from nca_trader.evaluate.result import Result
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
# Colours of a figure that stands alone, by placeholder.
PRINTED: dict[str, str] = dict(
    zip(
        (INK, MUTED, GRID, SEED, AGENT, *BASELINES),
        ("#000000", "#555555", "#dddddd", "#c25e00", "#1f5fa8", "#c25e00", "#2e7d32", "#7b3fa0",
         "#777777"),
        strict=True,
    )
)  # fmt: skip
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


def settings(colours: Mapping[str, str]) -> dict[Any, Any]:
    """Return matplotlib's settings in these colours; those of a page without any."""
    found = {key: colours.get(x, x) if isinstance(x, str) else x for key, x in SETTINGS.items()}
    return found | ({"figure.facecolor": "white"} if colours else {})


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
    with matplotlib.rc_context({**settings({}), "svg.hashsalt": name}):
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


def result_figure(results: Sequence[Result]) -> Figure:
    """Draw equity on a log scale, drawdown and, of one result, exposure.

    In-sample bars are shaded and named. One result is drawn next to its benchmark.
    """
    alone = results[0] if len(results) == 1 else None
    lines = [Line(x.name, x.equity, "baseline" if n else "agent") for n, x in enumerate(results)]
    if alone and alone.hold is not None:
        lines.append(Line("buy and hold", alone.hold.equity, "baseline"))
    # Exposure of several results would be a tangle, so only one shows it.
    heights = (3, 1.4, 1) if alone else (3, 1.6)
    with matplotlib.rc_context(settings(PRINTED)):
        figure = Figure(figsize=(9, 2.1 * sum(heights) / 1.8), layout="constrained")
        panels = figure.subplots(len(heights), sharex=True, height_ratios=heights)
        draw_equity(panels[0], lines, PRINTED)
        draw_drawdown(panels[1], lines, PRINTED)
        if alone:
            draw_exposure(panels[2], alone.exposure, PRINTED)
        # A set, since several results of one run share their in-sample bars.
        shade(panels, {seen_by(result) for result in results if result.in_sample}, PRINTED)
        _time_axis(panels[-1])
        _legend(panels[0], 4)
    return figure


def seen_by(result: Result) -> tuple[pd.Timestamp, pd.Timestamp]:
    """Return the first and the last bar that an agent was trained or selected on."""
    return result.equity.index[0], result.equity.index[(result.in_sample or 0) - 1]


def stress_figure(stress: Stress) -> Figure:
    """Draw the Sharpe ratio by costs, by delay, and by capital where volume is known."""
    with matplotlib.rc_context(settings(PRINTED)):
        figure = Figure(figsize=(9.6 if len(stress.capacity) else 6.4, 2.8), layout="constrained")
        draw_stress(figure, stress, PRINTED[AGENT])
    return figure


def draw_lines(axes: Axes, lines: Sequence[Line], colours: Mapping[str, str]) -> None:
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
        values = thinned(line.values)
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


def draw_equity(axes: Axes, lines: Sequence[Line], colours: Mapping[str, str]) -> None:
    """Draw equity on a log scale, see `draw_lines`."""
    draw_lines(axes, lines, colours)
    scale_equity(axes)
    axes.set_ylabel("equity, start = 1 (log scale)")


def draw_drawdown(axes: Axes, lines: Sequence[Line], colours: Mapping[str, str]) -> None:
    """Draw the drawdown of lines of equity, see `draw_lines`."""
    draw_lines(axes, [fallen(line) for line in lines], colours)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(top=0.0)
    axes.set_ylabel("drawdown")


def draw_exposure(axes: Axes, exposure: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Draw long and short exposure as areas, as fractions of equity."""
    for name, colour in (("long", AGENT), ("short", BASELINES[0])):
        kept = thinned(exposure[name])
        if kept.any():
            axes.fill_between(
                times(kept), 0.0, kept.to_numpy(), color=colours.get(colour, colour), alpha=0.55,
                lw=0, step="mid",
            )  # fmt: skip
    axes.axhline(0.0, color=colours.get(MUTED, MUTED), linewidth=0.8)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_ylabel("exposure")


def fallen(line: Line) -> Line:
    """Return the drawdown of a line of equity from its highest value so far."""
    depth = metrics.drawdown_series(metrics.simple_returns(line.values))
    return line._replace(values=pd.Series(depth, line.values.index))


def shade(
    panels: Sequence[Axes],
    spans: Collection[tuple[pd.Timestamp, pd.Timestamp]],
    colours: Mapping[str, str],
) -> None:
    """Shade the bars that an agent was trained or selected on, and name them."""
    for first, last in sorted(spans):
        for number, axes in enumerate(panels):
            # One entry in the legend, whatever the number of panels and spans.
            label = None if number or (first, last) != min(spans) else "in sample"
            ends: Any = [time.tz_localize(None).to_datetime64() for time in (first, last)]
            colour = colours.get(SEED, SEED)
            axes.axvspan(*ends, color=colour, alpha=0.2, linewidth=0, label=label)


def _time_axis(axes: Axes, narrow: bool = False) -> None:
    # With 5 ticks at most, no interval of months fits two to three years: 2 ticks must do.
    locator = AutoDateLocator(minticks=2 if narrow else 3, maxticks=5 if narrow else 9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.margins(x=0.01)


def _legend(axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once: dict[str, Any] = {}  # one entry for all seeds
    for label, handle in zip(labels, handles, strict=True):
        once.setdefault(label, handle)
    # A row of long names would leave no width for the plot itself. Eight more characters stand for
    # the handle and the gap.
    room = 24 * columns
    fits = max(1, room // (max(map(len, once), default=0) + 8))
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


def over_time(
    draw: Callable[[Axes], None],
    name: str,
    description: str,
    seen: tuple[pd.Timestamp, pd.Timestamp] | None = None,
    height: float = 1.0,
) -> Markup:
    """Draw a plot over time for a page, see `in_both_widths`.

    Args:
      draw: draws the lines and sets scales and labels.
      name: of the plot, unique in the page.
      description: for readers who cannot see it.
      seen: the first and the last bar that an agent was trained or selected on, which are shaded
        and named.
      height: relative to the usual one.
    """

    def whole(figure: Figure) -> None:
        axes, narrow = figure.add_subplot(), figure.get_figwidth() < 6
        draw(axes)
        shade([axes], [seen] if seen else [], {})
        _time_axis(axes, narrow)
        _legend(axes, 2 if narrow else 5)

    if seen is not None:
        description += f" Bars up to {seen[1].date()} are in sample."
    return in_both_widths(whole, name, description, height)


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


def equity_plot(lines: Sequence[Line], standing: str = "", seen: Any = None) -> Markup:
    """Draw equity on a log scale; capital before the first bar is 1.

    Args:
      lines: of equity.
      standing: as of `Evidence`.
      seen: see `over_time`.
    """
    ends = "; ".join(
        f"{line.label} ends at {line.values.iloc[-1]:.2f}" for line in lines if line.role != "seed"
    )
    text = f"{f'Equity {standing}'.rstrip()} on a log scale. {ends}."
    return over_time(lambda axes: draw_equity(axes, lines, {}), "equity", text, seen)


def drawdown_plot(lines: Sequence[Line], standing: str = "", seen: Any = None) -> Markup:
    """Draw the drawdown from the highest equity so far; takes what `equity_plot` takes."""
    ends = "; ".join(
        f"{line.label} {fallen(line).values.min():.1%}" for line in lines if line.role != "seed"
    )
    text = f"{f'Drawdown {standing}'.rstrip()}. Deepest: {ends}."
    return over_time(lambda axes: draw_drawdown(axes, lines, {}), "drawdown", text, seen)


def exposure_plot(exposure: pd.DataFrame, seen: Any = None) -> Markup:
    """Draw long and short exposure over time, as fractions of equity."""

    def draw(axes: Axes) -> None:
        draw_lines(axes, [Line("net", exposure["net"], "frame")], {})
        draw_exposure(axes, exposure, {})

    mean = exposure.mean()
    text = f"Exposure over time: on average {mean['long']:.1%} long, {-mean['short']:.1%} short."
    return over_time(draw, "exposure", text, seen, height=0.62)


SHORTEST = 20  # bars of a window: fewer say nothing of a ratio


def rolling_sharpe(returns: np.ndarray, window: int, bars_per_year: float) -> np.ndarray:
    """Compute the annualised Sharpe ratio of the last `window` returns at each bar.

    Args:
      returns: `[N]`.
      window: bars.
      bars_per_year: P.

    Returns:
      `[N]`, NaN for the first `window - 1` bars and where nothing moved.
    """
    r = pd.Series(returns).rolling(window)
    mean, deviation = r.mean().to_numpy(), r.std(ddof=1).to_numpy()
    # The first windows are NaN, as they should be.
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = mean / deviation * np.sqrt(bars_per_year)
    # A running sum leaves rounding where a window has no volatility, hence not `NO_VOLATILITY`.
    return np.where(deviation > 1e-8, ratio, np.nan)


def rolling_sharpe_plot(
    results: Mapping[str, Result], bars_per_year: float, seen: Any = None
) -> Markup | None:
    """Draw the Sharpe ratio of the last year of bars, or of a quarter of a shorter span.

    Args:
      results: name as shown -> result; the first is the one that the page is about.
      bars_per_year: P.
      seen: see `over_time`.

    Returns:
      None where there are too few bars.
    """
    first = next(iter(results.values()))
    window = min(round(bars_per_year), len(first.equity) // 4)
    if window < SHORTEST:
        return None
    lines = []
    for number, (name, result) in enumerate(results.items()):
        ratio = rolling_sharpe(result.judged_returns, window, bars_per_year)
        values = pd.Series(ratio, result.equity.index)
        lines.append(Line(name, values, "baseline" if number else "agent"))

    def draw(axes: Axes) -> None:
        draw_lines(axes, lines, {})
        axes.axhline(0.0, color=MUTED, linewidth=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylabel(f"Sharpe ratio of {window:,} bars")

    known = lines[0].values.dropna()
    text = f"Sharpe ratio of the last {window:,} bars."
    if len(known):
        text += (
            f" Between {known.min():.2f} and {known.max():.2f}, at the end {known.iloc[-1]:.2f}."
        )
    return over_time(draw, "rolling", text, seen)


def histogram(returns: np.ndarray) -> Markup | None:
    """Draw how often each return per bar occurred; None where none differs from 0.

    The outermost bins hold what is beyond 5 standard deviations.
    """
    r = metrics.known(returns)
    # Interest alone, taken off again, leaves rounding.
    r = r[np.abs(r) > metrics.NO_VOLATILITY]
    if len(r) < 2 or (deviation := r.std()) < metrics.NO_VOLATILITY:
        return None
    ends = r.mean() - 5.0 * deviation, r.mean() + 5.0 * deviation
    tail = metrics.value_at_risk(returns)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.hist(np.clip(r, *ends), bins=61, range=ends, color=AGENT, alpha=0.75)
        axes.axvline(tail, color=BASELINES[0], linewidth=1.4, linestyle="--")
        axes.text(
            tail, 0.98, f" 5% VaR {tail:.2%} ", color=INK, ha="right", va="top",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
        axes.set_xlabel("return per bar, where it is not 0")
        axes.set_ylabel("bars")

    text = f"Histogram of {len(r):,} returns per bar, 5% value at risk {tail:.2%}."
    return in_both_widths(draw, "histogram", text, height=0.75)


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
