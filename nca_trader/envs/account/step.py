"""What moves an account: a bar, and an order.

Training `vmap`s these functions, a backtest `scan`s them, paper trading calls them once a bar;
there is no other accounting in the package.

One bar is two calls. `on_bar` marks the gap to the bar's open, fills there what is pending, and
marks the body to its close. Then, with the close seen, `place` orders a target, which fills at
that close (`fill="close"`) or stays pending for the next open (`fill="next_open"`).
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.envs.account import costs as cost_of
from nca_trader.envs.account.intrabar import (
    Intrabar,
    begin,
    carry,
    mark,
    pay,
    recorded,
    settle,
    without,
)
from nca_trader.envs.account.legs import Legs, Quote
from nca_trader.envs.account.state import FILLED, REST, WHOLE, Account, Fill, Rules
from nca_trader.types import Costs, Tensor

# Of equity. A buy that lacks less has filled: whether a rest waits must not hang on the last bit of
# a sum. Of equity and not of the buy, because of an account that is fully invested already both the
# buy and the cash for it are nothing but rounding, and so is their quotient.
CUT_OF_ROUNDING = 1e-6
TINY = 1e-30  # of equity, added to what buys need: nothing over nothing is then infinite, not NaN


def fill_pending(now: Intrabar, quote: Quote, costs: Costs, rules: Rules) -> tuple[Intrabar, Fill]:
    """Fills what is pending at the price of the moment, in assets that are present.

    With `s` the fraction by which a fill is worse than the price, and `f` the commission, sells
    bring `S = sum |d_i| (1 - s_i)(1 - f)` and buys need `B = sum d_i (1 + s_i)(1 + f)`; where
    cash and `S` do not pay for `B`, every buy is divided by one excess. The cost `c` leaves
    equity, so `x <- (x + d) / (1 - c)`. Impact is that of the size before the cut.
    """
    account = now.account
    active = (account.pending != FILLED) & quote.present & ~now.ruined
    d = (capped(account.ordered, rules) - now.base) - now.change
    # A quotient, and so computed once for all that follows; what may not trade is d / inf = 0.
    d = d / jnp.where(active & ((account.pending != REST) | (d > 0.0)), 1.0, jnp.inf)
    d, waits = _constrained(d, now, quote, rules)
    s, parts = _worsening(d, now, quote, costs, rules)
    buys, whole, excess = d > 0.0, d, _excess(d, s, now, costs, rules)
    if excess is None:
        cut = jnp.zeros_like(buys)
    else:
        d = d / jnp.where(buys, excess, 1.0)
        cut = whole - d > CUT_OF_ROUNDING
    if excess is not None and rules.sized:
        # What the cut left must be whole lots again, and worth an order; so must the rest be.
        d = jnp.where(buys & (excess > 1.0), _constrained(d, now, quote, rules)[0], d)
        cut &= _constrained(whole - d, now, quote, rules)[0] > 0.0
    left = jnp.where(cut, REST, FILLED)
    if waits is not None:
        left = jnp.where(waits, account.pending, left)
    pending = jnp.where(active, left, account.pending).astype(jnp.int8)
    now = now._replace(account=account._replace(pending=pending))
    return _execute(now, d, s, parts, costs, rules)


def liquidate(now: Intrabar, quote: Quote, costs: Costs, rules: Rules) -> tuple[Intrabar, Fill]:
    """Closes every position that can be, where the maintenance margin is no longer met.

    It pays what trading costs, and `liquidation_fee`; lots and volume do not stop it. Orders
    are withdrawn, and a target that is ordered again is a new order.
    """
    called = cost_of.margin_called(now.held, rules.maintenance_margin or 0.0) & ~now.ruined
    closes = called & quote.present
    d = jnp.where(closes, -now.held, 0.0)
    s, parts = _worsening(d, now, quote, costs, rules)
    after, fill = _execute(now, d, s, parts, costs, rules, costs.liquidation_fee)
    return without(after, closes, called), fill


def capped(target: Array, rules: Rules) -> Array:
    """Scales the whole target down to `max_gross` and `max_net`; its direction stays."""
    over = None
    for cap, size in ((rules.max_gross, jnp.abs(target).sum()), (rules.max_net, target.sum())):
        if cap is not None:
            times = jnp.maximum(jnp.abs(size) / cap, 1.0)
            over = times if over is None else jnp.maximum(over, times)
    return target if over is None else target / over


def _units_a_weight(now: Intrabar, quote: Quote, rules: Rules) -> Array:
    """`[A]` units that a weight of 1 means at the price of the moment; needs a capital."""
    return _money(now, rules) / jnp.asarray(quote.price)


def _money(now: Intrabar, rules: Rules) -> Array:
    """`[]` the account's equity in money; needs a capital."""
    return (rules.capital or 0.0) * now.equity


def _constrained(d: Array, now: Intrabar, quote: Quote, rules: Rules) -> tuple[Array, Array | None]:
    """`[A]` trades that a venue takes, and which of them wait for more volume (None: none can)."""
    if not rules.sized:
        return d, None
    scale = _units_a_weight(now, quote, rules)
    units = d * scale
    allowed = cost_of.within_volume(units, jnp.asarray(quote.volume), rules.max_participation)
    waits = jnp.abs(allowed) < jnp.abs(units)
    allowed = cost_of.whole_lots(allowed, rules.lot)
    allowed = cost_of.worth_sending(allowed, jnp.asarray(quote.price), rules.min_notional)
    return jnp.where(allowed == units, d, allowed / scale), waits


def _worsening(
    d: Array, now: Intrabar, quote: Quote, costs: Costs, rules: Rules
) -> tuple[Tensor | float, tuple[Tensor | float, Tensor | float]]:
    """How much worse than the price a fill is, and of it (spread, impact); `[A]`, or for all."""
    impacted = 0.0
    if rules.capital is not None:
        units = d * _units_a_weight(now, quote, rules)
        impacted = cost_of.impact(costs.impact, units, jnp.asarray(quote.volume))
    s, spread = cost_of.worsening(costs, quote.half_spread, impacted)
    if rules.tick:
        s = cost_of.on_tick(jnp.asarray(quote.price), s, jnp.sign(d), rules.tick)
    return s, (spread, impacted)


def _at_least_nothing(d: Array, s: Tensor | float) -> Tensor | float:
    """`s` where no price falls below zero: what is sold brings at least nothing."""
    if isinstance(s, float) and s <= 1.0:
        return s
    return jnp.where(d < 0.0, jnp.minimum(s, 1.0), s)


def _fixed_fee(now: Intrabar, costs: Costs, rules: Rules) -> Array | float:
    """A fill's fixed fee as a fraction of equity."""
    return 0.0 if rules.capital is None else costs.fixed_fee / _money(now, rules)


def _excess(d: Array, s: Tensor | float, now: Intrabar, costs: Costs, rules: Rules) -> Array | None:
    """`[]` what every buy must be divided by for cash to pay for all; None where all is paid."""
    if rules.borrow:
        return None
    f, s = costs.commission, _at_least_nothing(d, s)
    cash = (1.0 - now.base.sum()) - now.change.sum()
    cash = cash + (jnp.maximum(-d, 0.0) * (1.0 - s)).sum() * (1.0 - f)
    if rules.capital is not None:
        cash = cash - _fixed_fee(now, costs, rules) * (d != 0.0).sum()
    need = (jnp.maximum(d, 0.0) * (1.0 + s)).sum() * (1.0 + f)
    return jnp.maximum((need + TINY) / jnp.maximum(cash, 0.0), 1.0)


def _execute(
    now: Intrabar,
    d: Array,
    s: Tensor | float,
    parts: tuple[Tensor | float, Tensor | float],
    costs: Costs,
    rules: Rules,
    liquidation_fee: float | None = None,
) -> tuple[Intrabar, Fill]:
    """Trades `d` `[A]` at prices worse by `s` `[A]`, and pays for it out of equity."""
    s, size, (spread, impacted) = _at_least_nothing(d, s), jnp.abs(d), parts
    paid = size + d * s
    fee = _fixed_fee(now, costs, rules)
    items = {
        "commission": -costs.commission * paid.sum(),
        "slippage": -(size * (s - spread - impacted)).sum(),
        "spread": -(size * spread).sum(),
        "impact": -(size * impacted).sum(),
        "fixed_fee": -fee * (d != 0.0).sum(),
    }
    cost = (size * s).sum() + costs.commission * paid.sum()
    if rules.capital is not None:
        cost = cost - items["fixed_fee"]
    if liquidation_fee is not None:
        items["liquidation"] = -liquidation_fee * size.sum()
        cost = cost - items["liquidation"]
    return pay(now, d, cost, items, rules)


def on_bar(account: Account, legs: Legs, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Moves the account from one close to the next, filling what is pending at the open.

    In this order: the gap (with dividends), holding charges, the closing of what was delisted, a
    margin call at the open, the fill, the body, funding of the bar, a margin call at the close.
    Charges for time are taken from the positions that were held through it, before they change:
    where orders fill at the open, at the open and for the time since the last one; where they
    fill at the close, at the close.
    """
    now, fill = mark(begin(account, rules), legs.gap, rules, legs.dividend, legs.delisted)
    fills = [fill]
    at_open = rules.fill == "next_open"
    if at_open and legs.years is not None:
        now, fill = carry(now, legs.years, None, costs, rules)
        fills.append(fill)
    if legs.delisted is not None:
        now = without(now, legs.delisted, legs.delisted)
    if rules.maintenance_margin is not None:
        now, fill = liquidate(now, legs.at_open, costs, rules)
        fills.append(fill)
    if at_open:
        now, fill = fill_pending(now, legs.at_open, costs, rules)
        fills.append(fill)
    now, fill = mark(now, legs.body, rules)
    fills.append(fill)
    years = None if at_open else legs.years
    if years is not None or legs.funding is not None:
        now, fill = carry(now, years, legs.funding, costs, rules)
        fills.append(fill)
    if rules.maintenance_margin is not None:
        now, fill = liquidate(now, legs.at_close, costs, rules)
        fills.append(fill)
    return settle(now, rules), jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *fills)


def place(
    account: Account, target: Tensor, quote: Quote, costs: Costs, rules: Rules
) -> tuple[Account, Fill]:
    """Orders `target` `[A]` weights, NaN where there is no order, with this bar's close seen.

    "on_change" orders where the target differs from the last one ordered; "rebalance" orders
    every target that is given. `quote` is what an order can fill at, at this close.
    """
    chex.assert_equal_shape([account.weight, target])
    given = ~(jnp.isnan(target) | account.ruined)
    new = given & (target != account.ordered) if rules.order == "on_change" else given
    account = account._replace(
        ordered=jnp.where(given, target, account.ordered),
        pending=jnp.where(new, WHOLE, account.pending).astype(jnp.int8),
    )
    if rules.fill == "close":
        return trade(account, quote, costs, rules)
    now = begin(account, rules)
    return account, recorded(now, now, {}, rules)


def trade(account: Account, quote: Quote, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Fills what is pending now, at the price of the moment; see `fill_pending`."""
    now, fill = fill_pending(begin(account, rules), quote, costs, rules)
    return settle(now, rules), fill
