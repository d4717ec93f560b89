"""Sends a session's orders to a venue so that each has effect once, whatever fails in between.

An order is in the journal before it is sent, and each step before the next: `order_intent`,
`order_sent`, then `order_ack`, or `order_ambiguous` until the venue has been asked what it has,
and `order_terminal` at the end. All that this module knows is a function of those events: a
session that was killed reads them and goes on. The venue's own books are compared with them at
the start and at every bar.
"""

from __future__ import annotations

import contextlib
import decimal
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.envs.account.state import ROUNDING
from nca_trader.errors import printable
from nca_trader.paper.clock import NANOSECONDS, PATIENCE, Clock, Patience, jitter
from nca_trader.paper.journal.journal import Journal, canonical
from nca_trader.paper.journal.ledger import UNITS, Ledger, Sent
from nca_trader.paper.session.halts import Halt
from nca_trader.paper.venue import (
    LARGEST,
    Answer,
    Books,
    CashFlow,
    Fill,
    Holdings,
    Instrument,
    OrderState,
    Outcome,
    TargetOrder,
    Ticket,
    Unreachable,
    Venue,
    fault_of,
    value_of,
)
from nca_trader.types import Costs


def tickets(
    orders: Sequence[TargetOrder],
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
    >>> order, stock = TargetOrder("a", "X", 0.5), {"X": Instrument("X", lot=1.0)}
    >>> tickets([order], here, np.array([70.0]), ["X"], stock, Costs(), borrow=False)
    ([Ticket(client_id='a', symbol='X', units=7.0, stop=None)], [])
    """
    worth = books.cash + float(value_of(books.units, close).sum())
    wanted: list[tuple[TargetOrder, float, float]] = []
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


ANSWERED = (Outcome.ACCEPTED, Outcome.REJECTED)
LATE = 7 * 86_400 * NANOSECONDS  # by which a payment may be listed after its day
OVERLAP = 3600 * NANOSECONDS  # of what two calls of `activity` cover: fills may be listed late
AHEAD = 366 * 86_400 * NANOSECONDS  # after which nothing can have happened yet


class OrderRouter:
    """A session's account at a venue.

    Args:
      venue: the account.
      journal: an open one.
      run: the session's hash, which its client ids carry.
      symbols: `A` names that the session trades; the account may hold others.
      newest_for: returns the seconds for which the bar that opens at a time is the newest.
      clock: for waits, and for the age of orders.
      patience: how long they are.
      refuse: called before every order; raises `Halt` where nothing may be sent any more.
      ledger: of the journal, where its events have been read already.
      by_venue: how the ids of fills begin by which the venue itself closes positions.
    """

    def __init__(
        self,
        venue: Venue,
        journal: Journal,
        run: str,
        symbols: Sequence[str],
        newest_for: Callable[[int], float],
        clock: Clock | None = None,
        patience: Patience = PATIENCE,
        refuse: Callable[[], None] = lambda: None,
        ledger: Ledger | None = None,
        by_venue: tuple[str, ...] = (),
    ):
        self.venue, self._journal, self._run = venue, journal, run
        self._symbols, self._newest_for = tuple(symbols), newest_for
        self._clock, self._patience, self._refuse = clock or Clock(), patience, refuse
        self.ledger = Ledger(journal.events()) if ledger is None else ledger
        self.prefix = f"nca-{run[:8]}-"
        self._ours = (self.prefix, *by_venue)
        self.held: dict[str, str] = {}  # symbols with an order whose fate is not known
        self._again: set[str] = set()  # orders that the venue has not got, to be sent again
        self._withdrawn: set[str] = set()  # orders that work although they were cancelled
        self._given: dict[str, float] = {}  # when the bar of an order came, by client id
        self._busy = -np.inf  # on the clock of waits, until when the venue takes no order
        self.instruments: dict[str, Instrument] = {}
        self.news: list[Fill] = []  # since the caller last emptied it

    def start(self, ts: int) -> None:
        """Take over the venue's books, or compare them with the journal; end what is unknown.

        Args:
          ts: nanoseconds since 1970 UTC, for the journal.

        Raises:
          Halt: they differ.
          Unreachable: the venue does not answer.
        """
        self.instruments = {s: self.venue.instrument(s) for s in self._symbols}
        if self.ledger.since is None:  # the first start, or a person lifted a halt
            # Before the books are taken over: an order that still works would change them.
            self._abandon(ts)
            self.adopt(ts)
        # These left this process, and their answer may have been lost with it.
        asked = [o for o in self.ledger.open.values() if o.state in ("sent", "ambiguous")]
        self._again = {o.ticket.client_id for o in asked if self._resolve(o, ts)}
        self.sync(ts)
        self.deliver(ts)

    def adopt(self, ts: int, reason: str = "first start") -> None:
        """Make the venue's books the journal's, whatever they are.

        Fills and payments that are listed by then are in these books, and later ones are not. Their
        times do not tell: a fill may have the very time of the venue's clock, and a dividend or a
        fee has a day, and may be listed some days after it.
        """
        now = self.venue.now()
        listed = self._listed_since(now)
        held = self.venue.holdings()
        if self._listed_since(now) != listed:
            raise Unreachable("moving", "a fill or payment came while the books were read")
        units = {name: n for name, n in sorted(held.units.items()) if n}
        body = {"code": "adopted", "reason": reason, "cash": held.cash, "units": units, "now": now}
        body |= {name: ids for name, ids in listed.items() if ids}
        # After a halt the books may be taken over again, at the same time of the same venue.
        self.write("recon", f"adopted:{now}:{self._journal.head.seq}", body, ts)

    def sync(self, ts: int) -> Books:
        """Take in what happened at the venue, and compare its books with the journal's.

        Raises:
          Halt: a position or the cash is not what the fills and payments say, after as many
            looks as `Patience` allows; a fill is more than its order, or not of an order of ours.
          Unreachable: the venue does not answer.
        """
        off: dict[str, Any] = {}
        for look in range(self._patience.recounts):
            if look:
                # A venue may list a fill later than the position that it made.
                self._clock.sleep(self._patience.first * 2**look)
            # A later look begins with the first fill, as one may be listed after the overlap.
            self.take(ts, since=None if look == 0 else (self.ledger.since or 0) - LATE)
            # After the fills: a fill between the two answers shows as a difference, and is looked
            # at again.
            held, working = self.venue.holdings(), self.venue.working()
            unknown = self._follow({order.client_id: order for order in working}, ts)
            off = self.ledger.differences(held, self._symbols)
            if not (off or unknown):
                self._list_foreign(working, held, ts)
                return self.books()
        # Named apart, as money alone may be a fee or a transfer that a person knows of.
        code = "cash-differs" if set(off) == {"cash"} else "position-differs"
        raise Halt(code if off else "fills-missing", **off, **unknown)

    def take(self, ts: int, since: int | None = None) -> None:
        """Journal the fills and payments that are new.

        Args:
          ts: nanoseconds since 1970 UTC, for orders that a fill ends.
          since: from where to look, on the venue's clock; None is an hour before the last.
        """
        begun = self.ledger.since or 0
        # Never before the books were taken over: what happened until then is in them.
        since = max(begun, self.ledger.last - OVERLAP) if since is None else since
        found = self.venue.activity(since)
        fills = [Fill(**body) for body in self._news(Fill, found.fills, begun, ts).values()]
        flows = self._news(CashFlow, found.flows, begun - LATE, ts)
        # Venues list fills in any order, and the books must not depend on it.
        fills.sort(key=lambda fill: (fill.ts, fill.execution_id))
        with self._journal.transaction():
            # All or none: with half of them the books would be ones that never were.
            for name, body in flows.items():
                self.write("cash", name, body, body["ts"])
            for fill in fills:
                self._fill(fill, ts)
        self.news += fills
        self._refuse_fills(fills)

    def _listed_since(self, now: int) -> dict[str, list[str]]:
        """Return the ids of the venue's fills from `now` on, and of payments that may come late."""
        found = self.venue.activity(now - LATE)
        fills = sorted(_id_of(fill) for fill in found.fills if not _is_before(fill, now))
        return {"payments": sorted(map(_id_of, found.flows)), "fills": fills}

    def withdraw(self, names: Iterable[str], ts: int) -> None:
        """Cancel orders of ours, then wait until the venue says that none of them works.

        One that still works after `Patience.looks` holds its symbol, and is cancelled again at
        each later call.
        """
        self._withdrawn &= self.ledger.open.keys()
        for name in sorted(self._withdrawn):
            self.venue.cancel(name)
        found = {name: self.ledger.open.get(name) for name in names}
        left = {name: order for name, order in found.items() if order is not None}
        asked = set(left)
        for waited in self._looks("withdraw") if left else ():
            # What was not heard is said again.
            asked -= {n for n in sorted(asked) if self.venue.cancel(n).outcome in ANSWERED}
            with contextlib.suppress(Unreachable):
                self.take(ts)
                working = {state.client_id: state for state in self.venue.working()}
                for order in left.values():
                    if order.state != "done":
                        self._follow_one(order, working, ts)
            left = {name: order for name, order in left.items() if order.state != "done"}
            if not left or waited >= self._patience.looks:
                break
            asked &= left.keys()
        for order in left.values():
            self._withdrawn.add(order.ticket.client_id)
            self._hold(order, "not-cancelled", ts)

    def cancel_all(self, venue: Venue) -> None:
        """Cancel at `venue`, once, every order of ours that may work there."""
        for name, order in list(self.ledger.open.items()):
            if order.state != "intent":
                with contextlib.suppress(Exception):  # it must not hide why the session ends
                    venue.cancel(name)

    def intend(
        self, ticket: Ticket, bar: int, more: Mapping[str, Any], ts: int, given: float | None = None
    ) -> None:
        """Journal an order that `deliver` may send; call it in the transaction of its decision.

        Args:
          ticket: the order.
          bar: seconds since 1970 UTC of the open of the bar that it follows from.
          more: what else the journal says of it.
          ts: nanoseconds since 1970 UTC, for the journal.
          given: when that bar came, on the clock of waits, from which the order's age counts.
        """
        if given is not None:
            self._given[ticket.client_id] = given
        body = {**more, "client_id": ticket.client_id, "symbol": ticket.symbol}
        body |= {"units": ticket.units, "bar": bar}
        self.write("order_intent", ticket.client_id, body, ts)

    def deliver(self, ts: int) -> None:
        """Send every order that is in the journal and has not reached the venue."""
        for name, order in list(self.ledger.open.items()):
            if order.state == "intent" or name in self._again:
                self._deliver(order, ts)
        self._again.clear()

    def books(self) -> Books:
        """Return cash and units `[A]` as the journal has them."""
        return self.ledger.books(self._symbols)

    def _deliver(self, order: Sent, ts: int) -> None:
        """Send an order, as often as the venue is busy or has not got it."""
        ticket, wait = order.ticket, self._patience.first
        while order.state != "done":
            if ticket.symbol in self.held:
                return self._end(order, "symbol-held", ts)
            # A venue that is busy is busy for every order; none waits longer than it may be sent.
            pause = max(self._busy - self._clock.monotonic(), 0.0)
            # What was sent before is not at the venue, or this would not be reached.
            if not pause <= self._left(order) > 0.0:
                unheard = order.state == "ambiguous"
                return self._end(order, "never-arrived" if unheard else "too-old", ts)
            if pause:
                self._clock.sleep(pause)
            self._refuse()
            # Before it leaves: after a crash here the venue is asked what it has.
            self.write("order_sent", f"{ticket.client_id}#{order.attempts}", {}, ts)
            answer = self.venue.submit(ticket)
            if answer.outcome is Outcome.ACCEPTED:
                return self._acknowledge(order, {}, ts)
            if answer.outcome is Outcome.BUSY:
                # A venue may say "nan" or "inf", which says no time.
                asked = answer.retry_after if np.isfinite(answer.retry_after) else 0.0
                ours = jitter(wait, f"{self.prefix}{ticket.client_id}{order.attempts}")
                pause = max(asked, min(ours, self._left(order)))
                self._busy = self._clock.monotonic() + pause
                wait = min(2.0 * wait, self._patience.last)
                continue
            if answer.outcome is Outcome.AMBIGUOUS:
                # Of the sending that it answers, which has been counted already.
                key = f"{ticket.client_id}#{order.attempts - 1}"
                self.write("order_ambiguous", key, {"reason": answer.reason}, ts)
            if not self._resolve(order, ts, answer):
                return None

    def _resolve(self, order: Sent, ts: int, answer: Answer | None = None) -> bool:
        """Ask the venue what became of an order; return whether it is to be sent again.

        An order that the venue has is adopted. One that it refused, or that it has not got after
        the grace, ends; the second kind may be sent again under the same id while it is fresh.
        """
        name = order.ticket.client_id
        # A refusal is believed once the venue confirms that it has no such order.
        refused = answer is not None and answer.outcome is Outcome.REJECTED
        # The next bar may close before the venue answers; its orders must not wait for this one.
        patience = max(min(self._patience.looks, self._left(order)), self._patience.grace)
        for waited in self._looks(f"{name}{order.attempts}"):
            try:
                state = self.venue.look_up(name)
            except Unreachable as error:
                if waited >= patience:
                    self._hold(order, error.reason, ts)
                    return False
            else:
                if state is not None and state.status != "rejected":
                    self._acknowledge(order, {"by": "look-up"}, ts)
                    return False
                if refused or state is not None:
                    why = answer.reason if answer and refused else "venue"
                    final = answer is not None and refused and answer.final
                    self._end(order, "refused" if final else "rejected", ts, code=why)
                    return False
                # A venue may list an order some time after it took it.
                if waited >= self._patience.grace:
                    break
        if self._left(order) < 0.0:
            self._end(order, "never-arrived", ts)
        return order.state != "done"

    def _abandon(self, ts: int) -> None:
        """Cancel and end every order of ours: the venue's books will be taken as they are."""
        left = dict(self.ledger.open)
        sent = {name for name, order in left.items() if order.state != "intent"}
        for name in sorted(sent):
            self.venue.cancel(name)
        for waited in self._looks("abandon") if left else ():
            for name, order in list(left.items()):
                state = self.venue.look_up(name) if name in sent else None
                # Fills of one that still works would come later, and be counted twice.
                if state is None or state.status != "working":
                    reason = "never-arrived" if state is None else state.status
                    # By us, here or at the halt, so that its target is still owed.
                    reason = "abandoned" if reason == "cancelled" else reason
                    self._end(order, reason, ts, venue=0.0 if state is None else state.filled)
                    del left[name]
            if not left:
                return
            if waited >= self._patience.looks:
                raise Halt("not-cancelled", client_id=next(iter(left)), orders=len(left))

    def _follow(self, working: dict[str, OrderState], ts: int) -> dict[str, Any]:
        """Bring our open orders up to date; return those whose fills are not all listed yet."""
        for name, state in working.items():
            if name.startswith(self.prefix) and self.ledger.order(name) is None:
                # The journal is older than the venue, e.g. restored from a copy.
                ticket = Ticket(name, state.symbol, state.units)
                self.intend(ticket, ts // NANOSECONDS, {"adopted": True}, ts)
                self._acknowledge(self.ledger.open[name], {"by": "adopted"}, ts)
        late = {}
        for name, order in list(self.ledger.open.items()):
            if order.state == "intent" or name in self._again:
                continue
            try:
                found = self._follow_one(order, working, ts)
            except Unreachable:
                # Of a held symbol it is known already that the venue does not answer.
                if order.ticket.symbol not in self.held:
                    raise
                continue
            if found is not None:
                late[name] = {"venue": found.filled, "journal": order.filled}
        return late

    def _follow_one(
        self, order: Sent, working: Mapping[str, OrderState], ts: int
    ) -> OrderState | None:
        """Bring an order up to date; return it as the venue has it where fills are missing."""
        name = order.ticket.client_id
        if name in working:
            # Kept whatever the positions are: its fills may be listed late.
            if order.state != "working":
                self._acknowledge(order, {"by": "look-up"}, ts)
            return None
        state = self.venue.look_up(name)
        if state is None:
            if order.state == "working":
                raise Halt("order-lost", client_id=name)
            self._end(order, "never-arrived", ts)
        elif state.status != "working":
            if abs(state.filled - order.filled) > UNITS * abs(order.ticket.units):
                return state
            self._end(order, state.status, ts)
        elif order.state != "working":
            self._acknowledge(order, {"by": "look-up"}, ts)
        return None

    def _news(self, kind: Any, items: Iterable[Any], begun: int, ts: int) -> dict[str, Any]:
        """Return by id the fills or payments since `begun` that the journal does not have.

        Raises:
          Halt: one cannot be booked, or the journal has it with another content.
        """
        found: dict[str, Any] = {}
        what, event = ("fill", "fill") if kind is Fill else ("payment", "cash")
        for item in items:
            name = _id_of(item)
            if name in self.ledger.adopted or _is_before(item, begun):
                continue
            fault = fault_of(item, kind)
            money = item.price * abs(item.units) if not fault and kind is Fill else 0.0
            if fault or item.ts > ts + AHEAD or not 0.0 <= money < LARGEST:
                why = fault or f"it is of {money:g} in money, at {item.ts} ns since 1970"
                raise Halt(f"{what}-unusable", id=printable(name[:80]), why=why)
            body = {field: x for field, x in item._asdict().items() if field != "id"}
            known = found.get(name) or self._journal.body(self._run, event, name)
            if known is None:
                found[name] = body
            elif known != body:
                # Books that were computed from the first version are wrong by now.
                raise Halt(f"{what}-changed", id=name, venue=body, journal=known)
        return found

    def _fill(self, fill: Fill, ts: int) -> None:
        order = self.ledger.order(fill.client_id)
        self.write("fill", fill.execution_id, fill._asdict(), fill.ts)
        if order is None or order.state == "done":
            return
        if order.state != "working":  # a fill before the answer is an answer
            self._acknowledge(order, {"by": "fill"}, ts)
        if order.whole:
            self._end(order, "filled", ts)

    def _refuse_fills(self, fills: Sequence[Fill]) -> None:
        """Halt on fills that no order of ours explains; they are in the journal already."""
        for fill in fills:
            order = self.ledger.order(fill.client_id)
            if order is None:
                if fill.symbol in self._symbols and not fill.client_id.startswith(self._ours):
                    raise Halt("foreign-fill", symbol=fill.symbol, units=fill.units)
                continue
            wanted = order.ticket.units
            excess = order.filled * np.sign(wanted) - abs(wanted)
            if fill.symbol != order.ticket.symbol or excess > UNITS * abs(wanted):
                raise Halt(
                    "overfilled", client_id=fill.client_id, ordered=wanted, filled=order.filled
                )

    def _list_foreign(self, working: Sequence[OrderState], held: Holdings, ts: int) -> None:
        """Journal orders and positions that are not ours where they changed; touch none of them."""
        orders = [list(o) for o in working if not o.client_id.startswith(self.prefix)]
        units = {s: n for s, n in sorted(held.units.items()) if n and s not in self._symbols}
        body: dict[str, Any] = {"orders": sorted(orders), "units": units}
        # So that a position of somebody else is written once, and not at every bar.
        found = hashlib.sha256(canonical(body).encode()).hexdigest()[:16]
        if found != self.ledger.recon and (orders or units or self.ledger.recon):
            body |= {"code": "foreign", "found": found}
            self.write("recon", f"foreign:{ts // NANOSECONDS}:{found[:8]}", body, ts)

    def _acknowledge(self, order: Sent, how: dict[str, Any], ts: int) -> None:
        if order.state not in ("working", "done"):
            self.write("order_ack", order.ticket.client_id, how, ts)
        self._release(order)

    def _end(self, order: Sent, reason: str, ts: int, **more: Any) -> None:
        body = {"reason": reason, "filled": order.filled, **more}
        self.write("order_terminal", order.ticket.client_id, body, ts)
        self._given.pop(order.ticket.client_id, None)
        self._release(order)

    def _release(self, order: Sent) -> None:
        if self.held.get(order.ticket.symbol) == order.ticket.client_id:
            del self.held[order.ticket.symbol]

    def _hold(self, order: Sent, reason: str, ts: int) -> None:
        """Send nothing more for a symbol until the fate of its order is known."""
        name, symbol = order.ticket.client_id, order.ticket.symbol
        self.held[symbol] = name
        body = {"code": "symbol-held", "symbol": symbol, "client_id": name, "reason": reason}
        self.write("risk", self.key(ts, f"{name}:held"), body, ts)

    def _looks(self, what: str) -> Iterator[float]:
        """Yield the seconds waited so far, see `Patience.looks_for`."""
        return self._patience.looks_for(self._clock, f"{self.prefix}{what}")

    def _left(self, order: Sent) -> float:
        """Return the seconds for which an order may still be sent; below 0 where it may not.

        That is while its bar is the newest one, and not for longer than `Patience.age`.
        """
        now = self._clock.monotonic()
        # Of an earlier process only the bar is known.
        age = now - self._given.setdefault(order.ticket.client_id, now)
        return min(self._patience.age - age, self._newest_for(order.bar))

    def key(self, ts: int, code: str) -> str:
        """Return a key of its own for what may happen again at a bar that is seen again."""
        return f"{ts // NANOSECONDS}:{code}:{self._journal.head.seq}"

    def write(self, kind: str, key: str, body: dict[str, Any], ts: int) -> None:
        """Journal an event, and take it into the books."""
        if self._journal.record(self._run, kind, key, body, ts):
            self.ledger.apply(kind, key, body)


def _id_of(item: Any) -> str:
    """Return the id of a fill or a payment, also of one that is none."""
    return printable(getattr(item, "execution_id", getattr(item, "id", item)))


def _is_before(item: Any, begun: int) -> bool:
    dated = getattr(item, "ts", None)
    return isinstance(dated, int) and dated < begun
