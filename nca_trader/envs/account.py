"""One account, scale-free: the log of its equity and the weight held in each asset.

Training `vmap`s these functions, a backtest `scan`s them, paper trading calls them once a bar;
there is no other accounting in the package. All terms are fractions of equity at the prices of
the moment, so no initial cash is needed and reward is a difference of log-equity.

One bar is two calls. `on_bar` marks the gap to the bar's open, fills there what is pending, and
marks the body to its close. Then, with the close seen, `place` orders a target, which fills at
that close (`fill="close"`) or stays pending for the next open (`fill="next_open"`).

Log-equity and weights are pairs of floats (`numerics.pair_add`): a held weight is a
multiplicative random walk, and in float32 alone it drifts by 2e-5 over 100,000 bars.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from nca_trader.numerics import pair_add
from nca_trader.types import Bars, Costs, Tensor

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


class Rules(NamedTuple):
    """How orders become trades; static under jit.

    fill: "next_open" or "close". order: "on_change" or "rebalance".
    max_gross: cap on sum |target|, the whole target is scaled to it; None is no cap.
    borrow: False cuts all buys by one factor where cash does not pay for them.
    floor: equity at or below which the account is ruined, as a fraction of the start's.
    """

    fill: str = "next_open"
    order: str = "on_change"
    max_gross: float | None = None
    borrow: bool = False
    floor: float = 1e-9


class Legs(NamedTuple):
    """Simple returns of the two parts of a bar, `[A]` (or `[N, A]` for many bars).

    gap: open / previous close - 1. body: close / open - 1. present: the bar exists, so that
    orders can fill in it. A missing bar has both returns 0.
    """

    gap: Tensor
    body: Tensor
    present: Tensor


class Fill(NamedTuple):
    """What a trade did, as fractions of equity before it.

    traded: `[A]` signed notional at the bar's price. cost: `[]` commission and slippage.
    """

    traded: Array
    cost: Array


def legs_of(bars: Bars) -> Legs:
    """The legs of all bars, `[N, A]` float64 on the host: where the digits of a price are.

    The first bar has no close before it, and a gap of 0.
    """
    previous = np.vstack([bars.open[:1], bars.close[:-1]])
    with np.errstate(invalid="ignore"):
        gap = np.where(bars.present, bars.open / previous - 1.0, 0.0)
        body = np.where(bars.present, bars.close / bars.open - 1.0, 0.0)
    return Legs(np.nan_to_num(gap), np.nan_to_num(body), bars.present)


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


def mark(account: Account, return_: Tensor, rules: Rules) -> Account:
    """Moves the account through simple returns `[A]` without trading.

    `g = sum_i x_i r_i; L += log1p(g); x_i += x_i (r_i - g) / (1 + g)`.
    """
    chex.assert_equal_shape([account.weight, return_])
    held = account.weight + account.weight_low
    growth = (held * return_).sum()
    solvent = growth > -1.0
    growth = jnp.where(solvent, growth, 0.0)
    drift = jnp.where(solvent, held * (return_ - growth) / (1.0 + growth), 0.0)
    return _settle(account, jnp.log1p(growth), drift, solvent, rules)


def trade(account: Account, present: Tensor, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Fills what is pending at the price of the moment, in assets that are `present` `[A]`.

    With `s` slippage and `f` commission, sells bring `S = sum |d_i| (1 - s)(1 - f)` and buys
    need `B = sum d_i (1 + s)(1 + f)`; where cash and `S` do not pay for `B`, every buy is cut by
    one factor `theta`. The cost `c` leaves equity, so `x <- (x + d) / (1 - c)`.
    """
    chex.assert_equal_shape([account.weight, present])
    s, f = costs.slippage, costs.commission
    active = (account.pending != FILLED) & present & ~account.ruined
    d = (_capped(account.ordered, rules.max_gross) - account.weight) - account.weight_low
    d = jnp.where(active, d, 0.0)
    d = jnp.where(account.pending == REST, jnp.maximum(d, 0.0), d)
    sell, buy = jnp.maximum(-d, 0.0), jnp.maximum(d, 0.0)
    theta = jnp.ones((), d.dtype)
    if not rules.borrow:
        cash = (1.0 - account.weight.sum()) - account.weight_low.sum()
        cash = jnp.maximum(cash + sell.sum() * ((1 - s) * (1 - f)), 0.0)
        need = buy.sum() * ((1 + s) * (1 + f))
        theta = jnp.where(need > cash, cash / jnp.where(need > cash, need, 1.0), theta)
    d = jnp.where(d > 0.0, theta * d, d)
    cost = sell.sum() * (s + f * (1 - s)) + theta * buy.sum() * (s + f * (1 + s))
    solvent = cost < 1.0
    cost = jnp.where(solvent, cost, 0.0)
    held = account.weight + account.weight_low + d
    shift = jnp.where(solvent, held * (cost / (1.0 - cost)), 0.0)
    cut = (buy > 0.0) & (theta < 1.0 - CUT_OF_ROUNDING)
    pending = jnp.where(active, jnp.where(cut, REST, FILLED), account.pending)
    weight, low = pair_add(account.weight, account.weight_low, d)
    account = account._replace(weight=weight, weight_low=low, pending=pending.astype(jnp.int8))
    return _settle(account, jnp.log1p(-cost), shift, solvent, rules), Fill(d, cost)


def on_bar(account: Account, legs: Legs, costs: Costs, rules: Rules) -> tuple[Account, Fill]:
    """Moves the account from one close to the next, filling what is pending at the open."""
    account = mark(account, legs.gap, rules)
    fill = _no_fill(account)
    if rules.fill == "next_open":
        account, fill = trade(account, legs.present, costs, rules)
    return mark(account, legs.body, rules), fill


def place(
    account: Account, target: Tensor, present: Tensor, costs: Costs, rules: Rules
) -> tuple[Account, Fill]:
    """Orders `target` `[A]` weights, NaN where there is no order, with this bar's close seen.

    "on_change" orders where the target differs from the last one ordered; "rebalance" orders
    every target that is given. `present` `[A]` says where this bar can fill an order at its close.
    """
    chex.assert_equal_shape([account.weight, target, present])
    new = ~jnp.isnan(target) & ~account.ruined
    if rules.order == "on_change":
        new &= target != account.ordered
    account = account._replace(
        ordered=jnp.where(new, target, account.ordered),
        pending=jnp.where(new, WHOLE, account.pending).astype(jnp.int8),
    )
    if rules.fill == "close":
        return trade(account, present, costs, rules)
    return account, _no_fill(account)


def _capped(target: Array, max_gross: float | None) -> Array:
    """Scales the whole target down to `max_gross`; its direction stays."""
    if max_gross is None:
        return target
    gross = jnp.abs(target).sum()
    return target * jnp.where(gross > max_gross, max_gross / jnp.maximum(gross, 1e-30), 1.0)


def _no_fill(account: Account) -> Fill:
    return Fill(jnp.zeros_like(account.weight), jnp.zeros_like(account.log_equity))


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
