"""AdamW behind a global-norm clip, behind a guard that skips an update that is not finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nca_trader.errors import ConfigError
from nca_trader.presets import OptimizerConfig


class GuardState(NamedTuple):
    """skipped: `[]` int32 updates that were dropped. inner: the guarded optimiser's state."""

    skipped: Array
    inner: Any


def learning_rate(config: OptimizerConfig, total: int) -> optax.Schedule:
    """Learning rate by gradient step: linear warm-up, then the schedule, 0 after `total`."""
    after = max(total - config.warmup_updates, 1)
    peak = config.learning_rate
    schedules = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, after),
        "cosine": lambda: optax.cosine_decay_schedule(peak, after),
    }
    if config.schedule not in schedules:
        raise ConfigError(
            f"optimizer.schedule = {config.schedule!r}; there are {', '.join(schedules)}."
        )
    warmup = optax.linear_schedule(0.0, peak, max(config.warmup_updates, 1))
    return optax.join_schedules([warmup, schedules[config.schedule]()], [config.warmup_updates])


def skip_not_finite(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Drops an update whose gradient's norm is NaN or infinite, and counts it.

    It stands outermost: moments, schedule and parameters stay as they were. (A NaN that reaches
    a clip becomes a NaN in every leaf; zeroed there, momentum would still move the weights.)
    """

    def init(params: Any) -> GuardState:
        return GuardState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, GuardState]:
        # The norm and not the leaves: where squares overflow, a clip would make the gradient 0.
        finite = jnp.isfinite(optax.tree.norm(updates))
        updates, moved = inner.update(updates, state.inner, params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0.0), updates)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state.inner)
        return updates, GuardState(state.skipped + ~finite, kept)

    return optax.GradientTransformation(init, update)


def make_optimizer(config: OptimizerConfig, total: int) -> optax.GradientTransformation:
    """The optimiser of a run of `total` gradient steps; decay is off for vectors and scalars."""
    schedule = learning_rate(config, total)
    return skip_not_finite(
        optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.adamw(
                schedule,
                b1=config.b1,
                b2=config.b2,
                eps=config.eps,
                weight_decay=config.weight_decay,
                mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
            ),
        )
    )
