"""Trades, orders and their metrics by hand; `test_judge.py` has those of drawn accounts."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars
from made_up import rules_of

from nca_trader.envs.account.effects import AccountFill, Effects, Flows
from nca_trader.evaluate import trades
from nca_trader.evaluate.simulate import Trace
from nca_trader.evaluate.trades import REASONS


def trace(bars, equity, at_open, held):
    """What an account did that trades at opens, `[N, A]` units traded and held after it."""
    before = np.concatenate([[1.0], equity[:-1]])
    gap = bars.open - np.vstack([bars.open[:1], bars.close[:-1]])
    worth = before + (np.vstack([0.0 * held[:1], held[:-1]]) * gap).sum(axis=1)
    value, free = at_open * bars.open / worth[:, None], np.zeros(at_open.shape)
    left, growth = held * bars.open / worth[:, None], worth / before - 1.0
    effects = Effects(
        Flows(*np.zeros((len(Flows._fields) - 1, len(equity)))),
        broke=np.zeros(len(equity), np.int8),
        at_open=AccountFill(value, free, (), left, growth),
    )
    return Trace(np.log(equity), None, None, effects)


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


def table_of(fills, num_bars, last=1.0):
    """Trades of `(row, price, units before, units after, cost)` at opens, of one asset."""
    price = np.full((num_bars, 1), last)
    bars = random_bars(np.random.default_rng(0), num_bars, 1)
    bars = dataclasses.replace(bars, close=price)
    row, price, before, after, cost = (np.array(x, float) for x in zip(*fills, strict=True))
    none, at = np.zeros(len(row), int), np.full(len(row), trades.AT_OPEN)
    found = trades.Fills(none, row.astype(int), at, price, before, after, cost, none)
    return trades.trade_table(found, bars, rules_of())


@pytest.mark.parametrize(
    ("fills", "last", "pnl", "largest"),
    [
        ([(0, 100, 0, 1, 0), (1, 120, 1, 0, 0)], 1, [20], [100]),
        # Added to: 2 units at 150. Of what left, 1.5 units at 200 and 0.5 at 100.
        (
            [(0, 100, 0, 1, 0), (1, 150, 1, 2, 0), (2, 200, 2, 0.5, 0), (3, 100, 0.5, 0, 0)],
            1,
            [100],
            [300],
        ),
        # A short of 1 at 100 turns to 3 long at 80, which cost 4 for 4 units and is still held.
        ([(0, 100, 0, -1, 0), (1, 80, -1, 3, 4)], 90, [20 - 1, 30 - 3], [100, 240]),
        # In and out of a part again and again: much is entered and little is held.
        (
            [(0, 100, 0, 1, 0)]
            + [
                (2 * i + k, 100, *held, 0)
                for i in range(9)
                for k, held in ((1, (1, 2)), (2, (2, 1)))
            ]
            + [(19, 110, 1, 0, 0)],
            1,
            [10],
            [200],
        ),
    ],
)
def test_the_return_of_a_trade_is_over_the_largest_notional_that_it_held(fills, last, pnl, largest):
    table = table_of(fills, 20, last)
    np.testing.assert_allclose(table["pnl"], pnl, rtol=1e-12)
    np.testing.assert_allclose(table["return"], np.array(pnl) / largest, rtol=1e-12)
    spread = table["size"] * (table["exit_price"] - table["entry_price"]) - table["cost"]
    np.testing.assert_allclose(table["pnl"], spread, rtol=1e-12)


@pytest.mark.parametrize(
    ("case", "commission"),
    [("longonly_nocost", 0.0), ("quickstart", 2e-3), ("trade_on_close", 2e-3)],
)
def test_the_returns_of_plain_trades_are_those_that_backtesting_py_published(
    shared, case, commission
):
    stated = pd.read_csv(shared / "expected" / f"bt_GOOG_sma10_20_{case}_trades.csv.gz")
    fills = {}
    for trade in stated.itertuples():
        for row, price, before, after in (
            (trade.EntryBar, trade.EntryPrice, 0.0, trade.Size),
            (trade.ExitBar, trade.ExitPrice, trade.Size, 0.0),
        ):
            cost = commission * abs(trade.Size) * price
            if row in fills:  # one fill ends the trade before as well
                _, _, before, _, paid = fills[row]
                cost += paid
            fills[row] = (row, price, before, after, cost)
    table = table_of([fills[row] for row in sorted(fills)], max(fills) + 1)
    assert len(table) == len(stated) > 40
    np.testing.assert_allclose(table["pnl"], stated["PnL"], rtol=1e-9)
    np.testing.assert_allclose(table["return"], stated["ReturnPct"], rtol=1e-9)


def test_the_reasons_have_the_codes_of_the_trace():
    assert REASONS[:5] == ("target", "stop", "take profit", "trailing stop", "liquidated")
