"""Results whose numbers no backtest found, from weights and returns chosen by a test; accounts."""

import dataclasses

import numpy as np
import pandas as pd

from nca_trader.config.account import PLAIN
from nca_trader.evaluate.backtest import backtest
from nca_trader.types import Bars, Costs


def rules_of(costs=Costs(), **given):
    """Return a complete account that orders on change, with these costs and fields.

    None takes a limit off, as it does in an environment.
    """
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(PLAIN, costs=costs, **given)


def made_up_result(name, targets, market, costs=None, fill="next_open", rate=7e-4, symbols=None):
    """A target earns the next return of `market` `[N, A]`, less `rate` of what it trades."""
    time = pd.date_range("2013-01-02", periods=len(market), freq="B", tz="UTC", name="time")
    symbols = list(symbols or [f"S{i}" for i in range(targets.shape[1])])
    held = np.vstack([np.zeros((1, targets.shape[1])), targets[:-1]])
    traded = np.abs(np.diff(held, axis=0, prepend=0.0)).sum(axis=1)
    equity = np.cumprod(1.0 + (held * market).sum(axis=1) - traded * rate)
    flows = pd.DataFrame({"market": np.diff(equity, prepend=1.0), "commission": 0.0}, time)
    if traded.any():
        flows.loc[time[0], ["market", "commission"]] += [0.01, -0.01]
    # What a backtest of the same targets has; its numbers are replaced by those of the rule above.
    close = 100.0 * np.cumprod(1.0 + market, axis=0)
    before = np.vstack([np.full((1, market.shape[1]), 100.0), close[:-1]])
    bars = Bars(
        time=time.to_numpy("datetime64[ns]"),
        symbols=tuple(symbols),
        open=before,
        high=np.maximum(before, close),
        low=np.minimum(before, close),
        close=close,
        volume=np.full(close.shape, 1e6),
        present=np.full(close.shape, True),
    )
    rules = rules_of(costs or Costs(commission=5e-4, slippage=2e-4), fill=fill)
    return dataclasses.replace(
        backtest(bars, targets, account=rules, name=name, look=False),
        equity=pd.Series(equity, time),
        log_equity=np.log(equity),
        targets=pd.DataFrame(targets, time, symbols),
        weights=pd.DataFrame(held, time, symbols),
        turnover=pd.Series(traded, time),
        cost=pd.Series(traded * rate, time),
        flows=flows.assign(impact=0.0),
        bars_per_year=252.0,
        in_sample=0,
    )
