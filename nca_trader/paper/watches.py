"""The drift watches of a session: of its account, and of each sleeve that shares it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.envs.account.state import Quote
from nca_trader.paper.core import Agent, Decision, Observed
from nca_trader.paper.drift import DriftWatch
from nca_trader.paper.sleeves import Member

ACCOUNT = ""  # the name of the account's own watch


class Watches:
    """Watches the agents of one account; a warning of a sleeve's has its name.

    Args:
      agent: of the account.
      members: its sleeves.
    """

    def __init__(self, agent: Agent, members: Sequence[Member] = ()):
        agents = {ACCOUNT: agent, **{member.name: member.agent for member in members}}
        self._of = {
            name: DriftWatch(one.usual, one.features, one.costs, one.rules)
            for name, one in agents.items()
        }
        self._members = tuple(members)

    @property
    def status(self) -> dict[str, Any]:
        """What is watched, for the journal; see `DriftWatch.status`."""
        found: dict[str, Any] = dict(self._of[ACCOUNT].status)
        if not self._members:
            return found
        # The account decides nothing of its own: its fills alone are watched.
        found = {name: "" if name == "slippage" else "each sleeve has its own" for name in found}
        return found | {"sleeves": {m.name: self._of[m.name].status for m in self._members}}

    def filled(
        self,
        asset: int,
        units: float,
        price: float,
        quote: Quote,
        money: float,
        sleeves: Iterable[str] = (),
    ) -> list[dict[str, Any]]:
        """Take a fill of the account's, as `DriftWatch.filled`.

        Args:
          asset: its place among the account's.
          units: signed, of the account's order: a sleeve's part of it had the same price.
          price: of it.
          quote: of the account's assets.
          money: the account's equity at about that time.
          sleeves: those that had part in it. A cross between sleeves is not a fill.
        """
        found = []
        for name in (ACCOUNT, *sleeves):
            found += _named(name, self._of[name].filled(asset, units, price, quote, money))
        return found

    def decided(
        self, decision: Decision, present: np.ndarray, turnover: Mapping[str, float]
    ) -> list[dict[str, Any]]:
        """Take a decision.

        Args:
          decision: of the account.
          present: `[A]`.
          turnover: of the account and of each sleeve, the notional traded since the last decision
            as a fraction of its own equity.
        """
        account = self._of[ACCOUNT]
        found = account.decided(decision.features, present)
        found += account.turned(turnover.get(ACCOUNT, 0.0))
        for member in self._members:
            own, watch = (decision.sleeves or {}).get(member.name), self._of[member.name]
            warned = [] if own is None else watch.decided(own.features, member.of(present))
            warned += watch.turned(turnover.get(member.name, 0.0))
            found += _named(member.name, warned)
        return found

    def followed(
        self, decision: Decision, present: np.ndarray, seen: Observed, quote: Quote
    ) -> list[dict[str, Any]]:
        """Take a decision on an account at a venue, and what traded since the one before.

        Args:
          decision: of the account.
          present: `[A]`.
          seen: the account as the venue has it.
          quote: of the bar at whose open it traded.
        """
        found, pairs = [], list(zip(self._members, seen.sleeves, strict=True))
        for asset in np.flatnonzero(seen.traded).tolist():
            price = float(seen.price[asset])
            # Back to units, which the watch turns into a fraction by its own price.
            units = float(seen.traded[asset] * seen.value / price)
            # A sleeve that only crossed had no fill at the venue.
            own = [member.name for member, one in pairs if asset in member.at[one.dealt]]
            found += self.filled(asset, units, price, quote, seen.value, own)
        turnover = {ACCOUNT: float(np.abs(seen.traded).sum())}
        turnover |= {member.name: float(np.abs(one.traded).sum()) for member, one in pairs}
        return found + self.decided(decision, present, turnover)


def watched_sentence(body: Mapping[str, Any]) -> str:
    """Say what a `watched` event says.

    >>> watched_sentence({"features": "a rule sees no features", "slippage": ""})
    'drift watched: slippage; not features (a rule sees no features)'
    """
    sleeves = body.get("sleeves")
    if isinstance(sleeves, Mapping):
        return "; ".join(f"{name}: {watched_sentence(own)}" for name, own in sleeves.items())
    kinds = {kind: why for kind, why in body.items() if isinstance(why, str)}
    seen = ", ".join(kind for kind, why in kinds.items() if not why) or "nothing"
    reasons = dict.fromkeys(why for why in kinds.values() if why)
    unseen = [f"{', '.join(k for k in kinds if kinds[k] == why)} ({why})" for why in reasons]
    return "; not ".join([f"drift watched: {seen}", *([", ".join(unseen)] if unseen else [])])


def _named(name: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**body, "sleeve": name} for body in bodies] if name else bodies
