"""An account inside a bar: what prices, trades and holding do to it, before its books close.

Every step of a bar multiplies equity and moves the weights by small fractions. They are gathered
here, and added to the account's pairs of floats once, when the bar is settled: half the
operations of settling each step, and no digit is lost, because the fractions are small. Where a
trade makes an asset's weight anew, it is the new base that they are small against.

Formulas divide where they could multiply by a reciprocal that is known. That is deliberate:
several results share each quotient, and XLA's CPU backend computes a division once for all who
read it, while it repeats sums and products for each (six times the
operations; docs/lab-notes/environments.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax.numpy as jnp
from jax import Array

from nca_trader.envs.account import costs as cost_of
from nca_trader.envs.account.state import FILLED, Account, Fill, Flows, Rules, equity
from nca_trader.numerics import pair_add, two_sum
from nca_trader.types import Costs, Tensor


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
        items["interest"] = cost_of.interest(held.sum(), costs, years)
        items["borrow_fee"] = -cost_of.borrow_fee(held, costs, years)
    if rate is not None or _maybe_charged(costs.funding):
        items["funding"] = -cost_of.funding(held, costs, 0.0 if years is None else years, rate)
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
