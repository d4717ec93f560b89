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

from nca_trader.envs.account.fills import fill_pending, liquidate
from nca_trader.envs.account.intrabar import begin, carry, mark, recorded, settle, without
from nca_trader.envs.account.legs import Legs, Quote
from nca_trader.envs.account.orders import Rules
from nca_trader.envs.account.state import WHOLE, Account, Fill
from nca_trader.types import Costs, Tensor


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
