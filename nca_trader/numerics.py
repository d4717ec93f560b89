"""Arithmetic that keeps the digits that bfloat16, or float32, would lose.

Islands: `sum32`, `cumsum32`, `ema32`, `exp32`, `logprob32`, `dot32` and `einsum32` compute in
float32 (in float64 for float64 operands) and return it. Matrix products may have bfloat16
operands, but sums over time, exponentials and comparisons may not. Do not cast their results back.

Pairs: `(high, low)` stands for their exact sum, with `low` below half a unit in the last place
of `high`. Adding to a pair costs six more additions and loses about 1e-14 instead of 1e-7.
"""

import contextlib
import contextvars
import math
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import jaxpr_as_fun

from nca_trader.types import Tensor

STARTED: list[int] = []  # the process in which this package first used JAX


def arrays(x: Tensor) -> ModuleType:
    """Return the module of array functions for `x`: `jax.numpy` for a jax array, else numpy."""
    return jnp if isinstance(x, jax.Array) else np  # tracers are jax arrays as well


def expect_shape(x: Tensor, other: Tensor) -> None:
    """Refuse two arrays of different shapes, which would broadcast.

    Raises:
      ValueError: they differ.
    """
    # As `chex.assert_equal_shape`, without the fifth of a second that importing it takes.
    if jnp.shape(x) != jnp.shape(other):
        raise ValueError(f"shapes {jnp.shape(x)} and {jnp.shape(other)} differ.")


def cpu() -> Any:
    """Return a CPU device of this process; `jax.devices("cpu")[0]` is another host's on most."""
    if not STARTED:
        STARTED.append(os.getpid())
    return jax.local_devices(backend="cpu")[0]


@contextlib.contextmanager
def float64_on_cpu() -> Iterator[None]:
    """Compute in float64 on `cpu()` inside the block: features, and accounts in reports."""
    # Entering costs 6 us, as long as a small program takes; a bar on paper enters several times.
    config: Any = jax.config
    if config.jax_enable_x64 and config.jax_default_device is cpu():
        yield
        return
    # For this block and thread only: training stays in float32.
    with jax.enable_x64(True), jax.default_device(cpu()):
        yield


def pack_numbers(tree: Any) -> tuple[Any, ...]:
    """Return all numbers of a tree of arrays as arrays `[n]`, one for each dtype.

    Each array that a compiled program takes or returns costs about 2 us.
    """
    leaves, xp = jax.tree.leaves(tree), None
    by_dtype: dict[str, list[Any]] = {}
    for leaf in leaves:
        xp = xp or arrays(leaf)
        by_dtype.setdefault(str(leaf.dtype), []).append(leaf.reshape(-1))
    return tuple(xp.concatenate(parts) for _, parts in sorted(by_dtype.items())) if xp else ()


def unpack_numbers(buffers: tuple[Any, ...], like: Any) -> Any:
    """Return the tree that `pack_numbers` packed; `like` has its shapes and dtypes."""
    leaves, tree = jax.tree.flatten(like)
    order = sorted({str(leaf.dtype) for leaf in leaves})
    begun, found = dict.fromkeys(order, 0), []
    for leaf in leaves:
        name = str(leaf.dtype)
        begin, begun[name] = begun[name], begun[name] + leaf.size
        found.append(buffers[order.index(name)][begin : begun[name]].reshape(leaf.shape))
    return tree.unflatten(found)


def row_sums(x: Any) -> Any:
    """Return `[N]` the sums of the rows of `[N, A]`.

    numpy takes 0.6 ms for 100,000 sums of one number each, as long as an account for a tenth of its
    bars.
    """
    return x[:, 0] if x.shape[1] == 1 else x.sum(axis=1)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return `a + b` as a rounded sum and its exact rounding error.

    Source: Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    """
    # This needs no branch on which of the two is larger, unlike Dekker's three operations.
    total = a + b
    b_seen = total - a
    a_seen = total - b_seen
    return total, (a - a_seen) + (b - b_seen)


def pair_add(high: Array, low: Array, x: Array) -> tuple[Array, Array]:
    """Add `x` to the pair `(high, low)`; return the new pair, all of one shape and dtype."""
    total, error = two_sum(high, x)
    return two_sum(total, error + low)


def wide(x: Array) -> Array:
    """Cast `x` to at least float32; float64 stays float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def sum32(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Return the sum over `axis`; in bfloat16 256 + 1 is 256."""
    return wide(x).sum(axis)


def cumsum32(x: Array, axis: int = 0) -> Array:
    """Return the running sum along `axis`; in bfloat16 it is 11% off after 512 steps."""
    return jnp.cumsum(wide(x), axis)


def ema32(average: Array, x: Array, decay: float) -> Array:
    """Return `average + (1 - decay) (x - average)` for arrays of one shape.

    In bfloat16 a decay of 0.999 is 1, and the average would never move.
    """
    average = wide(average)
    return average + (1.0 - decay) * (wide(x) - average)


def exp32(x: Array) -> Array:
    """Return `exp(x)`; rounding x = 50.1 to bfloat16 alone makes it 9.5% too small."""
    return jnp.exp(wide(x))


def logprob32(logits: Array) -> Array:
    """Return `log softmax` over the last axis; bfloat16 turns a ratio of 0.98807 into 0.98438."""
    return jax.nn.log_softmax(wide(logits))


def unrounded(*operands: Array) -> jax.lax.Precision | None:
    """Return the precision with which a product does not round its operands.

    By default a TPU rounds float32 operands to bfloat16, and a GPU to 10 bits of mantissa. At full
    precision a TPU takes six passes. None for bfloat16 operands, which have nothing to round.
    """
    narrow = jnp.result_type(*operands) == jnp.bfloat16
    return None if narrow else jax.lax.Precision.HIGHEST


def dot32(a: Array, b: Array) -> Array:
    """Return `a @ b` without rounding operands or sum to a narrower type."""
    wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return jnp.matmul(a, b, precision=unrounded(a, b), preferred_element_type=wide)


def einsum32(subscripts: str, *operands: Array) -> Array:
    """Return `jnp.einsum` without rounding operands or sum to a narrower type."""
    wide = jnp.promote_types(jnp.result_type(*operands), jnp.float32)
    precision = unrounded(*operands)
    return jnp.einsum(subscripts, *operands, precision=precision, preferred_element_type=wide)


def hash_uniform(*words: Array | int) -> Array:
    """Hash integers of broadcastable shapes to uniform float32 in [0, 1).

    A hash and not a random stream: the result for a bar depends on its words alone. Each word is
    mixed in with the finaliser of MurmurHash3, in which every input bit changes half of the output.
    """
    h = jnp.uint32(0x9E3779B9)  # 2^32 over the golden ratio: a word of 0 must not stay 0
    for word in words:
        h = h ^ jnp.asarray(word).astype(jnp.uint32)
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        h = h ^ (h >> 16)
    # 24 bits are what a float32 holds exactly; rounding 32 of them could give 1.0.
    return (h >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


# What XLA's CPU backend can put into one kernel: no library calls (matrix products, sorting), and
# no calls of Python.
IN_ONE_KERNEL = frozenset(
    """
    abs add and argmax argmin atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp
    clz concatenate cond convert_element_type copy copy_p cos cummax cummin cumprod cumsum
    custom_jvp_call div dynamic_slice dynamic_update_slice eq erf erf_inv erfc exp exp2 expand_dims
    expm1 floor gather ge gt integer_pow iota is_finite jit le log log1p logistic lt max min mul ne
    neg nextafter not or pad pjit pow random_bits random_fold_in random_seed random_unwrap
    random_wrap reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum
    rem reshape rev round rsqrt scan scatter scatter-add select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin slice split sqrt square squeeze
    stop_gradient sub tan tanh threefry2x32 transpose while xor
    """.split()
)


LEAST_BARS, MOST_ASSETS = 8, 32  # of a loop over bars that is compiled as one kernel
# Whether such a loop is being traced.
_ONE_KERNEL: contextvars.ContextVar[bool] = contextvars.ContextVar("one_kernel", default=False)


def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let XLA's CPU backend compile `function`, e.g. a scan of small steps, into one machine loop.

    Otherwise each step of a scan is some fifty kernels that a scheduler starts one by one; for a
    few hundred numbers that takes longer than their arithmetic, and longer to compile as well
    (docs/lab-notes/speed.md). A hint and no promise: a backend that does not know it ignores it. A
    function with an operation outside `IN_ONE_KERNEL` is compiled as usual. It is for small
    arrays, because one kernel uses one core.
    """

    def marked(*arguments: Any) -> Any:
        token = _ONE_KERNEL.set(True)
        try:
            closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        finally:
            _ONE_KERNEL.reset(token)
        if not _operations(closed.jaxpr) <= IN_ONE_KERNEL:
            return function(*arguments)

        def plain(*leaves: Any) -> Any:
            # The calls inside are inlined as usual.
            with set_xla_metadata(xla_cpu_small_call="false", inlineable="true"):
                return jaxpr_as_fun(closed)(*leaves)

        # What XLA marks small loops with by itself; a call that is inlined would lose the mark.
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            leaves = jax.jit(plain)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return marked


def put(rows: Array, row: Array, x: Array) -> Array:
    """Write numbers into columns of an array; a scan that carries it writes in place.

    Args:
      rows: `[R, A]`.
      row: `[..., A]` int32, where to write in each column, without repetition.
      x: `[..., A]`.
    """
    columns = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=row.dtype), row.shape)
    if not _ONE_KERNEL.get():
        return rows.at[row, columns].set(x, mode="promise_in_bounds", unique_indices=True)
    # One kernel has no scatter of several numbers.
    row, columns, x = row.ravel(), columns.ravel(), x.ravel()
    x = x.astype(jnp.promote_types(x.dtype, rows.dtype))  # wider numbers are refused below

    def write(i: Array, rows: Array) -> Array:
        return jax.lax.dynamic_update_slice(rows, x[i][None, None], (row[i], columns[i]))

    return jax.lax.fori_loop(0, len(row), write, rows)


def _operation(equation: Any) -> str:
    """Return the name of an operation, and of a scatter whether it has several indices."""
    name = equation.primitive.name
    # XLA makes an update of a slice of a scatter of one number.
    several = name.startswith("scatter") and math.prod(equation.invars[1].aval.shape[:-1]) > 1
    return f"{name} of several" if several else name


def _operations(jaxpr: Any) -> set[str]:
    """Return the names of all operations in a traced function, with those of its parts."""
    found = {_operation(equation) for equation in jaxpr.eqns}
    for equation in jaxpr.eqns:
        for part in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                found |= _operations(inner)
    return found
