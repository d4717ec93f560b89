"""Arithmetic that keeps the digits that bfloat16, or float32, would lose.

Islands: `sum32`, `cumsum32`, `ema32`, `exp32`, `logprob32`, `cov32`, `dot32` and `einsum32` compute
in float32 whatever they are given (in float64 where that is given) and return it: matrix products
may be of bfloat16 operands, but what is summed over time, exponentiated or compared may not. Their
results must not be cast back.

Pairs: `(high, low)` stands for their exact sum, with `low` below half a unit in the last place
of `high`. Adding to a pair costs six more additions and loses about 1e-14 instead of 1e-7.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.types import Tensor


def arrays(x: Tensor) -> ModuleType:
    """The module of array functions that `x` belongs to: jax's for a jax array, else numpy."""
    return jnp if isinstance(x, jax.Array) else np


@contextlib.contextmanager
def float64_on_cpu() -> Iterator[None]:
    """Computes in float64 on a CPU device of this process: accounts that are reported, features."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


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


def wide(x: Array) -> Array:
    """`x` in float32 at least: what is float64 stays it."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def sum32(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """The sum over `axis`; in bfloat16 256 + 1 is 256."""
    return wide(x).sum(axis)


def cumsum32(x: Array, axis: int = 0) -> Array:
    """The running sum along `axis`; in bfloat16 it is 11 % off after 512 steps."""
    return jnp.cumsum(wide(x), axis)


def ema32(average: Array, x: Array, decay: float) -> Array:
    """`average + (1 - decay) (x - average)` for arrays of one shape.

    In bfloat16 a decay of 0.999 is 1, and the average would never move.
    """
    average = wide(average)
    return average + (1.0 - decay) * (wide(x) - average)


def exp32(x: Array) -> Array:
    """`exp(x)`; in bfloat16 the rounding of x = 50.1 alone makes it 9.5 % too small."""
    return jnp.exp(wide(x))


def logprob32(logits: Array) -> Array:
    """`log softmax` over the last axis; in bfloat16 a ratio of 0.98807 comes out as 0.98438."""
    return jax.nn.log_softmax(wide(logits))


def cov32(x: Array, jitter: float = 0.0) -> Array:
    """`[D, D]` covariance of the columns of `x` `[N, D]`, with `jitter` added to its diagonal.

    With a jitter above the rounding of its largest entry it has a Cholesky factor, and a column
    that never changes has a correlation with others: 0.
    """
    centred = wide(x) - wide(x).mean(0, keepdims=True)
    return dot32(centred.T, centred) / x.shape[0] + jitter * jnp.eye(x.shape[1])


def unrounded(*operands: Array) -> jax.lax.Precision | None:
    """The precision to ask of a product that its operands be multiplied as they are.

    Left to itself, a TPU multiplies float32 operands rounded to bfloat16, a GPU to 10 bits of
    mantissa; in full, a TPU takes six passes. Of operands in bfloat16 nothing is asked.
    """
    narrow = jnp.result_type(*operands) == jnp.bfloat16
    return None if narrow else jax.lax.Precision.HIGHEST


def dot32(a: Array, b: Array) -> Array:
    """`a @ b`: the operands are multiplied as they are, and what they sum to is not rounded."""
    wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return jnp.matmul(a, b, precision=unrounded(a, b), preferred_element_type=wide)


def einsum32(subscripts: str, *operands: Array) -> Array:
    """`jnp.einsum` of operands that are multiplied as they are."""
    wide = jnp.promote_types(jnp.result_type(*operands), jnp.float32)
    precision = unrounded(*operands)
    return jnp.einsum(subscripts, *operands, precision=precision, preferred_element_type=wide)


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
