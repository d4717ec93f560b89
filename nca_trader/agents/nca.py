"""The neural cellular automaton: cells are bars (and assets), one rule for all cells and steps.

Run as a causal lattice over a whole segment, every bar of it is encoded once, whatever number
of decisions read it; a cell at bar t sees bars t - RF + 1 .. t and no later one.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nca_trader.numerics import dot32
from nca_trader.presets import PolicyConfig
from nca_trader.types import EnvSpec

TAPS = 3
NEIGHBOURS = {"none": 0, "ring": 2, "all": 1}


def dilations_of(config: PolicyConfig) -> tuple[int, ...]:
    """The dilation of each of the K steps: the cycle in the config, repeated."""
    return tuple(itertools.islice(itertools.cycle(config.dilations), config.steps))


def receptive_field(config: PolicyConfig) -> int:
    """Bars that a cell sees, itself included: `1 + 2 sum_k d_k`."""
    return 1 + (TAPS - 1) * sum(dilations_of(config))


class NCA(nnx.Module):
    """The rule, and the lattice that applies it.

    With `e = [clip(x) m, m] E`, `s_0 = e`, and for each step k with dilation d_k:

        h = relu(sum_j s[t - j d_k] W1_j + sum_n s[neighbour_n] G_n + e U + b1)    j = 0, 1, 2
        s = (1 - leak) s + tanh(h W2 + b2)

    so `|s| <= max(|e|, 1 / leak)`. W2 starts at zero: an untrained rule hands on its input.
    State and sums are float32; the operands of matrix products have `matmul_dtype`.
    """

    def __init__(self, spec: EnvSpec, config: PolicyConfig, matmul_dtype: str, rngs: nnx.Rngs):
        """Draws the parameters; every draw takes its own key from `rngs`."""
        self.config = config
        self.matmul_dtype = matmul_dtype
        width, hidden, slots = config.channels, config.hidden, NEIGHBOURS[config.neighbours]
        normal = jax.nn.initializers.lecun_normal()
        self.embed = nnx.Param(normal(rngs.params(), (spec.num_features + 1, width)))
        self.taps = nnx.Param(normal(rngs.params(), ((TAPS + slots) * width, hidden)))
        self.inject = nnx.Param(normal(rngs.params(), (width, hidden)))
        self.hidden_bias = nnx.Param(jnp.zeros(hidden))
        self.update = nnx.Param(jnp.zeros((hidden, width)))
        self.update_bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Array, present: Array) -> Array:
        """Encodes every cell of the lattice.

        Inside, arrays are `[C, T, B, A]`: long contiguous rows, a delay is a shift by whole bars,
        and sums over cells run along rows; twice as fast on the CPU as channels last.

        Args:
          x: `[B, T, A, F]` features. present: `[B, T, A]` bool.

        Returns:
          `[B, T, A, C]` states, float32. The first RF - 1 bars see fewer than RF bars; bars
          before the first are state 0 at every step.
        """
        config = self.config
        mask = present.astype(jnp.float32).transpose(1, 0, 2)[None]
        clip = config.feature_clip
        clipped = jnp.clip(x, -clip, clip).transpose(3, 1, 0, 2) * mask
        embedded = self._matmul(self.embed[...], jnp.concatenate([clipped, mask]))
        injected = self._matmul(self.inject[...], embedded) + _column(self.hidden_bias[...])
        state = embedded
        for dilation in dilations_of(config):
            seen = [_delayed(state, j * dilation) for j in range(TAPS)]
            seen += neighbour_states(state, mask, config.neighbours)
            hidden = self._matmul(self.taps[...], jnp.concatenate(seen)) + injected
            change = self._matmul(self.update[...], jax.nn.relu(hidden))
            change = jnp.tanh(change + _column(self.update_bias[...]))
            state = (1.0 - config.leak) * state + change
        return state.transpose(2, 1, 3, 0)

    def _matmul(self, w: Array, x: Array) -> Array:
        """`w` `[I, O]` applied to the channels of `x` `[I, T, B, A]`: `[O, T, B, A]` float32."""
        dtype = jnp.dtype(self.matmul_dtype)
        # Flat rows: with the cells on three axes the gradient's product is transposed by hand.
        flat = x.reshape(x.shape[0], -1).astype(dtype)
        out = dot32(w.T.astype(dtype), flat)
        return out.reshape(-1, *x.shape[1:])


def neighbour_states(state: Array, mask: Array, neighbours: str) -> list[Array]:
    """What each asset's cell sees of the other assets at the same bar, one array a slot.

    Args:
      state: `[C, T, B, A]`. mask: `[1, T, B, A]`, 1 where the asset is present.
      neighbours: "none"; "ring": the asset before and the one after, each with weights of its
        own, so that a direction can be learnt; "all": the mean over the other present assets.
    """
    shown = state * mask
    if neighbours == "ring":
        return [jnp.roll(shown, 1, axis=-1), jnp.roll(shown, -1, axis=-1)]
    if neighbours == "all":
        others = mask.sum(axis=-1, keepdims=True) - mask
        return [(shown.sum(axis=-1, keepdims=True) - shown) / jnp.maximum(others, 1.0)]
    return []


def _delayed(state: Array, bars: int) -> Array:
    """`state` `[C, T, B, A]` as it was `bars` earlier on the lattice, 0 before the first bar."""
    if bars == 0:
        return state
    length = state.shape[1]
    bars = min(bars, length)
    return jnp.pad(state, ((0, 0), (bars, 0), (0, 0), (0, 0)))[:, :length]


def _column(vector: Array) -> Array:
    return vector.reshape(-1, 1, 1, 1)
