"""The tables of a page, and a sweep and a walk-forward as sections and as pages."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics
from nca_trader.evaluate.figures import AGENT, INK, draw_stress
from nca_trader.evaluate.report.contents import Section
from nca_trader.evaluate.report.plots import in_both_widths
from nca_trader.evaluate.report.render import page_path, render, write
from nca_trader.evaluate.report.summary import WRITTEN, metric_rows
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.stress import Stress
from nca_trader.evaluate.trades import OPEN
from nca_trader.evaluate.wording import money, percent, with_error

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axis import Axis

BEST = 20  # rows of a sweep that a page shows
UNSHOWN = ("equity", "hit_rate", "skewness", "kurtosis", "expectancy")  # columns of a sweep
# Columns that are fractions; others are plain numbers.
SHARES = {k for k, (_, write) in WRITTEN.items() if getattr(write, "func", write) is percent}
SIDES = {"short": -1, "flat": 0, "long": 1}
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# Metrics of the table of details, by group; see `summary.WRITTEN`.
DETAILS = {
    "Return and risk": "sortino calmar omega value_at_risk expected_shortfall tail_ratio skewness "
    "kurtosis max_drawdown_duration ulcer_index stability hit_rate interest",
    "Trades": "trades win_rate profit_factor expectancy average_trade best_trade worst_trade "
    "trade_duration sqn capacity",
}


def sweep_section(table: pd.DataFrame, metric: str = "sharpe") -> Section:
    """Prepare the section of a sweep: its verdict, a heat map, and its best rows.

    Args:
      table: one row per combination, with parameter columns before those of metrics, as `nca.sweep`
        returns; `attrs["verdict"]` is its verdict, `attrs["about"]` what it is of.
      metric: column that the heat map shows, and that rows are sorted by.

    Raises:
      ConfigError: `table` is not a DataFrame, or lacks the metric or a parameter.
    """
    expect("table", table, pd.DataFrame, "a DataFrame, e.g. of nca.sweep")
    parameters = parameters_of(table)
    if metric not in table or not parameters:
        raise ConfigError(
            f"table has the columns {', '.join(map(str, table.columns))}; a sweep has parameters, "
            f"and then metrics with {metric!r} among them."
        )
    best = table.sort_values(metric, ascending=False)[:BEST]
    # A page is not as wide as the table; `sweep` returns every column.
    best = best.drop(columns=[x for x in UNSHOWN if x in best and x not in (metric, *parameters)])
    return Section(
        title="Sweep",
        verdict=str(table.attrs.get("verdict", "")),
        caption=f"The best {len(best):,} of {len(table):,} combinations by {_words(metric)}",
        headers=["", *(_words(name) for name in best.columns)],
        rows=_rows(best, [str(place) for place in range(1, len(best) + 1)]),
        plots=(*_heat_map(table, parameters, metric), *_parallel(table, parameters, metric)),
    )


def folds_section(folds: pd.DataFrame, verdict: str = "") -> Section:
    """Prepare the section of a walk-forward: one row per fold.

    Args:
      folds: one row per fold, as `nca.walk_forward(...).folds` has them.
      verdict: a sentence above the table; by default `attrs["verdict"]`.

    Raises:
      ConfigError: `folds` is not a DataFrame.
    """
    expect("folds", folds, pd.DataFrame, "a DataFrame, e.g. of nca.walk_forward(...).folds")
    return Section(
        title="Walk-forward",
        verdict=verdict or str(folds.attrs.get("verdict", "")),
        caption="Folds, one row each",
        headers=["Fold", *(_words(name) for name in folds.columns)],
        rows=_rows(folds, [str(name) for name in folds.index]),
    )


def stress_section(stress: Stress) -> Section:
    """Prepare the section of a stress: its sentence, its plot and its rows."""
    tables = {
        "costs {:g}x": stress.costs,
        "{:g} bars late": stress.delays,
        "capital {}": stress.capacity.rename(money),
    }
    rows = [
        (name.format(key), cells)
        for name, table in tables.items()
        for key, (_, cells) in zip(table.index, _rows(table, [""] * len(table)), strict=True)
    ]
    draw = functools.partial(draw_stress, tables=stress.tables, colour=AGENT)
    caption = "the Sharpe ratio at higher costs, with late orders, and with more capital"
    return Section(
        title="Costs, delay and capital",
        verdict=stress.sentence,
        caption="The backtest run again",
        headers=["", *(_words(name) for name in stress.costs.columns)],
        rows=rows,
        plots=((caption, in_both_widths(draw, "stress", f"{caption}.")),),
    )


def report_sweep(
    table: pd.DataFrame,
    path: str | os.PathLike[str],
    *,
    metric: str = "sharpe",
    title: str = "Sweep",
    command: str = "",
) -> Path:
    """Write the page of a sweep: verdict, heat map, best combinations.

    Args:
      table: see `sweep_section`.
      path: of the page, ends in .html.
      metric: see `sweep_section`.
      title: of the page.
      command: shown as the command that makes the page again.

    Returns:
      The path.

    Raises:
      ConfigError: another suffix, or a table that is not of a sweep.
      StateError: the page cannot be written.

    Example:
      >>> import pandas as pd
      >>> table = pd.DataFrame({"fast": [5, 5, 10, 10], "slow": [20, 40, 20, 40]})
      >>> table["sharpe"] = [0.4, 0.6, 0.1, 0.3]
      >>> report_sweep(table, "sweep.html").name
      'sweep.html'
    """
    path = page_path(path)
    section = sweep_section(table, metric)
    about = str(table.attrs.get("about", ""))
    return write_sections(path, title, [section], about, command)


def report_folds(
    folds: pd.DataFrame,
    path: str | os.PathLike[str],
    *,
    title: str = "Walk-forward",
    verdict: str = "",
    command: str = "",
) -> Path:
    """Write the page of a walk-forward: verdict and fold table.

    Args:
      folds: see `folds_section`.
      path: of the page, ends in .html.
      title: of the page.
      verdict: see `folds_section`.
      command: shown as the command that makes the page again.

    Returns:
      The path.

    Raises:
      ConfigError: another suffix, or folds that are not a DataFrame.
      StateError: the page cannot be written.

    Example:
      >>> import pandas as pd
      >>> folds = pd.DataFrame({"test_start": pd.to_datetime(["2020-01-01"]), "sharpe": [0.4]})
      >>> report_folds(folds, "folds.html").name
      'folds.html'
    """
    path = page_path(path)
    return write_sections(path, title, [folds_section(folds, verdict)], "", command)


def write_sections(
    path: Path, title: str, sections: Sequence[Section], about: str, command: str
) -> Path:
    """Write a page of sections that are a verdict, plots and a table each."""
    text = render("sections.html", title=title, about=about, sections=sections, command=command)
    return write(path, text)


def parameters_of(table: pd.DataFrame) -> list[str]:
    """Return the names of a sweep's parameters: `attrs["parameters"]`, or what precedes metrics."""
    if "parameters" in table.attrs:
        return [str(name) for name in table.attrs["parameters"]]
    known = {*WRITTEN, "bars", "final_equity"}
    names = []
    for name in table.columns:
        if name in known:
            break
        names.append(str(name))
    return names


def _varied(table: pd.DataFrame, parameters: Sequence[str]) -> list[str]:
    """Return the parameters that are numbers and have several values."""
    numeric = [name for name in parameters if pd.api.types.is_numeric_dtype(table[name])]
    return [name for name in numeric if table[name].nunique() > 1]


def _heat_map(
    table: pd.DataFrame, parameters: Sequence[str], metric: str
) -> tuple[tuple[str, Markup], ...]:
    """Draw the metric over the two parameters with the most values; return its caption and it."""
    counts = {name: table[name].nunique() for name in parameters}
    # Parameters that are names or choices have no axis.
    axes = sorted(_varied(table, parameters), key=lambda x: -counts[x])[:2]
    if not axes or table[metric].isna().all():
        return ()
    left_out = [name for name in parameters if name not in axes and counts[name] > 1]
    mean = f", mean over {', '.join(map(_words, left_out))}" if left_out else ""
    # One parameter has a curve, two have a map.
    draw, caption = _curve(table, axes[0], metric), f"{_words(metric)} by {axes[0]}{mean}"
    if len(axes) == 2:
        draw = _map(table, axes[0], axes[1], metric)
        caption = (
            f"{_words(metric)} by {' and '.join(axes)}{mean}; the ring is the best combination"
        )
    best = table.iloc[int(np.nanargmax(table[metric].to_numpy(float)))]
    at = ", ".join(f"{name} = {cell(name, best[name])}" for name in parameters)
    return (
        (caption, in_both_widths(draw, "heat", f"{caption}. Best {best[metric]:.3g} at {at}.")),
    )


def _parallel(
    table: pd.DataFrame, parameters: Sequence[str], metric: str
) -> tuple[tuple[str, Markup], ...]:
    """Draw a line for each combination across its parameters and the metric, the best in colour."""
    names = [*_varied(table, parameters), metric]
    known = table[table[metric].notna()].sort_values(metric)
    if len(names) < 3 or len(known) < 2:
        return ()
    low, high = known[names].min(), known[names].max()
    # Each axis from 0 to 1; one that has a single value stays at 0.
    scaled = ((known[names] - low) / (high - low).replace(0.0, 1.0)).to_numpy()
    tenth = max(1, len(known) // 10)
    # Lines beyond some hundred are a grey area, so the others are thinned out evenly.
    others = scaled[:-tenth][:: max(1, (len(known) - tenth) // 200)]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.grid(False)
        axes.plot(others.T, color=INK, alpha=0.12, linewidth=0.6)
        axes.plot(scaled[-tenth:][-100:].T, color=AGENT, alpha=0.35, linewidth=0.9)
        axes.plot(scaled[-1], color="#ff4d4d", linewidth=1.8)
        axes.set_xticks(
            range(len(names)),
            [f"{_words(x)}\n{low[x]:.3g} to {high[x]:.3g}" for x in names],
        )
        axes.set_yticks([])

    caption = (
        f"combinations from parameter to {_words(metric)}; the best tenth in blue, the best red"
    )
    return ((caption, in_both_widths(draw, "parallel", f"{caption}.")),)


def _curve(table: pd.DataFrame, name: str, metric: str):
    # The mean over the other parameters: one lucky combination makes no peak.
    mean = table.groupby(name)[metric].mean()

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot(mean.index.to_numpy(), mean.to_numpy(), color=AGENT, marker="o", markersize=3)
        axes.set_xlabel(name)
        axes.set_ylabel(_words(metric))

    return draw


def _map(table: pd.DataFrame, x: str, y: str, metric: str):
    grid = table.pivot_table(index=y, columns=x, values=metric)
    best = table.iloc[int(np.nanargmax(table[metric].to_numpy(float)))]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.grid(False)
        # A grid has a value in each cell; of a random sample each point is its own.
        if grid.notna().mean().mean() > 0.5:
            centres = (grid.columns.to_numpy(float), grid.index.to_numpy(float))
            look: Any = {"shading": "nearest", "cmap": "viridis", "edgecolor": "face"}
            shown: Any = axes.pcolormesh(*centres, grid.to_numpy(), **look)
            _tick(axes.xaxis, grid.columns)
            _tick(axes.yaxis, grid.index)
        else:
            shown = axes.scatter(table[x], table[y], c=table[metric], cmap="viridis", s=14)
        axes.plot(best[x], best[y], "o", markersize=11, fillstyle="none", color="#ff4d4d")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        bar = figure.colorbar(shown, ax=axes, label=_words(metric))
        bar.ax.yaxis.label.set_color(INK)

    return draw


def _tick(axis: Axis, values: pd.Index) -> None:
    """Place ticks at values that were tried, and at most a dozen of them."""
    axis.set_ticks(values[:: -(-len(values) // 12)])


def _rows(table: pd.DataFrame, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    records = table.to_dict("records")
    return [
        (name, [cell(str(column), value) for column, value in record.items()])
        for name, record in zip(names, records, strict=True)
    ]


def cell(name: str, value: Any) -> str:
    """Write a value by its type, and a metric by its name."""
    if value is None or value is pd.NaT or (isinstance(value, float) and np.isnan(value)):
        return "n/a"
    if isinstance(value, pd.Timestamp):
        return str(value)[:16].removesuffix(" 00:00")
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        return percent(float(value)) if name in SHARES else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} = {item}" for key, item in value.items())
    # The beginning of a checksum is enough to recognise it.
    return str(value)[:12] if name.endswith("sha256") else str(value)


def _words(name: Any) -> str:
    return str(name).replace("_", " ")


def details(agent: Result, best: Result) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return the groups of `DETAILS`, with the metrics of an account and its best baseline."""
    both = agent.metrics, best.metrics
    return [(group, metric_rows(agent, *both, keys=keys)) for group, keys in DETAILS.items()]


def monthly_returns(equity: pd.Series) -> pd.DataFrame:
    """Compute the return of each calendar month and year; NaN where there was no bar.

    Args:
      equity: `[N]` on a time axis; 1 before the first bar.

    Returns:
      One row per year, oldest first, with the columns `MONTHS` and "Year".

    Example:
      >>> index = pd.DatetimeIndex(["2020-01-31", "2020-02-03", "2020-02-28"], tz="UTC")
      >>> table = monthly_returns(pd.Series([1.1, 1.0, 1.21], index))
      >>> [round(x, 6) for x in table.loc[2020, ["Jan", "Feb", "Year"]]]
      [0.1, 0.1, 0.21]
    """
    index = pd.DatetimeIndex(equity.index)
    # Missing months stay missing: a market that was closed has no return of 0.
    ends = equity.groupby([index.year, index.month]).last()
    table = (ends / ends.shift(fill_value=1.0) - 1.0).unstack().reindex(columns=range(1, 13))
    return table.set_axis(MONTHS, axis=1).assign(Year=(1.0 + table).prod(axis=1) - 1.0)


def relative(m: dict[str, float]) -> dict[str, str]:
    """Write what the regression on the benchmark says; empty where there is none."""
    if np.isnan(m["beta"]):
        return {}
    return {
        "Alpha per year": with_error(m["alpha"], m["alpha_error"], percent),
        "Beta": with_error(m["beta"], m["beta_error"]),
        "Information ratio": with_error(m["information_ratio"], m["information_ratio_error"]),
    }


DRAWDOWNS = 5  # the deepest ones


def drawdown_periods(equity: pd.Series) -> pd.DataFrame:
    """List the deepest drawdowns, deepest first.

    Args:
      equity: `[N]` on a time axis; 1 before the first bar.

    Returns:
      One row each: `depth`; `peak`, the bar of the high before it (the first bar where it begins
      there); `bottom`; `recovery`, the first bar that is as high again, NaT where there is none
      yet; `bars`, from the peak to the recovery or the last bar.

    Example:
      >>> index = pd.date_range("2020-01-01", periods=5, tz="UTC")
      >>> found = drawdown_periods(pd.Series([1.0, 0.9, 0.8, 1.1, 1.0], index))
      >>> found["depth"].round(2).tolist(), found["bars"].tolist()
      ([-0.2, -0.09], [3, 1])
    """
    depth = metrics.drawdown_series(metrics.simple_returns(equity))
    below = np.concatenate([[False], depth < -metrics.NO_VOLATILITY, [False]])
    # Of each period the first bar below a high, and the first that is not any more.
    first, after = (np.flatnonzero(x) for x in (below[1:] & ~below[:-1], below[:-1] & ~below[1:]))
    bottoms = [i + int(np.argmin(depth[i:j])) for i, j in zip(first, after, strict=True)]
    order = np.argsort(depth[bottoms], kind="stable")[:DRAWDOWNS]
    index = pd.DatetimeIndex(equity.index)
    peak, after = np.maximum(first[order] - 1, 0), after[order]
    ended = after < len(index)
    last = np.minimum(after, len(index) - 1)
    bottom = np.array(bottoms, int)[order]
    return pd.DataFrame(
        {
            "depth": depth[bottom],
            "peak": index[peak],
            "bottom": index[bottom],
            "recovery": index[last].where(ended),
            "bars": last - peak,
        }
    )


def by_asset(agent: Result) -> list[tuple[str, list[str], dict[str, float]]]:
    """Return per asset its name, its trades, winners and profit, and its shares of bars by side."""
    table, symbols = agent.trades, agent.weights.columns
    number, pnl = symbols.get_indexer(pd.Index(table["symbol"])), table["pnl"].to_numpy(float)
    ended, size = (table["reason"] != OPEN).to_numpy(), len(symbols)
    count, done, won = (
        np.bincount(number[chosen], minlength=size)
        for chosen in (slice(None), ended, ended & (pnl > 0))
    )
    profit = np.bincount(number, pnl, size)
    sides = metrics.positions(agent.weights)
    shares = {name: (sides == value).mean(axis=0) for name, value in SIDES.items()}
    rows = []
    for k, symbol in enumerate(symbols):
        winners = won[k] / done[k] if done[k] else np.nan
        cells = [f"{count[k]:,}", percent(winners), percent(float(profit[k]), 2)]
        rows.append((symbol, cells, {name: float(of[k]) for name, of in shares.items()}))
    return rows
