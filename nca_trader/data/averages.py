"""Averages that take one value at a time: what the features of one asset are made of."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.types import Bar, Tensor

SPAN = 60  # bars: span of every average that normalises, 2 / (SPAN + 1) the newest bar's weight
LEAST = 1e-12  # a scale at or below it means that prices did not move, and gives 0


class Average(NamedTuple):
    """Exponentially weighted mean and variance, all `[]`; weights sum to 1 from the first value.

    `mean` and `variance` are pandas' `ewm(span=..., adjust=True)` mean and var(bias=True).
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor


def empty_average() -> Average:
    """Return the average before any value."""
    return Average(np.zeros(()), np.zeros(()), np.zeros(()))


def add(average: Average, x: Array, span: float = SPAN) -> Average:
    """Return the average after one more value `x` `[]`.

    With keep = 1 - 2 / (span + 1):  W' = keep W + 1;  m' = m + (x - m) / W';
    v' = (1 - 1 / W') (v + (x - m)^2 / W').
    Source: West, Updating mean and variance estimates, CACM 22 (1979), decayed weights.
    """
    weight = (1.0 - 2.0 / (span + 1.0)) * average.weight + 1.0
    step = (x - average.mean) / weight
    variance = (1.0 - 1.0 / weight) * (average.variance + step * (x - average.mean))
    return Average(weight, average.mean + step, variance)


def bars_to_forget(span: float, precision: float = 2.0**-52) -> int:
    """Return after how many values the older ones weigh less than `precision` in an EW mean.

    Example:
      >>> bars_to_forget(60)
      1082
    """
    keep = 1.0 - 2.0 / (span + 1.0)
    return math.ceil(math.log(precision) / math.log(keep)) if keep > 0.0 else 1


def z_score(past: Average, x: Array) -> Array:
    """Return `x` `[]` in standard deviations of the past from the past's mean."""
    return ratio(x - past.mean, jnp.sqrt(past.variance))


def wilder(mean: Array, x: Array, count: Array, period: int = 14) -> Array:
    """Return Wilder's average after value number `count` (from 1): a plain mean up to `period`.

    A' = A + (x - A) / min(count, period). Source: Wilder, New Concepts in Technical Trading
    Systems (1978).
    """
    return mean + (x - mean) / jnp.minimum(count, period)


def ratio(a: Array, b: Array, least: float = LEAST) -> Array:
    """Return `a / b`, and 0 where the scale `b` is at or below `least`."""
    usable = b > least
    return jnp.where(usable, a / jnp.where(usable, b, 1.0), 0.0)


def keep_unless(condition: Tensor, old: Any, new: Any) -> Any:
    """Return `new` where `condition` `[]` holds, else `old`, over two equal pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, b, a), old, new)


def shift(window: Tensor, x: Tensor) -> Array:
    """Return the window `[W]`, oldest first, after one more value."""
    return jnp.concatenate([window[1:], x[None]])


class Closes(NamedTuple):
    """Recent closes `[W]`, oldest first, and the EW mean of squared one-bar log-returns."""

    window: Tensor
    squares: Average


def empty_closes(window: int) -> Closes:
    """Return the state before any bar, which will keep `window` closes."""
    return Closes(np.ones(window), empty_average())


def advance(past: Closes, bar: Bar, count: Array) -> tuple[Closes, Array]:
    """Return the closes up to `bar`, and the volatility per bar `[]` of the bars before it.

    sigma_{t-1} = sqrt(EW mean of r^2), r = log(close_t / close_{t-1}), mean return taken as 0.
    Source: RiskMetrics Technical Document (1996), section 5.2, with span SPAN.
    """
    r = jnp.log(bar.close / past.window[-1])
    squares = keep_unless(count > 0, past.squares, add(past.squares, r * r))
    return Closes(shift(past.window, bar.close), squares), jnp.sqrt(past.squares.mean)
