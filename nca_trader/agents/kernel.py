"""The gradient of the automaton's steps as one kernel for a TPU: its states stay on the chip.

XLA writes each step's gradient as programs of their own, between which cells are read and written
again. Here a block of rows runs all steps once more, forward and then back, and only what comes in
and what goes out crosses the chip's main memory. Source of the language: jax's Pallas, for Mosaic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nca_trader.agents.lattice import TAPS
from nca_trader.errors import ConfigError
from nca_trader.numerics import unrounded

ROWS = 8  # of a batch that a block holds: those of a tile
BARS = 32  # that are computed at a time, 256 cells
LANES = 128  # that a channel's row fills, however narrow
MOST_BYTES = 58 * 2**20  # of a block; of vector memory v5p has least, 64 MiB
LIMIT_BYTES = 60 * 2**20  # with what the compiler adds


class Rule(NamedTuple):
    """The weights of a step: taps `[3 C, H]`, update `[H, C]`, bias `[C]`."""

    taps: Array
    update: Array
    bias: Array


class Plan(NamedTuple):
    """What is known of the steps when they are compiled.

    dilations: of each step. firsts: the bar from which each computes, and the last one's result
    begins, counted from the first that comes in: see `first_bars`.
    """

    dilations: tuple[int, ...]
    firsts: tuple[int, ...]
    leak: float
    dtype: str


class _Refs(NamedTuple):
    """The kernel's arguments. Bars are the first axis, then rows, then channels.

    states: `[K + 1, before + T, ROWS, C]` scratch, before each step and after the last; `before`
    bars of zeros stand for those before the first. hidden: `[K, T, ROWS, H]` scratch, of each step.
    slopes: two like `states`, of the loss by the states after and before a step.
    """

    state: Any
    injected: Any
    slope: Any
    taps: Any
    update: Any
    bias: Any
    of_state: Any
    of_injected: Any
    of_taps: Any
    of_update: Any
    of_bias: Any
    states: Any
    hidden: Any
    slopes: Any


def block_bytes(plan: Plan, bars: int, channels: int, hidden: int) -> int:
    """Of the vector memory that a block takes: what comes in and goes out is there twice."""
    steps, bars = len(plan.dilations), -(-bars // BARS) * BARS
    channels, hidden = (-(-width // LANES) * LANES for width in (channels, hidden))
    passing = 2 * bars * (3 * channels + 2 * hidden)
    kept = (steps + 3) * (_before(plan) + bars) * channels + steps * bars * hidden
    weights = (TAPS + 1) * channels * hidden * 2 * (jnp.dtype(plan.dtype).itemsize + 4)
    return 4 * ROWS * (passing + kept) + weights


def _before(plan: Plan) -> int:
    """Bars before the first that a tap may reach."""
    return (TAPS - 1) * max(plan.dilations)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def steps(
    plan: Plan,
    forward: Callable[[Rule, Array, Array, Array], Array],
    rule: Rule,
    state: Array,
    mask: Array,
    injected: Array,
) -> Any:
    """`forward(rule, state, mask, injected)`, whose gradient is the kernel's.

    Args:
      plan: of the steps that `forward` runs, which look at no neighbour and all fire.
      state: `[T - firsts[0], A, B, C]` float32. mask: has no part in it. injected:
        `[T, A, B, H]`.

    Returns:
      `[T - firsts[-1], A, B, C]` the states after the last step.

    Raises:
      ConfigError: when a gradient is taken, a block of rows is more than a chip holds.
    """
    return forward(rule, state, mask, injected)


def _steps_kept(
    plan: Plan, forward: Callable, rule: Rule, state: Array, mask: Array, injected: Array
) -> tuple[Array, tuple]:
    return forward(rule, state, mask, injected), (rule, state, mask, injected)


def _steps_back(plan: Plan, forward: Callable, kept: tuple, slope: Array) -> tuple:
    rule, state, mask, injected = kept
    begun = plan.firsts[0]
    plan = plan._replace(firsts=tuple(first - begun for first in plan.firsts))
    flat = [x.reshape(x.shape[0], -1, x.shape[-1]) for x in (state, injected[begun:], slope)]
    _check_room(plan, *(x.shape for x in flat[:2]))
    of_rule, of_state, of_injected = jax.lax.platform_dependent(
        rule,
        *flat,
        tpu=functools.partial(gradient, plan),
        default=functools.partial(gradient, plan, interpret=True),
    )
    early = [(begun, 0)] + [(0, 0)] * (injected.ndim - 1)
    of_injected = jnp.pad(of_injected.reshape(injected[begun:].shape), early)
    return of_rule, of_state.reshape(state.shape), jnp.zeros_like(mask), of_injected


steps.defvjp(_steps_kept, _steps_back)


def _check_room(plan: Plan, state: tuple[int, ...], injected: tuple[int, ...]) -> None:
    needed = block_bytes(plan, state[0], state[-1], injected[-1])
    if needed > MOST_BYTES:
        raise ConfigError(
            f"policy.remat = 'kernel' holds {ROWS} rows of {state[0]} bars, halo included, on the "
            f"chip, here {needed / 2**20:.1f} MiB where {MOST_BYTES >> 20} MiB are the most; give "
            "a smaller learner.segment_length, or policy.remat = 'step'."
        )


def gradient(
    plan: Plan, rule: Rule, state: Array, injected: Array, slope: Array, interpret: bool = False
) -> tuple[Rule, Array, Array]:
    """What the steps' weights, first state and injected input do to a loss.

    Args:
      state: `[T, N, C]` float32 before the first step. injected: `[T, N, H]` what the input adds
        to each step. slope: `[T - firsts[-1], N, C]`, the loss by the states after the last.
      interpret: run it as jax, anywhere, to see its values.

    Returns:
      The loss by the rule, by `state` and by `injected`, float32 and of their shapes.
    """
    length, rows, channels = state.shape
    # Bars before the first, up to a whole chunk, and rows up to a whole tile.
    early, more = -length % BARS, -rows % ROWS
    late = early + plan.firsts[-1]
    state, injected, slope = (
        jnp.pad(x, ((bars, 0), (0, more), (0, 0)))
        for x, bars in ((state, early), (injected, early), (slope, late))
    )
    bars, hidden = early + length, injected.shape[-1]
    before = _before(plan)
    count, dtype = len(plan.dilations), jnp.dtype(plan.dtype)

    def cells(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((bars, ROWS, width), lambda i: (0, i, 0))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: (0,) * len(shape))

    weights = [whole(TAPS * channels, hidden), whole(hidden, channels), whole(1, channels)]
    outs = (state, injected, rule.taps, rule.update, rule.bias[None])
    axes = jax.typeof(injected).manual_axis_type
    of_state, of_injected, *of_rule = pl.pallas_call(
        functools.partial(_kernel, plan, early),
        grid=((rows + more) // ROWS,),
        in_specs=[cells(channels), cells(hidden), cells(channels), *weights],
        out_specs=[cells(channels), cells(hidden), *weights],
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32, manual_axis_type=axes) for x in outs],
        scratch_shapes=[
            pltpu.VMEM((count + 1, before + bars, ROWS, channels), jnp.float32),
            pltpu.VMEM((count, bars, ROWS, hidden), jnp.float32),
            pltpu.VMEM((2, before + bars, ROWS, channels), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=LIMIT_BYTES
        ),
        interpret=interpret,
        name="steps_gradient",
    )(state, injected, slope, rule.taps.astype(dtype), rule.update.astype(dtype), rule.bias[None])
    taps, update, bias = of_rule
    kept = (slice(early, None), slice(0, rows))
    return Rule(taps, update, bias[0]), of_state[kept], of_injected[kept]


def _kernel(plan: Plan, early: int, *arguments: Any) -> None:
    """A block of rows. early: bars that come before the first, to fill a chunk."""
    refs = _Refs(*arguments)
    bars = refs.state.shape[0]
    before = refs.states.shape[1] - bars

    @pl.when(pl.program_id(0) == 0)
    def _nothing_yet() -> None:
        for summed in (refs.of_taps, refs.of_update, refs.of_bias):
            summed[...] = jnp.zeros_like(summed)

    firsts, count = first_chunks(plan, early), len(plan.dilations)
    outside = jnp.zeros_like(refs.states[0, :before])
    refs.of_injected[...] = jnp.zeros_like(refs.of_injected)
    refs.states[0, before:] = refs.state[...]
    for k in range(count):
        refs.states[k, :before] = outside
        _chunks(firsts[k], bars, functools.partial(_forward, refs, plan, early, k))
    refs.slopes[count % 2, before:] = refs.slope[...]
    for k in reversed(range(count)):
        refs.slopes[k % 2] = jnp.zeros_like(refs.slopes[0])
        _chunks(firsts[k], bars, functools.partial(_back, refs, plan, early, k))
    refs.of_state[...] = refs.slopes[0, before:]


def first_chunks(plan: Plan, early: int) -> list[int]:
    """The first chunk of each step: of whole chunks, all that a later step or the result sees."""
    chunk = (early + plan.firsts[-1]) // BARS
    firsts = [chunk]
    for dilation in plan.dilations[:0:-1]:
        chunk = max(0, (chunk * BARS - (TAPS - 1) * dilation) // BARS)
        firsts.append(chunk)
    return firsts[::-1]


def _chunks(first: int, bars: int, body: Callable[[Any], None]) -> None:
    """`body(first bar)` for each chunk from the `first`."""
    jax.lax.fori_loop(first, bars // BARS, lambda i, _: body(i * BARS), None)


def _seen(refs: _Refs, plan: Plan, k: int, bar: Any) -> list[Array]:
    """The states that a chunk's cells see at step `k`, `[BARS * ROWS, C]` for each tap."""
    return [
        _flat(refs.states[k, pl.ds(_at(refs, bar) - tap * plan.dilations[k], BARS)])
        for tap in range(TAPS)
    ]


def _at(refs: _Refs, bar: Any) -> Any:
    """Where a bar is, on an axis with bars before the first."""
    return refs.states.shape[1] - refs.state.shape[0] + bar


def _flat(cells: Array) -> Array:
    return cells.reshape(-1, cells.shape[-1])


def _product(a: Array, b: Array, over: tuple[int, int], dtype: str) -> Array:
    a, b = a.astype(dtype), b.astype(dtype)
    return jax.lax.dot_general(
        a,
        b,
        (((over[0],), (over[1],)), ((), ())),
        precision=unrounded(a, b),
        preferred_element_type=jnp.float32,
    )


def _there(early: int, bar: Any, cells: Array) -> Array:
    """`cells` of a chunk, 0 at the bars that only fill it."""
    if early == 0:
        return cells
    at = bar * ROWS + jax.lax.broadcasted_iota(jnp.int32, cells.shape, 0)
    return jnp.where(at >= early * ROWS, cells, 0.0)


def _forward(refs: _Refs, plan: Plan, early: int, k: int, bar: Any) -> None:
    seen = _seen(refs, plan, k, bar)
    width = seen[0].shape[-1]
    summed = _flat(refs.injected[pl.ds(bar, BARS)])
    for tap, cells in enumerate(seen):
        weight = refs.taps[tap * width : (tap + 1) * width]
        summed = summed + _product(cells, weight, (1, 0), plan.dtype)
    hidden = jnp.maximum(summed, 0.0)
    refs.hidden[k, pl.ds(bar, BARS)] = hidden.reshape(BARS, ROWS, -1)
    change = jnp.tanh(_product(hidden, refs.update[...], (1, 0), plan.dtype) + refs.bias[...])
    state = _there(early, bar, (1.0 - plan.leak) * seen[0] + change)
    refs.states[k + 1, pl.ds(_at(refs, bar), BARS)] = state.reshape(BARS, ROWS, -1)


def _back(refs: _Refs, plan: Plan, early: int, k: int, bar: Any) -> None:
    after, since = refs.slopes.at[(k + 1) % 2], refs.slopes.at[k % 2]
    here = pl.ds(_at(refs, bar), BARS)
    seen = _seen(refs, plan, k, bar)
    hidden = _flat(refs.hidden[k, pl.ds(bar, BARS)])
    # Kept nowhere, since the states tell it; to 1e-7 of them, which are of order 1 to 10.
    change = _flat(refs.states[k + 1, here]) - (1.0 - plan.leak) * seen[0]
    slope = _there(early, bar, _flat(after[here]))
    of_change = slope * (1.0 - change * change)
    refs.of_bias[...] += of_change.sum(0, keepdims=True)
    refs.of_update[...] += _product(hidden, of_change, (0, 0), plan.dtype)
    of_hidden = _product(of_change, refs.update[...], (1, 1), plan.dtype)
    of_hidden = jnp.where(hidden > 0.0, of_hidden, 0.0)
    refs.of_injected[pl.ds(bar, BARS)] += of_hidden.reshape(BARS, ROWS, -1)
    width = seen[0].shape[-1]
    for tap, cells in enumerate(seen):
        block = slice(tap * width, (tap + 1) * width)
        refs.of_taps[block] += _product(cells, of_hidden, (0, 0), plan.dtype)
        of_cells = _product(of_hidden, refs.taps[block], (1, 1), plan.dtype)
        of_cells = of_cells + (1.0 - plan.leak) * slope if tap == 0 else of_cells
        earlier = pl.ds(_at(refs, bar) - tap * plan.dilations[k], BARS)
        since[earlier] += of_cells.reshape(BARS, ROWS, -1)
