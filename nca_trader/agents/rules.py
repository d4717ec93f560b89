"""Rule-based strategies, the baselines that agents are compared with.

A strategy is an online update like a feature: it sees one closed bar at a time, so it cannot look
ahead. A rule is a function of its parameters that returns a `Strategy`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from nca_trader.config.ranges import refuse, whole
from nca_trader.errors import ConfigError
from nca_trader.types import Bar


class Strategy(NamedTuple):
    """A strategy as two pure, traceable functions.

    Attributes:
      name: shown in reports.
      init: `(num_assets) -> state`, a pytree of arrays.
      update: `(state, bar) -> (state, target)`. `bar` is a `Bar` of `[A]` float64 arrays, `target`
        is `[A]` weights as fractions of equity, NaN for no order.

    Example:
      >>> Strategy("half", lambda n: (), lambda state, bar: (state, 0.5 + 0 * bar.close)).name
      'half'
    """

    name: str
    init: Callable[[int], Any]
    update: Callable[[Any, Bar], tuple[Any, Array]]


def always_flat() -> Strategy:
    """Return the strategy that holds cash.

    Example:
      >>> always_flat().name
      'always flat'
    """
    return Strategy("always flat", lambda num_assets: (), lambda s, bar: (s, 0.0 * _ones(bar)))


def buy_and_hold() -> Strategy:
    """Return the strategy that buys 1/A of equity of each asset at its first bar, and holds.

    Example:
      >>> buy_and_hold().name
      'buy and hold'
    """

    def init(num_assets: int) -> Array:
        return jnp.zeros(num_assets, bool)

    def update(bought: Array, bar: Bar) -> tuple[Array, Array]:
        weight = _ones(bar) / bar.close.shape[0]
        # NaN places no order: the position is left to drift with the market.
        target = jnp.where(bar.present & ~bought, weight, jnp.nan)
        return bought | bar.present, target

    return Strategy("buy and hold", init, update)


def sma_cross(fast: int = 10, slow: int = 30) -> Strategy:
    """Return the moving-average cross: long 1/A of equity while the fast mean is the higher.

    Args:
      fast: closes of the fast mean.
      slow: closes of the slow mean, more than `fast`.

    Raises:
      ConfigError: a period below 1, or `fast` is not below `slow`.

    Example:
      >>> sma_cross(fast=10, slow=30).name
      'SMA cross 10/30'
    """
    _refuse_periods("sma_cross", fast=fast, slow=slow)
    if not fast < slow:
        raise ConfigError(f"sma_cross: fast = {fast} is not below slow = {slow}; give fewer bars.")

    def target(closes: Array) -> Array:
        return jnp.where(closes[:fast].mean(0) > closes[:slow].mean(0), 1.0, 0.0)

    return _from_closes(f"SMA cross {fast}/{slow}", slow, target)


def momentum(lookback: int = 50) -> Strategy:
    """Return momentum: long 1/A of equity while the close is above that of `lookback` bars ago.

    Args:
      lookback: bars.

    Raises:
      ConfigError: `lookback` is below 1.

    Example:
      >>> momentum(lookback=50).name
      'momentum 50'
    """
    _refuse_periods("momentum", lookback=lookback)
    return _from_closes(
        f"momentum {lookback}",
        lookback + 1,
        lambda closes: jnp.where(closes[0] > closes[lookback], 1.0, 0.0),
    )


def _refuse_periods(rule: str, **periods: int) -> None:
    problems = whole(types.SimpleNamespace(**periods), 1, *periods)
    refuse(f"{rule}: {problem}" for problem in problems)


def _from_closes(name: str, length: int, signal: Callable[[Array], Array]) -> Strategy:
    """Make a strategy of the last `length` closes `[length, A]`, newest first; flat before.

    A missing bar changes nothing: closes are those of present bars.
    """

    def init(num_assets: int) -> tuple[Array, Array]:
        # Closes are NaN until there are enough, and the count hides what is computed of them.
        return jnp.full((length, num_assets), jnp.nan), jnp.zeros(num_assets, jnp.int32)

    def update(state: tuple[Array, Array], bar: Bar) -> tuple[tuple[Array, Array], Array]:
        closes, seen = state
        shifted = jnp.concatenate([bar.close[None], closes[:-1]])
        closes = jnp.where(bar.present[None], shifted, closes)
        seen = seen + bar.present
        # A comparison with NaN is false, so the signal is a number even before.
        weight = signal(closes) / bar.close.shape[0]
        return (closes, seen), jnp.where(seen >= length, weight, 0.0)

    return Strategy(name, init, update)


def _ones(bar: Bar) -> Array:
    return jnp.ones_like(bar.close)
