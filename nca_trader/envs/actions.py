"""From an action to a target weight, for each kind of action an environment can have."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.config import MAX_NEIGHBOURS, EnvConfig
from nca_trader.types import Bars, EnvSpec, Tensor


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


def nearest_assets(bars: Bars) -> tuple[tuple[int, ...], ...]:
    """For each asset the numbers of up to `MAX_NEIGHBOURS` others, the most correlated first.

    The correlation is that of log-returns, close to close, over the bars at which both assets
    were there now and at the bar before. A pair that has none, or of which one never moved, comes
    last; equals keep their order. One asset has no others: ().
    """
    if bars.num_assets < 2:
        return ()
    correlation = correlations(bars)
    np.fill_diagonal(correlation, -np.inf)
    order = np.argsort(-correlation, axis=1, kind="stable")
    kept = min(bars.num_assets - 1, MAX_NEIGHBOURS)
    return tuple(tuple(int(b) for b in row[row != a][:kept]) for a, row in enumerate(order))


def correlations(bars: Bars) -> np.ndarray:
    """`[A, A]` float64 correlations of log-returns, pair by pair; -2 where there is none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        returns = np.diff(np.log(bars.close), axis=0)
    there = bars.present[1:] & bars.present[:-1] & np.isfinite(returns)
    m = there.astype(np.float64)
    # Less its mean, a series loses no digits in the sums of squares below.
    center = np.where(there, returns, 0.0).sum(0) / np.maximum(m.sum(0), 1.0)
    r = np.where(there, returns - center, 0.0)
    count = m.T @ m
    total = r.T @ m  # [a, b]: of a, over the bars that a and b share
    square = (r**2).T @ m
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = square / count - (total / count) ** 2
        covariance = r.T @ r / count - total * total.T / count**2
        found = covariance / np.sqrt(variance * variance.T)
    # What is left of the variance of a constant is rounding.
    usable = (count > 1) & (np.minimum(variance, variance.T) > 1e-24)
    return np.where(usable & np.isfinite(found), found, -2.0)
