"""Plots of one account through time: rolling Sharpe ratio, exposure, and the spread of returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nca_trader.evaluate import metrics
from nca_trader.evaluate.report.plots import (
    AGENT,
    BASELINES,
    INK,
    MUTED,
    Line,
    curves_over_time,
    in_both_widths,
    thinned,
    times,
)

if TYPE_CHECKING:
    from markupsafe import Markup

    from nca_trader.evaluate.result import Result

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
    results: Mapping[str, Result], bars_per_year: float, seen: pd.Timestamp | None
) -> Markup | None:
    """Draw the Sharpe ratio of the last year of bars, or of a quarter of a shorter span.

    Args:
      results: name as shown -> result; the first is the one that the page is about.
      bars_per_year: P.
      seen: the last bar that an agent was trained or selected on; None for none.

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

    def finish(axes: Axes) -> None:
        axes.axhline(0.0, color=MUTED, linewidth=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylabel(f"Sharpe ratio of {window:,} bars")

    known = lines[0].values.dropna()
    text = f"Sharpe ratio of the last {window:,} bars."
    if len(known):
        text += (
            f" Between {known.min():.2f} and {known.max():.2f}, at the end {known.iloc[-1]:.2f}."
        )
    return curves_over_time(lines, "rolling", text, finish, seen)


def exposure_plot(exposure: pd.DataFrame, seen: pd.Timestamp | None) -> Markup:
    """Draw long and short exposure over time, as fractions of equity."""

    def finish(axes: Axes) -> None:
        for name, colour in (("long", AGENT), ("short", BASELINES[0])):
            kept = thinned(exposure[name])
            if kept.any():
                axes.fill_between(
                    times(kept), 0.0, kept.to_numpy(), color=colour, alpha=0.55, lw=0, step="mid"
                )
        axes.axhline(0.0, color=MUTED, linewidth=0.8)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_ylabel("exposure")

    mean = exposure.mean()
    text = f"Exposure over time: on average {mean['long']:.1%} long, {-mean['short']:.1%} short."
    net = Line("net", exposure["net"], "frame")
    return curves_over_time([net], "exposure", text, finish, seen, height=0.62)


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
