"""Rolling indicators against pandas and exact fractions, with numbers and under vmap."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from nca_trader.errors import ConfigError
from nca_trader.numerics import as_one_kernel, float64_on_cpu
from nca_trader.strategies import rolling

PERIODS = (2, 3, 16, 40, 200)
PANDAS = {
    "mean": lambda s, n: s.rolling(n).mean(),
    "deviation": lambda s, n: s.rolling(n).std(),
    "highest": lambda s, n: s.rolling(n).max(),
    "lowest": lambda s, n: s.rolling(n).min(),
    "past": lambda s, n: s.shift(n),
    "ew_mean": lambda s, n: s.ewm(span=n).mean(),
    "ew_variance": lambda s, n: s.ewm(span=n).var(bias=True),
}


def run(indicator, x, present):
    """Scan an indicator over `x` `[N, A]`."""

    def step(state, xs):
        return indicator.update(state, *xs)

    return jax.lax.scan(step, indicator.init(x.shape[1]), (x, present))[1]


def over(name, periods, x, present):
    """One program for all periods `[P]`; return values `[P, N, A]`."""
    with float64_on_cpu(), rolling.periods_up_to(max(periods)):
        values = jax.jit(jax.vmap(lambda p: run(getattr(rolling, name)(p), x, present)))
        return np.asarray(values(jnp.asarray(periods)))


def walk(seed=0, num=300, assets=2):
    return 100.0 * np.exp(
        0.01 * np.random.default_rng(seed).standard_normal((num, assets)).cumsum(0)
    )


@pytest.mark.parametrize("name", PANDAS)
def test_indicators_equal_pandas_with_missing_bars(name):
    x = walk()
    present = np.random.default_rng(1).random(x.shape) < 0.8
    x = np.where(present, x, np.nan)
    for period, values in zip(PERIODS, over(name, PERIODS, x, present), strict=True):
        for asset in range(x.shape[1]):
            seen = pd.Series(x[:, asset]).dropna()
            expected = PANDAS[name](seen, period).reindex(range(len(x)))
            # A missing bar repeats the value before it, which pandas does not have.
            there = present[:, asset]
            np.testing.assert_allclose(values[there, asset], expected[there], rtol=1e-9)
            before = pd.Series(np.where(there, values[:, asset], np.nan)).ffill()
            np.testing.assert_array_equal(values[~there, asset], before[~there])


@pytest.mark.parametrize("name", PANDAS)
@pytest.mark.few(3)
def test_a_number_and_a_traced_period_agree(name):
    x, present = walk(2), np.ones((300, 2), bool)
    many = over(name, PERIODS, x, present)
    with float64_on_cpu():
        for period, values in list(zip(PERIODS, many, strict=True))[1:4:2]:
            one = jax.jit(lambda x, period=period: run(getattr(rolling, name)(period), x, present))
            # Fused operations may round the recursions of weighted means otherwise.
            exact = 0 if not name.startswith("ew") else 1e-13
            np.testing.assert_allclose(one(x), values, rtol=exact)


def test_the_mean_is_the_exact_mean_rounded_once():
    x = walk(3, 3000, 1) * 10.0 ** np.random.default_rng(4).integers(-3, 4, (3000, 1))
    values = over("mean", (3, 49, 1000), x, np.ones(x.shape, bool))
    exact = [Fraction(v) for v in x[:, 0]]
    for period, of_period in zip((3, 49, 1000), values, strict=True):
        total = sum(exact[:period], Fraction(0))
        for t in range(period, len(x)):
            total += exact[t] - exact[t - period]
            assert of_period[t, 0] == float(total / period)


def test_means_of_a_price_that_stops_moving_are_equal():
    x = np.concatenate([walk(5, 500, 1), np.full((300, 1), 97.13), np.full((300, 1), 0.1)])
    periods = tuple(range(2, 200))
    values = over("mean", periods, x, np.ones(x.shape, bool))
    # A plain sum divided by its length is off by a last bit for many of these lengths.
    assert (values[:, 799, 0] == 97.13).all() and (values[:, -1, 0] == 0.1).all()
    deviations = over("deviation", periods, x, np.ones(x.shape, bool))
    assert (deviations[:, -1, 0] < 1e-12).all()


def test_the_state_is_shared_by_all_periods():
    def states(period):
        mean = rolling.mean(period)
        return mean.update(mean.init(1), np.ones(1), np.ones(1, bool))[0]

    with float64_on_cpu(), rolling.periods_up_to(40):
        # out_axes=None is an error for a state that depends on the period.
        shared = jax.eval_shape(jax.vmap(states, out_axes=None), jnp.arange(2, 40))
    assert shared.high.shape == (41, 1)


@pytest.mark.parametrize("name", ["mean", "deviation", "highest", "past"])
@pytest.mark.parametrize("one_kernel", [True, False])
@pytest.mark.few(3)
def test_a_bar_copies_no_window(name, one_kernel):
    """Its cost is that of a few lookups, whatever the period: the rings are written in place."""
    period, x = 5000, jnp.ones((64, 2))

    def scan(x):
        return run(getattr(rolling, name)(period), x, jnp.isfinite(x))

    with float64_on_cpu():
        program = jax.jit(as_one_kernel(scan) if one_kernel else scan).lower(x).compile()
    made = [line.partition("= ")[2] for line in program.as_text().splitlines()]
    rings = [line for line in made if line.startswith(("f64[5", "f64[8"))]
    # Those that begin outside the loop are written into by the bars inside.
    copies = [line for line in rings if " copy(" in line or " select(" in line]
    assert rings and len(copies) <= 4


def test_a_traced_period_needs_its_largest_value():
    with pytest.raises(ConfigError, match="its largest value is unknown"):
        jax.vmap(lambda p: rolling.mean(p).init(1))(jnp.arange(2, 5))
