"""The account by hand, and its float32 against its float64; `test_judge.py` has the ledger."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from made_up import rules_of

from nca_trader import backtest
from nca_trader.envs.account import state as accounts
from nca_trader.envs.account import step as accounting
from nca_trader.envs.account.state import BarReturns, Quote
from nca_trader.types import Costs

COSTS = Costs(commission=5e-4, slippage=2e-4)


def scan(returns, weight, order, dtype):
    """Log-equity in float64 of a weight held or rebalanced through `returns`, in `dtype`."""
    rules = rules_of(COSTS, fill="close", order=order)
    present = jnp.ones(1, bool)

    def step(account, r):
        account, _ = accounting.on_bar(account, BarReturns(0.0 * r, r, present), rules)
        target = jnp.full(1, weight, r.dtype)
        account, _ = accounting.place(account, target, Quote(present), rules)
        return account, (account.log_equity, account.log_equity_low)

    with jax.enable_x64(True):
        start = accounts.open_account(jnp.zeros(1, dtype))
        run = jax.jit(lambda r: jax.lax.scan(step, start, r)[1])
        high, low = run(jnp.asarray(returns, dtype))
    return np.asarray(high, np.float64) + np.asarray(low, np.float64)


@pytest.mark.parametrize(("weight", "order"), [(0.9, "on_change"), (-0.3, "rebalance")])
def test_float32_stays_within_a_millionth_over_100_000_bars(weight, order):
    returns = np.random.default_rng(7).normal(1e-5, 0.01, (100_000, 1))
    exact = scan(returns, weight, order, jnp.float64)
    assert np.abs(np.expm1(scan(returns, weight, order, jnp.float32) - exact)).max() < 1e-6


def test_a_fully_invested_account_does_not_rebalance_on_change():
    # Cash cuts both buys; what is left of them waits, and must not sell the one that drifts up.
    bars = random_bars(np.random.default_rng(1), 300, 2)
    result = backtest(bars, np.full((300, 2), 0.5), COSTS, order="on_change")
    assert result.turnover.iloc[2:].max() < 1e-12
    units = result.weights.to_numpy() * result.equity.to_numpy()[:, None] / bars.close
    np.testing.assert_allclose(units[2:], np.tile(units[1], (298, 1)), rtol=1e-9)


def test_a_rest_waits_for_cash_and_not_for_the_rounding_of_a_full_account():
    """Of an account that holds 1 to rounding, the buy that is left and its cash are both 1e-7."""

    def pending(weight):
        account = accounts.open_account(weight)
        rest = jnp.full(1, accounts.REST, jnp.int8)
        account = account._replace(ordered=jnp.ones(1), pending=rest)
        quote = Quote(present=jnp.ones(1, bool))
        return accounting.trade(account, quote, rules_of(COSTS))[0].pending[0]

    full = [1.0 - 2.0**-21, 1.0 - 2.0**-22, 1.0 - 2.0**-24, 1.0, 1.0 + 2.0**-23]
    got = jax.jit(jax.vmap(pending))(jnp.asarray([0.0, 0.9, *full], jnp.float32)[:, None])
    assert got.tolist() == 2 * [accounts.REST] + 5 * [accounts.FILLED]


def ruin_bars(gap):
    """Three bars of one asset; the second moves by `gap`, in its gap or in its body."""
    bars = random_bars(np.random.default_rng(0), 5, 1, spread=0.0)
    price = np.array([1.0, 1.0, 1.0 + gap, 1.0 + gap, 1.0 + gap])[:, None] * 100
    return dataclasses.replace(bars, open=price, high=price, low=price, close=price)


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_a_gap_beyond_equity_ruins_and_nothing_trades_after(fill):
    result = backtest(ruin_bars(gap=1.5), np.array([-1.0, -1.0, -1.0, 1.0, -1.0]), COSTS, fill)
    equity = result.equity.to_numpy()
    assert equity[1] > 0.99
    np.testing.assert_allclose(equity[2:], 1e-9)
    assert (result.weights.to_numpy()[2:] == 0).all()
    assert (result.turnover.to_numpy()[2:] == 0).all()


@pytest.mark.slow
def test_gradients_stay_finite_through_ruin():
    def final(weight):
        account = accounts.open_account(jnp.reshape(weight, (1,)))
        legs = BarReturns(jnp.full(1, 2.0), jnp.full(1, 0.1), jnp.ones(1, bool))
        return accounting.on_bar(account, legs, rules_of(COSTS))[0].log_equity

    for weight in (-0.5, -0.4999, -1.0, 0.3):
        assert np.isfinite(jax.grad(final)(weight))
    assert final(-1.0) == pytest.approx(math.log(1e-9))
