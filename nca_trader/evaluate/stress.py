"""Stress of a backtest: higher costs, late orders, more capital, positions at other times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nca_trader.config.account import refuse_delay
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate.wording import decimal, money, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nca_trader.evaluate.result import Result

FACTORS = (1.0, 2.0, 3.0)
DELAYS = (0, 1, 2, 5)
STEPS = (0.1, 1.0, 10.0, 100.0)  # of the capacity at 1% of volume, see `trades.capacity`
PARTICIPATION = 0.1  # largest share of a bar's volume that an order takes
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

    def plot(self) -> Figure:
        """Draw the Sharpe ratio by costs, by delay, and by capital where volume is known."""
        from nca_trader.evaluate.report.figures import stress_figure  # imports matplotlib, 0.3 s

        return stress_figure(self)


def stress(
    result: Result,
    *,
    factors: Sequence[float] = FACTORS,
    delays: Sequence[int] | None = None,
    capitals: Sequence[float] | None = None,
    participation: float = PARTICIPATION,
) -> Stress:
    """Run a backtest again at higher costs, with late orders, and with more capital.

    A strategy that sees its account decides again in each rerun. Reruns of an agent are one look at
    their bars together with the backtest itself.

    Args:
      result: of `nca.backtest`.
      factors: of the costs of trading and borrowing.
      delays: bars that every order is late; None are the backtest's own, and 1, 2 and 5 more.
      capitals: in the currency of the prices; None are 0.1, 1, 10 and 100 times the capital whose
        fills take 1% of a bar's volume.
      participation: largest share of a bar's volume that an order takes with these capitals.

    Raises:
      ConfigError: a factor or capital that is not above 0, a delay that is not a whole number,
        costs that a factor makes impossible.
    """
    again = result.again
    for name, values in (("factors", factors), ("capitals", capitals or ())):
        for value in values:
            if isinstance(value, bool) or not 0.0 < value < math.inf:
                raise ConfigError(f"{argument(name, value)}: give numbers above 0.")
    given, own = result.charged, result.rules.delay
    delays = [own + more for more in DELAYS] if delays is None else delays
    for delay in delays:
        refuse_delay(delay)
    if capitals is None:
        # NaN, without a known volume, is not above 0 and leaves the table empty.
        known = result.metrics["capacity"]
        capitals = [float(f"{known * step:.2g}") for step in STEPS] if known > 0.0 else ()
    # Costs that halving does not change are all zero: no factor of them changes anything.
    free = dataclasses.asdict(given) == dataclasses.asdict(given.scaled(0.5))
    by_costs = {float(f): again(costs=given.scaled(f)) for f in factors}
    by_delay = {int(n): again(delay=int(n)) for n in delays}
    most = {"max_participation": participation}
    by_capital = {float(c): again(capital=float(c), **most) for c in capitals}
    return Stress(
        name=result.name,
        costs=_table(by_costs, "factor"),
        delays=_table(by_delay, "bars late"),
        capacity=_table(by_capital, "capital"),
        participation=participation,
        break_even=math.nan if free else _break_even_factor(result),
        charged=not free,
    )


def _table(rows: dict[Any, Result], name: str) -> pd.DataFrame:
    table = [[row.account_metrics[column] for column in COLUMNS] for row in rows.values()]
    return pd.DataFrame(table, pd.Index([*rows], name=name), [*COLUMNS])


def _break_even_factor(result: Result) -> float:
    """Search the factor of the costs at which final equity is 1, see `Stress`."""
    charged, again = result.charged, result.again
    if not result.log_equity[-1] > 0.0:
        return math.nan

    def gained(factor: float) -> bool:
        return again(costs=charged.scaled(factor)).log_equity[-1] > 0.0

    low, high = 1.0, 2.0
    try:
        while gained(high):
            low, high = high, 2.0 * high
            if high > HIGHEST:
                return math.inf
    except ConfigError:  # above what `Costs` accepts
        return math.inf
    # To three digits; a strategy that decides by its account may be uneven in its costs.
    while high - low > 1e-3 * low:
        # In the middle of factors, which are ratios.
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if gained(middle) else (low, middle)
    return high
