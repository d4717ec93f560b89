"""An episode as a picture: prices, what was held, and equity beside buy and hold."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure

from nca_trader.types import Bars

WIDTH, HEIGHT, DPI = 960, 640, 100  # pixels
BARS_BEFORE = 60  # shown before an episode's first bar, so that its start has a past
AGENT, MARKET, LONG, SHORT = "#1f5fbf", "#8a8f98", "#2a9d5c", "#d1495b"


def picture(bars: Bars, rows: np.ndarray, equity: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """`[HEIGHT, WIDTH, 3]` uint8 of an episode; the same episode gives the same pixels.

    Args:
      rows: `[n]` bars whose closes were seen, in order. equity: `[n]`, 1 at the first.
      weights: `[n, A]` held at those closes.
    """
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    price, held, result = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1.2, 2]}
    )
    _draw_prices(price, bars, rows)
    _draw_weights(held, bars, rows, weights)
    _draw_equity(result, bars, rows, equity)
    for axes in (price, held, result):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    locator = AutoDateLocator()
    result.xaxis.set_major_locator(locator)
    result.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _draw_prices(axes: Axes, bars: Bars, rows: np.ndarray) -> None:
    """Closes; of several assets each over its own at the episode's start."""
    first, last = max(int(rows[0]) - BARS_BEFORE, 0), int(rows[-1])
    seen = slice(first, last + 1)
    close = bars.close[seen]
    if bars.num_assets > 1:
        close = close / bars.close[rows[0]]
    for i, symbol in enumerate(bars.symbols):
        color = MARKET if bars.num_assets == 1 else f"C{i % 10}"
        axes.plot(bars.time[seen], close[:, i], color=color, linewidth=1.2, label=symbol)
    axes.axvline(float(date2num(bars.time[rows[0]])), color="black", linewidth=0.8, linestyle=":")
    axes.set_ylabel("close" if bars.num_assets == 1 else "close / first")
    axes.set_title(f"{bars.time[rows[-1]].astype('datetime64[m]')} UTC", loc="left", fontsize=10)
    if bars.num_assets <= 10:
        axes.legend(loc="upper left", fontsize=8, frameon=False, ncols=5)


def _draw_weights(axes: Axes, bars: Bars, rows: np.ndarray, weights: np.ndarray) -> None:
    """The weight held after each close: green above zero, red below, or a line an asset."""
    time = bars.time[rows]
    if bars.num_assets == 1:
        held = weights[:, 0]
        axes.fill_between(time, np.maximum(held, 0.0), step="post", color=LONG, linewidth=0)
        axes.fill_between(time, np.minimum(held, 0.0), step="post", color=SHORT, linewidth=0)
    else:
        for i in range(bars.num_assets):
            axes.step(time, weights[:, i], where="post", color=f"C{i % 10}", linewidth=1.2)
    axes.axhline(0.0, color="black", linewidth=0.6)
    axes.set_ylabel("weight held")


def _draw_equity(axes: Axes, bars: Bars, rows: np.ndarray, equity: np.ndarray) -> None:
    """Equity, and that of equal weights bought at the first close and held, free of costs."""
    time, held = bars.time[rows], np.nanmean(bars.close[rows] / bars.close[rows[0]], axis=1)
    label = f"buy and hold, no costs: {held[-1] - 1:+.1%}"
    axes.plot(time, held, color=MARKET, linewidth=1.2, label=label)
    axes.plot(time, equity, color=AGENT, linewidth=1.6, label=f"agent: {equity[-1] - 1:+.1%}")
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_ylabel("equity")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
