"""What a session's journal says about its account: orders, cash and units; and sizes.

Pure: the same events give the same books, in the session that wrote them and in the next one.
"""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.envs.account.state import ROUNDING
from nca_trader.paper.journal import Event
from nca_trader.paper.venue import (
    BY_VENUE,
    MARGIN,
    Books,
    Fill,
    Holdings,
    Instrument,
    Order,
    Ticket,
    valued,
)
from nca_trader.types import Costs

KEPT = 4096  # orders and fills that ended; older ones are in the journal alone
REFUSED = ("no-price", "not-shortable", "too-small")  # why `tickets` makes no order of a target
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

    @property
    def whole(self) -> bool:
        """Whether nothing is left to fill."""
        return abs(self.ticket.units - self.filled) <= UNITS * abs(self.ticket.units)


class Ledger:
    """Orders, cash and units as the journal's events say."""

    def __init__(self, events: Iterable[Event] = ()):
        self.open: dict[str, Sent] = {}  # orders that have not ended, by client id
        self.ended: dict[str, Sent] = {}
        self.cash = 0.0
        self.units: dict[str, float] = {}
        self.since: int | None = None  # the venue's clock when its books were taken over
        self.last = 0  # the newest fill or payment, on the venue's clock
        self.moves = 0  # fills and payments since then
        self.orders = self.count = 0  # orders and fills, of all time
        self.fills: dict[str, list[Any]] = {}
        self.traded: dict[str, list[float]] = {}  # units and money since the last `flush`
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
        if kind == "recon":
            self.recon = body.get("found", self.recon)

    def flush(self, symbols: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `[A]` what happened since the last call.

        Returns:
          Units traded, their mean price, NaN for none, and whether the venue closed the position
          and withdrew the orders; a margin call does so for every asset.
        """
        traded = np.array([self.traded.get(symbol, (0.0, 0.0)) for symbol in symbols])
        units, money = traded.reshape(-1, 2).T
        called = any(fill.client_id.startswith(MARGIN) for fill in self.closed)
        gone = {fill.symbol for fill in self.closed}
        closed = np.array([called or symbol in gone for symbol in symbols])
        self.traded.clear()
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
        return self.open.get(name) or self.ended.get(name)

    def _end(self, name: str, order: Sent) -> None:
        self.ended[name] = order
        if len(self.ended) > KEPT:
            # The oldest, so that a session of months keeps a bounded memory.
            self.ended.pop(next(iter(self.ended)))

    def _fill(self, fill: Fill, order: Sent | None) -> None:
        self.cash -= fill.units * fill.price + fill.commission
        self.units[fill.symbol] = self.units.get(fill.symbol, 0.0) + fill.units
        self.last, self.moves = max(self.last, fill.ts), self.moves + 1
        self.fills[fill.execution_id] = list(fill)
        self.count += 1
        if fill.client_id.startswith(BY_VENUE):
            self.closed.append(fill)
        units, money = self.traded.get(fill.symbol, (0.0, 0.0))
        self.traded[fill.symbol] = [units + fill.units, money + fill.units * fill.price]
        if len(self.fills) > KEPT:
            self.fills.pop(next(iter(self.fills)))
        if order:
            order.filled += fill.units


def tickets(
    orders: Sequence[Order],
    books: Books,
    close: np.ndarray,
    symbols: Sequence[str],
    instruments: Mapping[str, Instrument],
    costs: Costs,
    borrow: bool,
) -> tuple[list[Ticket], list[tuple[str, str]]]:
    """Turn target weights into tickets; pure.

    Args:
      orders: one for each symbol at most.
      books: what is held.
      close: `[A]` last closes.
      symbols: `A` names.
      instruments: by symbol: lots, the smallest order, whether it can be sold short.
      costs: what a fill is expected to cost.
      borrow: whether cash may go below 0. False cuts every buy by one factor.

    Returns:
      Tickets, sales first, and `(client_id, code)` of orders that cannot be sent.

    >>> here = Books(1000.0, np.array([0.0]))
    >>> order, stock = Order("a", "X", 0.5), {"X": Instrument("X", lot=1.0)}
    >>> tickets([order], here, np.array([70.0]), ["X"], stock, Costs(), borrow=False)
    ([Ticket(client_id='a', symbol='X', units=7.0, stop=None)], [])
    """
    worth = books.cash + float(valued(books.units, close).sum())
    wanted: list[tuple[Order, float, float]] = []
    refused = []
    for order in orders:
        i, instrument = list(symbols).index(order.symbol), instruments[order.symbol]
        price, held = float(close[i]), float(books.units[i])
        if not (np.isfinite(price) and price > 0.0 and worth > 0.0):
            refused.append((order.client_id, "no-price"))
            continue
        # By equity before any of these orders, as in a backtest.
        units = order.weight * worth / price - held
        if held + units < 0.0 and not instrument.shortable:
            refused.append((order.client_id, "not-shortable"))
            units = -max(held, 0.0)
        wanted.append((order, units, price))
    # An estimate: what a fill really costs is known when the venue says so.
    worse, f = costs.slippage + costs.half_spread, costs.commission
    # Sales come first and pay for the buys.
    sold = sum(-units * price for _, units, price in wanted if units < 0.0)
    bought = sum(units * price for _, units, price in wanted if units > 0.0)
    cash = max(books.cash + sold * (1.0 - worse) * (1.0 - f), 0.0)
    need = bought * (1.0 + worse) * (1.0 + f)
    cut = 1.0 if borrow or need <= cash else cash / need
    found = []
    for order, units, price in wanted:
        units = in_lots(units * cut if units > 0.0 else units, instruments[order.symbol].lot)
        # A shade less, since a venue's own rounding may be the other way.
        least = max(instruments[order.symbol].min_notional * (1.0 - ROUNDING), UNITS * worth)
        if (order.buy_only and units < 0.0) or abs(units) * price < least:
            refused.append((order.client_id, "too-small"))
        else:
            found.append(Ticket(order.client_id, order.symbol, units))
    return sorted(found, key=lambda ticket: ticket.units > 0.0), refused


def in_lots(units: float, lot: float) -> float:
    """Round towards zero to whole lots, without the digits that binary floats add."""
    if not lot:
        return units
    lots = int(np.floor(abs(units) / lot + ROUNDING))
    return float(np.sign(units)) * float(lots * decimal.Decimal(str(lot)))
