"""What an account did in a bar: fills in order, and where equity went.

`account.step` returns it. Tables of trades and orders, sweeps and metrics read it, so that none of
them has to find out afterwards what the account did.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nca_trader.envs.account.state import Account
from nca_trader.types import Costs, Tensor

# Why an account traded, values of `AccountFill.reason`: an order, a level, or a margin call.
NONE, STOP_LOSS, TAKE_PROFIT, TRAILING_STOP, LIQUIDATED = range(5)
# When an account went bankrupt, values of `Effects.broke`.
NEVER, AT_OPEN, INSIDE, AT_CLOSE = range(4)


class Flows(NamedTuple):
    """Changes of equity by cause, `[]` each, in units of the start's equity; gains are positive.

    market: returns on the weights held. dividends: paid and received. delisting: the haircut of
    positions closed because their asset is delisted. commission, fixed_fee, slippage (ticks
    included), spread, impact: of trades. liquidation: the fee of forced ones. interest,
    borrow_fee, funding: of holding. ruin: losses forgiven below the floor. own: of `Costs.own`.
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
    own: tuple[Tensor, ...] = ()

    def named(self, costs: Costs) -> dict[str, Tensor]:
        """Return the flows by name; those of your own costs by the names in `costs.own`."""
        shared = {name: flow for name, flow in self._asdict().items() if name != "own"}
        return shared | dict(zip(costs.own or (), self.own, strict=True))


def add_flows(*flows: Flows) -> Flows:
    """Add flows; only those of trades have an entry for costs of your own."""
    whole = jax.tree.map(
        lambda *parts: sum(parts[1:], parts[0]), *(f._replace(own=()) for f in flows)
    )
    own = zip(*(f.own for f in flows if f.own), strict=True)
    return whole._replace(own=tuple(sum(parts[1:], parts[0]) for parts in own))


class AccountFill(NamedTuple):
    """What an account traded at one moment of a bar; `[A]` each, unless said otherwise.

    traded: signed notional at the bar's price, as a fraction of equity before it.
    cost: of trading each asset, likewise.
    flows: where equity went; () in `Effects`, which have those of the whole bar.
    left: weights after it, as fractions of equity before it.
    growth: `[]` of equity from the last close to before it.
    small: `[]` number of orders that were not sent: lots, `min_notional` and cash left nothing of
      them. Less than a lot more or less of a position held does not count. None without both.
    price: of a fill inside the bar, NaN for none; a bankrupt account reaches it and trades nothing.
      None at the open and at the close, whose prices the bar has.
    reason: int8 of a fill inside the bar; None where all fills have one.
    """

    traded: Array
    cost: Array
    flows: Any
    left: Any = None
    growth: Any = 0.0
    small: Any = None
    price: Any = None
    reason: Any = None


class Effects(NamedTuple):
    """What an account did in a bar, moment by moment; None where nothing can happen.

    flows: where equity went, of the whole bar.
    growth: `[]` of equity over the bar, before an order fills at its close.
    broke: `[]` int8, when the account went bankrupt, e.g. `AT_OPEN`. It keeps its positions up to
      the price of that moment: the open, what it reached inside, or the close.
    overnight, intraday: `[A]` what each asset earned, as fractions of equity at the last close.
    gone: `[A]` bool, a position ended because its asset was delisted.
    called_at_open, at_open, inside, called_at_close, at_close: fills in order; a margin call comes
      before the orders of its moment.
    """

    flows: Flows
    growth: Any = None
    broke: Any = None
    overnight: Any = None
    intraday: Any = None
    gone: Any = None
    called_at_open: AccountFill | None = None
    at_open: AccountFill | None = None
    inside: AccountFill | None = None
    called_at_close: AccountFill | None = None
    at_close: AccountFill | None = None

    @property
    def fills(self) -> list[AccountFill]:
        """The fills in order."""
        return [fill for fill in self[6:] if fill is not None]

    def having(self, **fills: AccountFill | None) -> Effects:
        """Add fills by their moment, and their flows."""
        given = {moment: fill for moment, fill in fills.items() if fill is not None}
        bare = {moment: fill._replace(flows=()) for moment, fill in given.items()}
        flows = add_flows(self.flows, *(fill.flows for fill in given.values()))
        return self._replace(flows=flows, **bare)

    def closed(self, before: Account, after: Account, fill: AccountFill | None) -> Effects:
        """Add the fill of an order at the close, which took the account `before` to `after`."""
        if fill is None:
            return self
        broke = jnp.where(after.bankrupt & ~before.bankrupt, AT_CLOSE, self.broke).astype(jnp.int8)
        return self._replace(broke=broke).having(at_close=fill._replace(growth=self.growth))
