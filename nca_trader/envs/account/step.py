"""How an account moves: through a bar, and by an order.

Training `vmap`s these functions, a backtest `scan`s them, paper trading calls them once per bar;
the package has no other accounting.

One bar is two calls. `on_bar` marks the gap to the bar's open, fills there what is pending, and
marks the body to its close, with what is left on the way. Then, with the close seen, `place` orders
a target, which fills at that close (`fill="close"`) or stays pending for the next open
(`fill="next_open"`).

Every step of a bar multiplies equity and moves the weights by small fractions. `Intrabar` gathers
them, and `settle` adds them to the account's pairs of floats once per bar: half the operations of
settling each step. No digit is lost, because the fractions are small.

Formulas divide where they could multiply by a known reciprocal. That is deliberate: several results
share each quotient, and XLA's CPU backend computes a division once for all its readers, but repeats
sums and products for each (six times the operations; docs/lab-notes/environments.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.envs.account.risk import Intent, judge
from nca_trader.envs.account.state import (
    FILLED,
    LIQUIDATED,
    NONE,
    REST,
    STOP_LOSS,
    TRAILING_STOP,
    WHOLE,
    Account,
    Exit,
    Fill,
    Flows,
    Legs,
    Quote,
    Rules,
    add_flows,
    equity,
    executable,
    worsening,
)
from nca_trader.numerics import pair_add, two_sum
from nca_trader.types import Costs, Tensor

# Of equity. A buy that lacks less is filled: whether a rest waits must not depend on the last bit
# of a sum. Not of the buy, because in a fully invested account both the buy and the cash for it are
# rounding errors, and so is their quotient.
CUT_OF_ROUNDING = 1e-6
TINY = 1e-30  # of equity, added to what buys need: nothing over nothing is then infinite, not NaN


def on_bar(account: Account, legs: Legs, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Move the account from one close to the next, filling pending orders at the open.

    In this order: the gap (with dividends), holding charges, the closing of delisted positions, a
    margin call at the open, the fill, the body with a margin call inside it, funding of the bar, a
    margin call at the close.
    Charges for time are taken from the positions that were held through it, before they change: at
    the open where orders fill at the open, at the close where they fill at the close.

    Args:
      account: at the close of the bar before.
      legs: the bar's overnight and intraday returns, and its prices.
      costs: of trading and holding; they may be traced.
      rules: of the account, static: what they switch off is not in the compiled program.

    Returns:
      The account at the bar's close, and the effects of the bar.
    """
    now, fills = to_open(account, legs, costs, rules)
    now, inside, _ = through(now, legs, costs, rules)
    return to_close(now, [*fills, *inside], legs, costs, rules)


def to_open(
    account: Account, legs: Legs, costs: Costs, rules: Rules
) -> tuple[Intrabar, list[Fill]]:
    """Move the account from the close before to the bar's open, and fill there what is pending.

    Args and order: as `on_bar`, up to the fill.
    """
    now, fill = mark(begin(account, rules), legs.gap, rules, legs.dividend, legs.delisted)
    fills = [fill]
    at_open = rules.fill == "next_open"
    # Before the fill: a short that closes at Monday's open pays for the weekend, and one that opens
    # there does not.
    if at_open and legs.years is not None:
        now, fill = carry(now, legs.years, None, costs, rules)
        fills.append(fill)
    if legs.delisted is not None:
        now = without(now, legs.delisted, legs.delisted)
    if rules.maintenance_margin is not None:
        # Before the fill as well: a call withdraws the orders, and none of them may fill after it.
        now, fill = liquidate(now, legs.at_open, costs, rules)
        fills.append(fill)
    if at_open:
        now, fill = fill_pending(now, legs.at_open, costs, rules)
        fills.append(fill)
    return now, fills


class Reached(NamedTuple):
    """Levels that a bar reaches, `[A]` each.

    moved: return from the open to the level. price: the level. reason: a value of `Exit.reason`.
    at_open: bool, the open has passed the level.
    """

    moved: Tensor
    price: Tensor
    reason: Tensor
    at_open: Tensor


def through(
    now: Intrabar, legs: Legs, costs: Costs, rules: Rules, reached: Reached | None = None
) -> tuple[Intrabar, list[Fill], Exit | None]:
    """Move the account through the bar's body, and leave positions on the way.

    A bar does not say in which order its prices came, so the adverse ones count first: see
    `_called_inside`. What is left there pays the costs of trading; lots and volume do not stop it.

    Args:
      now: the account at the open, after its fills.
      legs: of the bar.
      costs: of trading.
      rules: of the account.
      reached: the levels of orders; None without any.

    Returns:
      The account before what is charged at the close, the effects, and what left; None where
      nothing can.
    """
    if reached is None and legs.low is None:
        now, fill = mark(now, legs.body, rules)
        return now, [fill], None
    body, reason = jnp.asarray(legs.body), jnp.zeros(now.held.shape, jnp.int8)
    if reached is not None:
        reason = reached.reason
        body = jnp.where(reason != NONE, reached.moved, body).astype(body.dtype)
    called = jnp.zeros((), bool)
    if legs.low is not None:
        called, moved, before = _called_inside(now, legs, costs, rules, reached)
        forced = called & ~before & legs.present & _is_held(now.held)
        body = jnp.where(called & ~before, moved, body).astype(body.dtype)
        # What the path did not come to is not reached.
        reason = jnp.where(forced, LIQUIDATED, jnp.where(called & ~before, NONE, reason))
    left = reason != NONE
    price = jnp.ones_like(body) if legs.open is None else legs.open * (1.0 + body)
    if reached is not None:
        price = jnp.where(left & (reason != LIQUIDATED), reached.price, price)
    now, fill = mark(now, body.astype(now.held.dtype), rules)
    # Bankruptcy on the way leaves nothing to close.
    closes = left & ~now.ruined
    quote = Quote(legs.present, price.astype(now.held.dtype), legs.volume, legs.half_spread)
    fee = jnp.where(reason == LIQUIDATED, costs.liquidation_fee, 0.0).astype(now.held.dtype)
    now, closed = close_out(now, closes, quote, costs, rules, None if legs.low is None else fee)
    exit_ = Exit(
        closed.traded,
        jnp.where(left, price, jnp.nan),
        jnp.where(closes, reason, NONE).astype(jnp.int8),
        closed.cost,
    )
    pending = jnp.where(closes, FILLED, now.account.pending).astype(jnp.int8)
    now = now._replace(account=now.account._replace(pending=pending))
    if legs.low is not None:
        called = called & ~now.ruined
        now = without(now, called & legs.present, called)
    return now, [fill, closed], exit_


def _called_inside(
    now: Intrabar, legs: Legs, costs: Costs, rules: Rules, reached: Reached | None
) -> tuple[Array, Array, Array]:
    """Find the margin call on the way from the open to the bar's adverse prices.

    All positions move together: after a share u of the way each has moved by u of the return to its
    low, of a short position to its high. Stops fill where the way comes to them. Between them
    equity and the gross position are linear in u, so equity meets its margin at a root.

    Returns:
      `[]` bool whether there is a call, `[A]` returns from the open to it, and `[A]` bool whether a
      level was reached before.
    """
    held, margin = now.held, rules.maintenance_margin or 0.0
    worst = jnp.where(held > 0.0, jnp.asarray(legs.low), jnp.asarray(legs.high))
    place, cost = jnp.full(held.shape, jnp.inf, held.dtype), jnp.zeros_like(held)
    if reached is not None:
        stops = (reached.reason == STOP_LOSS) | (reached.reason == TRAILING_STOP)
        moved = jnp.asarray(reached.moved, held.dtype)
        share = moved / jnp.where(worst != 0.0, worst, 1.0)
        # A level that the open has passed is left at the open, before the way begins.
        place = jnp.where(
            reached.at_open, 0.0, jnp.where(stops, jnp.clip(share, 0.0, 1.0), jnp.inf)
        )
        d = jnp.where(jnp.isfinite(place), -held * (1.0 + moved), 0.0)
        # A level of an asset without a price yet is NaN.
        price = jnp.where(jnp.isfinite(place), reached.price, 1.0)
        quote = Quote(legs.present, price, legs.volume, legs.half_spread)
        s = _worsening(d, now, quote, costs, rules)[0]
        cost = jnp.abs(d) * s + costs.commission * (jnp.abs(d) + d * s)
        if rules.capital is not None:
            cost = cost + costs.fixed_fee / _money(now, rules) * (d != 0.0)
    # Of the positions that stand after the way has come to each stop: [K] places, [K, A] masks.
    begins = jnp.concatenate([jnp.zeros(1, held.dtype), jnp.where(place < jnp.inf, place, 0.0)])
    begins = begins if reached is not None else begins[:1]
    gone = place[None, :] <= begins[:, None]
    gain, size = held * worst, jnp.abs(held)
    safe = jnp.where(jnp.isfinite(place), place, 0.0)
    fixed = 1.0 + jnp.where(gone, (gain * safe - cost)[None, :], 0.0).sum(axis=1)
    fixed = fixed - margin * jnp.where(gone, 0.0, size[None, :]).sum(axis=1)
    slope = jnp.where(gone, 0.0, (gain - margin * size * worst)[None, :]).sum(axis=1)
    ends = jnp.where(gone, jnp.inf, place[None, :]).min(axis=1)
    falls = slope < 0.0
    root = jnp.where(falls, -fixed / jnp.where(falls, slope, 1.0), jnp.inf)
    root = jnp.where(fixed + slope * begins < 0.0, begins, jnp.maximum(root, begins))
    first = jnp.where((root < ends) & (root <= 1.0), root, jnp.inf).min()
    called = (first <= 1.0) & ~now.ruined & _is_held(held).any()
    first = jnp.where(called, first, 0.0)
    return called, first * worst, place <= first


def to_close(
    now: Intrabar, fills: list[Fill], legs: Legs, costs: Costs, rules: Rules
) -> tuple[Account, Fill]:
    """Close the bar after its body: what is charged at the close, and a margin call there.

    Args:
      now: the account after the body.
      fills: the effects of the bar so far.
      legs: of the bar.
      costs: of holding.
      rules: of the account.

    Returns:
      The account at the bar's close, and the effects of the whole bar.
    """
    # The bars' own funding is paid at their close with either fill, by those who hold then.
    years = None if rules.fill == "next_open" else legs.years
    if years is not None or legs.funding is not None:
        now, fill = carry(now, years, legs.funding, costs, rules)
        fills = [*fills, fill]
    if rules.maintenance_margin is not None:
        now, fill = liquidate(now, legs.at_close, costs, rules)
        fills = [*fills, fill]
    account = settle(now, rules)
    if legs.size is not None:
        account = account._replace(size=legs.size)
    whole = sum_fills(fills)
    return account, whole._replace(flows=add_flows(*(fill.flows for fill in fills)))


def sum_fills(fills: list[Fill]) -> Fill:
    """Add the effects of a bar up to some moment of it, without their flows."""
    bare = (fill._replace(flows=()) for fill in fills)
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *bare)


def place(
    account: Account, target: Tensor, quote: Quote, costs: Costs, rules: Rules
) -> tuple[Account, Fill]:
    """Order a target, with this bar's close seen.

    "on_change" orders where the target differs from the last one ordered; "rebalance" orders
    every target that is given. A dead band leaves out what moved too little.

    Args:
      account: at the close.
      target: `[A]` weights, NaN for no order. They are multiplied by the size of `quote`.
      quote: prices at which an order can fill at this close.
      costs: of trading, paid if the order fills here.
      rules: of the account.

    Returns:
      The account with the order, filled if `rules.fill` is "close", and the effects of the fill.
    """
    chex.assert_equal_shape([account.weight, target])
    # A target of NaN leaves the last order as it is; a target of 0 would close the position.
    given = ~(jnp.isnan(target) | account.ruined)
    if quote.size is not None:
        target = target * jnp.asarray(quote.size, account.weight.dtype)
    if rules.risk is not None:
        account, target = guarded(account, target, quote, rules)
        given = given & ~jnp.isnan(target)
    new = _is_order(account, target, rules) & given
    if rules.dead_band:
        given = new
    account = account._replace(
        ordered=jnp.where(given, target, account.ordered),
        # A target that is not new keeps what is pending, e.g. the rest of a buy that cash cut.
        pending=jnp.where(new, WHOLE, account.pending).astype(jnp.int8),
    )
    if rules.fill == "close":
        return trade(account, quote, costs, rules)
    now = begin(account, rules)
    return account, recorded(now, now, {}, rules)


def guarded(account: Account, target: Tensor, quote: Quote, rules: Rules) -> tuple[Account, Array]:
    """Apply `rules.risk` to a target; return the account and what may be ordered.

    A halt withdraws what is pending. The position is what was last ordered then, so that the same
    target is a new order after trading has been resumed.
    """
    limits, seconds, moved = rules.risk, quote.seconds, quote.moved
    if limits is None or seconds is None or moved is None:
        raise ValueError("limits need a quote with the bar's time and move; see `next_legs`.")
    worth = account.log_equity + account.log_equity_low
    intent = Intent(target, account.held, account.ordered, worth, seconds, moved)

    def is_order(target: Array) -> Array:
        return _is_order(account, target, rules) & ~account.ruined

    guard, target = judge(account.guard, intent, limits, is_order)
    withdrawn = (guard.halted > 0) & (account.pending != FILLED)
    account = account._replace(
        guard=guard,
        ordered=jnp.where(withdrawn, account.held, account.ordered),
        pending=jnp.where(withdrawn, FILLED, account.pending).astype(jnp.int8),
    )
    return account, target


def _is_order(account: Account, target: Tensor, rules: Rules) -> Array:
    """Return `[A]` bool, whether each target is a new order."""
    new = ~jnp.isnan(target)
    # An exact comparison: both are targets as they were ordered, with no arithmetic in between.
    if rules.order == "on_change":
        new = new & (target != account.ordered)
    if rules.dead_band:
        before = account.ordered if rules.order == "on_change" else account.held
        # Without the second part a position smaller than the band could never be closed.
        new = new & ((jnp.abs(target - before) > rules.dead_band) | (target == 0.0))
    return new


def trade(account: Account, quote: Quote, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Fill pending orders now, at the prices of `quote`; see `fill_pending`."""
    now, fill = fill_pending(begin(account, rules), quote, costs, rules)
    return settle(now, rules), fill


class Intrabar(NamedTuple):
    """An account between the beginning and the end of a bar or an order.

    account: as it began; only its orders are kept up to date. growth: `[]` equity now over
    equity then, less 1. room: `[]` the growth at which equity is at the floor. held: `[A]`
    weights now, rounded at every step. base, change: `[A]` their sum is the same weights, not
    rounded. ruined: `[]` bool, as in `Account`.
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
    """Open the account for a bar or an order."""
    # Compared as a growth and not as an equity: one exponential per bar, and none per step of it.
    behind = (math.log(rules.floor) - account.log_equity) - account.log_equity_low
    return Intrabar(
        account=account,
        growth=0.0,  # not an array: XLA would keep the multiplications by it
        room=jnp.expm1(behind),
        held=account.held,
        base=account.weight,
        change=account.weight_low,
        ruined=account.ruined,
    )


def settle(now: Intrabar, rules: Rules) -> Account:
    """Close the bar: `L += log1p(growth)`, and the weights become pairs again."""
    account, ruined = now.account, now.ruined
    # Selects around safe values: neither a value nor a gradient of a bankrupt account is NaN.
    grown = jnp.log1p(jnp.where(ruined, 0.0, now.growth))
    log_equity, log_equity_low = pair_add(account.log_equity, account.log_equity_low, grown)
    weight, weight_low = two_sum(now.base, now.change)
    # A bankrupt account is at the floor exactly, however large its loss: it owes nothing.
    return account._replace(
        log_equity=jnp.where(ruined, math.log(rules.floor), log_equity),
        log_equity_low=jnp.where(ruined, 0.0, log_equity_low),
        weight=jnp.where(ruined, 0.0, weight),
        weight_low=jnp.where(ruined, 0.0, weight_low),
        ordered=jnp.where(ruined, 0.0, account.ordered),
        pending=jnp.where(ruined, FILLED, account.pending).astype(jnp.int8),
        ruined=ruined,
    )


def mark(
    now: Intrabar,
    return_: Tensor,
    rules: Rules,
    dividend: Tensor | None = None,
    delisted: Tensor | None = None,
) -> tuple[Intrabar, Fill]:
    """Move the account through simple returns `[A]` without trading.

    `g = sum_i x_i (r_i + y_i); L += log1p(g); x_i += x_i (r_i - g) / (1 + g)`.

    Args:
      now: the account.
      return_: `[A]` r, from the price before to the price now.
      rules: of the account.
      dividend: `[A]` y, cash paid as a fraction of the price before.
      delisted: `[A]` bool, the asset is gone: this return is the loss on a position in it, which
        `without` then closes.
    """
    chex.assert_equal_shape([now.base, return_])
    gain = now.held * return_
    items = {"market": gain.sum()}
    if dividend is not None:
        items["dividends"] = (now.held * dividend).sum()
    if delisted is not None:
        # A haircut is reported by its own name: it is not a move of the market.
        items["delisting"] = jnp.where(delisted, gain, 0.0).sum()
        items["market"] = jnp.where(delisted, 0.0, gain).sum()
    return earn(now, return_, items, rules)


def carry(
    now: Intrabar, years: Tensor | None, rate: Tensor | None, costs: Costs, rules: Rules
) -> tuple[Intrabar, Fill]:
    """Charge interest, borrow fees and funding on the current positions; see `Costs`.

    `h = years (i_lend max(0, 1 - sum x) - i_borrow max(0, sum x - 1) - fee sum max(0, -x)
    - i_funding sum x) - rate . x;  L += log1p(h);  x <- x / (1 + h)`.

    Args:
      now: the account.
      years: `[]` for which the positions were held; None charges nothing for time.
      rate: `[A]` funding of this bar, `Bars.funding`; None where bars have no funding.
      costs: rates per year.
      rules: of the account.
    """
    held, items = now.held, {}
    if years is not None:
        cash = 1.0 - held.sum()
        lent = costs.interest_lend * jnp.maximum(cash, 0.0)
        items["interest"] = years * (lent - costs.interest_borrow * jnp.maximum(-cash, 0.0))
        items["borrow_fee"] = -(years * costs.borrow_fee * jnp.maximum(-held, 0.0).sum())
    # A rate that is traced may be anything; a plain 0 leaves the term out of the program.
    charged = not isinstance(costs.funding, float) or costs.funding != 0.0
    if rate is not None or charged:
        paid = (0.0 if years is None else years) * costs.funding * held.sum()
        items["funding"] = -(paid if rate is None else paid + (rate * held).sum())
    return earn(now, jnp.zeros_like(held), items, rules)


def earn(
    now: Intrabar, return_: Tensor, items: Mapping[str, Tensor], rules: Rules
) -> tuple[Intrabar, Fill]:
    """Add `items`, fractions of equity, while the assets held return `return_` `[A]`."""
    gain = jnp.asarray(sum(items.values()))
    after = _grown(now, gain)
    # A loss of all equity bankrupts the account, and its weights are then 0: no division by 0 here.
    safe = jnp.where(gain > -1.0, 1.0 + gain, 1.0)
    safe = _of_each(safe, now.held)
    held = now.held * (1.0 + return_) / safe
    # The change of a weight and not the weight: it is small, so its sum with others loses no digit.
    change = now.change + now.held * ((return_ - gain) / safe)
    return after._replace(held=held, change=change), recorded(now, after, items, rules)


def fill_pending(now: Intrabar, quote: Quote, costs: Costs, rules: Rules) -> tuple[Intrabar, Fill]:
    """Fill pending orders at the prices of `quote`, in assets that are present.

    With `s` the fraction by which a fill is worse than the price, and `f` the commission, sells
    bring `S = sum |d_i| (1 - s_i)(1 - f)` and buys need `B = sum d_i (1 + s_i)(1 + f)`. Where cash
    and `S` do not pay for `B`, every buy is divided by one excess. The cost `c` leaves equity, so
    `x <- (x + d) / (1 - c)`. Impact is that of the size before the cut.
    """
    account = now.account
    # An order that meets a missing bar stays pending: there is no price to fill it at.
    active = (account.pending != FILLED) & quote.present & ~now.ruined
    # Base and change one after the other: their rounded sum would lose the low part of a pair.
    d = (capped(account.ordered, rules) - now.base) - now.change
    # A quotient, and so computed once for all its readers; what may not trade is d / inf = 0.
    d = d / jnp.where(active & ((account.pending != REST) | (d > 0.0)), 1.0, jnp.inf)
    if rules.capital is not None:
        # A fixed fee is charged for a trade, and not for the rounding that a closed position left.
        d = jnp.where(_is_held(d), d, 0.0)
    asked = d
    d, waits = _constrained(d, now, quote, rules)
    small = 0
    if rules.min_notional and waits is not None:
        small = (_is_held(asked) & (d == 0.0) & ~waits).sum()
    # Before cash cuts it: impact is that of the whole order.
    worse = _worsening(d, now, quote, costs, rules)
    buys, cut = d > 0.0, jnp.zeros(d.shape, bool)
    if not rules.borrow:
        whole, s, f = d, worse[0], costs.commission
        cash = (1.0 - now.base.sum()) - now.change.sum()
        cash = cash + (jnp.maximum(-d, 0.0) * (1.0 - s)).sum() * (1.0 - f)
        if rules.capital is not None:
            cash = cash - costs.fixed_fee / _money(now, rules) * (d != 0.0).sum()
        need = (jnp.maximum(d, 0.0) * (1.0 + s)).sum() * (1.0 + f)
        # Cash of 0 makes the excess infinite, and every buy d / inf is then 0.
        excess = jnp.maximum((need + TINY) / jnp.maximum(cash, 0.0), 1.0)
        d = d / jnp.where(buys, excess, 1.0)
        cut = whole - d > CUT_OF_ROUNDING
        if rules.sized:
            # The cut buys must be whole lots again, and worth an order; so must the rest be.
            d = jnp.where(buys & (excess > 1.0), _constrained(d, now, quote, rules)[0], d)
            cut &= _constrained(whole - d, now, quote, rules)[0] > 0.0
    left = jnp.where(cut, REST, FILLED)
    if waits is not None:
        # What volume held back may trade in either direction later, as the order did before.
        left = jnp.where(waits, account.pending, left)
    pending = jnp.where(active, left, account.pending).astype(jnp.int8)
    now = now._replace(account=account._replace(pending=pending))
    now, fill = _execute(now, d, worse, costs, rules)
    return now, fill._replace(small=small)


def liquidate(now: Intrabar, quote: Quote, costs: Costs, rules: Rules) -> tuple[Intrabar, Fill]:
    """Close every position in a present asset where the maintenance margin is not met.

    It pays the costs of trading and `liquidation_fee`; lots and volume do not stop it. Orders are
    withdrawn, and a target that is ordered again is a new order.
    """
    # Weights are fractions of equity, so `equity < margin * position` is a comparison with 1.
    gross = abs(now.held).sum()
    called = (gross * (rules.maintenance_margin or 0.0) > 1.0) & ~now.ruined
    closes = called & quote.present & _is_held(now.held)
    after, fill = close_out(now, closes, quote, costs, rules, costs.liquidation_fee)
    fill = fill._replace(forced=(fill.traded, fill.cost))
    return without(after, called & quote.present, called), fill


def close_out(
    now: Intrabar,
    closes: Tensor,
    quote: Quote,
    costs: Costs,
    rules: Rules,
    liquidation_fee: Tensor | float | None = None,
) -> tuple[Intrabar, Fill]:
    """Close the whole positions in `closes` `[A]` at the prices of `quote`, at any size."""
    d = jnp.where(closes, -now.held, 0.0)
    worse = _worsening(d, now, quote, costs, rules)
    return _execute(now, d, worse, costs, rules, liquidation_fee)


def capped(target: Array, rules: Rules) -> Array:
    """Scale the whole target down to `max_gross` and `max_net`; its direction stays."""
    over = None
    for cap, size in ((rules.max_gross, jnp.abs(target).sum()), (rules.max_net, target.sum())):
        if cap is not None:
            times = jnp.maximum(jnp.abs(size) / cap, 1.0)
            over = times if over is None else jnp.maximum(over, times)
    return target if over is None else target / over


def without(now: Intrabar, closed: Tensor, withdrawn: Tensor) -> Intrabar:
    """Remove the positions in `closed` `[A]` assets and the orders of `withdrawn` ones."""
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


def recorded(
    now: Intrabar,
    after: Intrabar,
    items: Mapping[str, Tensor],
    rules: Rules,
    own: Sequence[Tensor] = (),
) -> Fill:
    """Record `items` and your own costs, fractions of equity `now`.

    `ruin` is the loss that they do not explain.
    """
    none = jnp.zeros_like(now.room)

    def flow(amount: Tensor) -> Array:
        return jnp.where(now.ruined, 0.0, now.equity * amount) + none

    flows = {name: flow(amount) for name, amount in items.items()}
    paid = tuple(flow(amount) for amount in own)
    # A bankrupt account stands at the floor. The loss below it is forgiven, and without an item for
    # that the items would not add up to the change of equity.
    left = now.equity + jnp.asarray(sum([*flows.values(), *paid]))
    forgiven = jnp.where(after.ruined & ~now.ruined, rules.floor - left, 0.0)
    every = Flows(*[flows.get(name, none) for name in Flows._fields[:-1]], own=paid)
    every = every._replace(ruin=forgiven)
    return Fill(jnp.zeros_like(now.base), none, every)


def _execute(
    now: Intrabar,
    d: Array,
    worse: tuple[Tensor | float, Tensor | float, Tensor | float, tuple[Tensor | float, ...]],
    costs: Costs,
    rules: Rules,
    liquidation_fee: Tensor | float | None = None,
) -> tuple[Intrabar, Fill]:
    """Trade `d` `[A]` at prices that are `worse`, and pay the cost `c` from equity."""
    size, (s, spread, impacted, parts) = jnp.abs(d), worse
    listed, *own = parts or (s,)
    # Commission is charged on the amount paid, so slippage adds to it in a buy, and not in a sale.
    paid = size + d * s
    fee = 0.0 if rules.capital is None else costs.fixed_fee / _money(now, rules)
    items = {
        "commission": -costs.commission * paid.sum(),
        "slippage": -(size * (listed - spread - impacted)).sum(),
        "spread": -(size * spread).sum(),
        "impact": -(size * impacted).sum(),
        "fixed_fee": -fee * (d != 0.0).sum(),
    }
    cost = (size * s).sum() + costs.commission * paid.sum()
    if rules.capital is not None:
        cost = cost - items["fixed_fee"]
    if liquidation_fee is not None:
        items["liquidation"] = -(liquidation_fee * size).sum()
        cost = cost - items["liquidation"]  # items are negative, costs positive
    charged = [-(size * rate).sum() for rate in own]
    after = _grown(now, -cost)
    whole = now.held + d
    safe = jnp.where(cost < 1.0, 1.0 - cost, 1.0)  # a cost of all equity is bankruptcy
    # A traded weight is a new base; of the others only the small change moves.
    base = jnp.where(d != 0.0, whole, now.base)
    change = jnp.where(d != 0.0, 0.0, now.change) + whole * (cost / safe)
    after = after._replace(held=whole / _of_each(safe, whole), base=base, change=change)
    return after, recorded(now, after, items, rules, charged)._replace(traded=d, cost=cost)


def _is_held(held: Array) -> Array:
    """Whether each weight is a position, and not what rounding leaves of one that was closed."""
    return jnp.abs(held) > 16.0 * jnp.finfo(held.dtype).eps


def _money(now: Intrabar, rules: Rules) -> Array:
    """`[]` the account's equity in money; needs a capital."""
    return (rules.capital or 0.0) * now.equity


def _constrained(d: Array, now: Intrabar, quote: Quote, rules: Rules) -> tuple[Array, Array | None]:
    """Return `[A]` the trades that a venue executes, and a mask of those that wait for volume.

    The mask is None where no limit is set.
    """
    if not rules.sized:
        return d, None
    scale = _money(now, rules) / quote.price
    units = d * scale
    allowed, waits = executable(units, quote, rules)
    # What nothing cut is passed on as it came: to money and back would change its last bits.
    return jnp.where(allowed == units, d, allowed / scale), jnp.asarray(waits)


def _worsening(
    d: Array, now: Intrabar, quote: Quote, costs: Costs, rules: Rules
) -> tuple[Tensor | float, Tensor | float, Tensor | float, tuple[Tensor | float, ...]]:
    """As `worsening`, of trades `d` `[A]` in fractions of equity."""
    if rules.capital is None:  # then neither impact nor ticks can be set
        return worsening(d, quote, costs, rules.tick)
    money = _money(now, rules)
    return worsening(d * (money / quote.price), quote, costs, rules.tick, money)


def _grown(now: Intrabar, gain: Array) -> Intrabar:
    """Compound `gain` `[]`, and detect bankruptcy."""
    begun = isinstance(now.growth, float)  # nothing to compound with yet
    growth = gain if begun else now.growth + gain + now.growth * gain
    ruined = now.ruined | (gain <= -1.0) | (growth <= now.room)
    return now._replace(growth=growth, ruined=ruined)


def _of_each(divisor: Array, x: Array) -> Array:
    """`divisor` `[]` for each of `x` `[A]`; NaN for NaN, as the quotient is anyway.

    XLA turns `x / y`, with one y for many x, into `x * (1 / y)` in one program and not in another.
    The two round differently, and a run on eight devices would not equal a run on one bit for bit.
    """
    return jnp.where(x == x, divisor, jnp.nan)
