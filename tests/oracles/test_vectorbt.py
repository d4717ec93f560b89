"""The package against vectorbt: `make test-oracles`.

Which settings make vectorbt an oracle, and why, is in docs/concepts/parity.md.
"""

import dataclasses
import importlib.util

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars
from engines import (
    COSTS,
    FILLS,
    KINDS,
    ORDERS,
    VECTORBT_CASH,
    at_next_open,
    drawn_targets,
    orders_of,
)

import nca_trader as nca

if importlib.util.find_spec("vectorbt") is None:
    pytest.skip(
        "vectorbt is not installed here; `make test-oracles` installs it and runs these",
        allow_module_level=True,
    )

import vectorbt as vbt


@pytest.fixture(scope="module")
def markets():
    return {
        "sp500": nca.sample_bars("sp500").select("SP500"),
        "random": random_bars(np.random.default_rng(5), 3000, 1),
    }


def row_of_fill(bars, targets, fill, order):
    """Prices `[N, A]` at which each row fills, and what is ordered there."""
    orders = orders_of(targets, order)
    return (bars.open, at_next_open(orders)) if fill == "next_open" else (bars.close, orders)


def portfolio(bars, price, orders, costs, **settings):
    # Copies, because numba compiles once more for arrays that are read-only or laid out otherwise.
    close, size, price = (np.array(array, order="C") for array in (bars.close, orders, price))
    return vbt.Portfolio.from_orders(
        pd.DataFrame(close, bars.index.tz_localize(None), list(bars.symbols), copy=False),
        size=size,
        size_type="targetpercent",
        direction="both",
        price=price,
        val_price=price,
        fees=costs.commission,
        slippage=costs.slippage,
        group_by=True,
        cash_sharing=True,
        call_seq="auto",
        lock_cash=False,
        allow_partial=True,
        **{"init_cash": VECTORBT_CASH, **settings},
    )


def engine_equity(bars, price, orders, costs):
    return portfolio(bars, price, orders, costs).value().to_numpy() / VECTORBT_CASH


@pytest.mark.parametrize("market", ["sp500", "random"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.few(9)
def test_one_asset_equals_vectorbt(markets, market, kind, order, fill):
    bars = markets[market]
    targets = drawn_targets(np.random.default_rng(1), kind, (len(bars), 1))
    price, orders = row_of_fill(bars, targets, fill, order)
    finals = set()
    for costs in COSTS:
        expected = engine_equity(bars, price, orders, costs)
        equity = nca.backtest(bars, targets, costs, fill, order).equity
        np.testing.assert_allclose(equity, expected, rtol=1e-9)
        finals.add(round(expected[-1], 6))
    assert len(finals) == len(COSTS)  # each cost acts


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fill", FILLS)
def test_several_assets_equal_vectorbt_where_cash_does_not_bind(order, fill):
    rng = np.random.default_rng([ORDERS.index(order), FILLS.index(fill)])
    bars = random_bars(rng, 1000, 4)
    targets = np.where(rng.random((1000, 4)) < 0.7, rng.uniform(-0.4, 0.2, (1000, 4)), 0.1)
    price, orders = row_of_fill(bars, targets, fill, order)
    for costs in COSTS:
        expected = engine_equity(bars, price, orders, costs)
        equity = nca.backtest(bars, targets, costs, fill, order).equity
        np.testing.assert_allclose(equity, expected, rtol=1e-9)


def test_where_cash_binds_vectorbt_cuts_the_last_buy_and_the_package_every_buy_alike():
    # Targets of .8 and .9 with cash for 1; then the first asset gains 10 % and the second nothing.
    price = np.array([[100.0, 100.0], [110.0, 100.0]])
    bars = random_bars(np.random.default_rng(0), 2, 2)
    prices = dict.fromkeys(("open", "high", "low", "close"), price)
    bars = dataclasses.replace(bars, **prices)
    targets = np.array([[0.8, 0.9], [np.nan, np.nan]])
    result = nca.backtest(bars, targets, fill="close")
    np.testing.assert_allclose(result.weights.iloc[0], [8 / 17, 9 / 17], rtol=1e-12)
    np.testing.assert_allclose(result.equity, [1.0, 1 + 0.1 * 8 / 17], rtol=1e-12)
    expected = engine_equity(bars, price, targets, nca.Costs())
    np.testing.assert_allclose(expected, [1.0, 1 + 0.1 * 0.8], rtol=1e-12)


def test_a_small_purse_lets_vectorbt_skip_orders():
    # Why the purse is large: orders below 1e-12 units count as none, so with one unit
    # of money the engine departs from its own equity with a million.
    bars = nca.sample_bars("sp500").select("SP500")
    targets = drawn_targets(np.random.default_rng(1), "positions", (len(bars), 1))
    small = portfolio(bars, bars.close, targets, COSTS[-1], init_cash=1.0).value().to_numpy()
    large = engine_equity(bars, bars.close, targets, COSTS[-1])
    assert 1e-7 < np.abs(small / large - 1).max() < 1e-3
