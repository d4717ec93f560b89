"""How an account moves: through a bar, and by an order.

Training `vmap`s these functions, a backtest `scan`s them, paper trading calls them once per bar;
the package has no other accounting.

One bar is two calls. `on_bar` earns the overnight return, fills what is pending at the open, and
earns the intraday return, with the exits inside the bar. Then, with the close seen, `place` orders
a target, which fills at that close (`fill="close"`) or stays pending for the next open
(`fill="next_open"`). Both return what they did, see `Effects`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from nca_trader.config import AccountConfig
from nca_trader.envs.account.effects import (
    AT_CLOSE,
    AT_OPEN,
    INSIDE,
    LIQUIDATED,
    NEVER,
    NONE,
    STOP_LOSS,
    TRAILING_STOP,
    AccountFill,
    Effects,
    add_flows,
)
from nca_trader.envs.account.fills import (
    close_out,
    fill_pending,
    is_held,
    liquidate,
    money_of,
    worsened,
)
from nca_trader.envs.account.intrabar import Intrabar, begin, carry, mark, settle, without
from nca_trader.envs.account.risk import Intent, alone_of, apply_limits, apply_size
from nca_trader.envs.account.state import FILLED, WHOLE, Account, BarReturns, Quote
from nca_trader.numerics import expect_shape
from nca_trader.types import Tensor


def on_bar(account: Account, legs: BarReturns, rules: AccountConfig) -> tuple[Account, Effects]:
    """Move the account from one close to the next, filling pending orders at the open.

    In this order: the overnight return (with dividends), holding charges, the closing of delisted
    positions, a margin call at the open, the fill, the intraday return with a margin call inside
    the bar, funding of the bar, a margin call at the close.
    Charges for time are taken from the positions that were held through it, before they change: at
    the open where orders fill at the open, at the close where they fill at the close.

    Args:
      account: at the close of the bar before.
      legs: the bar's overnight and intraday returns, and its prices.
      rules: of the account, static: what they switch off is not in the compiled program.

    Returns:
      The account at the bar's close, and the effects of the bar.
    """
    now, effects = to_open(account, legs, rules)
    return from_open(now, effects, legs, rules)


def to_open(account: Account, legs: BarReturns, rules: AccountConfig) -> tuple[Intrabar, Effects]:
    """Move the account from the close before to the bar's open, and fill there what is pending.

    Args and order: as `on_bar`, up to the fill.
    """
    now = begin(account, rules)
    overnight = now.earned(legs.overnight)
    now, flows = mark(now, legs.overnight, rules, legs.dividend, legs.delisted)
    at_open = rules.fill == "next_open"
    # Before the fill: a short that closes at Monday's open pays for the weekend, and one that opens
    # there does not.
    if at_open and legs.years is not None:
        now, charged = carry(now, legs.years, None, rules)
        flows = add_flows(flows, charged)
    gone = called = filled = None
    if legs.delisted is not None:
        gone = legs.delisted & (now.held != 0.0)
        now = without(now, legs.delisted, legs.delisted)
    if rules.maintenance_margin:
        # Before the fill as well: a call withdraws the orders, and none of them may fill after it.
        now, called = liquidate(now, legs.at_open, rules)
    if at_open:
        now, filled = fill_pending(now, legs.at_open, rules)
    effects = Effects(flows, overnight=overnight, gone=gone)
    return now, effects.having(called_at_open=called, at_open=filled)


class Reached(NamedTuple):
    """Levels that a bar reaches, `[A]` each.

    moved: return from the open to the level. price: the level. reason: of `AccountFill`. at_open:
    bool, the open has passed the level.
    """

    moved: Tensor
    price: Tensor
    reason: Tensor
    at_open: Tensor


def from_open(
    now: Intrabar,
    effects: Effects,
    legs: BarReturns,
    rules: AccountConfig,
    reached: Reached | None = None,
) -> tuple[Account, Effects]:
    """Move the account from the bar's open, after its fills, to its close.

    Args:
      now: the account at the open.
      effects: of the bar so far.
      legs: of the bar.
      rules: of the account.
      reached: the levels of orders; None without any.

    Returns:
      The account at the bar's close, and the effects of the whole bar.
    """
    at_open = now.bankrupt
    now, effects = _through(now, effects, legs, rules, reached)
    inside = now.bankrupt
    # The bars' own funding is paid at their close with either fill, by those who hold then.
    years = None if rules.fill == "next_open" else legs.years
    if years is not None or legs.funding is not None:
        now, charged = carry(now, years, legs.funding, rules)
        effects = effects._replace(flows=add_flows(effects.flows, charged))
    if rules.maintenance_margin:
        now, called = liquidate(now, legs.at_close, rules)
        effects = effects.having(called_at_close=called)
    broke = jnp.where(at_open, AT_OPEN, jnp.where(inside, INSIDE, AT_CLOSE))
    broke = jnp.where(now.bankrupt & ~now.account.bankrupt, broke, NEVER).astype(jnp.int8)
    account = settle(now, rules)
    if legs.size is not None:
        account = account._replace(size=alone_of(legs.size))
    if legs.base is not None:
        account = account._replace(base=jnp.asarray(legs.base, account.weight.dtype))
    return account, effects._replace(growth=now.growth, broke=broke)


def _through(
    now: Intrabar,
    effects: Effects,
    legs: BarReturns,
    rules: AccountConfig,
    reached: Reached | None,
) -> tuple[Intrabar, Effects]:
    """Move the account from the open to the close, with exits inside the bar.

    A bar does not say in which order its prices came, so the adverse ones count first: see
    `_called_inside`. What is left there pays the costs of trading; lots and volume do not stop it.
    Args and returns: as `from_open`, but for what is charged at the close.
    """
    if reached is None and legs.low is None:
        effects = effects._replace(intraday=now.earned(legs.intraday))
        now, flows = mark(now, legs.intraday, rules)
        return now, effects._replace(flows=add_flows(effects.flows, flows))
    intraday, reason = jnp.asarray(legs.intraday), jnp.zeros(now.held.shape, jnp.int8)
    if reached is not None:
        reason = reached.reason
        intraday = jnp.where(reason != NONE, reached.moved, intraday).astype(intraday.dtype)
    called = jnp.zeros((), bool)
    if legs.low is not None:
        called, moved, before = _called_inside(now, legs, rules, reached)
        forced = called & ~before & legs.present & is_held(now.held)
        intraday = jnp.where(called & ~before, moved, intraday).astype(intraday.dtype)
        # Levels beyond the end of the path are not reached.
        reason = jnp.where(forced, LIQUIDATED, jnp.where(called & ~before, NONE, reason))
    left = reason != NONE
    price = jnp.ones_like(intraday) if legs.open is None else legs.open * (1.0 + intraday)
    if reached is not None:
        price = jnp.where(left & (reason != LIQUIDATED), reached.price, price)
    intraday = intraday.astype(now.held.dtype)
    effects = effects._replace(intraday=now.earned(intraday))
    now, flows = mark(now, intraday, rules)
    # An account that went bankrupt on the path has no position left to close.
    closes = left & ~now.bankrupt
    quote = Quote(legs.present, price.astype(now.held.dtype), legs.volume, legs.half_spread)
    fee = jnp.where(reason == LIQUIDATED, rules.costs.liquidation_fee, 0.0).astype(now.held.dtype)
    now, closed = close_out(now, closes, quote, rules, None if legs.low is None else fee)
    closed = closed._replace(
        price=jnp.where(left, price, jnp.nan),
        reason=jnp.where(closes, reason, NONE).astype(jnp.int8),
    )
    pending = jnp.where(closes, FILLED, now.account.pending).astype(jnp.int8)
    now = now._replace(account=now.account._replace(pending=pending))
    if legs.low is not None:
        called = called & ~now.bankrupt
        now = without(now, called & legs.present, called)
    effects = effects._replace(flows=add_flows(effects.flows, flows))
    return now, effects.having(inside=closed)


def _called_inside(
    now: Intrabar, legs: BarReturns, rules: AccountConfig, reached: Reached | None
) -> tuple[Array, Array, Array]:
    """Find the margin call on the way from the open to the bar's adverse prices.

    All positions move together: after a share u of the way each has moved by u of the return to its
    low, of a short position to its high. Stops fill where the way comes to them. Between them
    equity and the gross position are linear in u, so equity meets its margin at a root.

    Returns:
      `[]` bool whether there is a call, `[A]` returns from the open to it, and `[A]` bool whether a
      level was reached before.
    """
    held, margin, costs = now.held, rules.maintenance_margin, rules.costs
    worst = jnp.where(held > 0.0, jnp.asarray(legs.low), jnp.asarray(legs.high))
    place, cost = jnp.full(held.shape, jnp.inf, held.dtype), jnp.zeros_like(held)
    if reached is not None:
        stops = (reached.reason == STOP_LOSS) | (reached.reason == TRAILING_STOP)
        moved = jnp.asarray(reached.moved, held.dtype)
        share = moved / jnp.where(worst != 0.0, worst, 1.0)
        # A position whose level the open has passed is closed at the open, before the path begins.
        place = jnp.where(
            reached.at_open, 0.0, jnp.where(stops, jnp.clip(share, 0.0, 1.0), jnp.inf)
        )
        d = jnp.where(jnp.isfinite(place), -held * (1.0 + moved), 0.0)
        # A level of an asset without a price yet is NaN.
        price = jnp.where(jnp.isfinite(place), reached.price, 1.0)
        quote = Quote(legs.present, price, legs.volume, legs.half_spread)
        s = worsened(d, now, quote, rules)[0]
        cost = jnp.abs(d) * s + costs.commission * (jnp.abs(d) + d * s)
        if rules.capital:
            cost = cost + costs.fixed_fee / money_of(now, rules) * (d != 0.0)
    # Positions that are still held where the path comes to each stop: [K] places, [K, A] masks.
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
    called = (first <= 1.0) & ~now.bankrupt & is_held(held).any()
    first = jnp.where(called, first, 0.0)
    return called, first * worst, place <= first


def place(
    account: Account, target: Tensor, quote: Quote, rules: AccountConfig
) -> tuple[Account, AccountFill | None]:
    """Order a target, with this bar's close seen.

    "on_change" orders where the target differs from the last one ordered; "rebalance" orders
    every target that is given. A dead band leaves out what moved too little.

    Args:
      account: at the close.
      target: `[A]` weights, NaN for no order. They are multiplied by the size of `quote`; of sizes
        by covariance those that are ordered here share their risk.
      quote: prices at which an order can fill at this close.
      rules: of the account.

    Returns:
      The account with the order, and what filled here; None where orders fill at the next open.
    """
    expect_shape(account.weight, target)
    # A target of NaN leaves the last order as it is; a target of 0 would close the position.
    given = ~(jnp.isnan(target) | account.bankrupt)
    if quote.size is not None:
        target = apply_size(jnp.asarray(target, account.weight.dtype), quote.size, rules.size_cap)
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
        return trade(account, quote, rules)
    return account, None


def guarded(
    account: Account, target: Tensor, quote: Quote, rules: AccountConfig
) -> tuple[Account, Array]:
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
        return _is_order(account, target, rules) & ~account.bankrupt

    guard, target = apply_limits(account.guard, intent, limits, is_order)
    withdrawn = (guard.halted > 0) & (account.pending != FILLED)
    account = account._replace(
        guard=guard,
        ordered=jnp.where(withdrawn, account.held, account.ordered),
        pending=jnp.where(withdrawn, FILLED, account.pending).astype(jnp.int8),
    )
    return account, target


def _is_order(account: Account, target: Tensor, rules: AccountConfig) -> Array:
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


def trade(account: Account, quote: Quote, rules: AccountConfig) -> tuple[Account, AccountFill]:
    """Fill pending orders now, at the prices of `quote`; see `fill_pending`."""
    now, fill = fill_pending(begin(account, rules), quote, rules)
    return settle(now, rules), fill
