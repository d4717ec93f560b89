"""AdamW behind a global-norm clip, behind a guard that skips an update that is not finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nca_trader.config import OptimizerConfig
from nca_trader.errors import ConfigError
from nca_trader.learner.layout import EVERYWHERE, Layout, Split
from nca_trader.numerics import ema32, wide

Norm = Callable[[Any], Array]


class GuardState(NamedTuple):
    """State of the guard.

    Attributes:
      skipped: `[]` int32 number of dropped updates.
      inner: the guarded optimiser's state.
    """

    skipped: Array
    inner: Any


class AverageState(NamedTuple):
    """State of the average.

    Attributes:
      params: moving average of the parameters, float32, in their structure.
    """

    params: Any


def learning_rate(
    config: OptimizerConfig, total: int | Array, peak: float | Array | None = None
) -> optax.Schedule:
    """Learning rate by gradient step, from 0: linear warm-up, then the schedule.

    Warm-up of W steps: `peak (step + 1) / W`; the first step moves already. Then, with n steps
    behind it and T the steps of the run after its warm-up: "linear" is `peak (1 - n / T)`,
    "cosine" `peak (1 + cos(pi n / T)) / 2`, both 0 from `total` on; "sgdr" falls by a cosine
    within each period and starts again, the periods `first_period 2^i` long.
    Source: Loshchilov & Hutter 2017, "SGDR", equation 5 with T_mult = 2 and eta_min = 0.
    """
    schedules = {
        "constant": lambda n: jnp.ones_like(n, jnp.float32),
        "linear": lambda n: 1.0 - n / _at_least_one(total - config.warmup_updates),
        "cosine": lambda n: _cosine(n / _at_least_one(total - config.warmup_updates)),
        "sgdr": lambda n: _cosine(_restarted(n, config.first_period)),
    }
    if config.schedule not in schedules:
        raise ConfigError(
            f"optimizer.schedule = {config.schedule!r}; there are {', '.join(schedules)}."
        )
    shape, warmup = schedules[config.schedule], config.warmup_updates
    peak = config.learning_rate if peak is None else peak

    def rate(step: Any) -> Array:
        step = jnp.asarray(step)
        rising = (step + 1) / _at_least_one(warmup)
        falling = jnp.maximum(shape(jnp.maximum(step - warmup, 0)), 0.0)
        # `jnp.where` and not a Python branch: the step is traced.
        return peak * jnp.where(step < warmup, rising, falling)

    return rate


def _at_least_one(steps: Any) -> Any:
    return jnp.maximum(steps, 1) if isinstance(steps, Array) else max(steps, 1)


def _cosine(part: Array) -> Array:
    return 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(part, 0.0, 1.0)))


def _restarted(n: Array, first: int) -> Array:
    """Return the fraction of its period before step `n`; period i begins at `first (2^i - 1)`.

    In whole numbers: the logarithm of a boundary, rounded, could fall into the wrong period.
    """
    # The largest power of two that is not above n // first + 1; `clz` counts leading zeros of 32.
    length = jnp.left_shift(1, 31 - jax.lax.clz(jnp.asarray(n // first + 1, jnp.int32)))
    return (n - first * (length - 1)) / (first * length)


def skip_not_finite(
    inner: optax.GradientTransformation, norm: Norm = optax.tree.norm
) -> optax.GradientTransformation:
    """Drop an update whose gradient's norm is NaN or infinite, and count it.

    It is the outermost part, so moments, schedule, average and parameters do not change. (A clip
    spreads a NaN to every leaf. If only the gradient were set to zero, momentum would still move
    the weights.)

    Args:
      inner: the guarded optimiser.
      norm: of a gradient, the same on every device, so all of them drop the same updates.
    """

    def init(params: Any) -> GuardState:
        return GuardState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, GuardState]:
        # The norm is checked and not the leaves: where squares overflow, the clip would make the
        # gradient 0.
        finite = jnp.isfinite(norm(updates))
        # The inner optimiser runs in any case, and its result is selected: NaN in an unselected
        # branch does no harm, because nothing is differentiated here.
        updates, moved = inner.update(updates, state.inner, params)
        # Selected and not multiplied by 0: NaN times 0 is NaN.
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0.0), updates)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state.inner)
        return updates, GuardState(state.skipped + (~finite).astype(jnp.int32), kept)

    return optax.GradientTransformation(init, update)


def clip_by_norm(most: float, norm: Norm) -> optax.GradientTransformation:
    """Scale a gradient down to norm `most`, as `optax.clip_by_global_norm` does.

    Args:
      most: the largest norm that is left as it is.
      norm: of the whole gradient, where a device has a part of it.
    """

    def scaled(updates: Any, params: Any) -> Any:
        del params
        size = norm(updates)
        kept = size < most
        return jax.tree.map(lambda u: jnp.where(kept, u, u / size.astype(u.dtype) * most), updates)

    return optax.stateless(scaled)


def whole_or_nothing(
    before: tuple[Any, GuardState], after: tuple[Any, GuardState]
) -> tuple[Any, GuardState]:
    """Return `(params, state)` after an update, or before it if any of its gradients was dropped.

    An update makes several gradient steps on one batch. If one of them is not finite, all of them
    are undone. The count of dropped gradients stays.
    """
    skipped = after[1].skipped
    dropped = skipped > before[1].skipped
    old, new = (before[0], before[1].inner), (after[0], after[1].inner)
    # A branch, not a selection leaf by leaf: that is a loop each, and takes a second to compile.
    params, inner = jax.lax.cond(dropped, lambda: old, lambda: new)
    return params, GuardState(skipped, inner)


def scale_by_width(base_width: int, layout: Layout = EVERYWHERE) -> optax.GradientTransformation:
    """Multiply the update of a matrix `[..., n, m]` by `min(1, base_width / n)`.

    n is what the layer sums over. Where it grows, the same step of every weight moves the sum n
    times as far; with this factor a learning rate tuned at `base_width` holds for wider layers.
    Layers no wider, biases and vectors keep their rate.
    Source: Yang et al. 2022, "Tensor programs V" (muP), table 3, the rates under Adam.
    """

    def scaled(split: Split, leaf: Array) -> Array:
        return leaf * min(1.0, base_width / layout.fan_in(split, leaf)) if leaf.ndim > 1 else leaf

    return optax.stateless(lambda updates, params: layout.over(scaled, updates))


def average_params(decay: float) -> optax.GradientTransformation:
    """Keep `average <- decay average + (1 - decay) params` of the parameters after each update.

    It begins at the first parameters. Source: Polyak & Juditsky 1992, with a fading memory.
    """

    def init(params: Any) -> AverageState:
        # In bfloat16 a decay of 0.999 is 1, and the average would never move.
        return AverageState(jax.tree.map(wide, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AverageState]:
        # This is the last part of the chain, so `updates` are what the parameters will move by.
        after = optax.apply_updates(params, updates)
        return updates, AverageState(
            jax.tree.map(lambda old, new: ema32(old, new, decay), state.params, after)
        )

    return optax.GradientTransformation(init, update)


def averaged(state: GuardState) -> Any:
    """Return the averaged parameters from the state of an optimiser with `ema_decay` above 0."""
    # The average is the last part of the chain that `make_optimizer` builds.
    return state.inner[-1].params


def make_optimizer(
    config: OptimizerConfig,
    total: int | Array,
    layout: Layout = EVERYWHERE,
    peak: float | Array | None = None,
) -> optax.GradientTransformation:
    """Build the optimiser of a run of `total` gradient steps; only matrices have weight decay.

    Args:
      config: rates and decays.
      total: gradient steps of the whole run.
      layout: of the parameters on a mesh.
      peak: learning rate after the warm-up; None is the config's.
    """
    adamw = optax.adamw(
        learning_rate(config, total, peak),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    # The clip is before Adam, whose moments then see clipped gradients; the width's factor is after
    # it, because Adam's own normalisation would cancel it.
    parts = [clip_by_norm(config.max_grad_norm, layout.norm), adamw]
    parts += [scale_by_width(config.base_width, layout)] if config.base_width else []
    parts += [average_params(config.ema_decay)] if config.ema_decay else []
    # Outermost, so that a dropped gradient moves neither moments nor the average.
    return skip_not_finite(optax.chain(*parts), layout.norm)
