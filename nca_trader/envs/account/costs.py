"""What a fill costs and how large it may be: pure functions of numpy's arrays and of jax's.

The account calls them with jax, the simulated broker with numpy: one formula each, two sets of
books. Money is in the currency of the price; `units` are signed, bought above 0.
"""

from __future__ import annotations

from nca_trader.numerics import arrays
from nca_trader.types import Costs, Tensor

ROUNDING = 1e-9  # of a lot or a tick: what the last bits of a quotient may miss


def impact(coefficient: float, units: Tensor, volume: Tensor) -> Tensor:
    """Square-root impact, `coefficient * sqrt(|units| / volume)`, as a fraction of price.

    More than the whole volume, and any trade in a bar without volume, counts as the whole of it.
    Source: the square-root law, e.g. Almgren et al., Direct Estimation of Equity Market Impact
    (2005); `coefficient` holds the daily volatility and its factor of about one.
    """
    xp = arrays(units)
    share = abs(units) / xp.maximum(volume, 1e-30)
    some = share > 0.0  # the slope of a root is infinite at 0
    return coefficient * xp.where(some, xp.sqrt(xp.where(some, xp.minimum(share, 1.0), 1.0)), 0.0)


def worsening(
    costs: Costs, half_spread: Tensor | None, impacted: Tensor | float
) -> tuple[Tensor | float, Tensor | float]:
    """By which fraction of the bar's price a fill is worse, and what of it is the spread."""
    spread = costs.half_spread if half_spread is None else costs.half_spread + half_spread
    return costs.slippage + spread + impacted, spread


def on_tick(price: Tensor, worse: Tensor | float, side: Tensor, tick: float) -> Tensor:
    """The worsening `worse` after the fill's price is rounded to a tick, against the trader.

    Args:
      price: `[A]` of the bar. worse: fraction of it. side: `[A]` sign of the trade.
      tick: smallest step of the price, in money.
    """
    xp = arrays(price)
    ticks = price * (1.0 + side * worse) / tick
    rounded = xp.where(side > 0, xp.ceil(ticks - ROUNDING), xp.floor(ticks + ROUNDING))
    rounded = xp.maximum(rounded, 0.0)
    return xp.where(side == 0, worse, side * (rounded * tick / price - 1.0))


def whole_lots(units: Tensor, lot: float) -> Tensor:
    """Units rounded towards zero to a multiple of `lot`; 0 is no rounding."""
    if not lot:
        return units
    xp = arrays(units)
    return xp.sign(units) * xp.floor(abs(units) / lot + ROUNDING) * lot


def worth_sending(units: Tensor, price: Tensor, min_notional: float) -> Tensor:
    """`units` where their value reaches `min_notional` in money; else 0: no order is sent."""
    if not min_notional:
        return units
    return arrays(units).where(abs(units) * price >= min_notional * (1 - ROUNDING), units, 0.0)


def within_volume(units: Tensor, volume: Tensor, max_participation: float | None) -> Tensor:
    """`units` cut to a share of the bar's volume; the rest of the order waits."""
    if max_participation is None:
        return units
    limit = max_participation * volume
    return arrays(units).clip(units, -limit, limit)


def interest(weight_sum: Tensor, costs: Costs, years: Tensor | float) -> Tensor:
    """Interest earned less interest owed on cash `1 - weight_sum`, as a fraction of equity."""
    xp = arrays(weight_sum)
    cash = 1.0 - weight_sum
    earned = costs.interest_lend * xp.maximum(cash, 0.0)
    return years * (earned - costs.interest_borrow * xp.maximum(-cash, 0.0))


def borrow_fee(weight: Tensor, costs: Costs, years: Tensor | float) -> Tensor:
    """The fee on what is sold short, `[A]` weights, as a fraction of equity; not below 0."""
    return years * costs.borrow_fee * arrays(weight).maximum(-weight, 0.0).sum()


def funding(
    weight: Tensor, costs: Costs, years: Tensor | float, rate: Tensor | None = None
) -> Tensor:
    """What longs pay and shorts receive, `[A]` weights, as a fraction of equity.

    Args:
      rate: `[A]` of this bar, as a fraction of the position's value, beside `costs.funding`.
    """
    paid = years * costs.funding * weight.sum()
    return paid if rate is None else paid + (rate * weight).sum()


def margin_called(weight: Tensor, maintenance_margin: float) -> Tensor:
    """Whether equity has fallen below `maintenance_margin` of the gross position, `[A]` weights."""
    return abs(weight).sum() * maintenance_margin > 1.0
