"""Arithmetic that keeps the digits float32 would lose: sums carried as a pair of floats.

A pair `(high, low)` stands for their exact sum, with `low` below half a unit in the last place
of `high`. Adding to a pair costs six more additions and loses about 1e-14 instead of 1e-7.
"""

from jax import Array


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """`a + b` as a rounded sum and its rounding error, exactly.

    Source: Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    """
    total = a + b
    b_seen = total - a
    a_seen = total - b_seen
    return total, (a - a_seen) + (b - b_seen)


def pair_add(high: Array, low: Array, x: Array) -> tuple[Array, Array]:
    """Adds `x` to the pair `(high, low)`; returns the new pair, all of one shape and dtype."""
    total, error = two_sum(high, x)
    return two_sum(total, error + low)
