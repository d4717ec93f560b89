"""The self-contained HTML page of a backtest.

`report.html` holds the text and the layout; `contents` collects what it shows, and this module
turns that into plots, tables and the data of the price chart. See `render` for what a page may do.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.evaluate import inference, metrics
from nca_trader.evaluate import verdict as words
from nca_trader.evaluate.report import figures
from nca_trader.evaluate.report.chart import CHART, price_chart
from nca_trader.evaluate.report.contents import Report, backtest_baselines, report_on
from nca_trader.evaluate.report.render import LIBRARY, page_path, render, script, write
from nca_trader.evaluate.report.summary import annual, money, whole, with_error
from nca_trader.evaluate.report.tables import folds_section, stress_section, sweep_section
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.stress import Stress
from nca_trader.evaluate.trades import OPEN
from nca_trader.evaluate.verdict import decimal, percent
from nca_trader.progress import Progress
from nca_trader.runs.manifest import Run
from nca_trader.types import Bars

# Metrics of training in the order shown; a run that did not write one has no plot of it.
TRAINING = {
    "reward": "mean reward per bar",
    "mean_reward": "mean reward per bar",
    "equity": "equity",
    "entropy": "entropy of the policy",
    "approx_kl": "approximate KL per update",
    "explained_variance": "explained variance of the value",
    "clip_fraction": "share of ratios clipped",
    "loss": "loss",
}
# Costs that a reader may expect, where they are zero.
NOT_CHARGED = {
    "commission": "commission",
    "slippage": "slippage",
    "half_spread": "a spread in addition to the slippage and the bars' own quotes",
    "impact": "market impact",
    "borrow_fee": "borrowing fees",
    "interest_lend": "interest on cash",
}
SIDES = {"short": -1, "flat": 0, "long": 1}
DRAWN = 3  # baselines in a plot
TRADES_SHOWN = 5  # best and worst ones each
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# Metrics of the table of details: group, then key, name and how it is written.
DETAILS = {
    "Return and risk": (
        ("sortino", "Sortino ratio", decimal),
        ("calmar", "Calmar ratio", decimal),
        ("omega", "Omega ratio, threshold 0", decimal),
        ("value_at_risk", "5% value at risk per bar", lambda x: percent(x, 2)),
        ("expected_shortfall", "expected shortfall beyond it (CVaR)", lambda x: percent(x, 2)),
        ("tail_ratio", "tail ratio, 95% to 5%", decimal),
        ("skewness", "skewness", decimal),
        ("kurtosis", "kurtosis (a Gaussian has 3)", decimal),
        ("max_drawdown_duration", "longest drawdown, in bars", whole),
        ("ulcer_index", "ulcer index", percent),
        ("stability", "R² of log-equity on time", decimal),
        ("hit_rate", "winning bars, of those that moved", percent),
        ("interest", "interest earned on cash, of the capital", lambda x: percent(x, 2)),
    ),
    "Trades": (
        ("trades", "trades, with those still open", whole),
        ("win_rate", "winning trades, of those that ended", percent),
        ("profit_factor", "profit factor", decimal),
        ("expectancy", "expectancy per trade, of the capital", lambda x: percent(x, 3)),
        ("average_trade", "average trade", lambda x: percent(x, 2)),
        ("best_trade", "best trade", percent),
        ("worst_trade", "worst trade", percent),
        ("trade_duration", "average duration, in bars", lambda x: decimal(x, 1)),
        ("sqn", "system quality number", decimal),
        ("capacity", "capital at which fills take 1% of volume", money),
    ),
}


class Monthly(NamedTuple):
    """Returns of one calendar year: of its months, and of the year; NaN where there was no bar."""

    year: int
    months: list[float]
    total: float


def report(
    bars: Bars,
    result: Result,
    path: str | os.PathLike[str],
    *,
    run: Run | None = None,
    command: str = "",
    sweep: pd.DataFrame | None = None,
    folds: pd.DataFrame | None = None,
    stress: Stress | None = None,
) -> Path:
    """Write a backtest as one self-contained HTML page, compared with baselines.

    Args:
      bars: all bars that the backtest was given.
      result: of `nca.backtest`.
      path: of the page, e.g. "page.html".
      run: the run that acted; None for a strategy.
      command: shown on the page as the command that makes it again.
      sweep: the table of `nca.sweep` that chose the parameters, for a heat map and its verdict.
      folds: the fold table of `nca.walk_forward`.
      stress: of `result.stress()`.

    Returns:
      The path.

    Raises:
      ConfigError: `path` does not end in .html.
      StateError: the page cannot be written.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-100:]
      >>> result = nca.backtest(bars, nca.rules.momentum(20), nca.Costs(commission=5e-4))
      >>> nca.report(bars, result, "page.html").name
      'page.html'
    """
    path = page_path(path)
    index = result.equity.index
    after = bars.index.searchsorted(index[-1]) + 1
    # Baselines stop where the result did, which may be before the last bar.
    stop = str(bars.index[after]) if after < len(bars) else None
    with Progress(None, "page"):
        # At the result's own costs, fills and limits: otherwise the page would compare settings.
        baselines = backtest_baselines(bars, result, str(index[0]), stop)
        if run is None and sweep is not None:  # each combination is a trial, logged or not
            known = {"trials": len(sweep), "trials_variance": 1.0} | sweep.attrs.get("search", {})
            if known["trials"] > (result.tried or 0):
                more = {"tried": known["trials"], "tried_variance": known["trials_variance"]}
                result = dataclasses.replace(result, **more)
        shown = report_on(bars, result, baselines, run, command)
        shown = dataclasses.replace(shown, sweep=sweep, folds=folds, stress=stress)
        return write_report(path, shown)


def write_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write the page of a backtest, and the folder where it is missing.

    Returns:
      The path. The file appears whole or not at all.

    Raises:
      StateError: it cannot be written there.
    """
    return write(Path(path), page(report).encode())


def page(report: Report) -> str:
    """Render the page of a backtest."""
    agent, evidence, searched = report.agent, report.evidence, report.trials
    lines = [
        figures.Line(report.label, agent.equity, "agent"),
        # The first ones: a plot of all has no room left on a phone.
        *(
            figures.Line(name, b.equity, "baseline")
            for name, b in list(report.baselines.items())[:DRAWN]
        ),
        *(figures.Line("other seeds", seed.equity, "seed") for seed in report.other_seeds),
    ]
    # Only an in-sample part that is not the whole needs a line around it, but both are shaded.
    seen = figures.seen_by(agent) if agent.in_sample else None
    # A metric is shown where every update has it.
    rows = report.training
    keys = [key for key in TRAINING if rows and all(key in row for row in rows)]
    # A seed that was picked is named so, because a picked one is too good.
    seed_name = "the selected seed" if searched and searched.selected else f"seed {report.seed}"
    seed_name = "the mean of the seeds" if report.seed is None else seed_name
    held = {
        symbol: metrics.positions(agent.weights.iloc[:, number])
        for number, symbol in enumerate(report.symbols)
    }
    costs = dataclasses.asdict(agent.charged)
    # A cost of the user's own has a name and no rate, so it is listed apart.
    own, scale = costs.pop("own") or (), costs.pop("own_scale")
    chart = price_chart(agent)
    # The strongest baseline and not the first: an agent has to beat that one.
    best = report.baselines[evidence.best]
    years = len(agent.equity) / agent.bars_per_year
    return render(
        "report.html",
        scripts=[] if chart is None else [script(LIBRARY), script(CHART)],
        report=report,
        equity=figures.equity_plot(lines, evidence.standing, seen),
        drawdown=figures.drawdown_plot(lines, evidence.standing, seen),
        rolling=figures.rolling_sharpe_plot(
            {report.label: agent, evidence.best: best}, agent.bars_per_year, seen
        ),
        months=MONTHS,
        monthly=monthly_returns(agent.equity),
        histogram=figures.histogram(agent.judged_returns),
        exposure=figures.exposure_plot(agent.exposure, seen),
        chart=chart,
        extremes=_extreme_trades(agent.trades),
        details=[
            (
                group,
                [
                    (name, [annual(key, r.metrics, years, write) for r in (agent, best)])
                    for key, name, write in x
                ],
            )
            for group, x in DETAILS.items()
        ],
        relative=_relative(agent.metrics),
        annual=functools.partial(annual, years=years),
        sweep=None if report.sweep is None else sweep_section(report.sweep),
        folds=None
        if report.folds is None
        else folds_section(report.folds)._replace(verdict=""),  # it is at the top of the page
        stress=None if report.stress is None else stress_section(report.stress),
        training=[
            figures.training_plot(rows, key, TRAINING[key], report.seed, seed_name) for key in keys
        ],
        seed_name=seed_name,
        several_seeds=any(figures.per_seed(rows, key).shape[1] > 1 for key in keys),
        copy_share=words.COPY_SHARE,
        held=[
            (symbol, {name: float(np.mean(p == side)) for name, side in SIDES.items()})
            for symbol, p in held.items()
        ],
        uncharged=[text for name, text in NOT_CHARGED.items() if not costs[name]],
        other_costs={
            name.replace("_", " ").capitalize(): cost
            for name, cost in costs.items()
            if cost and name not in ("commission", "slippage")
        }
        | {f"{name}, your own, times": 1.0 if scale is None else scale for name in own},
        probabilistic=inference.probabilistic_sharpe(evidence.moments),
        deflated=searched
        and inference.deflated_sharpe(evidence.moments, searched.count, searched.sharpe_variance),
        wall_time=", ".join(f"{name} {spent:.1f} s" for name, spent in report.wall_times.items()),
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
    )


def monthly_returns(equity: pd.Series) -> list[Monthly]:
    """Compute the return of each calendar month and year, oldest year first.

    Args:
      equity: `[N]` on a time axis; 1 before the first bar.

    Example:
      >>> index = pd.DatetimeIndex(["2020-01-31", "2020-02-03", "2020-02-28"], tz="UTC")
      >>> year = monthly_returns(pd.Series([1.1, 1.0, 1.21], index))[0]
      >>> [round(x, 6) for x in (year.months[0], year.months[1], year.total)]
      [0.1, 0.1, 0.21]
    """
    index = pd.DatetimeIndex(equity.index)
    # Missing months stay missing: a market that was closed has no return of 0.
    ends = equity.groupby([index.year, index.month]).last()
    returns = ends / ends.shift(fill_value=1.0) - 1.0
    found = []
    for year in dict.fromkeys(returns.index.get_level_values(0)):
        of_year = returns[year]
        months = [float(of_year.get(month, np.nan)) for month in range(1, 13)]
        found.append(Monthly(int(year), months, float((1.0 + of_year).prod() - 1.0)))
    return found


def _relative(m: dict[str, float]) -> dict[str, str]:
    """Write what the regression on the benchmark says; empty where there is none."""
    if np.isnan(m["beta"]):
        return {}
    return {
        "Alpha per year": with_error(m["alpha"], m["alpha_error"], percent),
        "Beta": with_error(m["beta"], m["beta_error"]),
        "Information ratio": with_error(m["information_ratio"], m["information_ratio_error"]),
    }


def _extreme_trades(trades: pd.DataFrame) -> list[tuple[str, list[Any]]]:
    """Return the rows of the table of the best and the worst trades."""
    # A position that is still open has no result yet.
    closed = trades[trades["reason"] != OPEN].sort_values("pnl", ascending=False)
    if len(closed) > 2 * TRADES_SHOWN:
        closed = pd.concat([closed[:TRADES_SHOWN], closed[-TRADES_SHOWN:]])
    rows: list[dict[Any, Any]] = closed.to_dict("records")
    return [
        (
            row["symbol"],
            [
                "long" if row["size"] > 0 else "short",
                _moment(row["entry"]),
                _moment(row["exit"]),
                f"{row['entry_price']:,.6g}",
                f"{row['exit_price']:,.6g}",
                percent(row["pnl"], 2),
                percent(row["return"], 2),
                row["bars"],
                row["reason"],
            ],
        )
        for row in rows
    ]


def _moment(time: pd.Timestamp) -> str:
    return str(time)[:16].removesuffix(" 00:00")
