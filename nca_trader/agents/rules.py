"""Strategies by rule: what an agent is compared with, and what a user writes first.

A strategy is an online update, like a feature: it sees one closed bar at a time, so it cannot
look ahead. A rule is a function of its parameters that returns a `Strategy`.
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
    """name: for reports. init: `(num_assets) -> state`, a pytree of arrays.

    update: `(state, bar) -> (state, target)`; `bar` is a `Bar` of `[A]` float64 arrays, `target`
    is `[A]` weights as fractions of equity, NaN for no order. Pure and traceable.
    """

    name: str
    init: Callable[[int], Any]
    update: Callable[[Any, Bar], tuple[Any, Array]]


def always_flat() -> Strategy:
    """Holds cash."""
    return Strategy("always flat", lambda num_assets: (), lambda s, bar: (s, 0.0 * _ones(bar)))


def buy_and_hold() -> Strategy:
    """Buys each asset once, 1/A of equity in the first bar that it is there, and holds."""

    def init(num_assets: int) -> Array:
        return jnp.zeros(num_assets, bool)

    def update(bought: Array, bar: Bar) -> tuple[Array, Array]:
        weight = _ones(bar) / bar.close.shape[0]
        target = jnp.where(bar.present & ~bought, weight, jnp.nan)
        return bought | bar.present, target

    return Strategy("buy and hold", init, update)


def sma_cross(fast: int = 10, slow: int = 30) -> Strategy:
    """Long 1/A of equity while the mean of the last `fast` closes is above that of `slow`."""
    _refuse_periods("sma_cross", fast=fast, slow=slow)
    if not fast < slow:
        raise ConfigError(f"sma_cross: fast = {fast} is not below slow = {slow}; give fewer bars.")

    def target(closes: Array) -> Array:
        return jnp.where(closes[:fast].mean(0) > closes[:slow].mean(0), 1.0, 0.0)

    return _from_closes(f"SMA cross {fast}/{slow}", slow, target)


def momentum(lookback: int = 50) -> Strategy:
    """Long 1/A of equity while the close is above the close `lookback` bars ago."""
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
    """A strategy of the last `length` closes `[length, A]`, newest first; flat before them.

    A missing bar changes nothing: the closes are those of bars that were there.
    """

    def init(num_assets: int) -> tuple[Array, Array]:
        return jnp.full((length, num_assets), jnp.nan), jnp.zeros(num_assets, jnp.int32)

    def update(state: tuple[Array, Array], bar: Bar) -> tuple[tuple[Array, Array], Array]:
        closes, seen = state
        shifted = jnp.concatenate([bar.close[None], closes[:-1]])
        closes = jnp.where(bar.present[None], shifted, closes)
        seen = seen + bar.present
        weight = signal(closes) / bar.close.shape[0]
        return (closes, seen), jnp.where(seen >= length, weight, 0.0)

    return Strategy(name, init, update)


def _ones(bar: Bar) -> Array:
    return jnp.ones_like(bar.close)
