"""A result as 20 lines of text and as a table in a notebook, and several of them side by side."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError
from nca_trader.evaluate.report.render import render
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.trades import OPEN, TRADING_COSTS
from nca_trader.evaluate.wording import (
    count,
    decimal,
    few,
    in_sample_sentence,
    money,
    percent,
    whole,
    with_error,
)
from nca_trader.runs.manifest import Run
from nca_trader.types import trading_year

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 110  # of the line of caveats
LEAST_YEARS = 0.5  # below which a growth of a year is not shown


_FINE, _TENTH = functools.partial(percent, digits=2), functools.partial(decimal, digits=1)
# Each metric as a reader sees it: its name, and how it is written.
WRITTEN: dict[str, tuple[str, Callable[[float], str]]] = {
    "total_return": ("total return", percent),
    "cagr": ("CAGR", percent),
    "annual_volatility": ("volatility", percent),
    "sharpe": ("Sharpe ratio", decimal),
    "sortino": ("Sortino ratio", decimal),
    "calmar": ("Calmar ratio", decimal),
    "omega": ("Omega ratio, threshold 0", decimal),
    "max_drawdown": ("max drawdown", percent),
    "max_drawdown_duration": ("longest drawdown, bars", whole),
    "value_at_risk": ("5% VaR per bar", _FINE),
    "expected_shortfall": ("expected shortfall beyond it (CVaR)", _FINE),
    "tail_ratio": ("tail ratio, 95% to 5%", decimal),
    "skewness": ("skewness", decimal),
    "kurtosis": ("kurtosis", decimal),
    "ulcer_index": ("ulcer index", percent),
    "stability": ("R² of log-equity on time", decimal),
    "hit_rate": ("winning bars, of those that moved", percent),
    "interest": ("interest earned on cash, of the capital", _FINE),
    "alpha": ("alpha per year", percent),
    "beta": ("beta", decimal),
    "information_ratio": ("information ratio", decimal),
    "trades": ("trades, also open ones", whole),
    "win_rate": ("win rate, ended", percent),
    "profit_factor": ("profit factor", decimal),
    "expectancy": ("expectancy per trade, of the capital", functools.partial(percent, digits=3)),
    "average_trade": ("average trade", _FINE),
    "best_trade": ("best trade", percent),
    "worst_trade": ("worst trade", percent),
    "trade_duration": ("average duration, in bars", _TENTH),
    "sqn": ("system quality number", decimal),
    "capacity": ("capital at which fills take 1% of volume", money),
    "turnover": ("turnover per year", decimal),
    "exposure": ("exposure", percent),
}
# Of equity alone, so that a benchmark has them too; and those that a comparison adds.
SHOWN = (
    "total_return cagr annual_volatility sharpe sortino calmar max_drawdown max_drawdown_duration "
    "value_at_risk skewness kurtosis"
)
COMPARED = "alpha beta information_ratio trades win_rate profit_factor turnover exposure"


def title_of(result: Result) -> str:
    """Name the strategy, its assets and its span of bars."""
    first, last = (result.equity.index[end].date() for end in (0, -1))
    return f"{result.name} on {few(list(result.weights.columns))}, {first} to {last}"


def caveats(result: Result) -> list[str]:
    """Return what must be said with the metrics: the standing of the bars, cautions, the note."""
    # From the weakest statement to the strongest: the last one that holds is said.
    standing = "Parameters were chosen by the user; how many were tried is not known."
    if result.tried is not None:
        times = count(result.tried, "trial")
        standing = f"Parameters were chosen by the user; {times} on this market so far."
    if result.standing:
        standing = result.standing
    if result.in_sample is not None:
        standing = "Out of sample."
    if result.in_sample:
        standing = in_sample_sentence(result.in_sample, len(result.equity))
    others = "" if result.run is None else _others_sentence(result.run, [*result.weights.columns])
    # Cautions come first: the summary cuts the line.
    return [*result.cautions, standing, *filter(None, [others, result.note])]


def _others_sentence(run: Run, symbols: Sequence[str]) -> str:
    """Name the `symbols` that did not train the agent; "" if there are none."""
    trained = run.trained_symbols
    others = [symbol for symbol in symbols if symbol not in trained]
    if not others:
        return ""
    return (
        f"{len(others)} of {len(symbols)} symbols did not train it: {few(others, 8)}; it was "
        f"trained on {few(trained, 8)}."
    )


def summary_lines(result: Result) -> list[str]:
    """Return the summary of a result: 20 lines, caveats cut to the width of the rest."""
    m = result.metrics
    lines = [title_of(result)]
    _, found = trading_year(result.equity.index.to_numpy("datetime64[ns]"))
    fill = "next open" if result.fill == "next_open" else "close"
    lines.append(
        f"{len(result.equity):,} bars ({result.bars_per_year:,.1f} per year: {found}), fills at "
        f"the {fill}, {result.order}"
    )
    lines.append(f"{'':<22}{'this':>14}{'buy and hold':>16}")
    for name, (own, held) in metric_rows(result, m, result.hold.account_metrics):
        lines.append(f"{name:<22}{own:>14}{held:>16}")
    others = [*TRADING_COSTS, *(result.charged.own or ()), "market", "interest"]
    holding = result.flows.drop(columns=others, errors="ignore").to_numpy().sum()
    lines += [
        f"alpha per year {with_error(m['alpha'], m['alpha_error'], percent)}, beta "
        f"{with_error(m['beta'], m['beta_error'])}, information ratio "
        f"{with_error(m['information_ratio'], m['information_ratio_error'])}",
        f"trades {whole(m['trades'])}, {open_trades(result)} open, win rate of the ended "
        f"{percent(m['win_rate'])}, profit factor "
        f"{decimal(m['profit_factor'])}, average {percent(m['average_trade'], 2)} over "
        f"{decimal(m['trade_duration'], 1)} bars, SQN {decimal(m['sqn'])}",
        f"exposure {percent(m['exposure'])}, turnover {decimal(m['turnover'], 1)} per year, "
        f"capacity at 1% of volume {money(m['capacity'])}",
        result.uncharged
        or f"costs of trading {percent(result.costs_paid, 2)} of the capital, interest "
        f"{percent(m['interest'], 2)}, other holding {percent(holding, 2)}",
        "details: .trades .orders .positions .costs .exposure .metrics .plot() .report('x.html')",
    ]
    warning = " ".join(caveats(result))
    return [*lines, warning if len(warning) <= WIDTH else warning[: WIDTH - 3].rstrip() + "..."]


def metric_rows(
    result: Result, *of: dict[str, float], keys: str = SHOWN
) -> list[tuple[str, list[str]]]:
    """Write the metrics of `keys`, one cell for each of the accounts `of` of one span."""
    years = len(result.equity) / result.bars_per_year
    named = {key: WRITTEN[key] for key in keys.split()}
    return [
        (name, [annual(key, m, years, write) for m in of]) for key, (name, write) in named.items()
    ]


def annual(key: str, m: dict[str, float], years: float, write: Callable[[float], str]) -> str:
    """Write a metric of a span; one that half a year cannot show as n/a or with its error.

    Growth in a year is n/a. A Sharpe ratio has the standard error of Lo, The Statistics of Sharpe
    Ratios (2002), which is near 1 / sqrt(years).
    """
    if years >= LEAST_YEARS or key not in ("cagr", "calmar", "sharpe") or math.isnan(m[key]):
        return write(m[key])
    if key != "sharpe":
        return "n/a"
    return with_error(m[key], math.sqrt(1.0 / years + 0.5 * m[key] ** 2 / m["bars"]))


def open_trades(result: Result) -> int:
    """Return the number of trades that have not ended."""
    return int((result.trades["reason"] == OPEN).sum())


def summary_html(result: Result) -> str:
    """Return the summary of a result as an HTML table with a plot."""
    rows = metric_rows(result, result.metrics, result.hold.account_metrics)
    return _fragment(
        title_of(result),
        [result.name, "buy and hold"],
        rows,
        result.plot(),
        [*filter(None, [result.uncharged]), *caveats(result)],
    )


def _fragment(title, names, rows, figure, warning) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    picture = out.getvalue()
    return render(
        "fragment.html",
        title=title,
        names=names,
        rows=rows,
        picture=picture[picture.index("<svg") :],
        caveats=warning,
    )


class Comparison:
    """Several results side by side, made by `compare`.

    Attributes:
      results: in the order given.
      table: one row per result, with its first and last bar, and a column per metric.
    """

    def __init__(self, results: Sequence[Result]):
        """Build the table."""
        self.results = tuple(results)
        rows = {
            result.name: {
                "start": result.equity.index[0],
                "stop": result.equity.index[-1],
                "in_sample": result.in_sample,
                **result.metrics,
            }
            for result in self.results
        }
        self.table = pd.DataFrame.from_dict(rows, orient="index")
        self.table.index.name = "name"

    def __repr__(self) -> str:
        width = max(14, *(len(result.name) + 2 for result in self.results))
        lines = [f"{'':<24}" + "".join(f"{result.name:>{width}}" for result in self.results)]
        for name, cells in self._rows():
            lines.append(f"{name:<24}" + "".join(f"{cell:>{width}}" for cell in cells))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names = [result.name for result in self.results]
        return _fragment("", names, self._rows(), self.plot(), [])

    def _rows(self) -> list[tuple[str, list[str]]]:
        """Return the cells of each row in words."""
        results = self.results

        def row(name, cell):
            return name, [cell(result) for result in results]

        rows = [
            row("first bar", lambda r: str(r.equity.index[0].date())),
            row("last bar", lambda r: str(r.equity.index[-1].date())),
        ]
        if any(result.in_sample is not None for result in results):
            rows.append(
                row("in-sample bars", lambda r: "n/a" if (n := r.in_sample) is None else whole(n))
            )
        each = [metric_rows(x, x.metrics, keys=f"{SHOWN} {COMPARED}") for x in results]
        rows += [(row[0][0], [cells[0] for _, cells in row]) for row in zip(*each, strict=True)]
        return rows

    def plot(self) -> Figure:
        """Draw equity and drawdown of every result on one time axis."""
        from nca_trader.evaluate.figures import Curve, account_figure  # imports matplotlib, 0.3 s

        if len(self.results) == 1:
            return self.results[0].plot()
        roles = ["agent", *["baseline"] * (len(self.results) - 1)]
        lines = [Curve(x.name, x.equity, role) for x, role in zip(self.results, roles, strict=True)]
        # A set, since several results of one run share their in-sample bars.
        return account_figure(lines, {result.seen for result in self.results if result.seen})


def compare(results: Sequence[Result]) -> Comparison:
    """Put several results side by side, in a table and a plot.

    Args:
      results: at least one, each of another name; they may be of other bars and costs, which the
        table shows.

    Returns:
      A `Comparison`, whose `table` has one row per result.

    Raises:
      ConfigError: no result, something else, or two of one name.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-500:]
      >>> strategies = nca.rules.sma_cross(), nca.rules.momentum()
      >>> nca.compare([nca.backtest(bars, each) for each in strategies]).table.index.tolist()
      ['SMA cross 10/30', 'momentum 50']
    """
    # A single result is taken as a list of one.
    if isinstance(results, Result):
        results = [results]
    expect("results", results, Sequence, "a sequence of Results, e.g. of nca.backtest")
    for result in results:
        expect("results", result, Result, "a sequence of Results, e.g. of nca.backtest")
    if not results:
        raise ConfigError("compare was given no result; give at least one.")
    names = [result.name for result in results]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"results has {name!r} more than once; name them apart, e.g. with "
                "nca.backtest(..., name=...)."
            )
    return Comparison(results)
