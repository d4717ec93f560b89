"""Risk: how large a full position is, and what an account may order, both decided at each close.

`account.step.place` calls `apply_limits` wherever the account has limits of risk, so a scanned
backtest and a session on paper run the same code. `verdict` says in words what it did.

What is remembered is a function of the closes and orders so far: a restart repeats it.

`size` scales positions by volatility, `sqrt(E[r^2] / E[years])`: exponentially weighted means over
an asset's returns from close to close and the time between their bars, so it needs no number of
bars per year. Batches and live loops run one compiled update in float64, so their sizes are equal
bit for bit. Source: Moskowitz, Ooi and Pedersen, Time Series Momentum (2012), section 2.4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from nca_trader.config.account import CovarianceSizing, Limits, Sizing
from nca_trader.data.features import bars_to_forget
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import SECONDS_PER_YEAR, Bar, Bars, Tensor


class VolatilityState(NamedTuple):
    """What an estimate remembers of the bars so far, `[A]` float64 each.

    close, time: of the last present bar, seconds; NaN before the first. square, years: weighted
    sums of squared returns and of the time between bars. count: returns seen.
    """

    close: Tensor
    time: Tensor
    square: Tensor
    years: Tensor
    count: Tensor


def before_bars(num_assets: int) -> VolatilityState:
    """Return the memory before any bar."""
    zero, none = np.zeros(num_assets), np.full(num_assets, np.nan)
    return VolatilityState(none, none, zero, zero, zero)


def volatility(seen: VolatilityState, bar: Bar, span: Any) -> tuple[VolatilityState, Any]:
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
    return VolatilityState(close, time, square, years, seen.count + known), found


def size(seen: VolatilityState, bar: Bar, sizing: Sizing) -> tuple[VolatilityState, Any]:
    """Update the size by one closed bar.

    Returns:
      The memory, and `[A]` float64 the factor on targets; 0 until `span` returns were seen.
    """
    seen, estimate = volatility(seen, bar, sizing.span)
    scaled = jnp.minimum(sizing.cap, sizing.target / jnp.maximum(estimate, sizing.floor))
    return seen, jnp.where(seen.count >= sizing.span, scaled, 0.0)


class CovarianceState(NamedTuple):
    """What sizes by covariance remember of the bars so far.

    alone: of the volatilities. products: `[A, A]` weighted means of products of two returns, each 0
    where its bar is missing, so that they are the moments of one sample and their matrix is never
    negative. missing: `[A]` bars missing in a row.
    """

    alone: VolatilityState
    products: Tensor
    missing: Tensor


def before_covariance(num_assets: int) -> CovarianceState:
    """Return the memory before any bar."""
    products, none = np.zeros((num_assets, num_assets)), np.zeros(num_assets)
    return CovarianceState(before_bars(num_assets), products, none)


def covariance_size(
    seen: CovarianceState, bar: Bar, wanted: Array, sizing: CovarianceSizing
) -> tuple[CovarianceState, Array, Array]:
    """Update the sizes by covariance by one closed bar.

    For targets s they are `min(cap, v max(0, (K s)_i / s_i))`, where v is the size by volatility
    alone and K the inverse of the correlations among the assets held, shrunk by `sizing.shrinkage`
    towards 0. Without correlations K is 1: the sizes of "volatility". Assets that move together
    share a risk; one that hedges the others gets more. Where K does not exist the correlations are
    shrunk further, by a tenth of what is left of them at a time.

    Args:
      seen: the memory of the bars before.
      bar: `[A]` fields. A missing bar leaves its asset's volatility as it was, and correlations
        decay towards 0 in it, as they grow from 0 after an asset is listed.
      wanted: `[A]` targets in force, 0 for none.
      sizing: static.

    Returns:
      The memory, `[A]` sizes, and `[]` bool, whether the correlations were shrunk further.

    Source: Ledoit and Wolf, Honey, I shrunk the sample covariance matrix (2004), with a fixed
    intensity and the identity as the target; correlations by RiskMetrics (1996).
    """
    weight = 2.0 / (sizing.span + 1.0)
    return_ = bar.close / seen.alone.close - 1.0
    x = jnp.where(bar.present & jnp.isfinite(return_), return_, 0.0)
    products = seen.products + weight * (x[:, None] * x[None, :] - seen.products)
    alone, factor = size(seen.alone, bar, sizing.alone._replace(cap=jnp.inf))
    missing = jnp.where(bar.present, 0.0, seen.missing + 1.0)
    held = (wanted != 0.0) & (factor > 0.0) & (missing < sizing.delist_after)
    deviation = jnp.sqrt(jnp.diagonal(products))
    scale = jnp.where(held & (deviation > 0.0), 1.0 / jnp.where(held, deviation, 1.0), 0.0)
    same = jnp.eye(len(x), dtype=bool)

    def factored(share: Array) -> Array:
        correlations = share * products * scale[:, None] * scale[None, :]
        matrix = jnp.where(same, 1.0, jnp.nan_to_num(correlations, nan=0.0))
        return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)

    def singular(tried: tuple[Array, Array]) -> Array:
        share, root = tried
        # What is left of a matrix without an inverse is rounding.
        return ~(jnp.diagonal(root).min() > 1e-6) & (share > 0.0)

    def shrunk(tried: tuple[Array, Array]) -> tuple[Array, Array]:
        share = jnp.where(tried[0] > 0.01, 0.9 * tried[0], 0.0)
        return share, factored(share)

    first = jnp.asarray(1.0 - sizing.shrinkage, products.dtype)
    share, root = jax.lax.while_loop(singular, shrunk, (first, factored(first)))
    spread = jax.scipy.linalg.cho_solve((root, True), jnp.where(held, wanted, 0.0))
    times = jnp.where(held, jnp.maximum(spread / jnp.where(held, wanted, 1.0), 0.0), 0.0)
    found = jnp.minimum(sizing.alone.cap, factor * times)
    return CovarianceState(alone, products, missing), found, share < first


def bars_of_size(sizing: Sizing | None) -> int:
    """Return the bars of an asset on which its size depends, the newest included; 0 if fixed."""
    return 0 if sizing is None else bars_to_forget(sizing.span) + 1


_next_size = jax.jit(size, static_argnums=2)


@functools.partial(jax.jit, static_argnums=2)
def _scan(seen: VolatilityState, bars: Bar, sizing: Sizing) -> Any:
    return jax.lax.scan(lambda seen, bar: size(seen, bar, sizing), seen, bars)[1]


def next_size(
    seen: VolatilityState, bar: Bar, sizing: Sizing
) -> tuple[VolatilityState, np.ndarray]:
    """Run `size` for a live loop; arguments and results are numpy arrays."""
    with float64_on_cpu():
        return jax.tree.map(np.asarray, _next_size(seen, bar, sizing))


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


# Values of `LimitState.limited` and `LimitState.halted`.
CODES = (
    "",
    "max-position",
    "max-gross",
    "max-order",
    "max-orders-per-minute",
    "price-collar",
    "max-daily-loss",
    "max-drawdown",
)
_, POSITION, GROSS, ORDER, RATE, COLLAR, DAILY_LOSS, DRAWDOWN = range(len(CODES))
DAY, MINUTE = 86_400, 60  # seconds
NEVER = -(2**62)  # before any time in seconds
# Of equity. A cut order is a multiple of it: held weights differ by a rounding error between a
# scan and a single step, and the targets of a backtest and of paper must not.
STEP = 2.0**-30


class LimitState(NamedTuple):
    """What limits remember of an account.

    peak, close, opened: `[]` logarithms of equity: the highest, the last, and that at the last
    close before today. day: `[]` number of today since 1970 UTC. orders: `[K]` seconds of the last
    K = `max_orders_per_minute` orders, in order. limited: `[A]` int8, what was cut or denied at the
    last close, a place in `CODES`. halted: `[]` int8, the limit that was broken; 0 for none.
    """

    peak: Tensor
    close: Tensor
    opened: Tensor
    day: Tensor
    orders: Tensor
    limited: Tensor
    halted: Tensor


class Intent(NamedTuple):
    """What an account is asked to order at a close.

    target, held, ordered: `[A]` weights; a target of NaN orders nothing, and `ordered` is the
    last one. log_equity: `[]`. seconds: `[]` since 1970 UTC, the bar's open. moved: `[A]` return
    from the close before to this one.
    """

    target: Tensor
    held: Tensor
    ordered: Tensor
    log_equity: Tensor
    seconds: Tensor
    moved: Tensor


class Allow(NamedTuple):
    """Everything may be ordered as it was asked."""


class Clip(NamedTuple):
    """Something is cut or left out. target: `[A]` what may be ordered. codes: by asset's place."""

    target: np.ndarray
    codes: dict[int, str]


class Deny(NamedTuple):
    """Nothing may be ordered. code: the limit. detail: numbers. halts: whether trading stops."""

    code: str
    detail: dict[str, Any]
    halts: bool = False


def open_guard(num_assets: int, limits: Limits, dtype: DTypeLike) -> LimitState:
    """Return the memory of an account that begins with equity 1."""
    zero = jnp.zeros((), dtype)
    return LimitState(
        peak=zero,
        close=zero,
        opened=zero,
        day=jnp.full((), NEVER),
        orders=jnp.full(limits.max_orders_per_minute or 0, NEVER),
        limited=jnp.zeros(num_assets, jnp.int8),
        halted=jnp.zeros((), jnp.int8),
    )


def apply_limits(
    guard: LimitState, intent: Intent, limits: Limits, is_order: Callable[[Array], Array]
) -> tuple[LimitState, Array]:
    """Apply `limits` to what is asked, in numbers that a compiled program can take.

    Args:
      guard: at the close before.
      intent: what is asked at this one.
      limits: static.
      is_order: `[A]` targets -> `[A]` bool, whether each would be a new order.

    Returns:
      The guard, with `limited` about this close, and `[A]` the targets that may be ordered.
    """
    guard = _counted(guard, intent, limits)
    target, held = jnp.asarray(intent.target), intent.held
    limited = jnp.zeros(target.shape, jnp.int8)

    def cut(to: Array, code: int) -> tuple[Array, Array]:
        changed = (to != target) & ~jnp.isnan(target)
        return to, jnp.where(changed, code, limited).astype(jnp.int8)

    if limits.price_collar is not None:
        wild = is_order(target) & (jnp.abs(intent.moved) > limits.price_collar)
        target, limited = cut(jnp.where(wild, jnp.nan, target), COLLAR)
    if limits.max_position is not None:
        target, limited = cut(jnp.clip(target, -limits.max_position, limits.max_position), POSITION)
    if limits.max_gross is not None:
        kept = jnp.isnan(target)
        fixed = jnp.where(kept, jnp.abs(intent.ordered), 0.0).sum()
        asked = jnp.where(kept, 0.0, jnp.abs(target)).sum()
        room = jnp.maximum(limits.max_gross - fixed, 0.0)
        # Computed from targets and not from weights held: under "on_change" equal targets must be
        # cut equally, or they would be new orders.
        times = jnp.maximum(asked / jnp.maximum(room, 1e-300), 1.0)
        target, limited = cut(jnp.where(times > 1.0, target / times, target), GROSS)
    if limits.max_order is not None:
        size = target - held
        over = is_order(target) & (jnp.abs(size) > limits.max_order)
        near = _step_towards(held, held + jnp.sign(size) * limits.max_order)
        target, limited = cut(jnp.where(over, near, target), ORDER)
        if limits.max_gross is not None:
            # A sale that was cut leaves less room for what is bought.
            after = jnp.where(jnp.isnan(target), intent.ordered, target)
            grows = is_order(target) & (jnp.abs(target) > jnp.abs(held))
            without = jnp.where(grows, jnp.abs(held), jnp.abs(after)).sum()
            more = jnp.abs(after).sum() - without
            share = (limits.max_gross - without) / jnp.where(more > 0.0, more, 1.0)
            tight = grows & (share < 1.0) & (limited == ORDER).any()
            near = _step_towards(held, held + (target - held) * jnp.clip(share, 0.0, 1.0))
            target, limited = cut(jnp.where(tight, near, target), GROSS)
    # This comes last, because a cut above can turn a target into a new order.
    if limits.max_orders_per_minute is not None:
        recent = (guard.orders > intent.seconds - MINUTE).sum()
        late = _rank(target, held, is_order(target)) >= limits.max_orders_per_minute - recent
        target, limited = cut(jnp.where(late & is_order(target), jnp.nan, target), RATE)
    # A target that was cut to the one already ordered is not an order, so no limit is reported.
    limited = jnp.where(is_order(target) | jnp.isnan(target), limited, 0)
    halted = guard.halted > 0
    target = jnp.where(halted, jnp.nan, target)
    limited = jnp.where(halted & ~jnp.isnan(intent.target), guard.halted, limited).astype(jnp.int8)
    if limits.max_orders_per_minute is not None:
        sent = jnp.where(is_order(target), intent.seconds, NEVER)
        every = jnp.sort(jnp.concatenate([guard.orders, sent]))
        guard = guard._replace(orders=every[-limits.max_orders_per_minute :])
    return guard._replace(limited=limited), target


def verdict(guard: LimitState, asked: np.ndarray, given: np.ndarray) -> Allow | Clip | Deny:
    """Say what `apply_limits` did: it made targets `given` `[A]` of those `asked`."""
    limited = np.asarray(guard.limited)
    if halted := int(guard.halted):
        since = guard.peak if halted == DRAWDOWN else guard.opened
        return Deny(CODES[halted], {"loss": 1.0 - math.exp(float(guard.close - since))}, True)
    if not limited.any():
        return Allow()
    codes = {int(i): CODES[limited[i]] for i in np.flatnonzero(limited)}
    if np.isnan(given).all():
        return Deny(next(iter(codes.values())), {"assets": len(codes)})
    return Clip(np.where(np.isnan(asked), np.nan, given), codes)


def is_denied(guard: Any) -> np.ndarray | bool:
    """Return `[A]` bool, whether an order was refused at the last close; False without limits."""
    if not guard:
        return False
    return np.isin(guard.limited, (RATE, COLLAR)) | (np.asarray(guard.halted) > 0)


def lifted(guard: LimitState) -> LimitState:
    """Return the guard after a person resumed trading: losses count from here on."""
    return guard._replace(
        peak=guard.close,
        opened=guard.close,
        limited=np.zeros_like(guard.limited),
        halted=np.zeros_like(guard.halted),
    )


def _counted(guard: LimitState, intent: Intent, limits: Limits) -> LimitState:
    """Return the guard at this close, before anything is ordered."""
    today, now = jnp.asarray(intent.seconds) // DAY, jnp.asarray(intent.log_equity)
    # A day's loss counts from the last close before it, so that a gap overnight is part of it.
    opened = jnp.where(today == guard.day, guard.opened, guard.close)
    peak, halted = jnp.maximum(guard.peak, now), guard.halted
    for limit, since, code in (
        (limits.max_drawdown, peak, DRAWDOWN),
        (limits.max_daily_loss, opened, DAILY_LOSS),
    ):
        if limit is not None:
            broken = now - since < math.log1p(-limit)
            # The limit that broke first stays the reason.
            halted = jnp.where((halted == 0) & broken, code, halted).astype(jnp.int8)
    return guard._replace(peak=peak, close=now, opened=opened, day=today, halted=halted)


def _rank(target: Array, held: Tensor, new: Array) -> Array:
    """Return `[A]` the place of each new order: those that make a position smaller come first."""
    # What rounding left counts as flat.
    smaller = new & (jnp.abs(target) < jnp.abs(held) - STEP)
    first = jnp.cumsum(smaller) - 1
    return jnp.where(smaller, first, smaller.sum() + jnp.cumsum(new & ~smaller) - 1)


def _step_towards(held: Tensor, target: Tensor) -> Array:
    """Round targets to multiples of `STEP`, towards what is held."""
    steps = target / STEP
    return jnp.where(target > held, jnp.floor(steps), jnp.ceil(steps)) * STEP
