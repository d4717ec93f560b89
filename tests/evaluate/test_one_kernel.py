"""Backtests that are compiled as one kernel have the numbers of those that are not, and end.

XLA's compiler aborts the process on some programs of one kernel. What is compiled so is a short
list, and all of it is compiled here.
"""

import itertools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from drawn import bars_of

import nca_trader as nca
from nca_trader.evaluate import simulate
from nca_trader.evaluate.combinations import RULES
from nca_trader.strategies import targets

COSTS = nca.Costs(commission=5e-4, slippage=2e-4)


def made(num_bars, assets):
    rng = np.random.default_rng(num_bars + assets)
    close = 100.0 * np.exp((0.01 * rng.standard_normal((num_bars, assets))).cumsum(0))
    opened = close * np.exp(0.004 * rng.standard_normal(close.shape))
    present = rng.random(close.shape) > 0.1
    present[0] = True
    return bars_of(close, opened, "2010-01-01", present=present)


@pytest.fixture
def plain(monkeypatch):
    """Runs a backtest compiled the ordinary way."""

    def run(*given, **options):
        with monkeypatch.context() as patch:
            for module in (simulate, targets):
                patch.setattr(module, "LEAST_BARS", 10**9)
            jax.clear_caches()
            found = nca.backtest(*given, **options)
        jax.clear_caches()
        return found

    return run


def same(one, other):
    np.testing.assert_array_equal(one.targets, other.targets)
    np.testing.assert_allclose(one.equity, other.equity, rtol=1e-14)
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(one.flows, other.flows, rtol=1e-12, atol=1e-16)


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name in RULES if name != "always_flat"])
@pytest.mark.few(2)
def test_a_rule_in_one_kernel_earns_the_same(name, plain):
    bars = made(120, 2)
    rule = RULES[name]() if name != "tuned_sma" else RULES[name](pairs=((3, 9), (5, 20)), every=30)
    same(nca.backtest(bars, rule, COSTS), plain(bars, rule, COSTS))


SHAPES = [
    pytest.param(n, a, marks=[] if (n, a) in ((8, 1), (9, 3), (100, 32)) else pytest.mark.slow)
    for n, a in itertools.product((8, 9, 16, 31, 100, 1000), (1, 2, 3, 8, 32))
]


@pytest.mark.heavy
@pytest.mark.parametrize(("num_bars", "assets"), SHAPES)
@pytest.mark.few(1)
def test_an_account_in_one_kernel_earns_the_same(num_bars, assets, plain):
    bars = made(num_bars, assets)
    weights = np.random.default_rng(0).choice([0.0, 0.5, 1.0, np.nan], bars.close.shape) / assets
    weights[0] = 0.5 / assets
    for fill, order in itertools.product(("next_open", "close"), ("on_change", "rebalance")):
        given = (bars, weights, COSTS, fill, order)
        same(nca.backtest(*given), plain(*given))


@pytest.mark.parametrize("num_bars", [1, 2, 7])
@pytest.mark.few(1)
def test_a_few_bars_are_compiled_as_usual(num_bars):
    """A loop of one bar is a program on which the compiler would abort."""
    bars = made(20, 1)
    rule = nca.rules.sma_cross(2, 3)
    assert len(nca.backtest(bars, rule, COSTS, start=str(bars.index[-num_bars])).equity) == num_bars
    assert len(nca.backtest(bars[:num_bars], np.ones(num_bars), COSTS).equity) == num_bars


def test_limits_and_rates_are_compiled_as_usual(monkeypatch):
    def never(function):
        raise AssertionError("compiled as one kernel")

    monkeypatch.setattr(simulate, "as_one_kernel", never)
    bars = made(60, 2)
    nca.backtest(bars, np.full((60, 2), 0.4), COSTS, max_gross=0.5)
    nca.backtest(bars, np.full((60, 2), 0.4), nca.Costs(interest_lend=0.02))
    nca.backtest(made(60, 33), np.full((60, 33), 0.01), COSTS)


AS_USERS = """
import sys
import jax, jax.numpy as jnp, numpy as np
import nca_trader as nca
from nca_trader.numerics import as_one_kernel

sys.path.insert(0, "tests/support")
from drawn import random_bars

bars = random_bars(np.random.default_rng(0), 60, 12)
table = nca.sweep(bars, nca.rules.momentum, {"lookback": range(1, 351)}, trials=None, workers=1)
for row in (0, 20, 349):
    equity = nca.backtest(bars, nca.rules.momentum(row + 1)).equity.iloc[-1]
    np.testing.assert_allclose(table["equity"].iloc[row], equity, rtol=1e-6)
for rule in (nca.rules.sma_cross(3, 9), nca.rules.mean_reversion(5)):
    nca.backtest(bars, rule)


@jax.jit
@as_one_kernel
def loop(x):
    def step(carry, row):
        kept, count = carry
        at = count % 3, jnp.arange(2)
        kept = kept.at[at].set(jnp.where(row > 0.0, row, kept[at]), unique_indices=True)
        return (kept, count + 1), 2.0 * kept[at]

    return jax.lax.scan(step, (jnp.zeros((3, 2)), jnp.array([0, 1])), x)


found = loop(jnp.arange(8.0).reshape(4, 2))[0][0]
np.testing.assert_array_equal(found, [[6.0, 5.0], [2.0, 7.0], [4.0, 3.0]])
"""


@pytest.mark.heavy
def test_what_one_kernel_cannot_hold_is_compiled_as_users_compile_it(root):
    """A sweep of 4,200 numbers, and writes to several places: XLA refuses either in one kernel.

    With the compiler's settings of the tests it refuses neither.
    """
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", AS_USERS]
    done = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
