"""One account, scale-free: the log of its equity and the weight held in each asset.

Training `vmap`s these functions, a backtest `scan`s them, paper trading calls them once a bar;
there is no other accounting in the package. All terms are fractions of equity at the prices of
the moment, so no initial cash is needed and reward is a difference of log-equity. Only lots,
fixed fees, impact and the like need to know how much money that is: `Rules.capital`.

One bar is two calls. `on_bar` marks the gap to the bar's open, fills there what is pending, and
marks the body to its close. Then, with the close seen, `place` orders a target, which fills at
that close (`fill="close"`) or stays pending for the next open (`fill="next_open"`).

Log-equity and weights are pairs of floats (`numerics.pair_add`): a held weight is a
multiplicative random walk, and in float32 alone it drifts by 2e-5 over 100,000 bars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from nca_trader.envs import costs as cost_of
from nca_trader.envs.legs import Legs, Quote
from nca_trader.envs.orders import Rules
from nca_trader.numerics import pair_add
from nca_trader.types import Costs, Tensor

FILLED, WHOLE, REST = 0, 1, 2
# A buy that was cut by less has filled: whether targets that sum to 1 leave a rest that waits
# must not hang on the last bit of a sum.
CUT_OF_ROUNDING = 1e-6


class Account(NamedTuple):
    """One account; batch it with `jax.vmap`.

    log_equity, log_equity_low: `[]` pair, log of equity as a fraction of the start's.
    weight, weight_low: `[A]` pair, value held as a signed fraction of equity; the rest is cash.
    ordered: `[A]` the last ordered target weights. `on_change` compares with these and not with
      the weights held, which drift.
    pending: `[A]` int8. FILLED; WHOLE, the order waits for its fill, in either direction; REST,
      cash cut a buy, and what is left of it waits for cash. A rest never sells: it would turn
      `on_change` into rebalancing for any account that is fully invested.
    ruined: `[]` bool, equity fell to the floor; nothing trades any more.
    """

    log_equity: Array
    log_equity_low: Array
    weight: Array
    weight_low: Array
    ordered: Array
    pending: Array
    ruined: Array


class Flows(NamedTuple):
    """Where equity went: `[]` each, in units of the start's equity; gains are positive.

    market: what prices did to the weights held. dividends: paid and received. delisting: the
    haircut of positions that were closed because their asset is gone. commission, fixed_fee,
    slippage (ticks included), spread, impact: of trades. liquidation: the fee of forced ones.
    interest, borrow_fee, funding: of holding. ruin: what was forgiven below the floor.
    """

    market: Tensor
    dividends: Tensor
    delisting: Tensor
    commission: Tensor
    fixed_fee: Tensor
    slippage: Tensor
    spread: Tensor
    impact: Tensor
    liquidation: Tensor
    interest: Tensor
    borrow_fee: Tensor
    funding: Tensor
    ruin: Tensor


class Fill(NamedTuple):
    """What a bar or an order did.

    traded: `[A]` signed notional at the bar's price, as a fraction of equity before it.
    cost: `[]` what trading cost, likewise. flows: everything, in units of the start's equity.
    """

    traded: Array
    cost: Array
    flows: Flows


def open_account(weight: ArrayLike) -> Account:
    """An account of equity 1 that already holds `weight` `[A]`, in the dtype of `weight`."""
    weight = jnp.asarray(weight)
    zero = jnp.zeros((), weight.dtype)
    pending = jnp.full(weight.shape, FILLED, jnp.int8)
    none = jnp.zeros_like(weight)
    return Account(zero, zero, weight, none, weight, pending, jnp.zeros((), bool))


def equity(account: Account) -> Array:
    """`[]` equity as a fraction of the start's."""
    return jnp.exp(account.log_equity) * (1.0 + account.log_equity_low)


def log_return(before: Account, after: Account) -> Array:
    """`[]` log-return between two states of an account: the low parts keep its digits."""
    high = after.log_equity - before.log_equity
    return high + (after.log_equity_low - before.log_equity_low)


def on_bar(account: Account, legs: Legs, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Moves the account from one close to the next, filling what is pending at the open.

    In this order: the gap (with dividends, and the closing of what was delisted), a margin call
    at the open, the fill, the body, what holding costs, a margin call at the close.
    """
    fills = []
    account, fill = mark(account, legs.gap, rules, legs.dividend, legs.delisted)
    fills.append(fill)
    opened = legs.at_open
    if rules.maintenance_margin is not None:
        account, fill = liquidate(account, opened, costs, rules)
        fills.append(fill)
    if rules.fill == "next_open":
        account, fill = trade(account, opened, costs, rules)
        fills.append(fill)
    account, fill = mark(account, legs.body, rules)
    fills.append(fill)
    if legs.years is not None or legs.funding is not None:
        account, fill = carry(account, legs, costs, rules)
        fills.append(fill)
    if rules.maintenance_margin is not None:
        account, fill = liquidate(account, legs.at_close, costs, rules)
        fills.append(fill)
    return account, _sum(fills)


def place(
    account: Account, target: Tensor, quote: Quote, costs: Costs, rules: Rules
) -> tuple[Account, Fill]:
    """Orders `target` `[A]` weights, NaN where there is no order, with this bar's close seen.

    "on_change" orders where the target differs from the last one ordered; "rebalance" orders
    every target that is given. `quote` is what an order can fill at, at this close.
    """
    chex.assert_equal_shape([account.weight, target])
    new = ~jnp.isnan(target) & ~account.ruined
    if rules.order == "on_change":
        new &= target != account.ordered
    account = account._replace(
        ordered=jnp.where(new, target, account.ordered),
        pending=jnp.where(new, WHOLE, account.pending).astype(jnp.int8),
    )
    if rules.fill == "close":
        return trade(account, quote, costs, rules)
    return account, _nothing(account)


def mark(
    account: Account,
    return_: Tensor,
    rules: Rules,
    dividend: Tensor | None = None,
    delisted: Tensor | None = None,
) -> tuple[Account, Fill]:
    """Moves the account through simple returns `[A]` without trading.

    `g = sum_i x_i (r_i + y_i); L += log1p(g); x_i += x_i (r_i - g) / (1 + g)`.

    Args:
      dividend: `[A]` y, cash paid as a fraction of the price before. delisted: `[A]` bool, the
        asset is gone: at this return, what is held of it becomes cash, free of cost.
    """
    chex.assert_equal_shape([account.weight, return_])
    held = account.weight + account.weight_low
    gain = held * return_
    items = {"market": gain.sum()}
    if dividend is not None:
        items["dividends"] = (held * dividend).sum()
    if delisted is not None:
        items["delisting"] = jnp.where(delisted, gain, 0.0).sum()
        items["market"] = jnp.where(delisted, 0.0, gain).sum()
    after, fill = _earn(account, return_, items, rules)
    return after if delisted is None else _without(after, delisted, delisted), fill


def trade(account: Account, quote: Quote, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Fills what is pending at the price of the moment, in assets that are present.

    With `s` the fraction by which a fill is worse than the price, and `f` the commission, sells
    bring `S = sum |d_i| (1 - s_i)(1 - f)` and buys need `B = sum d_i (1 + s_i)(1 + f)`; where
    cash and `S` do not pay for `B`, every buy is cut by one factor `theta`. The cost `c` leaves
    equity, so `x <- (x + d) / (1 - c)`. Impact is that of the size before the cut.
    """
    active = (account.pending != FILLED) & quote.present & ~account.ruined
    d = (capped(account.ordered, rules) - account.weight) - account.weight_low
    d = jnp.where(active, d, 0.0)
    wanted = jnp.where(account.pending == REST, jnp.maximum(d, 0.0), d)
    d, waits = _constrained(wanted, account, quote, rules)
    s, parts = _worsening(d, account, quote, costs, rules)
    theta = _affordable(d, s, account, costs, rules)
    buys, whole = d > 0.0, d
    cut = buys & (theta < 1.0 - CUT_OF_ROUNDING)
    d = jnp.where(buys, theta * d, d)
    if rules.sized:  # what the cut left must be whole lots again, and worth an order
        d = jnp.where(buys & (theta < 1.0), _constrained(d, account, quote, rules)[0], d)
        cut &= _constrained(whole - d, account, quote, rules)[0] > 0.0  # and so must the rest be
    left = jnp.where(cut, REST, FILLED)
    if waits is not None:
        left = jnp.where(waits, account.pending, left)
    pending = jnp.where(active, left, account.pending)
    after, fill = _execute(account, d, s, parts, costs, rules)
    return after._replace(pending=jnp.where(after.ruined, FILLED, pending).astype(jnp.int8)), fill


def liquidate(account: Account, quote: Quote, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Closes every position that can be, where the maintenance margin is no longer met.

    It pays what trading costs, and `liquidation_fee`; lots and volume do not stop it. Orders
    are withdrawn, and a target that is ordered again is a new order.
    """
    margin = rules.maintenance_margin
    called = cost_of.margin_called(account.weight + account.weight_low, margin or 0.0)
    closes = called & quote.present & ~account.ruined
    d = jnp.where(closes, -account.weight - account.weight_low, 0.0)
    s, parts = _worsening(d, account, quote, costs, rules)
    after, fill = _execute(account, d, s, parts, costs, rules, costs.liquidation_fee)
    return _without(after, closes, called & ~account.ruined), fill


def carry(account: Account, legs: Legs, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """What holding the account up to this close earns and costs; see `Costs`.

    `h = years (i_lend max(0, 1 - sum x) - i_borrow max(0, sum x - 1) - fee sum max(0, -x))
    - funding . x;  L += log1p(h);  x <- x / (1 + h)`.
    """
    held = account.weight + account.weight_low
    years = 0.0 if legs.years is None else legs.years
    items = {
        "interest": cost_of.interest(held.sum(), costs, years),
        "borrow_fee": -cost_of.borrow_fee(held, costs, years),
        "funding": -cost_of.funding(held, costs, years, legs.funding),
    }
    return _earn(account, jnp.zeros_like(held), items, rules)


def capped(target: Array, rules: Rules) -> Array:
    """Scales the whole target down to `max_gross` and `max_net`; its direction stays."""
    scale = None
    for cap, size in ((rules.max_gross, jnp.abs(target).sum()), (rules.max_net, target.sum())):
        if cap is not None:
            size = jnp.abs(size)
            by = jnp.where(size > cap, cap / jnp.maximum(size, 1e-30), 1.0)
            scale = by if scale is None else jnp.minimum(scale, by)
    return target if scale is None else target * scale


def _units_a_weight(account: Account, quote: Any, rules: Any) -> Array:
    """`[A]` units that a weight of 1 means at the price of the moment; needs a capital."""
    return rules.capital * equity(account) / quote.price


def _constrained(
    d: Array, account: Account, quote: Any, rules: Rules
) -> tuple[Array, Array | None]:
    """`[A]` trades that a venue takes, and which of them wait for more volume (None: none can)."""
    if not rules.sized:
        return d, None
    scale = _units_a_weight(account, quote, rules)
    units = d * scale
    allowed = cost_of.within_volume(units, quote.volume, rules.max_participation)
    waits = jnp.abs(allowed) < jnp.abs(units)
    allowed = cost_of.whole_lots(allowed, rules.lot)
    allowed = cost_of.worth_sending(allowed, quote.price, rules.min_notional)
    return jnp.where(allowed == units, d, allowed / scale), waits


def _worsening(
    d: Array, account: Account, quote: Any, costs: Costs, rules: Rules
) -> tuple[Array, tuple[Array, Array]]:
    """`[A]` how much worse than the price a fill is, and of it (spread, impact)."""
    impacted = jnp.zeros((), d.dtype)
    if rules.capital is not None:
        units = d * _units_a_weight(account, quote, rules)
        impacted = cost_of.impact(costs.impact, units, quote.volume)
    s, spread = cost_of.worsening(costs, quote.half_spread, impacted)
    if rules.tick:
        s = cost_of.on_tick(quote.price, s, jnp.sign(d), rules.tick)
    s, spread, impacted = (jnp.broadcast_to(x, d.shape) for x in (s, spread, impacted))
    # No price falls below zero, whatever its parts add up to.
    return jnp.where(d < 0.0, jnp.minimum(s, 1.0), s), (spread, impacted)


def _fixed_fee(account: Account, costs: Costs, rules: Rules) -> Array | float:
    """A fill's fixed fee as a fraction of equity."""
    return 0.0 if rules.capital is None else costs.fixed_fee / (rules.capital * equity(account))


def _affordable(d: Array, s: Array, account: Account, costs: Costs, rules: Rules) -> Array:
    """`[]` the factor by which every buy must be cut for cash to pay for all of them."""
    one = jnp.ones((), d.dtype)
    if rules.borrow:
        return one
    f, fee = costs.commission, _fixed_fee(account, costs, rules)
    cash = (1.0 - account.weight.sum()) - account.weight_low.sum()
    cash = cash + (jnp.maximum(-d, 0.0) * (1.0 - s)).sum() * (1.0 - f)
    if rules.capital is not None:
        cash = cash - fee * (d != 0.0).sum()
    cash = jnp.maximum(cash, 0.0)
    need = (jnp.maximum(d, 0.0) * (1.0 + s)).sum() * (1.0 + f)
    return jnp.where(need > cash, cash / jnp.where(need > cash, need, 1.0), one)


def _execute(
    account: Account,
    d: Array,
    s: Array,
    parts: tuple[Array, Array],
    costs: Costs,
    rules: Rules,
    liquidation_fee: float = 0.0,
) -> tuple[Account, Fill]:
    """Trades `d` `[A]` at prices worse by `s` `[A]`, and pays for it out of equity."""
    size, (spread, impacted) = jnp.abs(d), parts
    paid = size * (1.0 + jnp.sign(d) * s)
    fee = _fixed_fee(account, costs, rules)
    items = {
        "commission": -costs.commission * paid.sum(),
        "slippage": -(size * (s - spread - impacted)).sum(),
        "spread": -(size * spread).sum(),
        "impact": -(size * impacted).sum(),
        "fixed_fee": -fee * (d != 0.0).sum(),
        "liquidation": -liquidation_fee * size.sum(),
    }
    cost = (size * s).sum() + costs.commission * paid.sum()
    if rules.capital is not None:
        cost = cost - items["fixed_fee"]
    cost = cost - items["liquidation"]
    solvent = cost < 1.0
    safe = jnp.where(solvent, cost, 0.0)
    held = account.weight + account.weight_low + d
    shift = jnp.where(solvent, held * (safe / (1.0 - safe)), 0.0)
    weight, low = pair_add(account.weight, account.weight_low, d)
    after = account._replace(weight=weight, weight_low=low)
    after = _settle(after, jnp.log1p(-safe), shift, solvent, rules)
    return after, _fill(account, after, items, d, safe)


def _fill(
    before: Account,
    after: Account,
    items: Mapping[str, Tensor],
    traded: Array | None = None,
    cost: Array | None = None,
) -> Fill:
    """The fill of `items`, fractions of equity `before`; ruin is what they do not explain."""
    at, none = equity(before), jnp.zeros_like(before.log_equity)
    flows = {name: at * amount + none for name, amount in items.items()}
    total = jnp.asarray(sum(flows.values()))
    flows["ruin"] = jnp.where(after.ruined, equity(after) - at - total, 0.0)
    return Fill(
        jnp.zeros_like(before.weight) if traded is None else traded,
        none if cost is None else cost,
        Flows(**{name: flows.get(name, none) for name in Flows._fields}),
    )


def _nothing(account: Account) -> Fill:
    return _fill(account, account._replace(ruined=jnp.zeros((), bool)), {})


def _sum(fills: list[Fill]) -> Fill:
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *fills)


def _earn(
    account: Account, return_: Tensor, items: Mapping[str, Tensor], rules: Rules
) -> tuple[Account, Fill]:
    """Adds `items`, fractions of equity, while the assets held return `return_` `[A]`."""
    growth = jnp.asarray(sum(items.values()))
    solvent = growth > -1.0
    growth = jnp.where(solvent, growth, 0.0)
    held = account.weight + account.weight_low
    drift = jnp.where(solvent, held * (return_ - growth) / (1.0 + growth), 0.0)
    after = _settle(account, jnp.log1p(growth), drift, solvent, rules)
    return after, _fill(account, after, items)


def _without(account: Account, closed: Tensor, withdrawn: Tensor) -> Account:
    """The account without what it held of `closed` `[A]` assets and its orders of `withdrawn`."""
    return account._replace(
        weight=jnp.where(closed, 0.0, account.weight),
        weight_low=jnp.where(closed, 0.0, account.weight_low),
        ordered=jnp.where(withdrawn, 0.0, account.ordered),
        pending=jnp.where(withdrawn, FILLED, account.pending).astype(jnp.int8),
    )


def _settle(account: Account, growth: Array, drift: Array, solvent: Array, rules: Rules) -> Account:
    """Adds `growth` to log-equity and `drift` to the weights; sees whether ruin has come."""
    log_equity, low = pair_add(account.log_equity, account.log_equity_low, growth)
    weight, weight_low = pair_add(account.weight, account.weight_low, drift)
    floor = math.log(rules.floor)
    ruined = account.ruined | ~solvent | (log_equity <= floor)
    return Account(
        log_equity=jnp.where(ruined, floor, log_equity),
        log_equity_low=jnp.where(ruined, 0.0, low),
        weight=jnp.where(ruined, 0.0, weight),
        weight_low=jnp.where(ruined, 0.0, weight_low),
        ordered=jnp.where(ruined, 0.0, account.ordered),
        pending=jnp.where(ruined, FILLED, account.pending).astype(jnp.int8),
        ruined=ruined,
    )
