"""An account between the beginning and the end of a bar: what it earns and pays by holding.

Every step of a bar multiplies equity and moves the weights by small fractions. `Intrabar` gathers
them, and `settle` adds them to the account's pairs of floats once per bar: half the operations of
settling each step. No digit is lost, because the fractions are small.

Formulas divide where they could multiply by a known reciprocal. That is deliberate: several results
share each quotient, and XLA's CPU backend computes a division once for all its readers, but repeats
sums and products for each (six times the operations; docs/lab-notes/speed.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from nca_trader.config import AccountConfig
from nca_trader.envs.account.effects import Flows
from nca_trader.envs.account.state import FILLED, Account, equity
from nca_trader.numerics import expect_shape, pair_add, two_sum
from nca_trader.types import Tensor


class Intrabar(NamedTuple):
    """An account between the beginning and the end of a bar or an order.

    account: as it began; only its orders are kept up to date. growth: `[]` equity now over
    equity then, less 1. room: `[]` the growth at which equity is at the floor. held: `[A]`
    weights now, rounded at every step. base, change: `[A]` their sum is the same weights, not
    rounded. bankrupt: `[]` bool, as in `Account`.
    """

    account: Account
    growth: Array | float
    room: Array
    held: Array
    base: Array
    change: Array
    bankrupt: Array

    @property
    def equity(self) -> Array:
        """`[]` equity now, as a fraction of the start's."""
        return equity(self.account) * (1.0 + self.growth)

    def earned(self, return_: Tensor) -> Array:
        """Return `[A]` what each asset earns, as a fraction of equity at the beginning."""
        return jnp.where(self.bankrupt, 0.0, (1.0 + self.growth) * (self.held * return_))


def begin(account: Account, rules: AccountConfig) -> Intrabar:
    """Open the account for a bar or an order."""
    # The floor is compared with growth, which takes one exponential per bar; a comparison of equity
    # would take one per step of the bar.
    behind = (math.log(rules.floor) - account.log_equity) - account.log_equity_low
    return Intrabar(
        account=account,
        growth=0.0,  # not an array: XLA would keep the multiplications by it
        room=jnp.expm1(behind),
        held=account.held,
        base=account.weight,
        change=account.weight_low,
        bankrupt=account.bankrupt,
    )


def settle(now: Intrabar, rules: AccountConfig) -> Account:
    """Close the bar: `L += log1p(growth)`, and the weights become pairs again."""
    account, bankrupt = now.account, now.bankrupt
    # Selects around safe values: neither a value nor a gradient of a bankrupt account is NaN.
    grown = jnp.log1p(jnp.where(bankrupt, 0.0, now.growth))
    log_equity, log_equity_low = pair_add(account.log_equity, account.log_equity_low, grown)
    weight, weight_low = two_sum(now.base, now.change)
    # A bankrupt account is set to the floor, however large its loss.
    return account._replace(
        log_equity=jnp.where(bankrupt, math.log(rules.floor), log_equity),
        log_equity_low=jnp.where(bankrupt, 0.0, log_equity_low),
        weight=jnp.where(bankrupt, 0.0, weight),
        weight_low=jnp.where(bankrupt, 0.0, weight_low),
        ordered=jnp.where(bankrupt, 0.0, account.ordered),
        pending=jnp.where(bankrupt, FILLED, account.pending).astype(jnp.int8),
        bankrupt=bankrupt,
    )


def mark(
    now: Intrabar,
    return_: Tensor,
    rules: AccountConfig,
    dividend: Tensor | None = None,
    delisted: Tensor | None = None,
) -> tuple[Intrabar, Flows]:
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
    expect_shape(now.base, return_)
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
    now: Intrabar, years: Tensor | None, rate: Tensor | None, rules: AccountConfig
) -> tuple[Intrabar, Flows]:
    """Charge interest, borrow fees and funding on the current positions; see `Costs`.

    `h = years (i_lend max(0, 1 - sum x) - i_borrow max(0, sum x - 1) - fee sum max(0, -x)
    - i_funding sum x) - rate . x;  L += log1p(h);  x <- x / (1 + h)`.

    Args:
      now: the account.
      years: `[]` for which the positions were held; None charges nothing for time.
      rate: `[A]` funding of this bar, `Bars.funding`; None where bars have no funding.
      rules: of the account.
    """
    held, items, costs = now.held, {}, rules.costs
    if years is not None:
        cash = 1.0 - held.sum()
        lent = costs.interest_lend * jnp.maximum(cash, 0.0)
        items["interest"] = years * (lent - costs.interest_borrow * jnp.maximum(-cash, 0.0))
        items["borrow_fee"] = -(years * costs.borrow_fee * jnp.maximum(-held, 0.0).sum())
    # A traced rate has no known value; for a rate that is the number 0 the term is left out of the
    # program.
    charged = not isinstance(costs.funding, float) or costs.funding != 0.0
    if rate is not None or charged:
        paid = (0.0 if years is None else years) * costs.funding * held.sum()
        items["funding"] = -(paid if rate is None else paid + (rate * held).sum())
    return earn(now, jnp.zeros_like(held), items, rules)


def earn(
    now: Intrabar, return_: Tensor, items: Mapping[str, Tensor], rules: AccountConfig
) -> tuple[Intrabar, Flows]:
    """Add `items`, fractions of equity, while the assets held return `return_` `[A]`."""
    gain = jnp.asarray(sum(items.values()))
    after = grown(now, gain)
    # A loss of all equity bankrupts the account, and its weights are then 0: no division by 0 here.
    safe = jnp.where(gain > -1.0, 1.0 + gain, 1.0)
    safe = of_each(safe, now.held)
    held = now.held * (1.0 + return_) / safe
    # The change of the weight is small, so adding it to the low part loses no digits.
    change = now.change + now.held * ((return_ - gain) / safe)
    return after._replace(held=held, change=change), recorded(now, after, items, rules)


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
    rules: AccountConfig,
    own: Sequence[Tensor] = (),
) -> Flows:
    """Record `items` and your own costs, fractions of equity `now`.

    `ruin` is the loss that they do not explain.
    """
    none = jnp.zeros_like(now.room)

    def flow(amount: Tensor) -> Array:
        return jnp.where(now.bankrupt, 0.0, now.equity * amount) + none

    flows = {name: flow(amount) for name, amount in items.items()}
    paid = tuple(flow(amount) for amount in own)
    # A bankrupt account stands at the floor. The loss below it is forgiven, and without an item for
    # that the items would not add up to the change of equity.
    left = now.equity + jnp.asarray(sum([*flows.values(), *paid]))
    forgiven = jnp.where(after.bankrupt & ~now.bankrupt, rules.floor - left, 0.0)
    every = Flows(*[flows.get(name, none) for name in Flows._fields[:-1]], own=paid)
    return every._replace(ruin=forgiven)


def grown(now: Intrabar, gain: Array) -> Intrabar:
    """Compound `gain` `[]`, and detect bankruptcy."""
    begun = isinstance(now.growth, float)  # nothing to compound with yet
    growth = gain if begun else now.growth + gain + now.growth * gain
    bankrupt = now.bankrupt | (gain <= -1.0) | (growth <= now.room)
    return now._replace(growth=growth, bankrupt=bankrupt)


def of_each(divisor: Array, x: Array) -> Array:
    """`divisor` `[]` for each of `x` `[A]`; NaN for NaN, as the quotient is anyway.

    XLA turns `x / y`, with one y for many x, into `x * (1 / y)` in one program and not in another.
    The two round differently, and a run on eight devices would not equal a run on one bit for bit.
    """
    return jnp.where(x == x, divisor, jnp.nan)
