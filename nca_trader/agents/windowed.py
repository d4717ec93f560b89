"""Encoders over a window of bars: the MLP and the GRU, which the NCA is compared with."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.agents.lattice import ROWS, delayed, rows_dense, stored, wide
from nca_trader.agents.nca import Fire
from nca_trader.config import PolicyConfig, PrecisionConfig
from nca_trader.types import EnvSpec


class MLP(nnx.Module):
    """Two layers over the last W bars of an asset, shared by all bars and assets.

    With `z_t = [clip(x_t) m_t, m_t]`, 0 before the first bar:

        h = tanh(sum_j z[t - j] W1_j + b1)    j = 0 .. W - 1
        s = tanh(h W2 + b2)

    Where `hidden` is 0 there is one layer, `s = h`, and with the head's two in all. Sums are
    float32; the operands of matrix products have `precision.matmul`.
    """

    HIDDEN: ClassVar = {"window": 1, "hidden_bias": 0, "cell": 0}

    def __init__(
        self, spec: EnvSpec, config: PolicyConfig, precision: PrecisionConfig, rngs: nnx.Rngs
    ):
        """Draw the parameters; every draw takes its own key from `rngs`."""
        self.config, self.precision = config, precision
        self.matmul_dtype = precision.matmul
        normal = jax.nn.initializers.lecun_normal()
        # One more per bar: whether it is present.
        inputs = config.window * (spec.num_features + 1)
        first = config.hidden or config.channels
        self.window = nnx.Param(normal(rngs.params(), (inputs, first)))
        self.hidden_bias = nnx.Param(jnp.zeros(first))
        if not config.hidden:
            return
        self.cell = nnx.Param(normal(rngs.params(), (config.hidden, config.channels)))
        self.cell_bias = nnx.Param(jnp.zeros(config.channels))

    @staticmethod
    def receptive_field(config: PolicyConfig) -> int:
        """Bars that a cell sees, itself included."""
        return config.window

    def __call__(self, x: Array, present: Array, fire: Fire | None = None, halo: int = 0) -> Array:
        """`[B, T - halo, A, C]` cells; `x` `[B, T, A, F]`, `present` `[B, T, A]`."""
        seen = entered(self.config, x, present)
        # Newest first, as in `stream`, which uses the same weights.
        bars = [delayed(seen, j, halo) for j in range(self.config.window)]
        return ROWS.leave(self._cells(jnp.concatenate(bars)))

    @staticmethod
    def begin(spec: EnvSpec, config: PolicyConfig) -> Array:
        """Return the stream's state before the first bar: the last W - 1 inputs, newest first."""
        shape = (config.window - 1, spec.num_features + 1, 1, 1, spec.num_assets)
        return jnp.zeros(shape, jnp.float32)

    def stream(self, past: Array, x: Array, present: Array) -> tuple[Array, Array]:
        """Encode one new bar, `x` `[A, F]` and `present` `[A]`; return cells `[A, C]`."""
        seen = entered(self.config, x[None, None], present[None, None])
        bars = jnp.concatenate([seen[None], past])
        cells = self._cells(bars.reshape(-1, *seen.shape[1:]))
        return bars[:-1], ROWS.leave(cells)[0, 0]

    def _cells(self, seen: Array) -> Array:
        dtype = self.matmul_dtype
        hidden = rows_dense(self.window[...], seen, dtype) + ROWS.column(self.hidden_bias[...])
        if not self.config.hidden:
            return jnp.tanh(hidden)
        hidden = stored(jnp.tanh(hidden), self.precision)
        cells = rows_dense(self.cell[...], hidden, dtype)
        return jnp.tanh(cells + ROWS.column(self.cell_bias[...]))


def entered(config: PolicyConfig, x: Array, present: Array) -> Array:
    """Return `[F + 1, T, B, A]`: features clipped, 0 in missing bars, and the mask of bars."""
    mask = present.astype(jnp.float32)[..., None]
    clipped = jnp.clip(x, -config.feature_clip, config.feature_clip)
    return ROWS.enter(jnp.concatenate([clipped * mask, mask], axis=-1))


class GRU(nnx.Module):
    """A gated recurrent unit that starts from state 0, W bars before each decision.

    A state that is carried without end would depend on where a segment begins. Over a window a
    cell is a function of its bars, so lattice, window and stream agree. Each costs W updates per
    bar. With `z_t = [clip(x_t) m_t, m_t]`:

        r = sigma(z U_r + s R_r + b_r),  u = sigma(z U_u + s R_u + b_u)
        n = tanh(z U_n + b_n + r (s R_n)),  s' = (1 - u) n + u s

    Bars before the first leave the state at 0. Sums are float32; the operands of matrix products
    have `precision.matmul`, the states `precision.compute`. Source: Cho et al., Learning phrase
    representations (2014), with the reset gate after the product.
    """

    HIDDEN: ClassVar = {"inputs": 1, "recurrent": 1, "bias": 0}

    def __init__(
        self, spec: EnvSpec, config: PolicyConfig, precision: PrecisionConfig, rngs: nnx.Rngs
    ):
        """Draw the parameters; every draw takes its own key from `rngs`."""
        self.config, self.precision = config, precision
        self.matmul_dtype = precision.matmul
        normal, width = jax.nn.initializers.lecun_normal(), config.channels
        self.inputs = nnx.Param(normal(rngs.params(), (spec.num_features + 1, 3 * width)))
        self.recurrent = nnx.Param(normal(rngs.params(), (width, 3 * width)))
        self.bias = nnx.Param(jnp.zeros(3 * width))

    @staticmethod
    def receptive_field(config: PolicyConfig) -> int:
        """Bars that a cell sees, itself included."""
        return config.window

    def __call__(self, x: Array, present: Array, fire: Fire | None = None, halo: int = 0) -> Array:
        """`[B, T - halo, A, C]` cells; `x` `[B, T, A, F]`, `present` `[B, T, A]`."""
        added, window = self._added(x, present), self.config.window
        # A unit for each bar that is returned; all of them take their windows at the same time.
        length = added.shape[1] - halo
        padded = jnp.pad(added, ((0, 0), (window - 1, 0), (0, 0), (0, 0)))

        def step(state: Array, late: Array) -> tuple[Array, None]:
            """All windows take their bar number `late`: of bar t it is t - W + 1 + late."""
            bar = jax.lax.dynamic_slice_in_dim(padded, halo + late, length, axis=1)
            # Bars before the first are padding, and leave the state at 0.
            there = jnp.arange(halo, halo + length) + late >= window - 1
            return jnp.where(there.reshape(1, -1, 1, 1), self._next(state, bar), state), None

        # It begins from the data, so that it has their sharding type under shard_map.
        state = stored(jnp.zeros_like(added[: self.config.channels, halo:]), self.precision)
        state = jax.lax.scan(step, state, jnp.arange(window))[0]
        return wide(ROWS.leave(state))

    @staticmethod
    def begin(spec: EnvSpec, config: PolicyConfig) -> Array:
        """Return a stream's first state, `[C, W, 1, A]`: one unit for each open window."""
        return jnp.zeros((config.channels, config.window, 1, spec.num_assets), jnp.float32)

    def stream(self, states: Array, x: Array, present: Array) -> tuple[Array, Array]:
        """Encode one new bar, `x` `[A, F]` and `present` `[A]`; return cells `[A, C]`.

        The units are of the windows that are open, oldest first; the bar closes the oldest, and
        opens one that ends W bars later.
        """
        added = self._added(x[None, None], present[None, None])
        states = self._next(states, jnp.broadcast_to(added, (len(added), *states.shape[1:])))
        fresh = jnp.zeros_like(states[:, :1])
        return jnp.concatenate([states[:, 1:], fresh], axis=1), states[:, 0, 0].T

    def _added(self, x: Array, present: Array) -> Array:
        """Return the `[3 C, T, B, A]` inputs of each bar to the gates."""
        seen = entered(self.config, x, present)
        # Computed once per bar, though W windows read it.
        added = rows_dense(self.inputs[...], seen, self.matmul_dtype)
        return added + ROWS.column(self.bias[...])

    def _next(self, state: Array, added: Array) -> Array:
        reset, update, new = jnp.split(added, 3)
        reset_s, update_s, new_s = jnp.split(
            rows_dense(self.recurrent[...], state, self.matmul_dtype), 3
        )
        # Gates are computed in float32; only the new state is stored in `precision.compute`.
        keep = jax.nn.sigmoid(update + update_s)
        new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_s) * new_s)
        return stored((1.0 - keep) * new + keep * state, self.precision).astype(state.dtype)
