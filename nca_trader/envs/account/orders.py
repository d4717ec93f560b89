"""How orders become trades: the rules of an account, fixed for its life."""

from __future__ import annotations

from typing import NamedTuple

from nca_trader.config import EnvConfig


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
