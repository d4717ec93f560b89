"""The result of a backtest: one row per bar, where equity went, trades, metrics and plots."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.config import AccountConfig
from nca_trader.config.account import refuse_delay
from nca_trader.config.ranges import expect
from nca_trader.data.feature_sets import feature_set
from nca_trader.envs.account.risk import CODES
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate import benchmark, metrics, trades
from nca_trader.evaluate.lookahead.outputs import foresights, own_features
from nca_trader.evaluate.simulate import Trace
from nca_trader.evaluate.stress import Stress, break_even_factor, table_of
from nca_trader.evaluate.trades import Fills
from nca_trader.machine import make_directory, write_atomically
from nca_trader.runs.manifest import Run
from nca_trader.strategies.targets import NO_CUT, Cut
from nca_trader.types import Bars, Costs

# Of a liquid market, shown next to a result without any cost.
PLAUSIBLE = Costs(commission=5e-4, slippage=2e-4)
WAITING = 20  # bars that an asset stays flat after an exit, at least, to be named
CAPITALS = (0.1, 1.0, 10.0, 100.0)  # of a stress, times the capacity at 1% of volume

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a backtest, by bar; a bar's entry is as of its close, after a fill there.

    Attributes:
      name: of the strategy.
      equity: `[N]`; capital before the first bar is 1.0.
      log_equity: `[N]`, its logarithm, with the digits that a large equity loses.
      targets: `[N, A]` weights decided; NaN means no order.
      weights: `[N, A]` weights held.
      turnover: `[N]`, sum of absolute traded notional over equity.
      cost: `[N]`, cost of trading as a fraction of equity.
      flows: `[N]` where equity went in each bar, a column per item of `account.Flows`, in units of
        the capital; a row sums to the change of equity.
      logits: `[N, A, n]` float32 of an agent, NaN where it did not decide; None of a strategy.
      rules: what the account was given, complete: costs, `fill`, `order`, limits, delay.
      bars_per_year: of the bars.
      note: what a report must say of the data.
      in_sample: number of these bars at or before the last that trained or selected the
        agent, see `seen_rows`; None where the targets are not of a run.
      evaluations: evaluations of agents on these symbols in years that overlap, with this one; None
        where that was not counted, see `trials.count`.
      cut: orders for more than the account may hold.
      shrunk: bars on which correlations had no inverse and were shrunk further, see
        `account.risk.correlations_of`.
      bars: all that the backtest was given; it traded a span of them.
      trace: what the account did in each bar; trades and orders are made of it.
      run: that acted; None where the targets are not of a run.
      unchecked: whether a function of bars was not run again on truncated histories.
      tried: trials on these bars in the project's trial log, with this one; None where they
        were not counted.
      tried_variance: of the rules among them, see `trials.Tried`.
      standing: of a baseline that trades in the place of an agent, a sentence on what the bars are
        to both; "" elsewhere.
      parts: `[N, P]` of a blend, what the market gave to each part in each bar, in units of the
        capital; see `evaluate.attribution`. None elsewhere.
      indicators: of the strategy, drawn on the price chart, see `Strategy`; None elsewhere.
      again: runs this backtest again; fields of the account by name take the place of its own.
        Given a strategy, runs that over the same bars in the same account.

    Printed, a result is a summary of 20 lines; in a notebook, a table with a plot.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-250:].select("SP500")
      >>> result = nca.backtest(bars, nca.rules.sma_cross(5, 20), nca.Costs(commission=1e-3))
      >>> len(result.trades), round(result.metrics["beta"], 2)
      (7, 0.29)
      >>> len(str(result).splitlines())
      20
    """

    name: str
    equity: pd.Series
    log_equity: np.ndarray
    targets: pd.DataFrame
    weights: pd.DataFrame
    turnover: pd.Series
    cost: pd.Series
    flows: pd.DataFrame
    rules: AccountConfig
    bars_per_year: float
    bars: Bars
    trace: Trace
    again: Callable[..., Result]
    logits: np.ndarray | None = None
    note: str = ""
    in_sample: int | None = None
    evaluations: int | None = None
    cut: Cut = NO_CUT
    shrunk: int = 0
    run: Run | None = None
    unchecked: bool = False
    tried: int | None = None
    tried_variance: float = 1.0
    standing: str = ""
    parts: pd.DataFrame | None = None
    indicators: Callable[[Bars], Mapping[str, ArrayLike]] | None = None

    def __repr__(self) -> str:
        from nca_trader.evaluate.report.summary import summary_lines  # stands on results

        return "\n".join(summary_lines(self))

    def _repr_html_(self) -> str:
        from nca_trader.evaluate.report.summary import summary_html  # stands on results

        return summary_html(self)

    @property
    def num_fills(self) -> int:
        """The number of bars with a fill; at 0 the metrics are those of cash alone."""
        return int((self.turnover > metrics.NO_WEIGHT).sum())

    @property
    def cautions(self) -> tuple[str, ...]:
        """Warnings to show with the metrics, e.g. that nothing was filled."""
        found = []
        if self.unchecked:
            found.append(
                "UNCHECKED: the function was not run again on truncated histories, so its targets "
                "may depend on later bars."
            )
        found += self._foresights
        if not self.num_fills:
            said = "NO FILLS: nothing was ever bought or sold, so what moved is cash alone"
            found.append(f"{said}{self._why}.")
        # A cut order is not an error, but a user who meant leverage reads other results.
        if self.cut.orders:
            found.append(
                f"CUT: on {self.cut.orders:,} bars the order was for more than the account may "
                f"hold (the largest for {self.cut.largest:g} times its equity), and was cut to "
                "that."
            )
        if self.cut.small:
            lot, least = self.rules.lot, self.rules.min_notional
            limits = [f"of less than lot={lot:g}"] * bool(lot)
            limits += [f"worth less than min_notional={least:g}"] * bool(least)
            found.append(
                f"NOT SENT: orders {' or '.join(limits)}, {self.cut.small:,} in all; what they "
                "were to change stays as it was. More capital makes orders larger."
            )
        if self.shrunk:
            found.append(
                f"SHRUNK: on {self.shrunk:,} bars the correlations had no inverse, and were "
                f"shrunk further than shrinkage={self.rules.shrinkage:g}."
            )
        if out := self.closed_until(self.equity.index[-1], WAITING):
            found.append(
                f"CLOSED: a level closed {', '.join(out)}, flat since then because the target has "
                "not changed."
            )
        return (*found, *self._limited)

    def closed_until(self, time: pd.Timestamp, least: int = 0) -> list[str]:
        """Return symbols that a level closed, and whose target has not changed until `time`.

        Args:
          time: of a bar.
          least: bars from the exit to it, at least.
        """
        found = []
        if self.trace.left is None:  # without levels, trades need not be made
            return found
        for symbol, own in self.trades.groupby("symbol", sort=False):
            before = own[own["entry"] <= time].sort_values("entry")
            if len(before) and before["reason"].iloc[-1] in trades.BY_LEVEL:
                asked = self.targets[symbol].loc[before["exit"].iloc[-1] : time]
                if len(asked) > max(least, 1) and asked.isna().all():
                    found.append(str(symbol))
        return found

    @property
    def _why(self) -> str:
        """Why nothing was filled, in words; "" where it is not known."""
        rules, asked = self.rules, np.abs(np.nan_to_num(self.targets.to_numpy()))
        if not asked.any():
            return "; no weight other than 0 was ordered"
        if (most := asked.max()) <= metrics.NO_WEIGHT:
            return f"; the largest weight ordered is {most:g}, which counts as rounding"
        if rules.fill == "next_open" and asked[:-1].max(initial=0.0) <= metrics.NO_WEIGHT:
            return "; only the last bar orders, and no bar follows whose open would fill it"
        if self.cut.small:
            return "; every order is too small"
        if rules.max_participation < math.inf and not self._limited:
            return f"; max_participation={rules.max_participation:g} of the volume leaves no order"
        return ""

    @property
    def _limited(self) -> list[str]:
        """What the risk limits did, in words."""
        if self.trace.limited is None or self.trace.halted is None:
            return []
        codes, halted = np.asarray(self.trace.limited), np.asarray(self.trace.halted)
        found = []
        if (stopped := np.flatnonzero(halted)).size:
            code, when = CODES[halted[stopped[0]]], self.equity.index[stopped[0]]
            found.append(f"HALTED: {code} stopped trading at {when}; positions stay as they were.")
            # After a halt nothing trades, so later codes only repeat it.
            codes = codes[: stopped[0]]
        if codes.any():
            names = ", ".join(CODES[code] for code in np.unique(codes[codes > 0]))
            found.append(f"LIMITED: {(codes > 0).sum():,} orders were cut or denied by {names}.")
        return found

    # A result is frozen, so nothing below can change once it is computed.
    @functools.cached_property
    def _foresights(self) -> list[str]:
        """Warnings of own columns, and of own features of the run, see `outputs.foresights`."""
        # A market of this package has states that predict.
        known = None if self.run is None or self.run.env_config.market else self.run.env_config
        own = own_features(known.features) if known else ()
        values = {}
        if known and self.run and own:
            found = feature_set(own, self.run.spec.bar_seconds, known.sessions).batch(self.bars)
            values = dict(zip(own, np.moveaxis(found, -1, 0), strict=True))
        return foresights(self.bars, values)

    @functools.cached_property
    def account_metrics(self) -> dict[str, float]:
        """The metrics of the account alone, those of `metrics.summary`."""
        interest = self.flows.get("interest")
        return metrics.summary(
            self.equity, self.weights, self.turnover, self.bars_per_year, interest=interest
        )

    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of this result by name; NaN where one is undefined.

        They are `account_metrics`, those of `benchmark.relative` (against `hold`),
        `trades.trade_metrics` and `trades.capacity`.
        """
        held, per_year = self.hold.excess_returns, self.bars_per_year
        against = benchmark.relative(self.excess_returns, held, per_year)._asdict()
        found = self.account_metrics | against | trades.trade_metrics(self.trades)
        return found | {"capacity": trades.capacity(self.fills, self.traded_bars)}

    @functools.cached_property
    def returns(self) -> np.ndarray:
        """`[N]` simple returns per bar."""
        return metrics.simple_returns(self.equity)

    @functools.cached_property
    def excess_returns(self) -> np.ndarray:
        """`[N]` returns in excess of the interest on cash, which ratios are computed from."""
        excess = metrics.excess_returns(self.equity, self.flows.get("interest"))
        return metrics.traded_returns(excess, self.turnover)

    @functools.cached_property
    def traded_bars(self) -> Bars:
        """The N bars that were traded."""
        # The usual case, without a search and without a copy.
        if len(self.bars) == len(self.equity):
            return self.bars
        first = self.bars.row(self.equity.index[0])
        return self.bars[first : first + len(self.equity)]

    @functools.cached_property
    def hold(self) -> Result:
        """`nca.rules.buy_and_hold()` in the same account, but for its levels."""
        return self.again(benchmark.HOLD)

    @property
    def benchmark(self) -> pd.Series:
        """`[N]` equity of `hold`."""
        return self.hold.equity

    @functools.cached_property
    def fills(self) -> Fills:
        """Every fill, see `trades.fills_in`."""
        return trades.fills_in(self.traded_bars, self.trace, self.rules)

    @functools.cached_property
    def trades(self) -> pd.DataFrame:
        """One row per trade (a round trip of one asset), see `trades.trade_table`.

        The sum of `pnl`, plus what holding paid and charged, is final equity less 1.
        """
        return trades.trade_table(self.fills, self.traded_bars, self.rules)

    @functools.cached_property
    def orders(self) -> pd.DataFrame:
        """One row per fill of an order, see `trades.order_table`."""
        return trades.order_table(self.fills, self.traded_bars, self.rules)

    @functools.cached_property
    def positions(self) -> pd.DataFrame:
        """`[N, A]` units held at each close, negative for a short position.

        They are those of `rules.capital`, or of a capital of 1 without one.
        """
        bars = self.traded_bars
        held = trades.units_held(bars, np.exp(self.log_equity), self.weights.to_numpy())
        capital = self.rules.capital or 1.0
        return pd.DataFrame(held * capital, self.equity.index, self.weights.columns)

    @property
    def seen(self) -> tuple[pd.Timestamp, pd.Timestamp] | None:
        """The first and the last in-sample bar; None where there is none."""
        index = self.equity.index
        return (index[0], index[self.in_sample - 1]) if self.in_sample else None

    @functools.cached_property
    def exposure(self) -> pd.DataFrame:
        """`[N]` sums of weights at each close: columns `long`, `short`, `gross`, `net`."""
        weights = np.where(metrics.positions(self.weights) != 0, self.weights, 0.0)
        long, short = np.maximum(weights, 0.0).sum(axis=1), np.minimum(weights, 0.0).sum(axis=1)
        columns = {"long": long, "short": short, "gross": long - short, "net": long + short}
        return pd.DataFrame(columns, self.equity.index)

    @property
    def charged(self) -> Costs:
        """The costs."""
        return self.rules.costs

    @property
    def fill(self) -> str:
        """Where orders fill: "next_open" or "close"."""
        return self.rules.fill

    @property
    def order(self) -> str:
        """When a target trades: "on_change" or "rebalance"."""
        return self.rules.order

    @property
    def costs_paid(self) -> float:
        """What trading cost, of the capital: commission, slippage and the other costs of trades."""
        # A cost of the user's own is a cost of trading too. What is not charged has no column.
        trading = [*trades.TRADING_COSTS, *(self.charged.own or ())]
        return -float(self.flows.reindex(columns=trading, fill_value=0.0).to_numpy().sum())

    @functools.cached_property
    def uncharged(self) -> str:
        """What plausible costs would leave of a result that paid none; "" for others."""
        charged = dataclasses.replace(self.charged, quote_scale=None)
        if charged != Costs() or self.costs_paid or not self.num_fills:  # quotes are paid too
            return ""
        again = self.again(costs=PLAUSIBLE)
        total = metrics.total_return(again.returns)
        sharpe = metrics.sharpe(again.excess_returns, self.bars_per_year)
        return (
            f"NOTHING CHARGED: at {1e4 * PLAUSIBLE.commission:g} bp commission and "
            f"{1e4 * PLAUSIBLE.slippage:g} bp slippage total return {total:.1%}, "
            f"Sharpe ratio {sharpe:.2f}."
        )

    @property
    def costs(self) -> pd.DataFrame:
        """Where equity went: one row per item, and their sum, which is final equity less 1.

        Columns: `amount` in units of the capital, gains positive; `a_year`, the same per year.
        """
        amount = self.flows.sum()
        table = pd.DataFrame({"amount": [*amount, amount.sum()]}, index=[*amount.index, "total"])
        table.index.name = "item"
        return table.assign(a_year=table["amount"] * self.bars_per_year / len(self.equity))

    def plot(self) -> Figure:
        """Draw equity against the benchmark, drawdown and exposure over time.

        In-sample bars are shaded, and named in the legend.

        Returns:
          A matplotlib figure; `figure.savefig("x.png")` writes it.
        """
        from nca_trader.evaluate.figures import Curve, account_figure  # imports matplotlib, 0.3 s

        lines = [Curve(self.name, self.equity, "agent")]
        lines.append(Curve("buy and hold", self.hold.equity, "baseline"))
        return account_figure(lines, {*filter(None, [self.seen])}, self.exposure)

    def at_costs(self, factor: float) -> Result:
        """Run this backtest again with its costs of trading and borrowing times `factor`.

        Spreads that the bars quote are such costs.
        """
        return self.again(costs=self.charged.scaled(factor, self._quotes))

    @property
    def _quotes(self) -> bool:
        spreads = self.bars.half_spread
        return spreads is not None and bool(np.nan_to_num(spreads).any())

    def stress(
        self,
        *,
        factors: Sequence[float] = (1.0, 2.0, 3.0),
        delays: Sequence[int] | None = None,
        capitals: Sequence[float] | None = None,
        participation: float = 0.1,
    ) -> Stress:
        """Run this backtest again at higher costs, with late orders, and with more capital.

        A strategy that sees its account decides again in each rerun. Reruns of an agent are one
        look at their bars together with the backtest itself.

        Args:
          factors: of the costs of trading and borrowing.
          delays: bars that every order is late; None are the backtest's own, and 1, 2 and 5 more.
          capitals: in the currency of the prices; None are 0.1, 1, 10 and 100 times the capital
            whose fills take 1% of a bar's volume, see `trades.capacity`.
          participation: largest share of a bar's volume that an order takes with these capitals.

        Raises:
          ConfigError: a factor or capital that is not above 0, a delay that is not a whole number,
            costs that a factor makes impossible.
        """
        for name, values in (("factors", factors), ("capitals", capitals or ())):
            for value in values:
                if isinstance(value, bool) or not 0.0 < value < math.inf:
                    raise ConfigError(f"{argument(name, value)}: give numbers above 0.")
        costs, delay = self.charged, self.rules.delay
        delays = [delay, delay + 1, delay + 2, delay + 5] if delays is None else delays
        for delay in delays:
            refuse_delay(delay)
        if capitals is None:
            # NaN, without a known volume, is not above 0 and leaves the table empty.
            known = self.metrics["capacity"]
            capitals = [float(f"{known * x:.2g}") for x in CAPITALS] if known > 0.0 else ()

        def again(**changes: Any) -> dict[str, float]:
            return self.again(**changes).account_metrics

        def gains(factor: float) -> bool:
            return self.at_costs(factor).log_equity[-1] > 0.0

        by_costs = {float(f): self.at_costs(f).account_metrics for f in factors}
        by_delay = {int(n): again(delay=int(n)) for n in delays}
        most = {"max_participation": participation}
        by_capital = {float(c): again(capital=float(c), **most) for c in capitals}
        # Costs that halving does not change are all zero: no factor of them changes anything.
        half = costs.scaled(0.5, self._quotes)
        free = dataclasses.asdict(costs) == dataclasses.asdict(half)
        gained = not free and self.log_equity[-1] > 0.0
        return Stress(
            name=self.name,
            costs=table_of(by_costs, "factor"),
            delays=table_of(by_delay, "bars late"),
            capacity=table_of(by_capital, "capital"),
            participation=participation,
            break_even=break_even_factor(gains) if gained else math.nan,
            charged=not free,
        )

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        command: str = "",
        indicators: Mapping[str, ArrayLike] | None = None,
    ) -> pathlib.Path:
        """Write this result as one self-contained HTML page, see `nca.report`.

        Args:
          path: of the page, ends in .html.
          command: shown on the page as the command that makes it again.
          indicators: lines on the price chart, by name.

        Returns:
          The path.

        Raises:
          ConfigError: another suffix.
          StateError: the page cannot be written.
        """
        from nca_trader.evaluate.report.page import report  # imports matplotlib, 0.3 s

        more = {"command": command, "indicators": indicators}
        return report(self.bars, self, path, run=self.run, **more)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per bar: time, equity, log_equity, turnover, cost and per symbol columns.

        They are `target:SYM` and `weight:SYM`, and for an agent `logits:SYM:i` of action i.
        """
        columns: dict[str, Any] = {
            "time": self.equity.index,
            "equity": self.equity.to_numpy(),
            "log_equity": self.log_equity,
            "turnover": self.turnover.to_numpy(),
            "cost": self.cost.to_numpy(),
        }
        for i, symbol in enumerate(self.targets.columns):
            columns[f"target:{symbol}"] = self.targets[symbol].to_numpy()
            columns[f"weight:{symbol}"] = self.weights[symbol].to_numpy()
            if self.logits is not None:
                # One column each, as a table file has no cells of several numbers.
                for action in range(self.logits.shape[-1]):
                    columns[f"logits:{symbol}:{action}"] = self.logits[:, i, action]
        return pd.DataFrame(columns)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write `to_frame()` with every digit.

        Args:
          path: ends in .parquet or .csv.

        Returns:
          The path.

        Raises:
          ConfigError: another suffix.
          StateError: it cannot be written; then no file is left.
        """
        expect("path", path, str | os.PathLike, "a path in .parquet or .csv")
        path = pathlib.Path(path)
        if path.suffix not in (".parquet", ".csv"):
            raise ConfigError(
                f"{argument('path', str(path))}: a result by bar is written to .parquet or .csv; "
                "give such a name. `report` writes a page to .html."
            )
        make_directory(path.parent)  # as `report` does
        frame = self.to_frame()
        # The text of a float reads back as the same float.
        csv = path.suffix == ".csv"
        write_atomically(path, frame.to_csv(index=False) if csv else frame.to_parquet(index=False))
        return path


def columns_of(trace: Trace, index: pd.Index, symbols: pd.Index, costs: Costs) -> dict[str, Any]:
    """Return the fields of a `Result` that are made of its trace."""
    # Not copied: a result is frozen, and so are the arrays of its trace.
    table = functools.partial(pd.DataFrame, index=index, copy=False)
    column = functools.partial(pd.Series, index=index, copy=False)
    return {
        "equity": column(np.exp(trace.log_equity), name="equity"),
        # Kept as well: its exponential loses digits where equity is large.
        "log_equity": np.asarray(trace.log_equity),
        "targets": table(trace.target, columns=symbols),
        "weights": table(trace.weight, columns=symbols),
        "turnover": column(trace.turnover, name="turnover"),
        "cost": column(trace.cost, name="cost"),
        "flows": table(trace.flows.named(costs)),
        "trace": trace,
    }
