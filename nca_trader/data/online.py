"""Online statistics, and the form of a feature: an update that sees one bar at a time.

Every average weighs by the past alone, and every state is a pytree of numpy arrays for one asset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.types import Bar, Tensor

SPAN = 60  # bars: span of every average that normalises, 2 / (SPAN + 1) the newest bar's weight
LEAST = 1e-12  # at or below it (in units of price) prices did not move, and nothing is scaled


class Feature(NamedTuple):
    """A feature of one asset.

    Attributes:
      init: `() -> state`, a pytree of numpy arrays.
      update: `(state, bar) -> state, value`; `bar` has scalar fields, `value` is `[]` float64 and
        finite. A bar that is not `present` leaves the state as it was and has value 0.
      warmup: number of present bars before the value is meaningful; it is 0 until then.
    """

    init: Callable[[], Any]
    update: Callable[[Any, Bar], tuple[Any, Array]]
    warmup: int


def make_feature(
    init: Callable[[], Any],
    update: Callable[[Any, Bar, Array], tuple[Any, Array]],
    warmup: int,
    counts: Callable[[Bar], Tensor] = lambda bar: bar.present,
) -> Feature:
    """Makes a feature from an update that need not handle missing bars and the warm-up.

    Args:
      init: `() -> state`.
      update: `(state, bar, count) -> state, value`, called for counted bars; `count` is their
        number before this one. At the first (0) the state is `init`'s and not a bar's.
      warmup: counted bars before the value is meaningful.
      counts: whether a bar counts.
    """

    def guarded(state: Any, bar: Bar) -> tuple[Any, Array]:
        count, inner = state
        seen = counts(bar)
        new, value = update(inner, bar, count)
        new = keep_unless(seen, inner, new)
        value = jnp.where(seen & (count >= warmup), value, 0.0)
        return (count + seen, new), value

    return Feature(lambda: (np.zeros((), np.int64), init()), guarded, warmup)


class Average(NamedTuple):
    """Exponentially weighted mean and variance, all `[]`; weights sum to 1 from the first value.

    `mean` and `variance` are pandas' `ewm(span=..., adjust=True)` mean and var(bias=True).
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor


def empty_average() -> Average:
    """Returns the average before any value."""
    return Average(np.zeros(()), np.zeros(()), np.zeros(()))


def add(average: Average, x: Array, span: float = SPAN) -> Average:
    """Returns the average after one more value `x` `[]`.

    With keep = 1 - 2 / (span + 1):  W' = keep W + 1;  m' = m + (x - m) / W';
    v' = (1 - 1 / W') (v + (x - m)^2 / W').
    Source: West, Updating mean and variance estimates, CACM 22 (1979), decayed weights.
    """
    weight = (1.0 - 2.0 / (span + 1.0)) * average.weight + 1.0
    step = (x - average.mean) / weight
    variance = (1.0 - 1.0 / weight) * (average.variance + step * (x - average.mean))
    return Average(weight, average.mean + step, variance)


def z_score(past: Average, x: Array) -> Array:
    """Returns `x` `[]` in standard deviations of the past from the past's mean."""
    return ratio(x - past.mean, jnp.sqrt(past.variance))


def wilder(mean: Array, x: Array, count: Array, period: int = 14) -> Array:
    """Returns Wilder's average after value number `count` (from 1): a plain mean up to `period`.

    A' = A + (x - A) / min(count, period). Source: Wilder, New Concepts in Technical Trading
    Systems (1978).
    """
    return mean + (x - mean) / jnp.minimum(count, period)


def ratio(a: Array, b: Array, least: float = LEAST) -> Array:
    """Returns `a / b`, and 0 where the scale `b` is at or below `least`."""
    usable = b > least
    return jnp.where(usable, a / jnp.where(usable, b, 1.0), 0.0)


def keep_unless(condition: Tensor, old: Any, new: Any) -> Any:
    """Returns `new` where `condition` `[]` holds, else `old`, over two equal pytrees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, b, a), old, new)


def shift(window: Tensor, x: Tensor) -> Array:
    """Returns the window `[W]`, oldest first, after one more value."""
    return jnp.concatenate([window[1:], x[None]])


class Market(NamedTuple):
    """Recent closes `[W]`, oldest first, and the EW mean of squared one-bar log-returns."""

    closes: Tensor
    squares: Average


def empty_market(window: int) -> Market:
    """Returns the market before any bar, which will keep `window` closes."""
    return Market(np.ones(window), empty_average())


def advance(market: Market, bar: Bar, count: Array) -> tuple[Market, Array]:
    """Returns the market after `bar`, and the volatility per bar `[]` of the bars before it.

    sigma_{t-1} = sqrt(EW mean of r^2), r = log(close_t / close_{t-1}), mean return taken as 0.
    Source: RiskMetrics Technical Document (1996), section 5.2, with span SPAN.
    """
    r = jnp.log(bar.close / market.closes[-1])
    squares = keep_unless(count > 0, market.squares, add(market.squares, r * r))
    return Market(shift(market.closes, bar.close), squares), jnp.sqrt(market.squares.mean)
