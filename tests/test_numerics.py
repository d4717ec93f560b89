"""Pairs of floats against exact rational arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.numerics import ema32, pair_add, two_sum


def drawn(rng, size):
    """float32 numbers of both signs whose sizes differ by up to 2**40."""
    return np.ldexp(rng.normal(size=size), rng.integers(-20, 20, size)).astype(np.float32)


def exact(*numbers):
    return sum(Fraction(float(x)) for x in numbers)


def test_a_sum_and_its_error_are_the_exact_sum():
    rng = np.random.default_rng(0)
    a, b = drawn(rng, 2000), drawn(rng, 2000)
    total, error = (np.asarray(x) for x in jax.jit(two_sum)(a, b))
    assert all(exact(t, e) == exact(x, y) for t, e, x, y in zip(total, error, a, b, strict=True))
    np.testing.assert_array_equal(total, a + b)
    assert np.count_nonzero(error) > 1000


def test_a_compiled_pair_keeps_what_float32_loses():
    x = np.random.default_rng(1).normal(0.001, 1.0, 100_000).astype(np.float32)

    def add(carry, x):
        (high, low), plain = carry
        return (pair_add(high, low, x), plain + x), None

    zero = jnp.zeros(())
    (pair, plain), _ = jax.jit(lambda x: jax.lax.scan(add, ((zero, zero), zero), x)[0])(x), None
    true = float(exact(*x))
    assert abs(float(exact(*pair)) - true) < 1e-9 * np.abs(x).sum()
    assert abs(float(plain) - true) > 1e-8 * np.abs(x).sum()


def test_the_low_part_stays_below_half_a_unit_of_the_high_part():
    rng = np.random.default_rng(2)
    high, low = two_sum(drawn(rng, 500), drawn(rng, 500))
    for x in drawn(rng, (50, 500)):
        high, low = pair_add(high, low, x)
        np.testing.assert_array_equal(np.asarray(high + low), np.asarray(high))


def in_bfloat16(*arrays):
    return [jnp.asarray(x, jnp.bfloat16) for x in arrays]


def test_an_average_with_a_long_memory_moves():
    average, x = in_bfloat16(1.0, 2.0)
    for _ in range(1000):
        average = ema32(average, x, 0.999)
    assert average.dtype == jnp.float32
    np.testing.assert_allclose(average, 2.0 - 0.999**1000, rtol=1e-5)
    stuck, x, decay = in_bfloat16(1.0, 2.0, 0.999)
    assert float(decay * stuck + (1 - decay) * x) == 1.0  # what bfloat16 makes of it
