"""The package against backtesting.py: `make test-oracles`.

Which settings make backtesting.py an oracle, and why, is in docs/concepts/parity.md.
"""

import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from drawn import random_bars
from engines import (
    BACKTESTING_CASH,
    FILLS,
    ORDERS,
    drawn_targets,
    orders_of,
)

import nca_trader as nca

if importlib.util.find_spec("backtesting") is None:
    pytest.skip(
        "backtesting.py is not installed here; `make test-oracles` installs it and runs these",
        allow_module_level=True,
    )

from backtesting import Backtest, Strategy
from backtesting.test import GOOG

pytestmark = [
    # Two warnings of the engine, neither of its accounting: it calls a renamed pandas attribute,
    # and it would rather close the last trade (at the last bar's open, once that bar is over).
    pytest.mark.filterwarnings("ignore:DatetimeIndex.dayofweek is deprecated"),
    pytest.mark.filterwarnings("ignore:Some trades remain open"),
]
COLUMNS = ("open", "high", "low", "close", "volume")
NEARLY_ONE = 1 - np.finfo(float).eps  # a size of 1 or more would be units, not a fraction


@pytest.fixture(scope="module")
def markets():
    return {
        "sp500": nca.sample_bars("sp500").select("SP500"),
        "random": random_bars(np.random.default_rng(5), 1000, 1),
    }


def frame_of(bars):
    columns = {name.capitalize(): getattr(bars, name)[:, 0] for name in COLUMNS}
    return pd.DataFrame(columns, bars.index.tz_localize(None))


def bars_of(frame):
    columns = {name: frame[[name.capitalize()]].to_numpy(float) for name in COLUMNS}
    present = np.ones((len(frame), 1), bool)
    return nca.Bars(time=frame.index.to_numpy(), symbols=("GOOG",), present=present, **columns)


def engine_equity(frame, orders, trade_on_close, cash=BACKTESTING_CASH, **costs):
    """Equity `[N]` in money of orders `[N]`, fractions of equity with NaN for none."""

    class Given(Strategy):
        def init(self):
            pass

        def next(self):
            order = orders[len(self.data) - 1]
            if order > 0:
                self.buy(size=min(order, NEARLY_ONE))
            elif order < 0:
                self.sell(size=min(-order, NEARLY_ONE))
            elif order == 0:
                self.position.close()

    test = Backtest(
        frame,
        Given,
        cash=cash,
        exclusive_orders=True,
        trade_on_close=trade_on_close,
        finalize_trades=False,
        **costs,
    )
    return test.run()["_equity_curve"]["Equity"].to_numpy()


@pytest.mark.parametrize("market", ["sp500", "random"])
@pytest.mark.parametrize("kind", ["positions", "weights"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.few(7)
def test_one_asset_equals_backtesting_py_at_zero_cost(markets, market, kind, order, fill):
    bars = markets[market]
    targets = drawn_targets(np.random.default_rng(1), kind, len(bars))
    targets[0] = 0.0  # the engine's strategy is first called at the second bar
    orders = orders_of(targets, order)
    expected = engine_equity(frame_of(bars), orders, fill == "close") / BACKTESTING_CASH
    equity = nca.backtest(bars, targets, fill=fill, order=order).equity
    np.testing.assert_allclose(equity, expected, rtol=1e-8)


def crossings(close, short):
    """`[N]` 1 where the average of 10 closes crosses that of 20 from below, `short` from above."""
    fast, slow = (pd.Series(close).rolling(n).mean().to_numpy() for n in (10, 20))
    above, below = fast > slow, fast < slow
    orders = np.full(len(close), np.nan)
    orders[1:] = np.where(below[:-1] & above[1:], 1.0, orders[1:])
    orders[1:] = np.where(above[:-1] & below[1:], short, orders[1:])
    return orders


@pytest.mark.parametrize(
    ("case", "short", "trade_on_close", "commission"),
    [
        ("GOOG_sma10_20_longonly_nocost", 0.0, False, 0.0),
        ("GOOG_sma10_20_quickstart", -1.0, False, 0.002),
        ("GOOG_sma10_20_trade_on_close", -1.0, True, 0.002),
    ],
)
def test_the_stated_equity_of_the_tutorial(shared, case, short, trade_on_close, commission):
    stated = pd.read_csv(shared / "expected" / f"bt_{case}_equity.csv.gz", index_col=0)["Equity"]
    final = json.loads((shared / "expected" / "backtesting_py.json").read_text())[case]
    assert stated.iloc[-1] == pytest.approx(final["Equity Final [$]"], rel=1e-12)
    orders = crossings(GOOG["Close"].to_numpy(), short)
    engine = engine_equity(GOOG, orders, trade_on_close, 10_000, commission=commission)
    np.testing.assert_allclose(engine, stated, rtol=1e-12)
    if short == 0.0:
        equity = nca.backtest(bars_of(GOOG), orders, capital=10_000, lot=1.0).equity * 10_000
        np.testing.assert_allclose(equity, stated, rtol=1e-9)


@pytest.mark.parametrize("fill", FILLS)
def test_whole_lots_with_commission_equal_the_units_of_backtesting_py(fill):
    # Long or flat: a short is sized before the close of a long here, and after it there.
    orders = crossings(GOOG["Close"].to_numpy(), 0.0)
    expected = engine_equity(GOOG, orders, fill == "close", 10_000, commission=0.002)
    costs = nca.Costs(commission=0.002)
    result = nca.backtest(bars_of(GOOG), orders, costs, fill, capital=10_000, lot=1.0)
    # The engine books a fill at a close in the next bar: that row shows its commission too late.
    rows = (result.turnover == 0) | (fill == "next_open")
    np.testing.assert_allclose(result.equity[rows] * 10_000, expected[rows], rtol=1e-9)
    assert (result.turnover > 0).sum() > 90


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("stop", "target"), [(0.01, None), (None, 0.01), (0.02, 0.015)])
def test_stops_and_targets_equal_those_of_backtesting_py(markets, fill, stop, target):
    bars = markets["random"]
    sides = drawn_targets(np.random.default_rng(7), "positions", len(bars))
    sides[0] = 0.0
    changed = np.flatnonzero(np.diff(sides, prepend=0.0))
    closes = bars.close[:, 0]

    def level(fraction, sign, side, close):
        return None if fraction is None else close * (1 + sign * side * fraction)

    class Given(Strategy):
        def init(self):
            pass

        def next(self):
            t = len(self.data) - 1
            if t not in changed:
                return
            side = sides[t]
            if not side:
                self.position.close()
                return
            levels = {
                "sl": level(stop, -1, side, closes[t]),
                "tp": level(target, 1, side, closes[t]),
            }
            (self.buy if side > 0 else self.sell)(size=NEARLY_ONE, **levels)

    test = Backtest(
        frame_of(bars), Given, cash=BACKTESTING_CASH, exclusive_orders=True,
        trade_on_close=fill == "close", finalize_trades=False,
    )  # fmt: skip
    statistics = test.run()
    expected = statistics["_equity_curve"]["Equity"].to_numpy() / BACKTESTING_CASH

    def act(row, bar):
        table = jnp.asarray(sides[:, None])  # here, where arrays are float64
        side = table[row]
        prices = {}
        if stop is not None:
            prices["stop_price"] = bar.close * (1 - side * stop)
        if target is not None:
            prices["limit_price"] = bar.close * (1 + side * target)
        new = side != table[jnp.maximum(row - 1, 0)]
        # Levels are those of the close that ordered; later closes do not move them.
        prices = {name: jnp.where(new, price, jnp.nan) for name, price in prices.items()}
        return row + 1, nca.Order(side, **prices)

    replay = nca.Strategy(lambda num_assets: 0, act)
    result = nca.backtest(bars, replay, fill=fill)
    assert len(statistics["_trades"]) > 30
    np.testing.assert_allclose(result.equity, expected, rtol=1e-8)
