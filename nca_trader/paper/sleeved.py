"""Holders of an account that several sleeves share, in replay and at a venue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.paper.broker import valued
from nca_trader.paper.core import Agent, Core, Observed, Outcome, State
from nca_trader.paper.gate import in_json
from nca_trader.paper.holders import UNDONE, Holder, Sized, VenueHolder
from nca_trader.paper.ledger import Books, tickets
from nca_trader.paper.router import Halting, VenueBroker
from nca_trader.paper.sleeve_books import Pool, split
from nca_trader.paper.sleeve_core import SleevedCore
from nca_trader.paper.sleeve_ledger import SleevedLedger
from nca_trader.paper.sleeves import NET, Member
from nca_trader.paper.venue import Ticket

GAP = 1e-9  # relative, between the sleeves' books and the account's


def described(
    members: Sequence[Member], halted: Mapping[str, str], books: Sequence[tuple[Any, float, float]]
) -> dict[str, Any]:
    """Return what a snapshot says of sleeves: `books` are (cash and units, value, equity)."""
    found = {}
    for member, (own, value, equity) in zip(members, books, strict=True):
        body = {"cash": own.cash, "units": in_json(np.asarray(own.units)), "value": value}
        found[member.name] = body | {"equity": equity, "halted": halted.get(member.name)}
    return {"sleeves": found}


class SleevedHolder(Holder):
    """Sleeves that share the account of a replay.

    Args:
      pool: the broker, with the sleeves' books.
    """

    def __init__(self, pool: Pool):
        self._pool, self.members = pool, pool.members

    def core(self, core: Core) -> SleevedCore:
        """As `Holder.core`."""
        self._core = SleevedCore(core, self.members, self._pool.correct)
        return self._core

    def stage(self, state: State) -> None:
        """As `Holder.stage`."""
        self._pool.staged = state.memory.staged

    def allocations(self) -> list[tuple[str, dict[str, Any]]]:
        """As `Holder.allocations`."""
        return self._pool.take_allocations()

    def settled(self, state: State) -> State:
        """As `Holder.settled`."""
        return self._core.corrected(state)

    def off(self, state: State) -> float:
        """As `Holder.off`: of the sleeves' sum, or of a sleeve's own account from its books."""
        pool, close = self._pool, state.close
        price = np.nan_to_num(close)
        cash, units = pool.position()
        worth = float(cash + valued(units, close).sum())
        off = abs(sum(b.position().cash for b in pool.books) - cash)
        off += float((abs(sum(b.position().units for b in pool.books) - units) * price).sum())
        for member, book, own in zip(pool.members, pool.books, state.memory.states, strict=True):
            # Below the floor the account stands still, and its books go on.
            if own.account is None or own.account.ruined:
                continue
            value = book.value(close)
            equity = float(np.exp(own.account.log_equity + own.account.log_equity_low))
            off = max(off, abs(value - book.capital * equity) * worth / value)
            held = member.of(book.position().units * price) / value
            off = max(off, float(np.abs(held - own.account.held).max()) * worth)
        return off / worth

    def worth(self, state: State, account: float) -> dict[str, float]:
        """As `Holder.worth`."""
        pairs = zip(self.members, self._pool.books, strict=True)
        return {"": account, **{member.name: book.value(state.close) for member, book in pairs}}

    def described(self, state: State) -> dict[str, Any]:
        """As `Holder.described`."""
        books = []
        for member, book in zip(self.members, self._pool.books, strict=True):
            own, value = book.position(), book.value(state.close)
            books.append((Books(own.cash, member.of(own.units)), value, value / book.capital))
        return described(self.members, state.memory.halted, books)


class SleevedVenueHolder(VenueHolder):
    """Sleeves that share an account at a venue.

    Args:
      agent: the one that stands for all, from `members_of`.
      members: the sleeves.
    """

    def __init__(self, agent: Agent, members: Sequence[Member]):
        super().__init__(agent)
        self.members = tuple(members)

    def core(self, core: Core) -> SleevedCore:
        """As `VenueHolder.core`."""
        return SleevedCore(core, self.members)

    def ledger(self) -> SleevedLedger:
        """As `VenueHolder.ledger`."""
        return SleevedLedger(self.members)

    def waiting(self, ledger: SleevedLedger, symbol: str) -> dict[str, float]:
        """As `VenueHolder.waiting`."""
        return dict(ledger.waiting.get(symbol, {}))

    def observe(self, ledger: SleevedLedger, state: State, close: np.ndarray) -> Observed:
        """As `VenueHolder.observe`."""
        priced = zip(self.agent.symbols, close.tolist(), strict=True)
        ledger.close = {symbol: price for symbol, price in priced if np.isfinite(price)}
        off = ledger.gap()
        if not off <= GAP:  # so that NaN is a difference
            raise Halting("sleeves-differ", relative=off)
        sleeves = [
            self._of_sleeve(k, ledger, state, member.of(close))
            for k, member in enumerate(self.members)
        ]
        return super().observe(ledger, state, close)._replace(sleeves=sleeves)

    def _of_sleeve(
        self, k: int, ledger: SleevedLedger, state: State, close: np.ndarray
    ) -> Observed:
        """Return sleeve k's account at closes `[A_k]`."""
        member, memory = self.members[k], state.memory
        symbols = member.agent.symbols
        waiting, undone = np.zeros(len(close), bool), np.zeros(len(close), bool)
        for i, symbol in enumerate(symbols):
            if symbol not in memory.states[k].working:
                continue
            name = ledger.latest.get((member.name, symbol))
            order = None if name is None else ledger.order(name)
            # One that was withdrawn for another sleeve's order, which has its rest as well.
            rest = order is not None and order.reason == "cancelled" and not order.whole
            rest &= len(self.members) > 1
            waiting[i] = order is not None and (order.state != "done" or rest)
            waiting[i] |= member.name in ledger.waiting.get(symbol, {})
            undone[i] = order is not None and order.reason in UNDONE
        if memory.cuts[k] is not None:
            undone |= memory.cuts[k].retried
        dealt = np.array([symbol in ledger.dealt[member.name] for symbol in symbols])
        books, traded = ledger.books_of(member), ledger.flush_of(member)
        return self._seen(member.name, books, close, traded, waiting, undone, dealt)

    def size(self, router: VenueBroker, state: State, outcome: Outcome) -> Sized:
        """As `VenueHolder.size`.

        Each sleeve's orders are sized by its own books; what is left of their sum is an order.
        """
        memory, symbols = state.memory, self.agent.symbols
        ledger: Any = router.ledger
        many, instruments = len(self.members) > 1, router.instruments
        # Only symbols whose orders changed: the others are at the venue, or waiting.
        wanted = {symbol: np.zeros(len(self.members)) for symbol in memory.fresh}
        # The least order is the venue's, and so of the net.
        free = {symbol: one._replace(min_notional=0.0) for symbol, one in instruments.items()}
        refused: list[tuple[str, str]] = []
        for k, member in enumerate(self.members):
            own = [order for order in memory.staged[k] if order.symbol in memory.fresh]
            agent, books, close = member.agent, ledger.books_of(member), member.of(state.close)
            found, less = tickets(
                own, books, close, agent.symbols, free if many else instruments,
                self.agent.costs, agent.rules.borrow,
            )  # fmt: skip
            for ticket in found:
                wanted[ticket.symbol][k] += ticket.units
            names = {order.client_id: order.symbol for order in own}
            refused += [(names[name], code) for name, code in less]
        sized, sent = [], {order.symbol: order for order in outcome.sent}
        missed = [(sent[symbol].client_id, code) for symbol, code in refused if symbol in sent]
        plans, crosses = {}, []
        for symbol in [s for s in symbols if s in wanted]:
            units, order = wanted[symbol], sent.get(symbol)
            net, price = float(units.sum()), float(state.close[symbols.index(symbol)])
            dust = np.count_nonzero(units) > 1 and abs(net) <= NET * np.abs(units).sum()
            least = instruments[symbol].min_notional * (1 - 1e-9)
            if order is None or dust or abs(net) * price < least:
                if order is not None and net and not dust:
                    missed.append((order.client_id, "too-small"))
                net = 0.0
            # What is not sent crosses as far as it can.
            crossed, venue = split(units, net) if units.any() else (units, units)
            here = [
                k
                for k, staged in enumerate(memory.staged)
                if any(order.symbol == symbol for order in staged)
            ]
            body = {"symbol": symbol, "units": self._named(here, crossed), "order": None}
            if order is not None and net:
                sized.append(Ticket(order.client_id, symbol, net))
                plans[order.client_id] = self._named(here, venue)
                body["order"] = order.client_id
            # Also of nothing: what waited for a bar or at the venue was decided again.
            if many:
                crosses.append(body)
        sales_first = sorted(sized, key=lambda ticket: ticket.units > 0.0)
        return Sized(sales_first, missed, plans, crosses)

    def described(self, state: State, ledger: SleevedLedger) -> dict[str, Any]:
        """As `VenueHolder.described`."""
        books = []
        for member in self.members:
            value = ledger.worth(member.name)
            equity = value / self.bases.get(member.name, value)
            books.append((ledger.books_of(member), value, equity))
        return described(self.members, state.memory.halted, books)

    def _named(self, places: Sequence[int], values: np.ndarray) -> dict[str, float]:
        return {self.members[k].name: float(values[k]) for k in places}
