"""What a session's journal says about its account: orders, cash and units; read by every session.

`paper.tally` adds the sums that people look at.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.paper.journal.journal import Event
from nca_trader.paper.venue import BY_VENUE, MARGIN, Books, Fill, Holdings, Ticket

KEPT = 4096  # orders that ended; older ones are in the journal alone
# Why an order had no effect at the venue; in several bars in a row that stops trading.
FAILED = ("rejected", "refused", "too-old", "never-arrived")
IN_A_ROW = 3  # bars whose orders are remembered
REFUSED = ("no-price", "not-shortable", "too-small")  # why no order is made of a target
UNITS = 1e-9  # relative, of a position: what floats add up to
CASH = 1e-6  # relative, of cash: venues round money to cents


@dataclasses.dataclass
class Sent:
    """An order of ours. state: "intent", "sent", "ambiguous", "working" or "done"."""

    ticket: Ticket
    bar: int
    state: str = "intent"
    attempts: int = 0
    filled: float = 0.0
    reason: str = ""
    paid: float = 0.0  # money of its fills

    @property
    def price(self) -> float:
        """Mean price paid per unit; NaN before a fill."""
        return self.paid / self.filled if self.filled else math.nan

    @property
    def failed(self) -> bool:
        """Whether it ended without an effect at the venue."""
        return self.reason in FAILED and not self.filled

    @property
    def whole(self) -> bool:
        """Whether nothing is left to fill."""
        return abs(self.ticket.units - self.filled) <= UNITS * abs(self.ticket.units)


class Ledger:
    """What a session's journal says about its account: orders, cash and units.

    The same events give the same books, in the session that wrote them and in the next one. A body
    that it cannot read is an error.
    """

    def __init__(self, events: Iterable[Event] = ()):
        self.open: dict[str, Sent] = {}  # orders that have not ended, by client id
        self._tried: dict[int, list[Sent]] = {}  # the newest bars with orders, and these
        self._ended: dict[str, Sent] = {}
        self.cash = 0.0
        self.units: dict[str, float] = {}
        self.since: int | None = None  # the venue's clock when its books were taken over
        self.last = 0  # the newest fill or payment, on the venue's clock
        self.moves = 0  # fills and payments since then
        self.orders = self.count = 0  # orders and fills, of all time
        self._traded: dict[str, list[float]] = {}  # units and money since the last `flush`
        self.closed: list[Fill] = []  # by which the venue itself closed positions, since then
        self.adopted: frozenset[str] = frozenset()  # fills and payments in the books taken over
        self.recon = ""  # digest of the last finding, which is not written twice
        for event in events:
            self.apply(event.kind, event.key, event.body)

    def apply(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        """Take in one event."""
        name = body.get("client_id", key.partition("#")[0])
        order = self.order(name)
        if kind == "order_intent":
            # A replay orders weights, which are sized where they fill.
            ticket = Ticket(name, body["symbol"], body.get("units", np.nan))
            self.open[name], self.orders = Sent(ticket, body.get("bar", 0)), self.orders + 1
            self._tried.setdefault(body.get("bar", 0), []).append(self.open[name])
            self._tried = dict([*self._tried.items()][-IN_A_ROW:])
        elif kind in ("order_sent", "order_ack", "order_ambiguous") and order:
            order.state = {"order_sent": "sent", "order_ack": "working"}.get(kind, "ambiguous")
            # Sendings and not answers: each one has a key of its own in the journal.
            order.attempts += kind == "order_sent"
        elif kind == "order_terminal" and order:
            order.state, order.reason = "done", body["reason"]
            self._end(name, self.open.pop(name))
        elif kind == "risk" and body["code"] in REFUSED:
            # A target that is neither ordered nor refused was not written: the process ended.
            ticket = Ticket(name, body["symbol"], 0.0)
            self._end(name, Sent(ticket, 0, "done", reason=body["code"]))
        elif kind == "fill":
            self._fill(Fill(**body), order)
        elif kind == "cash":
            self.cash += body["amount"]
            self.last, self.moves = max(self.last, body.get("ts", 0)), self.moves + 1
        # Other findings of a comparison change no books.
        elif kind == "recon" and "cash" in body:
            self.cash, self.units = body["cash"], dict(body["units"])
            self.since = self.last = body["now"]
            self.adopted = frozenset([*body.get("payments", ()), *body.get("fills", ())])
            self.moves = 0
        elif kind == "run_started" and "venue" not in body:
            self.cash = body["capital"]  # a venue has its own
        elif kind == "resume":
            self.since = None  # a person has looked: the venue's books are taken over again
            self._tried.clear()
        if kind == "recon":
            self.recon = body.get("found", self.recon)

    @property
    def failed(self) -> list[list[Sent]]:
        """The orders of the newest bars at which every order failed, by bar, the newest first."""
        bars = reversed(self._tried.values())
        return list(itertools.takewhile(lambda bar: all(order.failed for order in bar), bars))

    def flush(self, symbols: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `[A]` what happened since the last call.

        Returns:
          Units traded, their mean price, NaN for none, and whether the venue closed the position
          and withdrew the orders; a margin call does so for every asset.
        """
        traded = np.array([self._traded.get(symbol, (0.0, 0.0)) for symbol in symbols])
        units, money = traded.reshape(-1, 2).T
        called = any(fill.client_id.startswith(MARGIN) for fill in self.closed)
        gone = {fill.symbol for fill in self.closed}
        closed = np.array([called or symbol in gone for symbol in symbols])
        self._traded.clear()
        self.closed.clear()
        price = np.where(units == 0.0, np.nan, money / np.where(units == 0.0, 1.0, units))
        return units, price, closed

    def books(self, symbols: Sequence[str]) -> Books:
        """Return cash and units `[A]`."""
        return Books(self.cash, np.array([self.units.get(s, 0.0) for s in symbols], float))

    def differences(self, held: Holdings, symbols: Sequence[str]) -> dict[str, Any]:
        """Return what the venue has and the journal does not explain."""
        off: dict[str, Any] = {}
        for symbol in symbols:
            there, here = held.units.get(symbol, 0.0), self.units.get(symbol, 0.0)
            # Written with `not`, so that a NaN is a difference.
            if not abs(there - here) <= UNITS * max(1.0, abs(there), abs(here)):
                off[symbol] = {"venue": there, "journal": here}
        # A venue rounds each payment to a cent.
        near = CASH * max(abs(held.cash), abs(self.cash)) + 0.01 * (1 + self.moves)
        if not abs(held.cash - self.cash) <= near:
            off["cash"] = {"venue": held.cash, "journal": self.cash}
        return off

    def order(self, name: str) -> Sent | None:
        """Return an order that is open, or ended not long ago."""
        return self.open.get(name) or self._ended.get(name)

    def _end(self, name: str, order: Sent) -> None:
        self._ended[name] = order
        if len(self._ended) > KEPT:
            # The oldest, so that a session of months keeps a bounded memory.
            self._ended.pop(next(iter(self._ended)))

    def _fill(self, fill: Fill, order: Sent | None) -> None:
        self.cash -= fill.units * fill.price + fill.commission
        self.units[fill.symbol] = self.units.get(fill.symbol, 0.0) + fill.units
        self.last, self.moves = max(self.last, fill.ts), self.moves + 1
        self.count += 1
        if fill.client_id.startswith(BY_VENUE):
            self.closed.append(fill)
        units, money = self._traded.get(fill.symbol, (0.0, 0.0))
        self._traded[fill.symbol] = [units + fill.units, money + fill.units * fill.price]
        if order:
            order.filled += fill.units
            order.paid += fill.units * fill.price
