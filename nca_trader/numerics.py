"""Arithmetic that keeps the digits float32 would lose: sums carried as a pair of floats.

A pair `(high, low)` stands for their exact sum, with `low` below half a unit in the last place
of `high`. Adding to a pair costs six more additions and loses about 1e-14 instead of 1e-7.
"""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.types import Tensor


def arrays(x: Tensor) -> ModuleType:
    """The module of array functions that `x` belongs to: jax's for a jax array, else numpy."""
    return jnp if isinstance(x, jax.Array) else np


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


def ema32(average: Array, x: Array, decay: float) -> Array:
    """`average + (1 - decay) (x - average)` in float32; the three broadcast.

    In bfloat16 a decay of 0.999 is 1, and the average would never move.
    """
    average, x = average.astype(jnp.float32), x.astype(jnp.float32)
    return average + (1.0 - decay) * (x - average)


def hash_uniform(*words: Array | int) -> Array:
    """Uniform float32 in [0, 1) from whole numbers of broadcastable shapes: the same, always.

    A hash, not a stream: what a bar draws depends on its words alone. Each word is stirred in by
    the finaliser of MurmurHash3, in which every bit of the input moves half of the output's.
    """
    h = jnp.uint32(0x9E3779B9)
    for word in words:
        h = h ^ jnp.asarray(word).astype(jnp.uint32)
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        h = h ^ (h >> 16)
    return (h >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
