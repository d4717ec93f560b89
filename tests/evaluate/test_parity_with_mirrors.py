"""`nca.backtest` against mirrors of vectorbt and backtesting.py; `tests/oracles` proves those."""

import ledger
import numpy as np
import pytest
from drawn import random_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from mirrors import (
    BACKTESTING_CASH,
    FILLS,
    KINDS,
    ORDERS,
    at_next_open,
    backtesting_py_equity,
    drawn_targets,
    orders_of,
    vectorbt_equity,
)

import nca_trader as nca
from nca_trader.types import Costs

seeds = st.integers(0, 2**32 - 1)
fractions = st.one_of(st.just(0.0), st.floats(0.0, 0.05))


def mirrored_vectorbt(bars, targets, costs, fill, order):
    orders = orders_of(targets, order)
    if fill == "close":
        return vectorbt_equity(bars.close, bars.close, orders, costs)
    return vectorbt_equity(bars.open, bars.close, at_next_open(orders), costs)


@settings(max_examples=60)
@given(
    seed=seeds,
    kind=st.sampled_from(KINDS),
    fill=st.sampled_from(FILLS),
    order=st.sampled_from(ORDERS),
    commission=fractions,
    slippage=fractions,
)
def test_any_targets_of_one_asset_equal_vectorbt(seed, kind, fill, order, commission, slippage):
    rng = np.random.default_rng(seed)
    bars = random_bars(rng, 60, 1, spread=0.02)
    targets = drawn_targets(rng, kind, (60, 1))
    costs = Costs(commission=commission, slippage=slippage)
    expected, _ = mirrored_vectorbt(bars, targets, costs, fill, order)
    equity = nca.backtest(bars, targets, costs, fill, order).equity
    np.testing.assert_allclose(equity, expected, rtol=1e-9)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("order", ORDERS)
def test_twenty_years_of_the_sp500_equal_both_engines(fill, order):
    bars = nca.sample_bars("sp500").select("SP500")
    rng = np.random.default_rng([FILLS.index(fill), ORDERS.index(order)])
    targets = drawn_targets(rng, "positions", (len(bars), 1))
    targets[0] = 0.0
    costs = Costs(commission=5e-4, slippage=2e-4)
    expected, _ = mirrored_vectorbt(bars, targets, costs, fill, order)
    equity = nca.backtest(bars, targets, costs, fill, order).equity
    np.testing.assert_allclose(equity, expected, rtol=1e-9)
    orders = orders_of(targets[:, 0], order)
    expected = backtesting_py_equity(bars.open[:, 0], bars.close[:, 0], orders, fill == "close")
    equity = nca.backtest(bars, targets, None, fill, order).equity
    np.testing.assert_allclose(equity, expected / BACKTESTING_CASH, rtol=1e-8)


@settings(max_examples=30)
@given(
    seed=seeds,
    kind=st.sampled_from(["positions", "weights"]),
    fill=st.sampled_from(FILLS),
    order=st.sampled_from(ORDERS),
)
def test_any_targets_at_zero_cost_equal_backtesting_py(seed, kind, fill, order):
    rng = np.random.default_rng(seed)
    bars = random_bars(rng, 60, 1, spread=0.02)
    targets = drawn_targets(rng, kind, 60)
    targets[0] = 0.0  # the engine orders nothing before it has seen two bars
    orders = orders_of(targets, order)
    expected = backtesting_py_equity(bars.open[:, 0], bars.close[:, 0], orders, fill == "close")
    equity = nca.backtest(bars, targets, fill=fill, order=order).equity
    np.testing.assert_allclose(equity, expected / BACKTESTING_CASH, rtol=1e-8)


@settings(max_examples=30)
@given(seed=seeds, fill=st.sampled_from(FILLS))
def test_whole_lots_long_or_flat_equal_the_units_of_backtesting_py(seed, fill):
    # Without commission, so that no buy is cut: the package would buy the rest later, unit by unit.
    rng = np.random.default_rng(seed)
    bars = random_bars(rng, 60, 1, spread=0.02)
    targets = rng.integers(0, 2, 60).astype(float)
    targets[0] = 0.0
    open_, close = bars.open[:, 0], bars.close[:, 0]
    orders = orders_of(targets, "on_change")
    expected = backtesting_py_equity(open_, close, orders, fill == "close", 5_000.0)
    limits = {"order": "on_change", "capital": 5_000.0, "lot": 1.0}
    equity = nca.backtest(bars, targets, fill=fill, **limits).equity
    np.testing.assert_allclose(5_000.0 * equity, expected, rtol=1e-9)


@settings(max_examples=30)
@given(
    seed=seeds,
    fill=st.sampled_from(FILLS),
    order=st.sampled_from(ORDERS),
    commission=st.floats(0.0, 0.01),
    slippage=st.floats(0.0, 0.01),
)
def test_several_assets_equal_vectorbt_where_cash_does_not_bind(
    seed, fill, order, commission, slippage
):
    rng = np.random.default_rng(seed)
    bars = random_bars(rng, 60, 3)
    targets = rng.uniform(-0.5, 0.25, (60, 3))
    costs = Costs(commission=commission, slippage=slippage)
    expected, short_of_cash = mirrored_vectorbt(bars, targets, costs, fill, order)
    assert not short_of_cash.any()
    equity = nca.backtest(bars, targets, costs, fill, order).equity
    np.testing.assert_allclose(equity, expected, rtol=1e-9)


def test_where_cash_binds_every_buy_is_cut_by_one_factor_and_not_the_last_alone():
    # Targets of .8 and .9 with cash for 1: the package buys 8/17 and 9/17, vectorbt .8 and .2.
    # Then the first asset gains 10 % and the second nothing.
    price = np.array([[100.0, 100.0], [110.0, 100.0]])
    bars = random_bars(np.random.default_rng(0), 2, 2)
    bars = nca.Bars(
        time=bars.time,
        symbols=bars.symbols,
        open=price,
        high=price,
        low=price,
        close=price,
        volume=bars.volume,
        present=bars.present,
    )
    targets = np.array([[0.8, 0.9], [np.nan, np.nan]])
    result = nca.backtest(bars, targets, fill="close")
    np.testing.assert_allclose(result.weights.iloc[0], [8 / 17, 9 / 17], rtol=1e-12)
    np.testing.assert_allclose(result.equity, [1.0, 1 + 0.1 * 8 / 17], rtol=1e-12)
    judged = ledger.run(bars, targets, {}, {"fill": "close"})
    np.testing.assert_allclose(judged.equity, result.equity, rtol=1e-12)
    equity, short_of_cash = vectorbt_equity(price, price, targets, Costs())
    np.testing.assert_allclose(equity, [1.0, 1 + 0.1 * 0.8], rtol=1e-12)
    assert short_of_cash.tolist() == [True, False]
