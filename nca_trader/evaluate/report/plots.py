"""The plots of a page as inline SVG, each once wide and once narrow."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from nca_trader.evaluate import metrics
from nca_trader.evaluate.report.figures import (
    AGENT,
    BASELINES,
    INK,
    MUTED,
    SEED,
    VARIABLES,
    Curve,
    draw_drawdown,
    draw_equity,
    draw_exposure,
    draw_lines,
    fallen,
    legend,
    settings,
    shade,
    time_axis,
)

if TYPE_CHECKING:
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
        time_axis(axes, narrow)
        legend(axes, 2 if narrow else 5)

    if seen is not None:
        description += f" Bars up to {seen[1].date()} are in sample."
    return in_both_widths(whole, name, description, height)


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


def equity_plot(lines: Sequence[Curve], standing: str = "", seen: Any = None) -> Markup:
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


def drawdown_plot(lines: Sequence[Curve], standing: str = "", seen: Any = None) -> Markup:
    """Draw the drawdown from the highest equity so far; takes what `equity_plot` takes."""
    ends = "; ".join(
        f"{line.label} {fallen(line).values.min():.1%}" for line in lines if line.role != "seed"
    )
    text = f"{f'Drawdown {standing}'.rstrip()}. Deepest: {ends}."
    return over_time(lambda axes: draw_drawdown(axes, lines, {}), "drawdown", text, seen)


def exposure_plot(exposure: pd.DataFrame, seen: Any = None) -> Markup:
    """Draw long and short exposure over time, as fractions of equity."""

    def draw(axes: Axes) -> None:
        draw_lines(axes, [Curve("net", exposure["net"], "frame")], {})
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
        ratio = rolling_sharpe(result.excess_returns, window, bars_per_year)
        values = pd.Series(ratio, result.equity.index)
        lines.append(Curve(name, values, "baseline" if number else "agent"))

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
