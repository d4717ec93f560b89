"""Trades, orders and their metrics by hand; `test_judge.py` has those of drawn accounts."""

import math
import time

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


def test_a_hundred_thousand_bars_with_thousands_of_trades_take_a_fraction_of_a_second():
    rng = np.random.default_rng(0)
    bars = random_bars(rng, 100_000, 1, spread=0.001, unit="m")
    side = np.repeat(rng.choice([-1.0, 0.0, 1.0], 5_000), 20)[:, None]
    change = np.diff(side, axis=0, prepend=0.0)
    found = trace(bars, np.ones(100_000), change / bars.open, side / bars.open)
    begun = time.perf_counter()
    fills = trades.fills_in(bars, found, rules_of())
    table = trades.trade_table(fills, bars, rules_of())
    spent = time.perf_counter() - begun
    assert len(table) > 2_000
    # About 0.05 s; a loop over bars would take seconds.
    assert spent < 1.0


def test_the_reasons_have_the_codes_of_the_trace():
    assert REASONS[:5] == ("target", "stop", "take profit", "trailing stop", "liquidated")
