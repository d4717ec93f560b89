"""What a journal says of the sleeves of an account at a venue: cash, units, orders that they share.

Pure, as `paper.ledger` is: the same events give the same books.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.paper.ledger import Books, Ledger
from nca_trader.paper.sleeve_books import shared
from nca_trader.paper.sleeves import Member
from nca_trader.paper.venue import Fill


class SleevedLedger(Ledger):
    """The books of an account at a venue and of its sleeves, as the journal's events say.

    cash: by sleeve. held: units by sleeve and symbol. waiting: crosses that wait for a bar, by
    symbol. latest: the client id of the last order that a sleeve had part in, by sleeve and symbol.
    dealt: the symbols in which a sleeve had a part of the venue's fills since the last `flush_of`.
    close: by symbol, for shares of payments that are for no symbol.
    """

    def __init__(self, members: Sequence[Member]):
        self.members = tuple(members)
        names = [member.name for member in members]
        self.own_cash = dict.fromkeys(names, 0.0)
        self.held: dict[str, dict[str, float]] = {name: {} for name in names}
        self.waiting: dict[str, dict[str, float]] = {}
        self.latest: dict[tuple[str, str], str] = {}
        self.close: dict[str, float] = {}
        self._parts: dict[str, dict[str, float]] = {}
        self._traded: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        self.dealt: dict[str, set[str]] = {name: set() for name in names}
        super().__init__()

    def apply(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        """Take in one event."""
        if kind == "recon" and "cash" in body:
            # Before the account's own, as the difference is what is shared.
            self._adopt(body)
        super().apply(kind, key, body)
        if kind == "order_intent" and "parts" in body:
            name = body["client_id"]
            self._parts[name] = dict(body["parts"])
            for sleeve in body["parts"]:
                self.latest[sleeve, body["symbol"]] = name
        elif kind == "cross":
            symbol, units = body["symbol"], body["units"]
            self.waiting[symbol] = {name: n for name, n in units.items() if n}
            if body["order"] is None:  # what a sleeve had at the venue before is done with
                for name in units:
                    self.latest.pop((name, symbol), None)
        elif kind == "allocation":
            self._allocate(key, body)
        for name in [n for n in self._parts if self.order(n) is None]:
            del self._parts[name]  # as old as the orders that are forgotten

    def allocated(
        self, kind: str, key: str, body: Mapping[str, Any]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return keys and bodies of the events that share a fill or a payment among sleeves."""
        names = [member.name for member in self.members]
        if kind == "cash":
            held = np.array([self.held[name].get(body["symbol"], 0.0) for name in names])
            worth = np.array([self.worth(name) for name in names])
            # A dividend belongs to those that hold the share, and interest to all.
            weights = held if held.sum() else worth
            parts = shared(body["amount"], weights).tolist()
            return [(key, {"amount": dict(zip(names, parts, strict=True))})]
        if kind != "fill":
            return []
        fill = Fill(**body)
        parts = self._parts.get(fill.client_id)
        if parts is None:  # not an order of a sleeve: a margin call, or somebody else's
            parts = {name: self.held[name].get(fill.symbol, 0.0) for name in names}
            # Nobody holds it, so each bears its share of the account.
            if not sum(parts.values()):
                parts = {member.name: member.share for member in self.members}
        # In one order: the journal sorts names, and sums must round alike after a restart.
        parts = {name: parts[name] for name in names if name in parts}
        weights = np.array(list(parts.values()))
        units = shared(fill.units, weights).tolist()
        fees = shared(fill.commission, np.abs(weights)).tolist()
        body = {"symbol": fill.symbol, "price": fill.price}
        body["units"] = dict(zip(parts, units, strict=True))
        body["commission"] = dict(zip(parts, fees, strict=True))
        return [(key, body)]

    def worth(self, name: str) -> float:
        """Return a sleeve's cash and positions in money, at the closes that are known."""
        held = self.held[name].items()
        return self.own_cash[name] + sum(n * self.close.get(s, 0.0) for s, n in held if n)

    def books_of(self, member: Member) -> Books:
        """Return a sleeve's cash and units `[A_k]`."""
        held = self.held[member.name]
        units = [held.get(symbol, 0.0) for symbol in member.agent.symbols]
        return Books(self.own_cash[member.name], np.array(units, float))

    def flush_of(self, member: Member) -> tuple[np.ndarray, np.ndarray]:
        """As `flush`, of one sleeve."""
        own = self._traded[member.name]
        traded = np.array([own.get(symbol, (0.0, 0.0)) for symbol in member.agent.symbols])
        own.clear()
        self.dealt[member.name].clear()
        units, money = traded.reshape(-1, 2).T
        return units, np.where(units == 0.0, np.nan, money / np.where(units == 0.0, 1.0, units))

    def gap(self) -> float:
        """Return how far the sleeves' books are from the account's, relative to its worth."""
        symbols = {*self.units, *(s for own in self.held.values() for s in own)}
        off = abs(sum(self.own_cash.values()) - self.cash)
        worth = abs(self.cash)
        for symbol in symbols:
            price, units = self.close.get(symbol, 0.0), self.units.get(symbol, 0.0)
            mine = sum(own.get(symbol, 0.0) for own in self.held.values())
            off += abs(mine - units) * price
            worth += abs(units) * price
        return off / max(worth, 1e-300)

    def _adopt(self, body: Mapping[str, Any]) -> None:
        """Share what a venue's books have that these do not know."""
        cash, units = body["cash"] - self.cash, dict(body["units"])
        shares = np.array([member.share for member in self.members])
        names = [member.name for member in self.members]
        if cash:
            for name, part in zip(names, shared(cash, shares).tolist(), strict=True):
                self.own_cash[name] += part
        for symbol in {*units, *self.units}:
            more = units.get(symbol, 0.0) - self.units.get(symbol, 0.0)
            for name, part in zip(names, shared(more, shares).tolist(), strict=True):
                if part:
                    self.held[name][symbol] = self.held[name].get(symbol, 0.0) + part

    def _allocate(self, key: str, body: Mapping[str, Any]) -> None:
        for name, amount in body.get("amount", {}).items():
            self.own_cash[name] += amount
        for name, units in body.get("units", {}).items():
            symbol, own = body["symbol"], self.held[name]
            fee = body.get("commission", {}).get(name, 0.0)
            self.own_cash[name] -= units * body["price"] + fee
            own[symbol] = own.get(symbol, 0.0) + units
            so_far, money = self._traded[name].get(symbol, (0.0, 0.0))
            self._traded[name][symbol] = [so_far + units, money + units * body["price"]]
            # A cross has no slippage, and would dilute the mean that the drift watch follows.
            if units and not key.startswith("cross-"):
                self.dealt[name].add(symbol)
        if key.startswith("cross-"):
            self.waiting.pop(body["symbol"], None)
