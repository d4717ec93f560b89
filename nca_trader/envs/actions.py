"""From an action to a target weight, for each kind of action an environment can have."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from nca_trader.config import EnvConfig
from nca_trader.types import EnvSpec, Tensor


def targets_of(config: EnvConfig, num_assets: int) -> tuple[float, ...]:
    """The weights that an asset may be ordered to, rising."""
    size = 1.0 / num_assets if config.size is None else config.size
    return (-size, 0.0, size) if config.short else (0.0, size)


def to_target(spec: EnvSpec, action: Tensor, ordered: Array) -> Array:
    """The target weights `[A]` that `action` `[A]` orders.

    Args:
      action: int32, or floating where `spec.actions` is "weights": there it is the target, and
        is cut to `spec.bounds`. ordered: `[A]` last ordered targets, which "orders" moves.
    """
    low, high = spec.bounds
    if spec.actions == "weights":
        return jnp.clip(jnp.asarray(action, ordered.dtype), low, high)
    if spec.actions == "orders":
        step = jnp.asarray(action - 1, ordered.dtype) * high
        return jnp.clip(ordered + step, low, high)
    # Selected, not looked up: a table of three is read one account at a time.
    *rest, target = (jnp.asarray(weight, ordered.dtype) for weight in spec.targets)
    for number, weight in reversed(list(enumerate(rest))):
        target = jnp.where(action == number, weight, target)
    return jnp.broadcast_to(target, jnp.shape(action))
