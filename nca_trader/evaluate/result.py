"""The result of a backtest: one row per bar, and where equity went."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.config.ranges import expect
from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError, StateError, argument
from nca_trader.evaluate import metrics
from nca_trader.evaluate.targets import NO_CUT, Cut
from nca_trader.types import Costs


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
      charged: the costs.
      rules: of the account, with `fill` and `order`.
      bars_per_year: of the bars.
      note: what a report must say of the data.
      in_sample: number of these bars at or before the last that trained or selected the
        agent, see `seen_rows`; None where the targets are not of a run.
      looks: evaluations of agents on these symbols in years that overlap, with this one; None
        where that was not counted, see `looks_at`.
      cut: orders for more than the account may hold.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-250:]
      >>> result = nca.backtest(bars, nca.rules.buy_and_hold(), nca.Costs(commission=1e-3))
      >>> float(result.equity.iloc[0]), sorted(result.metrics)[:3]
      (1.0, ['annual_volatility', 'bars', 'cagr'])
    """

    name: str
    equity: pd.Series
    log_equity: np.ndarray
    targets: pd.DataFrame
    weights: pd.DataFrame
    turnover: pd.Series
    cost: pd.Series
    flows: pd.DataFrame
    logits: np.ndarray | None
    charged: Costs
    rules: Rules
    bars_per_year: float
    note: str = ""
    in_sample: int | None = None
    looks: int | None = None
    cut: Cut = NO_CUT

    @property
    def num_fills(self) -> int:
        """The number of bars with a fill; at 0 the metrics are those of cash alone."""
        return int((self.turnover > 0.0).sum())

    @property
    def cautions(self) -> tuple[str, ...]:
        """Warnings to show with the metrics: nothing was filled, or orders were cut."""
        said = []
        if not self.num_fills:
            said.append("NO FILLS: nothing was ever bought or sold, so what moved is cash alone.")
        # A cut order is not an error, but a user who meant leverage reads other results.
        if self.cut.orders:
            said.append(
                f"CUT: on {self.cut.orders:,} bars the order was for more than the account may "
                f"hold (the largest for {self.cut.largest:g} times its equity), and was cut to "
                "that."
            )
        return tuple(said)

    # A result is frozen, so its metrics cannot change.
    @functools.cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of this result, see `metrics.summary`."""
        return metrics.summary(self.equity, self.weights, self.turnover, self.bars_per_year)

    @property
    def fill(self) -> str:
        """Where orders fill: "next_open" or "close"."""
        return self.rules.fill

    @property
    def order(self) -> str:
        """When a target trades: "on_change" or "rebalance"."""
        return self.rules.order

    @property
    def costs(self) -> pd.DataFrame:
        """Where equity went: one row per item, and their sum, which is final equity less 1.

        Columns: `amount` in units of the capital, gains positive; `a_year`, the same per year.
        """
        amount = self.flows.sum()
        table = pd.DataFrame({"amount": [*amount, amount.sum()]}, index=[*amount.index, "total"])
        table.index.name = "item"
        return table.assign(a_year=table["amount"] * self.bars_per_year / len(self.equity))

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
                "give such a name. The command `backtest` writes a page to .html."
            )
        # Renamed when complete, so that the file is whole or not there.
        part = path.with_name(path.name + ".part")
        try:
            if path.suffix == ".csv":  # text of a float that reads back as the same float
                self.to_frame().to_csv(part, index=False)
            else:
                self.to_frame().to_parquet(part, index=False)
            os.replace(part, path)
        except OSError as error:
            # The disk may be gone; the first error is the one to report.
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            what = error.strerror or str(error)
            raise StateError(f"{path}: cannot be written ({what}); repair that.") from None
        return path
