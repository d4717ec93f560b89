"""Volatility-scaled sizes: how large a full position in each asset is at each close.

The volatility of an asset is `sqrt(E[r^2] / E[years])`, exponentially weighted means over its
returns from close to close and the time between their bars, so it needs no number of bars per year.
A bar's size is a function of bars up to its close. Batches and live loops run one compiled update,
in float64, so their sizes are equal bit for bit.

Source: Moskowitz, Ooi and Pedersen, Time Series Momentum (2012), section 2.4, which scales each
position to a volatility estimated with exponential weights.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.numerics import float64_on_cpu
from nca_trader.types import SECONDS_PER_YEAR, Bar, Bars, Tensor


class Sizing(NamedTuple):
    """How sizes follow volatility: `min(cap, target / max(volatility, floor))`.

    target, floor: volatility per year. span: of the estimate, in bars. cap: the largest size.
    """

    target: Any = 0.15
    span: Any = 60
    floor: Any = 0.01
    cap: Any = 1.0


class Seen(NamedTuple):
    """What an estimate remembers of the bars so far, `[A]` float64 each.

    close, time: of the last present bar, seconds; NaN before the first. square, years: weighted
    sums of squared returns and of the time between bars. count: returns seen.
    """

    close: Tensor
    time: Tensor
    square: Tensor
    years: Tensor
    count: Tensor


def before_bars(num_assets: int) -> Seen:
    """Return the memory before any bar."""
    zero, none = np.zeros(num_assets), np.full(num_assets, np.nan)
    return Seen(none, none, zero, zero, zero)


def volatility(seen: Seen, bar: Bar, span: Any) -> tuple[Seen, Any]:
    """Update the estimate by one closed bar.

    Args:
      seen: the memory of the bars before.
      bar: `[A]` fields. A missing bar leaves the estimate as it was.
      span: of the means, in bars; a new return has the weight `2 / (span + 1)`.

    Returns:
      The memory, and volatility per year `[A]`, 0 before the first return.
    """
    weight = 2.0 / (span + 1.0)
    return_ = bar.close / seen.close - 1.0
    elapsed = (bar.time - seen.time) / SECONDS_PER_YEAR
    known = bar.present & ~jnp.isnan(return_)
    square = jnp.where(known, seen.square + weight * (return_**2 - seen.square), seen.square)
    years = jnp.where(known, seen.years + weight * (elapsed - seen.years), seen.years)
    close, time = (
        jnp.where(bar.present, now, before)
        for now, before in ((bar.close, seen.close), (bar.time, seen.time))
    )
    # Both means start at 0, and their quotient is free of that bias.
    found = jnp.sqrt(square / jnp.where(years > 0.0, years, 1.0))
    return Seen(close, time, square, years, seen.count + known), found


def size(seen: Seen, bar: Bar, sizing: Sizing) -> tuple[Seen, Any]:
    """Update the size by one closed bar.

    Returns:
      The memory, and `[A]` float64 the factor on targets; 0 until `span` returns were seen.
    """
    seen, estimate = volatility(seen, bar, sizing.span)
    scaled = jnp.minimum(sizing.cap, sizing.target / jnp.maximum(estimate, sizing.floor))
    return seen, jnp.where(seen.count >= sizing.span, scaled, 0.0)


@functools.partial(jax.jit, static_argnums=2)
def _step(seen: Seen, bar: Bar, sizing: Sizing) -> tuple[Seen, Any]:
    return size(seen, bar, sizing)


@functools.partial(jax.jit, static_argnums=2)
def _scan(seen: Seen, bars: Bar, sizing: Sizing) -> Any:
    return jax.lax.scan(lambda seen, bar: size(seen, bar, sizing), seen, bars)[1]


def next_size(seen: Seen, bar: Bar, sizing: Sizing) -> tuple[Seen, np.ndarray]:
    """Run `size` for a live loop; arguments and results are numpy arrays."""
    with float64_on_cpu():
        return jax.tree.map(np.asarray, _step(seen, bar, sizing))


def sizes(bars: Bars, sizing: Sizing) -> np.ndarray:
    """Return `[N, A]` float64 factors on the targets that are ordered at each close.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[:200].select("SP500")
      >>> found = sizes(bars, Sizing(target=0.1, cap=2.0))
      >>> bool(found[:60].any()), bool((found[61:] > 0.0).all())
      (False, True)
    """
    with float64_on_cpu():
        return np.asarray(_scan(before_bars(bars.num_assets), bars.as_bar(), sizing))
