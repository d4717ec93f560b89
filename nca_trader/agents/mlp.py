"""The perceptron: what an automaton is compared with, and with a window of one bar no history."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.agents.lattice import ROWS, delayed, rows_dense, stored
from nca_trader.agents.nca import Fire
from nca_trader.config import PolicyConfig, PrecisionConfig
from nca_trader.types import EnvSpec


class MLP(nnx.Module):
    """Two layers over the last W bars of an asset, the same for all bars and assets.

    With `z_t = [clip(x_t) m_t, m_t]`, 0 before the first bar:

        h = tanh(sum_j z[t - j] W1_j + b1)    j = 0 .. W - 1
        s = tanh(h W2 + b2)

    Where `hidden` is 0 there is one layer, `s = h`, and with the readout's two in all. Sums are
    float32; the operands of matrix products have `precision.matmul`.
    """

    HIDDEN: ClassVar = {"window": 1, "hidden_bias": 0, "cell": 0}

    def __init__(
        self, spec: EnvSpec, config: PolicyConfig, precision: PrecisionConfig, rngs: nnx.Rngs
    ):
        """Draws the parameters; every draw takes its own key from `rngs`."""
        self.config, self.precision = config, precision
        self.matmul_dtype = precision.matmul
        normal = jax.nn.initializers.lecun_normal()
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
        bars = [delayed(seen, j, halo) for j in range(self.config.window)]
        return ROWS.leave(self._cells(jnp.concatenate(bars)))

    @staticmethod
    def begin(spec: EnvSpec, config: PolicyConfig) -> Array:
        """The stream's state before the first bar: the last W - 1 inputs, newest first."""
        shape = (config.window - 1, spec.num_features + 1, 1, 1, spec.num_assets)
        return jnp.zeros(shape, jnp.float32)

    def stream(self, past: Array, x: Array, present: Array) -> tuple[Array, Array]:
        """Encodes one new bar, `x` `[A, F]` and `present` `[A]`; cells `[A, C]` come back."""
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
    """`[F + 1, T, B, A]` clipped features, 0 where a bar is missing, and whether it is there."""
    mask = present.astype(jnp.float32)[..., None]
    clipped = jnp.clip(x, -config.feature_clip, config.feature_clip)
    return ROWS.enter(jnp.concatenate([clipped * mask, mask], axis=-1))
