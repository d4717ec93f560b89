"""The plots of a page as inline SVG, each once wide and once narrow."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from nca_trader.evaluate import metrics
from nca_trader.evaluate.figures import (
    AGENT,
    BASELINES,
    INK,
    MUTED,
    OF_A_PHONE,
    SEED,
    VARIABLES,
    Curve,
    draw_drawdown,
    draw_equity,
    draw_exposure,
    draw_lines,
    draw_years,
    fallen,
    is_narrow,
    legend,
    mark_starts,
    settings,
    shade,
    thinned,
    time_axis,
)
from nca_trader.evaluate.result import Result


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
    # Ids are hashes. Without a salt of our own they are random, and without the plot's name in it
    # those of two plots could be the same.
    with matplotlib.rc_context():
        # A style that another package or the user has set would move what a page has placed.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**settings({}), "svg.hashsalt": name})
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


def over_time(
    draw: Callable[[Sequence[Axes]], None],
    name: str,
    description: str,
    seen: tuple[pd.Timestamp, pd.Timestamp] | None = None,
    height: float = 1.0,
    heights: Sequence[float] = (1.0,),
    starts: Mapping[str, pd.Timestamp] = MappingProxyType({}),
) -> Markup:
    """Draw a plot over time for a page, see `in_both_widths`.

    Args:
      draw: draws the lines of each panel and sets scales and labels.
      name: of the plot, unique in the page.
      description: for readers who cannot see it.
      seen: the first and the last bar that an agent was trained or selected on, which are shaded
        and named.
      height: relative to the usual one.
      heights: of the panels, one below the other.
      starts: of the folds of a walk-forward, by name.
    """

    def whole(figure: Figure) -> None:
        grid = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        panels: list[Axes] = list(grid[:, 0])
        draw(panels)
        shade(panels, [seen] if seen else [], {})
        mark_starts(panels, starts)
        time_axis(panels[-1])
        for axes in panels:
            axes.margins(x=0.01)
        rows = legend(panels[0], 2 if is_narrow(panels[0]) else 5)
        with_margins(figure, rows)

    if seen is not None:
        description += f" Bars up to {seen[1].date()} are in sample."
    return in_both_widths(whole, name, description, height)


def with_margins(figure: Figure, legend_rows: int = 0, bottom: float = 0.32) -> None:
    """Set the margins of a figure over time: a constrained layout would draw all of it twice."""
    figure.set_layout_engine(None)
    width, height = figure.get_size_inches()
    top = 1.0 - (0.08 + 0.22 * legend_rows) / height
    figure.subplots_adjust(
        left=0.94 / width, right=1.0 - 0.08 / width, bottom=bottom / height, top=top, hspace=0.09
    )


def in_both_widths(
    draw: Callable[[Figure], None], name: str, description: str, height: float = 1.0
) -> Markup:
    """Draw once wide and once narrow, as text of a scaled plot is too small; see `svg`."""
    # The style sheet shows one of them, by the width of the screen.
    both = {"wide": (11.6, 4.2 * height), "narrow": (4.6, 3.7 * height)}
    images = {kind: svg(draw, size, f"{name}-{kind}", description) for kind, size in both.items()}
    return Markup("").join(
        Markup('<div class="{}">{}</div>').format(kind, image) for kind, image in images.items()
    )


def equity_plot(
    lines: Sequence[Curve],
    standing: str = "",
    seen: Any = None,
    starts: Mapping[str, pd.Timestamp] = MappingProxyType({}),
) -> Markup:
    """Draw equity on a log scale, and the drawdown from its highest value so far below it.

    Capital before the first bar is 1.

    Args:
      lines: of equity.
      standing: as of `Evidence`.
      seen: see `over_time`.
      starts: see `over_time`.
    """
    shown = [line for line in lines if line.role != "seed"]
    depths = [fallen(line) for line in shown]
    ends = "; ".join(
        f"{line.label} ends at {line.values.iloc[-1]:.2f}, deepest drawdown "
        f"{depth.values.min():.1%}"
        for line, depth in zip(shown, depths, strict=True)
    )
    text = f"{f'Equity {standing}'.rstrip()} on a log scale, and drawdown. {ends}."

    def draw(panels: Sequence[Axes]) -> None:
        draw_equity(panels[0], lines, {})
        draw_drawdown(panels[1], depths, {})

    return over_time(draw, "equity", text, seen, 1.35, (2.2, 1.0), starts)


def yearly_plot(years: Mapping[str, pd.Series], seen: Any = None) -> Markup | None:
    """Draw the return of each calendar year; None for fewer than two of them.

    Args:
      years: name as shown -> return by year; the first is what the page is about.
      seen: see `over_time`.
    """
    name, own = next(iter(years.items()))
    if len(own) < 2:
        return None
    text = f"Return of each year: {name} {own.min():.1%} to {own.max():.1%}."
    return over_time(lambda panels: draw_years(panels[0], years), "years", text, seen, 0.75)


def exposure_plot(exposure: pd.DataFrame, seen: Any = None) -> Markup:
    """Draw long and short exposure over time, as fractions of equity."""

    def draw(panels: Sequence[Axes]) -> None:
        net = thinned(exposure["net"], OF_A_PHONE)
        draw_lines(panels[0], [Curve("net", net, "frame")], {})
        draw_exposure(panels[0], exposure, {})

    mean = exposure.mean()
    text = f"Exposure over time: on average {mean['long']:.1%} long, {-mean['short']:.1%} short."
    return over_time(draw, "exposure", text, seen, height=0.62)


SHORTEST = 20  # bars of a window: fewer say nothing of a ratio


def rolling(returns: np.ndarray, window: int, bars_per_year: float) -> pd.DataFrame:
    """Compute the annualised Sharpe ratio and volatility of the last `window` returns at each bar.

    Args:
      returns: `[N]`.
      window: bars.
      bars_per_year: P.

    Returns:
      `[N]` each, columns `sharpe` and `volatility`. NaN for the first `window - 1` bars; the ratio
      is NaN where nothing moved.
    """
    r = pd.Series(returns).rolling(window)
    mean, deviation = r.mean().to_numpy(), r.std(ddof=1).to_numpy()
    # The first windows are NaN, as they should be.
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = mean / deviation * np.sqrt(bars_per_year)
    # A running sum leaves rounding where a window has no volatility, hence not `NO_VOLATILITY`.
    ratio = np.where(deviation > 1e-8, ratio, np.nan)
    return pd.DataFrame({"sharpe": ratio, "volatility": deviation * np.sqrt(bars_per_year)})


def rolling_plot(
    results: Mapping[str, Result], bars_per_year: float, seen: Any = None
) -> Markup | None:
    """Draw Sharpe ratio and volatility of the last year of bars, or of a quarter of a shorter span.

    Args:
      results: name as shown -> result; the first is the one that the page is about.
      bars_per_year: P.
      seen: see `over_time`.

    Returns:
      None where there are too few bars.
    """
    first = next(iter(results.values()))
    # The bars of a year are unknown where there is one bar alone.
    window = min(round(np.nan_to_num(bars_per_year)), len(first.equity) // 4)
    if window < SHORTEST:
        return None
    found = {
        name: rolling(result.excess_returns, window, bars_per_year).set_index(result.equity.index)
        for name, result in results.items()
    }

    def draw(panels: Sequence[Axes]) -> None:
        for axes, column in zip(panels, ("sharpe", "volatility"), strict=True):
            lines = [
                Curve(name, table[column], "baseline" if number else "agent")
                for number, (name, table) in enumerate(found.items())
            ]
            draw_lines(axes, lines, {})
            axes.yaxis.set_major_locator(MaxNLocator(4))
        panels[0].axhline(0.0, color=MUTED, linewidth=0.8)
        panels[0].set_ylabel("Sharpe ratio")
        panels[1].yaxis.set_major_formatter(PercentFormatter(1.0))
        panels[1].set_ylabel("volatility")

    known = next(iter(found.values())).dropna()
    text = f"Sharpe ratio and volatility per year of the last {window:,} bars."
    if len(known):
        ratio, moved = known["sharpe"], known["volatility"]
        text += (
            f" The ratio is between {ratio.min():.2f} and {ratio.max():.2f}, at the end "
            f"{ratio.iloc[-1]:.2f}; the volatility between {moved.min():.1%} and {moved.max():.1%}."
        )
    return over_time(draw, "rolling", text, seen, 1.1, (1.2, 1.0))


def histogram(returns: np.ndarray) -> Markup | None:
    """Draw how often each return per bar occurred; None where none differs from 0.

    The outermost bins hold what is beyond 5 standard deviations.
    """
    r = metrics.drop_nan(returns)
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
        with_margins(figure, bottom=0.52)

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
