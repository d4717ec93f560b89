"""Fills of an account: which part of an order trades, at which price, and what it costs."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from nca_trader.config import AccountConfig
from nca_trader.envs.account.effects import AccountFill
from nca_trader.envs.account.intrabar import Intrabar, grown, of_each, recorded, without
from nca_trader.envs.account.state import (
    FILLED,
    REST,
    ROUNDING,
    WHOLE,
    Quote,
    executable,
    worsening,
)
from nca_trader.types import Tensor

# Of equity. A buy that lacks less is filled: whether a rest waits must not depend on the last bit
# of a sum. Not of the buy, because in a fully invested account both the buy and the cash for it are
# rounding errors, and so is their quotient.
CUT_OF_ROUNDING = 1e-6
TINY = 1e-30  # of equity, added to what buys need, so that 0 / 0 becomes infinite and not NaN


def fill_pending(now: Intrabar, quote: Quote, rules: AccountConfig) -> tuple[Intrabar, AccountFill]:
    """Fill pending orders at the prices of `quote`, in assets that are present.

    With `s` the fraction by which a fill is worse than the price, and `f` the commission, sells
    bring `S = sum |d_i| (1 - s_i)(1 - f)` and buys need `B = sum d_i (1 + s_i)(1 + f)`. Where cash
    and `S` do not pay for `B`, every buy is divided by one excess. The cost `c` leaves equity, so
    `x <- (x + d) / (1 - c)`. Impact is that of the size before the cut.
    """
    account = now.account
    # An order that meets a missing bar stays pending: there is no price to fill it at.
    active = (account.pending != FILLED) & quote.present & ~now.bankrupt
    # Base and change one after the other: their rounded sum would lose the low part of a pair.
    d = (cap(account.ordered, rules) - now.base) - now.change
    # A quotient, and so computed once for all its readers; what may not trade is d / inf = 0.
    d = d / jnp.where(active & ((account.pending != REST) | (d > 0.0)), 1.0, jnp.inf)
    if rules.capital:
        # A fixed fee is charged for a trade, and not for the rounding that a closed position left.
        d = jnp.where(is_held(d), d, 0.0)
    affordable = d
    d, waits = _constrained(d, now, quote, rules)
    # Computed before cash cuts the order, because impact is that of the whole order.
    worse = worsened(d, now, quote, rules)
    buys, cut = d > 0.0, jnp.zeros(d.shape, bool)
    if not rules.borrow:
        whole, s, f = d, worse[0], rules.costs.commission
        cash = (1.0 - now.base.sum()) - now.change.sum()
        cash = cash + (jnp.maximum(-d, 0.0) * (1.0 - s)).sum() * (1.0 - f)
        if rules.capital:
            cash = cash - rules.costs.fixed_fee / money_of(now, rules) * (d != 0.0).sum()
        need = (jnp.maximum(d, 0.0) * (1.0 + s)).sum() * (1.0 + f)
        # Cash of 0 makes the excess infinite, and every buy d / inf is then 0.
        excess = jnp.maximum((need + TINY) / jnp.maximum(cash, 0.0), 1.0)
        d = d / jnp.where(buys, excess, 1.0)
        affordable = jnp.where(buys & (excess > 1.0), d, affordable)
        cut = whole - d > CUT_OF_ROUNDING
        if rules.sized:
            # The cut buys must be whole lots again, and worth an order; so must the rest be.
            d = jnp.where(buys & (excess > 1.0), _constrained(d, now, quote, rules)[0], d)
            cut &= _constrained(whole - d, now, quote, rules)[0] > 0.0
    left = jnp.where(cut, REST, FILLED)
    small = None
    if waits is not None and (rules.lot or rules.min_notional):
        # What waits for volume or cash was counted when it was ordered, or is tried again.
        unsent = is_held(affordable) & (d == 0.0) & ~waits & (account.pending == WHOLE)
        if rules.lot:
            lots = money_of(now, rules) / (quote.price * rules.lot)
            flat = (jnp.abs(now.held) * lots <= ROUNDING) & (account.ordered != 0.0)
            # Less than a lot more or less of a position that is held does not count.
            unsent &= flat | (jnp.abs(affordable) * lots + ROUNDING >= 1.0)
        small = unsent.sum()
    if waits is not None:
        # What volume held back may trade in either direction later, as the order did before.
        left = jnp.where(waits, account.pending, left)
    pending = jnp.where(active, left, account.pending).astype(jnp.int8)
    now = now._replace(account=account._replace(pending=pending))
    now, fill = _execute(now, d, worse, rules)
    return now, fill._replace(small=small)


def liquidate(now: Intrabar, quote: Quote, rules: AccountConfig) -> tuple[Intrabar, AccountFill]:
    """Close every position in a present asset where the maintenance margin is not met.

    It pays the costs of trading and `liquidation_fee`; lots and volume do not stop it. Orders are
    withdrawn, and a target that is ordered again is a new order.
    """
    # Weights are fractions of equity, so `equity < margin * position` is a comparison with 1.
    gross = abs(now.held).sum()
    called = (gross * rules.maintenance_margin > 1.0) & ~now.bankrupt
    closes = called & quote.present & is_held(now.held)
    after, fill = close_out(now, closes, quote, rules, rules.costs.liquidation_fee)
    return without(after, called & quote.present, called), fill


def close_out(
    now: Intrabar,
    closes: Tensor,
    quote: Quote,
    rules: AccountConfig,
    liquidation_fee: Tensor | float | None = None,
) -> tuple[Intrabar, AccountFill]:
    """Close the whole positions in `closes` `[A]` at the prices of `quote`, at any size."""
    d = jnp.where(closes, -now.held, 0.0)
    worse = worsened(d, now, quote, rules)
    return _execute(now, d, worse, rules, liquidation_fee)


def cap(target: Array, rules: AccountConfig) -> Array:
    """Scale the whole target down to `max_gross` and `max_net`; its direction stays."""
    over = None
    for cap, size in ((rules.max_gross, jnp.abs(target).sum()), (rules.max_net, target.sum())):
        if cap < math.inf:
            times = jnp.maximum(jnp.abs(size) / cap, 1.0)
            over = times if over is None else jnp.maximum(over, times)
    return target if over is None else target / over


def _execute(
    now: Intrabar,
    d: Array,
    worse: tuple[Tensor | float, Tensor | float, Tensor | float, tuple[Tensor | float, ...]],
    rules: AccountConfig,
    liquidation_fee: Tensor | float | None = None,
) -> tuple[Intrabar, AccountFill]:
    """Trade `d` `[A]` at prices that are `worse`, and pay the cost `c` from equity."""
    size, (s, spread, impacted, parts), costs = jnp.abs(d), worse, rules.costs
    listed, *own = parts or (s,)
    # Commission is charged on the amount paid, so slippage adds to it in a buy, and not in a sale.
    paid = size + d * s
    fee = costs.fixed_fee / money_of(now, rules) if rules.capital else 0.0
    items = {
        "commission": -costs.commission * paid.sum(),
        "slippage": -(size * (listed - spread - impacted)).sum(),
        "spread": -(size * spread).sum(),
        "impact": -(size * impacted).sum(),
        "fixed_fee": -fee * (d != 0.0).sum(),
    }
    cost = (size * s).sum() + costs.commission * paid.sum()
    if rules.capital:
        cost = cost - items["fixed_fee"]
    if liquidation_fee is not None:
        items["liquidation"] = -(liquidation_fee * size).sum()
        cost = cost - items["liquidation"]  # items are negative, costs positive
    each = size * s + costs.commission * paid
    if rules.capital:
        each = each + jnp.where(d != 0.0, fee, 0.0)
    if liquidation_fee is not None:
        each = each + liquidation_fee * size
    charged = [-(size * rate).sum() for rate in own]
    after = grown(now, -cost)
    whole = now.held + d
    safe = jnp.where(cost < 1.0, 1.0 - cost, 1.0)  # a cost of all equity is bankruptcy
    # A traded weight is a new base; of the others only the small change moves.
    base = jnp.where(d != 0.0, whole, now.base)
    change = jnp.where(d != 0.0, 0.0, now.change) + whole * (cost / safe)
    after = after._replace(held=whole / of_each(safe, whole), base=base, change=change)
    flows = recorded(now, after, items, rules, charged)
    return after, AccountFill(d, each, flows, left=whole, growth=now.growth)


def is_held(held: Array) -> Array:
    """Whether each weight is a position, and not what rounding leaves of one that was closed."""
    return jnp.abs(held) > 16.0 * jnp.finfo(held.dtype).eps


def money_of(now: Intrabar, rules: AccountConfig) -> Array:
    """`[]` the account's equity in money; needs a capital."""
    return rules.capital * now.equity


def _constrained(
    d: Array, now: Intrabar, quote: Quote, rules: AccountConfig
) -> tuple[Array, Array | None]:
    """Return `[A]` the trades that a venue executes, and a mask of those that wait for volume.

    The mask is None where no limit is set.
    """
    if not rules.sized:
        return d, None
    scale = money_of(now, rules) / quote.price
    units = d * scale
    allowed, waits = executable(units, quote, rules)
    # Weights that no rule cut are returned unchanged: conversion to money and back would change
    # their last bits.
    return jnp.where(allowed == units, d, allowed / scale), jnp.asarray(waits)


def worsened(
    d: Array, now: Intrabar, quote: Quote, rules: AccountConfig
) -> tuple[Tensor | float, Tensor | float, Tensor | float, tuple[Tensor | float, ...]]:
    """Return the terms of `worsening` for trades `d` `[A]` in fractions of equity."""
    if not rules.capital:  # without a capital neither impact nor ticks can be set
        return worsening(d, quote, rules)
    money = money_of(now, rules)
    return worsening(d * (money / quote.price), quote, rules, money)
