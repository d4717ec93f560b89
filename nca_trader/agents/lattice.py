"""Layouts of cells in memory, and the matrix products that fit each of them.

An encoder is written once, over a `Form`. On a CPU, delayed long rows and one product are fastest
(the gradient of a convolution is 20 to 30 times slower there). On a TPU a narrow convolution is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from nca_trader.config import PrecisionConfig
from nca_trader.numerics import dot32, unrounded

TAPS = 3  # of a step: now, d bars ago, 2 d bars ago


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gauged:
    """A weight of an exported policy, which rounds what it is multiplied with to a grid.

    Attributes:
      weight: `[I, O]`.
      step: `[]` step of the grid, from the training span.
      bits: the grid goes from `-(2^(bits-1) - 1)` to `2^(bits-1) - 1` steps.
    """

    weight: Array
    step: Array
    bits: int = dataclasses.field(metadata={"static": True})

    def __getitem__(self, whole: object) -> Gauged:
        """Itself: a parameter of a module is read as `parameter[...]`."""
        return self

    def meets(self, x: Array) -> tuple[Array, Array]:
        """Return the weight, and `x` on the grid."""
        most = 2.0 ** (self.bits - 1) - 1.0
        return self.weight, jnp.clip(jnp.round(x / self.step), -most, most) * self.step


def operands(w: Array | Gauged, x: Array) -> tuple[Array, Array]:
    """Return what is multiplied: a weight and cells."""
    return w.meets(x) if isinstance(w, Gauged) else (w, x)


class Form(NamedTuple):
    """One layout of cells.

    Attributes:
      enter: `[B, T, A, C]` to this layout.
      leave: back.
      assets: the axis of assets.
      dense: `(w [I, O], cells of I channels, dtype) -> cells of O channels`, operands in `dtype`,
        sums in float32.
      taps: `(w, state, dilation, beside, dtype, first) -> cells`, the product of the blocks of `w`
        with `TAPS` delayed states and the states `beside`, in this order. It covers the bars of
        `state` from `first` on. `beside` has the same bars.
      since: `(cells, first)`, the same bars of cells.
      column: `[C]`, shaped for adding to cells.
      placed: cells, with the layout as a constraint for the compiler.
      relu: `max(cells, 0)`.
      held: `(w, state, dtype)` -> the state between two steps, and the same as `taps` takes it.
    """

    enter: Callable[[Array], Array]
    leave: Callable[[Array], Array]
    assets: int
    dense: Callable[[Array, Array, str], Array]
    taps: Callable[[Array, Array, int, list[Array], str, int], Array]
    since: Callable[[Array, int], Array]
    column: Callable[[Array], Array]
    placed: Callable[[Array], Array]
    relu: Callable[[Array], Array]
    held: Callable[[Array, Array, str], tuple[Array, Array]]


@jax.custom_vjp
def written(arrays: Any) -> Any:
    """Return the arrays unchanged, stored once instead of computed again by every reader.

    A gradient's program has no barrier, because one costs more cycles there than it saves (see
    docs/lab-notes/devices.md).
    """
    return jax.lax.optimization_barrier(arrays)


written.defvjp(lambda arrays: (arrays, None), lambda _, gradients: (gradients,))


@jax.custom_jvp
def relu_once(x: Array) -> Array:
    """Return `max(x, 0)`; a CPU computes its gradient once, however many operations read it.

    XLA's CPU compiler repeats cheap operations in each fusion that reads their result, here from
    arrays that are no longer in the cache. It drops a barrier before it fuses. It does not repeat a
    division, because it counts that as expensive. So the gradient is divided by one. Zeros are
    divided by two, because the compiler would drop a divisor that it knows to be one.
    """
    return jax.nn.relu(x)


@relu_once.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    one = jnp.ones((), tangent.dtype)
    # A gradient goes the other way: it is masked first, and divided last.
    divided = tangent / jnp.where(x > 0, one, 2 * one)
    return relu_once(x), jnp.where(x > 0, divided, jnp.zeros_like(one))


def store(x: Array, precision: PrecisionConfig) -> Array:
    """Cast cells to the type in which they are stored between products, after all sums."""
    return x.astype(jnp.bfloat16) if precision.compute == "bfloat16" else x


def enter(form: Form, clip: float, x: Array, present: Array) -> Array:
    """Return features `[B, T, A, F]`, clipped, and the mask of bars as one more, laid out.

    A missing bar has features 0, and the mask tells it from a bar whose features are 0.
    """
    mask = present.astype(jnp.float32)[..., None]
    return form.enter(jnp.concatenate([jnp.clip(x, -clip, clip) * mask, mask], axis=-1))


def delay(state: Array, bars: int, first: int = 0) -> Array:
    """Delay `state` `[C, T, B, A]` by `bars`, 0 before the first bar; return it from `first` on."""
    # A delay longer than the segment sees only bars before the first.
    length = state.shape[1]
    bars = min(bars, length)
    seen = state[:, max(first - bars, 0) : length - bars]
    return jnp.pad(seen, ((0, 0), (max(bars - first, 0), 0), (0, 0), (0, 0)))


def rows_dense(w: Array, x: Array, dtype: str) -> Array:
    """Apply `w` `[I, O]` to the channels of `x` `[I, T, B, A]`; return `[O, T, B, A]` float32."""
    w, x = operands(w, x)
    # Flat rows: with the cells on three axes the gradient's product is transposed by hand.
    flat = x.reshape(x.shape[0], -1).astype(dtype)
    out = dot32(w.T.astype(dtype), flat)
    return out.reshape(-1, *x.shape[1:])


def _rows_taps(
    w: Array, state: Array, dilation: int, beside: list[Array], dtype: str, first: int
) -> Array:
    seen = [delay(state, j * dilation, first) for j in range(TAPS)]
    return rows_dense(w, jnp.concatenate(seen + beside), dtype)


def _last_dense(w: Array, x: Array, dtype: str) -> Array:
    w, x = operands(w, x)
    return dot32(x.astype(dtype), w.astype(dtype))


def _last_taps(
    w: Array, state: Array, dilation: int, beside: list[Array], dtype: str, first: int
) -> Array:
    if isinstance(w, Gauged):
        beside = [w.meets(other)[1] for other in beside]
    w, state = operands(w, state)
    length, assets, batch, width = state.shape
    # A convolution's first weight is that of the oldest bar.
    kernel = w[: TAPS * width].reshape(TAPS, width, -1)[::-1]
    rows, kernel = state.reshape(length, assets * batch, width).astype(dtype), kernel.astype(dtype)
    out = jax.lax.conv_general_dilated(
        rows,
        kernel,
        window_strides=(1,),
        padding=[((TAPS - 1) * dilation - first, 0)],
        rhs_dilation=(dilation,),
        dimension_numbers=("WNC", "WIO", "WNC"),
        precision=unrounded(rows, kernel),
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    # What follows goes into the next product: in this one it takes more cycles than the product.
    out = written(out).reshape(length - first, assets, batch, -1)
    for slot, other in enumerate(beside, start=TAPS):
        out = out + _last_dense(w[slot * width : (slot + 1) * width], other, dtype)
    return out


def _last_held(w: Array | Gauged, state: Array, dtype: str) -> tuple[Array, Array]:
    # Both are stored once. Else the compiler repeats the steps before in a step's product.
    taken = state if isinstance(w, Gauged) else state.astype(dtype)
    return written((state, taken))


# Long contiguous rows: a delay is a shift by whole bars, and sums over cells run along rows.
ROWS = Form(
    enter=lambda x: x.transpose(3, 1, 0, 2),
    leave=lambda x: x.transpose(2, 1, 3, 0),
    assets=3,
    dense=rows_dense,
    taps=_rows_taps,
    since=lambda x, first: x[:, first:],
    column=lambda vector: vector.reshape(-1, 1, 1, 1),
    placed=lambda x: x,
    relu=relu_once,
    held=lambda w, state, dtype: (state, state),
)
# Channels fill the lanes of a matrix unit, and bars, the axis that a convolution runs along, are
# the outermost: then a delay moves no row within a tile of the chip's memory. Left to itself, the
# compiler takes the layout of the features, and turns the cells around for every convolution.
CHANNELS_LAST = Form(
    enter=lambda x: x.transpose(1, 2, 0, 3),
    leave=lambda x: x.transpose(2, 0, 1, 3),
    assets=1,
    dense=_last_dense,
    taps=_last_taps,
    since=lambda x, first: x[first:],
    column=lambda vector: vector.reshape(1, 1, 1, -1),
    placed=lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))),
    relu=jax.nn.relu,
    held=_last_held,
)
