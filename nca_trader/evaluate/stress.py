"""Stress of a backtest: higher costs, late orders, more capital, positions at other times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate.wording import decimal, money, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("total_return", "cagr", "annual_volatility", "sharpe", "max_drawdown", "turnover")
HIGHEST = 1024.0  # a factor of costs; the break-even is not looked for beyond it
MOST = 5000  # shifts that are computed; of longer spans as many are drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stress:
    """One backtest under worse conditions; rows of metrics, the first row being the backtest's own.

    Attributes:
      name: of the strategy.
      costs: by factor of the costs of trading and borrowing.
      delays: by the number of bars that every order is late; the first is the backtest's own.
      capacity: by capital, in the currency of the prices, where an order takes at most
        `participation` of its bar's volume and the rest waits; no rows where no volume is known.
      participation: see `capacity`.
      break_even: factor of the costs at which the total return is 0; infinite where none that is
        plausible does that, NaN where nothing is gained at the costs given, or nothing charged.
      charged: whether there are costs of trading or borrowing.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-500:].select("SP500")
      >>> rule, costs = nca.rules.sma_cross(5, 20), nca.Costs(commission=1e-4)
      >>> stress = nca.backtest(bars, rule, costs).stress()
      >>> stress.costs["sharpe"].is_monotonic_decreasing
      True
    """

    name: str
    costs: pd.DataFrame
    delays: pd.DataFrame
    capacity: pd.DataFrame
    participation: float
    break_even: float
    charged: bool = True

    @property
    def sentence(self) -> str:
        """What the tables say, in words."""
        ratios = ", ".join(f"{decimal(x)} at {f:g}x" for f, x in self.costs["sharpe"].items())
        sentences = [f"Sharpe ratio by costs: {ratios}."]
        if not self.charged:
            sentences = [
                "No costs of trading or borrowing are given, so there are none to stress; "
                f"give e.g. {argument('commission', 5e-4)}."
            ]
        if math.isfinite(self.break_even):
            sentences.append(f"It earns nothing at {self.break_even:.3g} times the costs.")
        elif math.isinf(self.break_even):
            sentences.append("It gains at all costs that are plausible.")
        late = [f"{decimal(x)} at {n}" for n, x in self.delays["sharpe"].items() if n]
        if late:
            sentences.append(f"With orders late by so many bars: {', '.join(late)}.")
        if len(self.capacity):
            share, by = percent(self.participation, 0), self.capacity["sharpe"]
            rows = ", ".join(
                f"{decimal(x)} at {money(c)}" for c, x in zip(by.index, by, strict=True)
            )
            sentences.append(f"By capital, with at most {share} of a bar's volume: {rows}.")
        return " ".join(sentences)

    def __repr__(self) -> str:
        shown = [f"Stress of {self.name}"]
        costs = self.costs if self.charged else self.costs[:0]
        for table in (costs, self.delays, self.capacity.rename(money)):
            if len(table):
                shown.append(table.to_string(float_format="{:.4g}".format))
        return "\n".join([*shown, self.sentence])

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables that have rows, by what their rows differ in."""
        tables = {"costs, times those given": self.costs, "bars late": self.delays}
        tables["capital"] = self.capacity
        return {label: table for label, table in tables.items() if len(table)}

    def plot(self) -> Figure:
        """Draw the Sharpe ratio by costs, by delay, and by capital where volume is known."""
        from nca_trader.evaluate.figures import stress_figure  # imports matplotlib, 0.3 s

        return stress_figure(self.tables)


def table_of(metrics: Mapping[Any, Mapping[str, float]], name: str) -> pd.DataFrame:
    """Return the table of the metrics of some accounts, whose index has this name."""
    rows = [[row[column] for column in COLUMNS] for row in metrics.values()]
    return pd.DataFrame(rows, pd.Index([*metrics], name=name), [*COLUMNS])


def break_even_factor(gains: Callable[[float], bool]) -> float:
    """Search the factor of the costs at which final equity is 1, see `Stress`.

    gains: whether the account gains at a factor of its costs, as it does at 1.
    """
    low, high = 1.0, 2.0
    try:
        while gains(high):
            low, high = high, 2.0 * high
            if high > HIGHEST:
                return math.inf
    except ConfigError:  # above what `Costs` accepts
        return math.inf
    # To three digits; a strategy that decides by its account may be uneven in its costs.
    while high - low > 1e-3 * low:
        # In the middle of factors, which are ratios.
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return high
