"""The neural cellular automaton: cells are bars (and assets), one rule for all cells and steps.

As a causal lattice it encodes every bar of a segment once, however many decisions read it. A cell
at bar t sees bars t - RF + 1 .. t and no later one. As a stream it makes K updates of a cell per
new bar: each step keeps the states that its taps will reach.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from nca_trader.agents.lattice import CHANNELS_LAST, ROWS, TAPS, Form, enter, store
from nca_trader.config import PolicyConfig, PrecisionConfig
from nca_trader.config.agent import num_slots
from nca_trader.numerics import hash_uniform, wide
from nca_trader.types import EnvSpec


class StepWeights(NamedTuple):
    """The weights of a step: taps `[3 C, H]`, update `[H, C]`, bias `[C]`."""

    taps: Array
    update: Array
    bias: Array


class Fire(NamedTuple):
    """The mask of cell updates in training; the same seed and bar give the same mask anywhere.

    Attributes:
      seed: `[B]` uint32.
      first: `[B]` int32 row, among all bars, of the first bar that is encoded. So the mask of a
        bar does not depend on the segment that it is encoded in.
    """

    seed: Array
    first: Array


def dilations_of(config: PolicyConfig) -> tuple[int, ...]:
    """Return the dilation of each of the K steps: the cycle in the config, repeated."""
    return tuple(itertools.islice(itertools.cycle(config.dilations), config.steps))


def first_bars(dilations: tuple[int, ...], halo: int) -> list[int]:
    """Return the first bar whose state is needed, before each step and after the last.

    After the last step the bars of the halo are not needed. A step reaches `TAPS - 1` dilations
    back.
    """
    reach = [(TAPS - 1) * dilation for dilation in dilations]
    return [max(0, halo - sum(reach[k:])) for k in range(len(reach) + 1)]


# Bytes of one array of cells, float32. About six of them at a time fit into the vector memory of a
# TPU; v5p has the smallest, 64 MiB.
CHUNK_BYTES = 2**23
ROWS_OF_A_TILE = 8


def num_chunks(cells: tuple[int, ...], width: int) -> int:
    """Return the number of parts of a batch `[B, T, A]` of cells; each part stays on the chip.

    It is the fewest that divide B, or 1 if the parts would have fewer rows than a tile of the
    chip's memory.
    """
    batch, *others = cells
    # 4 bytes of a float32.
    most = CHUNK_BYTES // (4 * width * math.prod(others))
    rows = next((n for n in range(min(batch, most), 0, -1) if batch % n == 0), 0)
    return batch // rows if rows >= ROWS_OF_A_TILE else 1


UPDATE_SCALE = 0.5  # of W2's first values, times those of a layer that keeps a sum's spread


class NCA(nnx.Module):
    """The rule, and the lattice that applies it.

    With `e = [clip(x) m, m] E`, `s_0 = e`, and for each step k with dilation d_k:

        h = relu(sum_j s[t - j d_k] W1_j + sum_n s[neighbour_n] G_n + e U + b1)    j = 0, 1, 2
        s = (1 - leak) s + tanh(h W2 + b2) fire

    so `|s| <= max(|e|, 1 / leak)` where fire is 1. W2 starts small, and not at zero: information
    from an asset n places away passes through n updates, and with W2 = 0 its gradient is W2^n = 0.
    Sums are float32; the operands of matrix products have `precision.matmul`, and the state between
    steps has `precision.compute`.
    """

    HIDDEN: ClassVar = {"taps": 1, "inject": 1, "hidden_bias": 0, "update": 0}

    def __init__(
        self, spec: EnvSpec, config: PolicyConfig, precision: PrecisionConfig, rngs: nnx.Rngs
    ):
        """Draw the parameters; every draw takes its own key from `rngs`."""
        self.config, self.spec = config, spec
        self.precision, self.matmul_dtype = precision, precision.matmul
        width, hidden, slots = config.channels, config.hidden, num_slots(spec.num_assets, config)
        normal = jax.nn.initializers.lecun_normal()
        self.embed = nnx.Param(normal(rngs.params(), (spec.num_features + 1, width)))
        self.taps = nnx.Param(normal(rngs.params(), ((TAPS + slots) * width, hidden)))
        self.inject = nnx.Param(normal(rngs.params(), (width, hidden)))
        self.hidden_bias = nnx.Param(jnp.zeros(hidden))
        self.update = nnx.Param(UPDATE_SCALE * normal(rngs.params(), (hidden, width)))
        self.update_bias = nnx.Param(jnp.zeros(width))

    @staticmethod
    def receptive_field(config: PolicyConfig) -> int:
        """Bars that a cell sees, itself included: `1 + 2 sum_k d_k`."""
        return 1 + (TAPS - 1) * sum(dilations_of(config))

    def __call__(self, x: Array, present: Array, fire: Fire | None = None, halo: int = 0) -> Array:
        """Encode the cells of a lattice, in the form that suits the platform it is lowered for.

        Args:
          x: `[B, T, A, F]` features.
          present: `[B, T, A]` bool.
          fire: the mask of cell updates; None is every update.
          halo: bars at the beginning whose cells are not returned. Later cells see them, so a
            step computes only the states there that a later step reaches.

        Returns:
          `[B, T - halo, A, C]` states, float32. The first RF - 1 bars see fewer than RF bars;
          bars before the first are state 0 at every step.
        """
        # Chosen when the program is lowered, not by this machine: a program for a TPU may be
        # compiled on a CPU.
        return jax.lax.platform_dependent(
            x,
            present,
            fire,
            tpu=functools.partial(self.encode_chunks, halo=halo),
            default=functools.partial(self.encode, ROWS, halo=halo),
        )

    def encode_chunks(self, x: Array, present: Array, fire: Fire | None, halo: int = 0) -> Array:
        """Encode for a TPU, in parts of a batch that stay on the chip.

        The gradient encodes a part again: reading the states back from the chip's main memory
        would take longer than the products.
        """
        encode = functools.partial(self.encode, CHANNELS_LAST, halo=halo)
        parts = num_chunks(x.shape[:3], max(self.config.channels, self.config.hidden))
        if parts == 1:
            return encode(x, present, fire)
        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, present, fire))
        # In sequence, so that one part at a time is on the chip.
        cells = jax.lax.map(lambda part: jax.checkpoint(encode)(*part), cut)
        return cells.reshape(-1, *cells.shape[2:])

    def encode(
        self, form: Form, x: Array, present: Array, fire: Fire | None, halo: int = 0
    ) -> Array:
        """Encode in one form; the forms differ by rounding only."""
        dilations = dilations_of(self.config)
        firsts = first_bars(dilations, halo)
        mask, embedded, injected = self._enter(form, x, present)
        chances = None
        # Backtest and paper trading pass no mask and apply every update.
        if fire is not None and self.config.fire_rate < 1.0:
            chances = functools.partial(_fire_mask, fire, x.shape[:3], self.config.fire_rate)

        def run(
            steps: range, rule: StepWeights, state: Array, mask: Array, injected: Array
        ) -> Array:
            for k in steps:
                on = None if chances is None else form.enter(chances(k)[..., None])
                # Bars before it are read by no later step.
                begin = firsts[k + 1]
                late, added = form.since(mask, begin), form.since(injected, begin)
                on = None if on is None else form.since(on, begin)
                dropped = begin - firsts[k]
                state = self._step(form, rule, dilations[k], dropped, state, late, added, on)
            return state

        rule = self._rule()
        # The halo is kept as far as any step reaches it; each step drops the bars that no later one
        # reads.
        state: Any = form.since(embedded, firsts[0])
        for steps, run_steps in _blocks(self.config, run):
            state = run_steps(steps, rule, state, mask, injected)
        return wide(form.leave(state))

    @staticmethod
    def begin(spec: EnvSpec, config: PolicyConfig) -> tuple[Array, ...]:
        """Return a stream's first state: 2 d_k rows `[C, 2 d_k, 1, A]` for each step."""
        return tuple(
            jnp.zeros((config.channels, (TAPS - 1) * dilation, 1, spec.num_assets), jnp.float32)
            for dilation in dilations_of(config)
        )

    def stream(
        self, past: tuple[Array, ...], x: Array, present: Array
    ) -> tuple[tuple[Array, ...], Array]:
        """Encode one new bar, `x` `[A, F]` and `present` `[A]`; return cells `[A, C]`.

        The state holds the newest rows in order, not a ring with a pointer. So it depends only on
        the last RF - 1 bars, not on when the stream began.
        """
        mask, state, injected = self._enter(ROWS, x[None, None], present[None, None])
        rule, kept = self._rule(), []
        for rows, dilation in zip(past, dilations_of(self.config), strict=True):
            # The state before this step: its taps look back at the same step of earlier bars.
            joined = jnp.concatenate([rows, state], axis=1)
            kept.append(joined[:, 1:])
            taps = [joined[:, j * dilation :][:, :1] for j in reversed(range(TAPS))]
            state = self._next(rule, taps, self._beside(ROWS, state, mask), injected)
        return tuple(kept), wide(ROWS.leave(state))[0, 0]

    def _rule(self) -> StepWeights:
        return StepWeights(self.taps[...], self.update[...], self.update_bias[...])

    def _enter(self, form: Form, x: Array, present: Array) -> tuple[Array, Array, Array]:
        """Return the mask, `e`, and the input that `e` adds to every step, laid out as `form`."""
        seen = enter(form, self.config.feature_clip, x, present)
        embedded = form.placed(form.dense(self.embed[...], seen, self.matmul_dtype))
        # The same for every step, so it is computed once.
        injected = self._injected(form, embedded)
        embedded = store(embedded, self.precision)
        mask = form.enter(present.astype(jnp.float32)[..., None])
        return mask, embedded, injected

    def _injected(self, form: Form, embedded: Array) -> Array:
        injected = form.dense(self.inject[...], embedded, self.matmul_dtype)
        return injected + form.column(self.hidden_bias[...])

    def _beside(self, form: Form, state: Array, mask: Array) -> list[Array]:
        return neighbour_states(state, mask, self.spec, self.config, form.assets)

    @jax.named_scope("step")  # a name for plans: what an instruction is part of
    def _step(
        self,
        form: Form,
        rule: StepWeights,
        dilation: int,
        first: int,
        state: Array,
        mask: Array,
        injected: Array,
        fire: Array | None,
    ) -> Array:
        dtype = self.matmul_dtype
        state, taken = form.held(rule.taps, state, dtype)
        # Cut after the taps were copied, because they reach further back.
        state = form.since(state, first)
        beside = self._beside(form, state, mask)
        seen = form.taps(rule.taps, taken, dilation, beside, dtype, first)
        return self._move(form, rule, state, seen + injected, fire)

    def _next(self, rule: Any, past: list[Array], beside: list[Array], injected: Array) -> Array:
        """Return the state after a step, from its past, newest first, and other assets' states."""
        seen = ROWS.dense(rule.taps, jnp.concatenate(past + beside), self.matmul_dtype)
        return self._move(ROWS, rule, past[0], seen + injected, None)

    def _move(
        self, form: Form, rule: StepWeights, state: Array, hidden: Array, fire: Array | None
    ) -> Array:
        """Return the state after a step whose hidden layer sums to `hidden`."""
        hidden = form.relu(store(hidden, self.precision))
        change = form.dense(rule.update, hidden, self.matmul_dtype)
        change = jnp.tanh(change + form.column(rule.bias))
        change = change if fire is None else change * fire
        # The tanh and the leak bound the state, see the class.
        return ((1.0 - self.config.leak) * state + change).astype(state.dtype)


def neighbour_states(
    state: Array, mask: Array, spec: EnvSpec, config: PolicyConfig, axis: int
) -> list[Array]:
    """Return the states of other assets that each cell sees at its bar, one array per slot.

    A slot has weights of its own, so a direction can be learnt. A missing asset shows 0.

    Args:
      state: cells, with assets on `axis`.
      mask: of one channel, 1 where the asset is present.
      spec: its number of assets, and their ranking for "nearest".
      config: "ring" shows the asset before and the one after (of two assets: the other one);
        "nearest" those that `spec.nearest` ranks first; "all" the mean over the others present.
      axis: the axis of assets in `state` and `mask`.
    """
    slots = num_slots(spec.num_assets, config)
    shown = state * mask
    if config.neighbours == "ring":
        return [jnp.roll(shown, shift, axis) for shift in (1, -1)[:slots]]
    if config.neighbours == "nearest":
        ranked = np.array(spec.nearest, np.int32)
        return [jnp.take(shown, ranked[:, slot], axis) for slot in range(slots)]
    if slots:
        others = mask.sum(axis, keepdims=True) - mask
        # The maximum is for a bar at which no other asset is present: its mean is 0.
        return [(shown.sum(axis, keepdims=True) - shown) / jnp.maximum(others, 1.0)]
    return []


def _fire_mask(fire: Fire, shape: tuple[int, ...], rate: float, step: int) -> Array:
    """Return the mask `shape` `[B, T, A]`: 1 / rate where `step` updates the cell, else 0."""
    _, length, assets = shape
    row = fire.first[:, None, None] + jnp.arange(length, dtype=jnp.int32)[None, :, None]
    asset = jnp.arange(assets, dtype=jnp.int32)[None, None]
    drawn = hash_uniform(fire.seed[:, None, None], row, asset, step)
    # Divided by the rate, so that the expected update is that of evaluation, which applies all.
    return jnp.where(drawn < rate, jnp.float32(1.0 / rate), jnp.float32(0.0))


def _blocks(config: PolicyConfig, run: Callable) -> list[tuple[range, Callable]]:
    """Return groups of steps that share a rematerialisation, each with its function."""
    steps, remat = range(config.steps), config.remat
    if remat == "none":
        return [(steps, run)]
    if remat == "dots":
        # Results of products are kept, and the cheaper operations between them repeated.
        keep = jax.checkpoint_policies.dots_saveable
        return [(steps, jax.checkpoint(run, static_argnums=0, policy=keep))]
    every = 1 if remat == "step" else int(remat.removeprefix("every:"))
    again = jax.checkpoint(run, static_argnums=0)
    return [(steps[first : first + every], again) for first in range(0, len(steps), every)]
