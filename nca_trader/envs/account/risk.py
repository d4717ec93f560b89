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

from nca_trader.config.account import AccountConfig, CovarianceSizing, Limits, Sizing
from nca_trader.data.features import bars_to_forget
from nca_trader.errors import BarError, logger
from nca_trader.machine import memory
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import SECONDS_PER_YEAR, Bar, Bars, Tensor

log = logger(__name__)
AnySizing = Sizing | CovarianceSizing


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


class Joint(NamedTuple):
    """What sizes by covariance need of a bar, next to targets.

    alone: `[A]` sizes by volatility alone, without a cap; 0 for an asset that has none.
    correlations: `[A, A]`, shrunk so that they have an inverse.
    """

    alone: Tensor
    correlations: Tensor


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


def correlations_of(
    seen: CovarianceState, bar: Bar, sizing: CovarianceSizing, held: Any = True
) -> tuple[CovarianceState, Joint, Array]:
    """Update what sizes by covariance are computed of by one closed bar.

    Where the correlations have no inverse they are shrunk further, by a tenth of what is left of
    them at a time.

    Args:
      seen: the memory of the bars before.
      bar: `[A]` fields. A missing bar leaves its asset's volatility as it was, and correlations
        decay towards 0 in it, as they grow from 0 after an asset is listed.
      sizing: static.
      held: `[A]` bool, the assets whose correlations are to have an inverse.

    Returns:
      The memory, the sizes and correlations of `sized_jointly`, and `[]` bool, whether the
      correlations were shrunk further.

    Source: Ledoit and Wolf, Honey, I shrunk the sample covariance matrix (2004), with a fixed
    intensity and the identity as the target; correlations by RiskMetrics (1996).
    """
    weight = 2.0 / (sizing.span + 1.0)
    return_ = bar.close / seen.alone.close - 1.0
    x = jnp.where(bar.present & jnp.isfinite(return_), return_, 0.0)
    products = seen.products + weight * (x[:, None] * x[None, :] - seen.products)
    alone, factor = size(seen.alone, bar, sizing.alone._replace(cap=jnp.inf))
    missing = jnp.where(bar.present, 0.0, seen.missing + 1.0)
    factor = jnp.where(missing < sizing.delist_after, factor, 0.0)
    deviation = jnp.sqrt(jnp.diagonal(products))
    known = (factor > 0.0) & (deviation > 0.0) & held
    scale = jnp.where(known, 1.0 / jnp.where(known, deviation, 1.0), 0.0)
    whole = jnp.nan_to_num(products * scale[:, None] * scale[None, :], nan=0.0)
    share = first = jnp.asarray(1.0 - sizing.shrinkage, products.dtype)

    def of(share: Array) -> Array:
        return jnp.where(jnp.eye(len(x), dtype=bool), 1.0, share * whole)

    if sizing.may_shrink:

        def singular(share: Array) -> Array:
            root = jax.lax.linalg.cholesky(of(share), symmetrize_input=False)
            # What is left of a matrix without an inverse is rounding.
            return ~(jnp.diagonal(root).min() > 1e-6) & (share > 0.0)

        share = jax.lax.while_loop(singular, lambda s: jnp.where(s > 0.01, 0.9 * s, 0.0), first)
    found = Joint(factor, of(share))
    return CovarianceState(alone, products, missing), found, share < first


def sized_jointly(target: Array, joint: Joint, cap: Any) -> Array:
    """Return the weights of targets with sizes by covariance.

    For targets s they are `v (K s)` within `[0, cap s]`, where v is the size by volatility alone
    and K the inverse of the shrunk correlations among the assets held. Without correlations K is 1:
    the weights of "volatility". Assets that move together share a risk; one that hedges the others
    gets more. A target of 0 is of no position, which shares none; so the others' weights jump where
    a target becomes 0.

    Args:
      target: `[A]`, NaN for no order.
      joint: of the bar at whose close they are ordered.
      cap: the largest size.

    Returns:
      `[A]`, NaN where the target is.
    """
    wanted = jnp.nan_to_num(target)
    alone, correlations = (jnp.asarray(x, wanted.dtype) for x in joint)
    held = (alone > 0.0) & is_target(wanted)
    both = held[:, None] & held[None, :]
    matrix = jnp.where(both, correlations, jnp.eye(len(wanted), dtype=wanted.dtype))
    root = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    most = cap * wanted
    # Without a division, so that a target of 0 has the slope of an asset alone.
    found = alone * jax.scipy.linalg.cho_solve((root, True), wanted)
    found = jnp.clip(found, jnp.minimum(most, 0.0), jnp.maximum(most, 0.0))
    return jnp.where(jnp.isnan(target), target, found)


def is_target(target: Array) -> Array:
    """Return `[A]` bool, whether a target is of a position; what rounding leaves of 0 is none."""
    return jnp.abs(target) > 1e-9 * jnp.abs(target).max()


def apply_size(target: Array, size: Any, cap: Any) -> Array:
    """Return `[A]` targets times their sizes, which are `[A]`, a `Joint`, or None for 1."""
    if size is None:
        return target
    if isinstance(size, Joint):
        return sized_jointly(target, size, cap)
    return target * jnp.asarray(size, target.dtype)


def undo_size(weights: np.ndarray, size: Any) -> np.ndarray:
    """Return targets `[N, A]` that were ordered as `weights`; 0 where an asset had no size.

    Exact where no size was capped or, of sizes by covariance, held at 0.
    """
    alone = alone_of(size)
    targets = np.divide(weights, alone, out=np.zeros_like(weights), where=alone > 0.0)
    if not isinstance(size, Joint):
        return targets
    return np.where(targets != 0.0, np.einsum("nab,nb->na", size.correlations, targets), 0.0)


def alone_of(size: Any) -> Any:
    """Return the sizes by volatility alone of a size, `[..., A]`."""
    return size.alone if isinstance(size, Joint) else size


def bars_of_size(rules: AccountConfig) -> int:
    """Return the bars of an asset on which its size depends, the newest included; 0 if fixed."""
    spans = (rules.volatility_span, rules.correlation_span)
    count = {"fixed": 0, "volatility": 1, "covariance": 2}[rules.sizing]
    return max((bars_to_forget(span) + 1 for span in spans[:count]), default=0)


def before_sizes(num_assets: int, sizing: AnySizing | None) -> Any:
    """Return the memory of sizes before any bar."""
    joint = isinstance(sizing, CovarianceSizing)
    return before_covariance(num_assets) if joint else before_bars(num_assets)


def update_size(seen: Any, bar: Bar, sizing: AnySizing) -> tuple[Any, Any]:
    """Update either size by one closed bar; return its memory and the size of `apply_size`."""
    if isinstance(sizing, CovarianceSizing):
        return correlations_of(seen, bar, sizing)[:2]
    return size(seen, bar, sizing)


_next_size = jax.jit(update_size, static_argnums=2)
_apply_size = jax.jit(apply_size)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _scan(seen: Any, bars: Bar, sizing: AnySizing, dtype: DTypeLike) -> Any:
    def step(seen: Any, bar: Bar) -> Any:
        seen, found = update_size(seen, bar, sizing)
        return seen, jax.tree.map(lambda x: x.astype(dtype), found)

    return jax.lax.scan(step, seen, bars)[1]


@functools.partial(jax.jit, static_argnums=2)
def _scan_last(seen: Any, bars: Bar, sizing: AnySizing) -> Any:
    return jax.lax.scan(lambda seen, bar: (update_size(seen, bar, sizing)[0], None), seen, bars)[0]


@functools.partial(jax.jit, static_argnums=3)
def _scan_shrunk(seen: CovarianceState, bars: Bar, held: Array, sizing: CovarianceSizing) -> Array:
    def step(seen: CovarianceState, xs: tuple[Bar, Array]) -> Any:
        seen, _, shrunk = correlations_of(seen, xs[0], sizing, xs[1])
        return seen, shrunk

    return jax.lax.scan(step, seen, (bars, held))[1]


def shrunk_bars(bars: Bars, sizing: CovarianceSizing, held: np.ndarray) -> int:
    """Return at how many closes the correlations among assets held `[N, A]` are shrunk further."""
    with float64_on_cpu():
        before = before_covariance(bars.num_assets)
        return int(np.asarray(_scan_shrunk(before, bars.as_bar(), held, sizing)).sum())


def warn_shrunk(bars: Bars, rules: AccountConfig) -> None:
    """Log on how many bars the correlations of all assets have no inverse."""
    sizing = rules.covariance
    if sizing is None or not sizing.may_shrink:
        return
    if count := shrunk_bars(bars, sizing, np.ones(bars.close.shape, bool)):
        log.warning(
            "shrinkage=%g: on %s bars the correlations of all assets have no inverse; those of "
            "what is held are shrunk further where they have none",
            rules.shrinkage,
            f"{count:,}",
        )


def next_size(seen: Any, bar: Bar, sizing: AnySizing) -> tuple[Any, Any]:
    """Run `update_size` for a live loop; arguments and results are numpy arrays."""
    with float64_on_cpu():
        return jax.tree.map(np.asarray, _next_size(seen, bar, sizing))


def apply_next_size(target: np.ndarray, size: Any, cap: float) -> np.ndarray:
    """Run `apply_size` for a live loop."""
    if not isinstance(size, Joint):
        return target * size
    with float64_on_cpu():
        return np.asarray(_apply_size(target, size, cap))


def sizes(bars: Bars, sizing: AnySizing, first: int = 0, dtype: DTypeLike = np.float64) -> Any:
    """Return the factors on the targets that are ordered at each close.

    Args:
      bars: N bars of A assets.
      sizing: by volatility, or by covariance.
      first: the first row that is wanted.
      dtype: of the result; the sizes are computed in float64.

    Returns:
      `[N - first, A]`, or a `Joint` of as many rows.

    Raises:
      BarError: memory does not hold the correlations.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[:200].select("SP500")
      >>> found = sizes(bars, Sizing(target=0.1, cap=2.0))
      >>> bool(found[:60].any()), bool((found[61:] > 0.0).all())
      (False, True)
    """
    count, rows = bars.num_assets, len(bars) - first
    if isinstance(sizing, CovarianceSizing):
        need, free = 2 * rows * count**2 * np.dtype(dtype).itemsize, memory().free
        if need > free:
            raise BarError(
                f"{bars.source or 'bars'}: correlations of {count} assets at {rows:,} bars need "
                f"{need / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; give fewer bars or assets, "
                "or sizing='volatility'."
            )
    with float64_on_cpu():
        seen, bar = before_sizes(count, sizing), bars.as_bar()
        if first:
            # Only the memory is kept of the bars before.
            seen = _scan_last(seen, jax.tree.map(lambda x: x[:first], bar), sizing)
        found = _scan(seen, jax.tree.map(lambda x: x[first:], bar), sizing, np.dtype(dtype))
        return jax.tree.map(np.asarray, found)


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
