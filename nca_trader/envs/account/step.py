"""What moves an account: a bar, and an order.

Training `vmap`s these functions, a backtest `scan`s them, paper trading calls them once a bar;
there is no other accounting in the package.

One bar is two calls. `on_bar` marks the gap to the bar's open, fills there what is pending, and
marks the body to its close. Then, with the close seen, `place` orders a target, which fills at
that close (`fill="close"`) or stays pending for the next open (`fill="next_open"`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.envs.account.state import (
    FILLED,
    REST,
    WHOLE,
    Account,
    Fill,
    Flows,
    Legs,
    Quote,
    Rules,
    borrow_fee,
    equity,
    funding,
    impact,
    interest,
    margin_called,
    on_tick,
    whole_lots,
    within_volume,
    worsening,
    worth_sending,
)
from nca_trader.numerics import pair_add, two_sum
from nca_trader.types import Costs, Tensor

# Of equity. A buy that lacks less has filled: whether a rest waits must not hang on the last bit of
# a sum. Of equity and not of the buy, because of an account that is fully invested already both the
# buy and the cash for it are nothing but rounding, and so is their quotient.
CUT_OF_ROUNDING = 1e-6
TINY = 1e-30  # of equity, added to what buys need: nothing over nothing is then infinite, not NaN


class Intrabar(NamedTuple):
    """An account between the beginning and the end of a bar or an order.

    account: as it began; only its orders are kept up to date. growth: `[]` equity now over
    equity then, less 1. room: `[]` the growth at which equity is at the floor. held: `[A]`
    weights now, rounded at every step. base, change: `[A]` the same weights are their sum, which
    is not. ruined: `[]` bool.
    """

    account: Account
    growth: Array | float
    room: Array
    held: Array
    base: Array
    change: Array
    ruined: Array

    @property
    def equity(self) -> Array:
        """`[]` equity now, as a fraction of the start's."""
        return equity(self.account) * (1.0 + self.growth)


def begin(account: Account, rules: Rules) -> Intrabar:
    """The account as its bar, or its order, begins."""
    behind = (math.log(rules.floor) - account.log_equity) - account.log_equity_low
    return Intrabar(
        account=account,
        growth=0.0,  # not an array: XLA would go on multiplying by it
        room=jnp.expm1(behind),
        held=account.held,
        base=account.weight,
        change=account.weight_low,
        ruined=account.ruined,
    )


def settle(now: Intrabar, rules: Rules) -> Account:
    """Closes the books: `L += log1p(growth)`, and the weights become pairs again."""
    account, ruined = now.account, now.ruined
    grown = jnp.log1p(jnp.where(ruined, 0.0, now.growth))
    log_equity, log_equity_low = pair_add(account.log_equity, account.log_equity_low, grown)
    weight, weight_low = two_sum(now.base, now.change)
    return account._replace(
        log_equity=jnp.where(ruined, math.log(rules.floor), log_equity),
        log_equity_low=jnp.where(ruined, 0.0, log_equity_low),
        weight=jnp.where(ruined, 0.0, weight),
        weight_low=jnp.where(ruined, 0.0, weight_low),
        ordered=jnp.where(ruined, 0.0, account.ordered),
        pending=jnp.where(ruined, FILLED, account.pending).astype(jnp.int8),
        ruined=ruined,
    )


def earn(
    now: Intrabar, return_: Tensor, items: Mapping[str, Tensor], rules: Rules
) -> tuple[Intrabar, Fill]:
    """Adds `items`, fractions of equity, while the assets held return `return_` `[A]`."""
    gain = jnp.asarray(sum(items.values()))
    after = _grown(now, gain)
    safe = jnp.where(gain > -1.0, 1.0 + gain, 1.0)
    safe = _of_each(safe, now.held)
    held = now.held * (1.0 + return_) / safe
    change = now.change + now.held * ((return_ - gain) / safe)
    return after._replace(held=held, change=change), recorded(now, after, items, rules)


def _of_each(divisor: Array, x: Array) -> Array:
    """`divisor` `[]` for each of `x` `[A]`; NaN for NaN, as the quotient is anyway.

    Of `x / y` with one y for many x, XLA makes `x * (1 / y)` in one program and not in another,
    and rounds so: a run on eight devices would not end in the bits of a run on one.
    """
    return jnp.where(x == x, divisor, jnp.nan)


def pay(
    now: Intrabar, d: Array, cost: Array, items: Mapping[str, Tensor], rules: Rules
) -> tuple[Intrabar, Fill]:
    """Trades `d` `[A]` and pays `cost` `[]` out of equity, `x <- (x + d) / (1 - c)`."""
    after = _grown(now, -cost)
    traded = d != 0.0
    whole = now.held + d
    safe = jnp.where(cost < 1.0, 1.0 - cost, 1.0)
    base = jnp.where(traded, whole, now.base)
    change = jnp.where(traded, 0.0, now.change) + whole * (cost / safe)
    after = after._replace(held=whole / _of_each(safe, whole), base=base, change=change)
    return after, recorded(now, after, items, rules)._replace(traded=d, cost=cost)


def mark(
    now: Intrabar,
    return_: Tensor,
    rules: Rules,
    dividend: Tensor | None = None,
    delisted: Tensor | None = None,
) -> tuple[Intrabar, Fill]:
    """Moves the account through simple returns `[A]` without trading.

    `g = sum_i x_i (r_i + y_i); L += log1p(g); x_i += x_i (r_i - g) / (1 + g)`.

    Args:
      dividend: `[A]` y, cash paid as a fraction of the price before. delisted: `[A]` bool, the
        asset is gone: this return is what a position in it loses; `without` then closes it.
    """
    chex.assert_equal_shape([now.base, return_])
    gain = now.held * return_
    items = {"market": gain.sum()}
    if dividend is not None:
        items["dividends"] = (now.held * dividend).sum()
    if delisted is not None:
        items["delisting"] = jnp.where(delisted, gain, 0.0).sum()
        items["market"] = jnp.where(delisted, 0.0, gain).sum()
    return earn(now, return_, items, rules)


def carry(
    now: Intrabar, years: Tensor | None, rate: Tensor | None, costs: Costs, rules: Rules
) -> tuple[Intrabar, Fill]:
    """Charges and pays what holding the positions of this moment costs and earns; see `Costs`.

    `h = years (i_lend max(0, 1 - sum x) - i_borrow max(0, sum x - 1) - fee sum max(0, -x)
    - i_funding sum x) - rate . x;  L += log1p(h);  x <- x / (1 + h)`.

    Args:
      years: `[]` for which the positions were held; None charges nothing for time.
      rate: `[A]` funding of this bar, `Bars.funding`; None where bars have none.
    """
    held, items = now.held, {}
    if years is not None:
        items["interest"] = interest(held.sum(), costs, years)
        items["borrow_fee"] = -borrow_fee(held, costs, years)
    if rate is not None or _maybe_charged(costs.funding):
        items["funding"] = -funding(held, costs, 0.0 if years is None else years, rate)
    return earn(now, jnp.zeros_like(held), items, rules)


def without(now: Intrabar, closed: Tensor, withdrawn: Tensor) -> Intrabar:
    """The account without what it held of `closed` `[A]` assets and its orders of `withdrawn`."""
    account = now.account
    orders = account._replace(
        ordered=jnp.where(withdrawn, 0.0, account.ordered),
        pending=jnp.where(withdrawn, FILLED, account.pending).astype(jnp.int8),
    )
    return now._replace(
        account=orders,
        held=jnp.where(closed, 0.0, now.held),
        base=jnp.where(closed, 0.0, now.base),
        change=jnp.where(closed, 0.0, now.change),
    )


def recorded(now: Intrabar, after: Intrabar, items: Mapping[str, Tensor], rules: Rules) -> Fill:
    """The fill of `items`, fractions of equity `now`; ruin is what they do not explain."""
    none = jnp.zeros_like(now.room)
    flows = {
        name: jnp.where(now.ruined, 0.0, now.equity * amount) + none
        for name, amount in items.items()
    }
    left = now.equity + jnp.asarray(sum(flows.values()))
    flows["ruin"] = jnp.where(after.ruined & ~now.ruined, rules.floor - left, 0.0)
    every = Flows(**{name: flows.get(name, none) for name in Flows._fields})
    return Fill(jnp.zeros_like(now.base), none, every)


def _maybe_charged(rate: Tensor | float) -> bool:
    """Whether a rate is not known to be 0 before the program runs."""
    return not isinstance(rate, float) or rate != 0.0


def _grown(now: Intrabar, gain: Array) -> Intrabar:
    """Compounds `gain` `[]`, and sees whether ruin has come."""
    begun = isinstance(now.growth, float)  # nothing to compound with yet
    growth = gain if begun else now.growth + gain + now.growth * gain
    ruined = now.ruined | (gain <= -1.0) | (growth <= now.room)
    return now._replace(growth=growth, ruined=ruined)


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
    called = margin_called(now.held, rules.maintenance_margin or 0.0) & ~now.ruined
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
    allowed = within_volume(units, jnp.asarray(quote.volume), rules.max_participation)
    waits = jnp.abs(allowed) < jnp.abs(units)
    allowed = whole_lots(allowed, rules.lot)
    allowed = worth_sending(allowed, jnp.asarray(quote.price), rules.min_notional)
    return jnp.where(allowed == units, d, allowed / scale), waits


def _worsening(
    d: Array, now: Intrabar, quote: Quote, costs: Costs, rules: Rules
) -> tuple[Tensor | float, tuple[Tensor | float, Tensor | float]]:
    """How much worse than the price a fill is, and of it (spread, impact); `[A]`, or for all."""
    impacted = 0.0
    if rules.capital is not None:
        units = d * _units_a_weight(now, quote, rules)
        impacted = impact(costs.impact, units, jnp.asarray(quote.volume))
    s, spread = worsening(costs, quote.half_spread, impacted)
    if rules.tick:
        s = on_tick(jnp.asarray(quote.price), s, jnp.sign(d), rules.tick)
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
