"""The neural cellular automaton: cells are bars (and assets), one rule for all cells and steps.

Run as a causal lattice over a whole segment, every bar of it is encoded once, whatever number
of decisions read it; a cell at bar t sees bars t - RF + 1 .. t and no later one.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

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

        Args:
          x: `[B, T, A, F]` features. present: `[B, T, A]` bool.

        Returns:
          `[B, T, A, C]` states, float32. The first RF - 1 bars see fewer than RF bars; bars
          before the first are state 0 at every step.
        """
        config = self.config
        mask = present[..., None].astype(jnp.float32)
        clipped = jnp.clip(x, -config.feature_clip, config.feature_clip) * mask
        embedded = self._matmul(jnp.concatenate([clipped, mask], -1), self.embed[...])
        injected = self._matmul(embedded, self.inject[...]) + _row(self.hidden_bias[...], 4)
        state = embedded
        for dilation in dilations_of(config):
            seen = [_delayed(state, j * dilation) for j in range(TAPS)]
            seen += neighbour_states(state, mask, config.neighbours)
            hidden = self._matmul(jnp.concatenate(seen, -1), self.taps[...]) + injected
            change = self._matmul(jax.nn.relu(hidden), self.update[...])
            change = jnp.tanh(change + _row(self.update_bias[...], 4))
            state = (1.0 - config.leak) * state + change
        return state

    def _matmul(self, x: Array, w: Array) -> Array:
        dtype = jnp.dtype(self.matmul_dtype)
        return jnp.matmul(x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32)


def neighbour_states(state: Array, mask: Array, neighbours: str) -> list[Array]:
    """What each asset's cell sees of the other assets at the same bar, one array a slot.

    Args:
      state: `[B, T, A, C]`. mask: `[B, T, A, 1]`, 1 where the asset is present.
      neighbours: "none"; "ring": the asset before and the one after, each with weights of its
        own, so that a direction can be learnt; "all": the mean over the other present assets.
    """
    shown = state * mask
    if neighbours == "ring":
        return [jnp.roll(shown, 1, axis=2), jnp.roll(shown, -1, axis=2)]
    if neighbours == "all":
        others = mask.sum(axis=2, keepdims=True) - mask
        return [(shown.sum(axis=2, keepdims=True) - shown) / jnp.maximum(others, 1.0)]
    return []


def _delayed(state: Array, bars: int) -> Array:
    """`state` `[B, T, A, C]` as it was `bars` earlier on the lattice, 0 before the first bar."""
    if bars == 0:
        return state
    bars = min(bars, state.shape[1])
    return jnp.pad(state, ((0, 0), (bars, 0), (0, 0), (0, 0)))[:, : state.shape[1]]


def _row(vector: Array, rank: int) -> Array:
    return vector.reshape((1,) * (rank - 1) + vector.shape)
