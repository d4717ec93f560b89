"""Trades, orders and their metrics by hand; `test_judge.py` has those of drawn accounts."""

import csv
import gzip
import math
import time

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars

from nca_trader.envs.account.effects import Effects, Fill, Flows
from nca_trader.envs.account.state import Rules
from nca_trader.evaluate import trades
from nca_trader.evaluate.simulate import Trace
from nca_trader.evaluate.trades import REASONS
from nca_trader.types import Bars


def trace(bars, equity, at_open, held, *, exited=None, price=None):
    """What an account did that trades at opens, `[N, A]` units traded and held after it.

    exited: units that left inside the bar, at `price`.
    """
    before = np.concatenate([[1.0], equity[:-1]])
    kept = held if exited is None else held + exited
    gap = bars.open - np.vstack([bars.open[:1], bars.close[:-1]])
    worth = before + (np.vstack([0.0 * kept[:1], kept[:-1]]) * gap).sum(axis=1)

    def fill(units, prices, left, worth, **more):
        value, free = units * prices / worth[:, None], np.zeros(units.shape)
        growth = worth / before - 1.0
        return Fill(value, free, (), left * prices / worth[:, None], growth, **more)

    inside = None
    if exited is not None:
        during = worth + (held * (price - bars.open)).sum(1)
        reason = np.where(exited != 0, REASONS.index("stop"), 0).astype(np.int8)
        reached = np.where(exited != 0, price, np.nan)
        inside = fill(exited, price, kept, during, price=reached, reason=reason)
    effects = Effects(
        Flows(*np.zeros((len(Flows._fields) - 1, len(equity)))),
        broke=np.zeros(len(equity), np.int8),
        at_open=fill(at_open, bars.open, held, worth),
        inside=inside,
    )
    return Trace(np.log(equity), None, None, effects)


def hand_bars(open_, close):
    open_, close = (np.asarray(x, float)[:, None] for x in (open_, close))
    time = np.datetime64("2024-01-01", "ns") + np.arange(len(open_)) * np.timedelta64(1, "D")
    high, low = np.maximum(open_, close), np.minimum(open_, close)
    fields = {"open": open_, "high": high, "low": low, "close": close}
    return Bars(
        time=time,
        symbols=("A",),
        volume=np.full(open_.shape, 1000.0),
        present=np.ones(open_.shape, bool),
        **fields,
    )


def test_a_position_that_is_stopped_in_the_bar_of_its_entry_is_a_trade_of_its_own():
    bars = hand_bars([100, 100, 90, 95], [100, 94, 96, 99])
    # Bought with everything at the open of bar 1, stopped at 95 in the same bar; bought again at
    # the open of bar 2, and held.
    equity = np.array([1.0, 0.95, 0.95 * 96 / 90, 0.95 * 99 / 90])
    bought = np.array([[0.0], [0.01], [0.95 / 90], [0.0]])
    exited = np.array([[0.0], [-0.01], [0.0], [0.0]])
    held = np.array([[0.0], [0.01], [0.95 / 90], [0.95 / 90]])
    found = trace(bars, equity, bought, held, exited=exited, price=np.full((4, 1), 95.0))
    fills = trades.fills_in(bars, found, Rules())
    table = trades.trade_table(fills, bars, Rules())
    assert table["reason"].tolist() == ["stop", "open"]
    assert table["entry_price"].tolist() == [100.0, 90.0]
    assert table["exit_price"].tolist() == pytest.approx([95.0, 99.0], rel=1e-14)
    np.testing.assert_allclose(table["return"], [-0.05, 0.1], atol=1e-14)
    np.testing.assert_allclose(table["pnl"].sum(), equity[-1] - 1.0, atol=1e-14)
    assert table["bars"].tolist() == [0, 1] and pd.isna(table["exit"][1])
    orders = trades.order_table(fills, bars, Rules())
    assert orders["at"].tolist() == ["open", "inside", "open"]
    assert orders["side"].tolist() == ["buy", "sell", "buy"]
    # Sizes 0.01, 0.01 and 0.95 / 90 per 1 of the capital, volume 1,000, at most 1% of it.
    smallest = np.quantile([1000.0, 1000.0, 10.0 * 90 / 0.95], 0.05)
    assert trades.capacity(fills, bars) == pytest.approx(smallest, rel=1e-12)


def test_metrics_of_trades_by_hand():
    table = pd.DataFrame(
        {
            "pnl": [0.02, -0.01, 0.03, 0.0, 9.0],
            "return": [0.2, -0.1, 0.3, 0.0, 9.0],
            "bars": [1, 2, 3, 6, 99],
            "reason": ["target", "stop", "target", "target", "open"],
        }
    )
    found = trades.trade_metrics(table)
    assert found["trades"] == 5 and found["win_rate"] == 0.5
    assert found["profit_factor"] == pytest.approx(5.0)
    assert found["expectancy"] == pytest.approx(0.01)
    deviation = math.sqrt((0.01**2 + 0.02**2 + 0.02**2 + 0.01**2) / 3)
    assert found["sqn"] == pytest.approx(2.0 * 0.01 / deviation)
    assert found["average_trade"] == pytest.approx(0.1)
    assert (found["best_trade"], found["worst_trade"]) == (0.3, -0.1)
    assert found["trade_duration"] == 3.0
    nothing = trades.trade_metrics(table[:0])
    assert nothing.pop("trades") == 0.0 and all(math.isnan(x) for x in nothing.values())


def test_a_hundred_thousand_bars_with_thousands_of_trades_take_a_fraction_of_a_second():
    rng = np.random.default_rng(0)
    bars = random_bars(rng, 100_000, 1, spread=0.001, unit="m")
    side = np.repeat(rng.choice([-1.0, 0.0, 1.0], 5_000), 20)[:, None]
    change = np.diff(side, axis=0, prepend=0.0)
    found = trace(bars, np.ones(100_000), change / bars.open, side / bars.open)
    begun = time.perf_counter()
    fills = trades.fills_in(bars, found, Rules())
    table = trades.trade_table(fills, bars, Rules())
    spent = time.perf_counter() - begun
    assert len(table) > 2_000
    # About 0.05 s; a loop over bars would take seconds.
    assert spent < 1.0


def test_the_reasons_have_the_codes_of_the_trace():
    assert REASONS[:5] == ("target", "stop", "take profit", "trailing stop", "liquidated")


def engine_trades(shared, name):
    with gzip.open(shared / "expected" / f"{name}_trades.csv.gz", "rt") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_trades_equal_those_of_backtesting_py(shared):
    """Of its file: sizes, bars and prices give equity by hand; its trades must come back."""
    theirs = engine_trades(shared, "bt_GOOG_sma10_20_longonly_nocost")
    with gzip.open(
        shared / "expected" / "bt_GOOG_sma10_20_longonly_nocost_equity.csv.gz", "rt"
    ) as file:
        equity = np.array([float(row["Equity"]) for row in csv.DictReader(file)]) / 10_000
    n = len(equity)
    open_, close, units = np.full(n, np.nan), np.full(n, np.nan), np.zeros(n + 1)
    for trade in theirs:
        entry, exit_ = int(trade["EntryBar"]), int(trade["ExitBar"])
        open_[entry], open_[exit_] = trade["EntryPrice"], trade["ExitPrice"]
        units[entry:exit_] = trade["Size"] / 10_000
        before = equity[entry - 1]
        held = slice(entry, exit_)
        close[held] = trade["EntryPrice"] + (equity[held] - before) / units[entry]
    units = units[:n]
    # Where nothing is held any price will do.
    close = pd.Series(close).ffill().bfill().to_numpy()
    open_ = np.where(np.isnan(open_), close, open_)
    bars = hand_bars(open_, close)
    change = np.diff(units, prepend=0.0)
    found = trace(bars, equity, change[:, None], units[:, None])
    fills = trades.fills_in(bars, found, Rules())
    ours = trades.trade_table(fills, bars, Rules(capital=10_000.0))
    ours = ours[ours["reason"] != "open"].reset_index()
    assert len(ours) == len(theirs)
    for k, trade in enumerate(theirs):
        assert ours["entry"][k] == bars.index[int(trade["EntryBar"])]
        assert ours["exit"][k] == bars.index[int(trade["ExitBar"])]
        assert ours["size"][k] == pytest.approx(trade["Size"])
        assert ours["pnl"][k] * 10_000 == pytest.approx(trade["PnL"], abs=1e-6)
        assert ours["return"][k] == pytest.approx(trade["ReturnPct"], abs=1e-9)
