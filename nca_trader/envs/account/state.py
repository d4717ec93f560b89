"""One account, scale-free: the log of its equity and the weight held in each asset.

All terms are fractions of equity at the prices of the moment, so no initial cash is needed and
reward is a difference of log-equity. Only lots, fixed fees, impact and the like need to know how
much money that is: `Rules.capital`. What moves an account is in `nca_trader.envs.account.step`.

Log-equity and weights are pairs of floats (`numerics.pair_add`): a held weight is a
multiplicative random walk, and in float32 alone it drifts by 2e-5 over 100,000 bars.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from nca_trader.config import EnvConfig
from nca_trader.types import Tensor


class Rules(NamedTuple):
    """Static under jit; each field as in `EnvConfig`.

    fill: "next_open" or "close". order: "on_change" or "rebalance".
    max_gross, max_net: caps on sum |target| and |sum target|, the whole target is scaled to them;
      None is no cap.
    borrow: False cuts all buys by one factor where cash does not pay for them.
    floor: equity at or below which the account is ruined, as a fraction of the start's.
    maintenance_margin: equity below this fraction of the gross position closes every position;
      None is no margin call.
    capital: money that an equity of 1 stands for; None where no size in money matters.
    lot: units are whole multiples of it, 0 trades any fraction. tick: prices of fills are whole
      multiples of it, rounded against the trader. min_notional: money below which no order is
      sent. max_participation: share of a bar's volume that a fill may take.
    delist_after: bars missing in a row after which an asset is taken for gone; None is never.
    delist_haircut: fraction of its last price that is lost then.
    """

    fill: str = "next_open"
    order: str = "on_change"
    max_gross: float | None = None
    max_net: float | None = None
    borrow: bool = False
    floor: float = 1e-9
    maintenance_margin: float | None = None
    capital: float | None = None
    lot: float = 0.0
    tick: float = 0.0
    min_notional: float = 0.0
    max_participation: float | None = None
    delist_after: int | None = None
    delist_haircut: float = 0.0

    @property
    def sized(self) -> bool:
        """Whether a venue refuses or cuts some sizes."""
        return bool(self.lot or self.min_notional or self.max_participation is not None)


def rules_of(config: EnvConfig) -> Rules:
    """The account's rules in the environment that `config` makes."""
    names = (name for name in Rules._fields if name != "floor")
    return Rules(floor=config.ruin_floor, **{name: getattr(config, name) for name in names})


FILLED, WHOLE, REST = 0, 1, 2


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
    memory: what the reward remembers, see `nca_trader.envs.rewards`; () for nothing.
    """

    log_equity: Array
    log_equity_low: Array
    weight: Array
    weight_low: Array
    ordered: Array
    pending: Array
    ruined: Array
    memory: Any = ()

    @property
    def held(self) -> Array:
        """`[A]` value held in each asset, as a signed fraction of equity."""
        return self.weight + self.weight_low


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
