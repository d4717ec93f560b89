"""Pairs of floats against exact rational arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.numerics import (
    cumsum32,
    dot32,
    einsum32,
    ema32,
    exp32,
    logprob32,
    pair_add,
    sum32,
    two_sum,
)


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


def drawn_in_bfloat16(*shape, seed=3, mean=0.0, scale=1.0):
    """The same numbers in bfloat16 and, exactly, in float64."""
    x = jnp.asarray(np.random.default_rng(seed).normal(mean, scale, shape), jnp.bfloat16)
    return x, np.asarray(x, np.float64)


def off(got, expected):
    """The largest error, relative to the largest number."""
    expected = np.asarray(expected, np.float64)
    return np.abs(np.asarray(got, np.float64) - expected).max() / np.abs(expected).max()


def one_by_one(x):
    """The running sum as a loop in the dtype of `x` makes it."""
    total, sums = jnp.zeros((), x.dtype), []
    for value in np.asarray(x):
        total = total + value
        sums.append(total)
    return jnp.stack(sums)


def test_sums_are_not_rounded():
    x, exact_x = drawn_in_bfloat16(512, mean=1.0, scale=0.2)
    assert off(sum32(x), exact_x.sum()) < 1e-6 and sum32(x).dtype == jnp.float32
    assert off(cumsum32(x), exact_x.cumsum()) < 1e-6 and cumsum32(x).dtype == jnp.float32
    plain = one_by_one(x)
    assert off(plain[-1], exact_x.sum()) > 0.01 and off(plain, exact_x.cumsum()) > 0.01
    rows, exact_rows = drawn_in_bfloat16(3, 4, 5)
    assert off(sum32(rows, (0, 2)), exact_rows.sum((0, 2))) < 1e-6
    assert off(cumsum32(rows, 1), exact_rows.cumsum(1)) < 1e-6


def test_an_average_with_a_long_memory_moves():
    average, x, decay = (jnp.asarray(v, jnp.bfloat16) for v in (1.0, 2.0, 0.999))
    stuck = decay * average + (1 - decay) * x
    for _ in range(1000):
        average = ema32(average, x, 0.999)
    assert average.dtype == jnp.float32
    np.testing.assert_allclose(average, 2.0 - 0.999**1000, rtol=1e-5)
    assert float(stuck) == 1.0  # what bfloat16 makes of it


def test_exponentials_and_their_arguments_are_not_rounded():
    x = jnp.asarray([50.1, -0.012], jnp.float32)
    true = np.exp(np.asarray(x, np.float64))
    assert (np.abs(exp32(x) / true - 1.0) < 1e-5).all()
    rounded = np.asarray(jnp.exp(x.astype(jnp.bfloat16)), np.float64)
    assert rounded[0] / true[0] - 1.0 < -0.09 and rounded[1] != true[1]
    assert exp32(x.astype(jnp.bfloat16)).dtype == jnp.float32


def test_log_probabilities_are_not_rounded():
    logits, exact_logits = drawn_in_bfloat16(200, 3)
    true = exact_logits - np.log(np.exp(exact_logits).sum(1, keepdims=True))
    got = logprob32(logits)
    assert off(got, true) < 1e-6 and got.dtype == jnp.float32
    plain = jax.nn.log_softmax(logits)
    # A ratio of two of them is what the surrogate clips at 1 +- 0.2.
    ratio = np.exp(np.asarray(plain, np.float64) - true)
    assert np.abs(ratio - 1.0).max() > 5e-3
    assert np.abs(np.exp(np.asarray(got, np.float64) - true) - 1.0).max() < 1e-6


def test_products_are_summed_without_rounding():
    (a, exact_a), (b, exact_b) = drawn_in_bfloat16(4, 1000), drawn_in_bfloat16(1000, 5, seed=4)
    true = exact_a @ exact_b
    assert off(dot32(a, b), true) < 1e-6 and dot32(a, b).dtype == jnp.float32
    assert off(a @ b, true) > 3e-4
    summed = einsum32("ij,jk->ik", a, b)
    assert off(summed, true) < 1e-6 and summed.dtype == jnp.float32
    assert off(jnp.einsum("ij,jk->ik", a, b), true) > 3e-4


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)))
        multiplied, contracted = lambda x: dot32(x, x), lambda x: einsum32("ij,jk->ik", x, x)
        for island in (sum32, cumsum32, exp32, logprob32, multiplied, contracted):
            assert island(x).dtype == jnp.float64
        assert ema32(x, x, 0.9).dtype == jnp.float64
