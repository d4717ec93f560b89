"""Sessions whose account several sleeves share, in replay and live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.config.limits import Limits
from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError
from nca_trader.paper.broker import Fill
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.core import Agent, Observed, Outcome
from nca_trader.paper.gate import Passed
from nca_trader.paper.journal import Event, Journal
from nca_trader.paper.ledger import Books, Ledger, tickets
from nca_trader.paper.live import UNDONE, LiveSession
from nca_trader.paper.router import Halting
from nca_trader.paper.session import (
    TOLERANCE,
    Halt,
    Session,
    Terms,
    agent_of,
    in_json,
    opened,
    refuse_subject,
    symbols_of,
)
from nca_trader.paper.sleeve_books import Pool, split
from nca_trader.paper.sleeve_core import SleevedCore, keyed
from nca_trader.paper.sleeve_ledger import SleevedLedger
from nca_trader.paper.sleeves import NET, Member, Sleeve, members_of
from nca_trader.paper.venue import Ticket
from nca_trader.runs.manifest import Run
from nca_trader.types import Bar, Bars


def lifts_of(journal: Journal) -> dict[int, list[str]]:
    """Return the sleeves that a person let go on, by the time of the bar after which."""
    found: dict[int, list[str]] = {}
    for event in journal.events("resume"):
        if "sleeve" in event.body:
            found.setdefault(event.ts_event, []).append(event.body["sleeve"])
    return found


def described(
    members: Sequence[Member], halted: Mapping[str, str], books: Sequence[tuple[Any, float, float]]
) -> dict[str, Any]:
    """Return what a snapshot says of sleeves: `books` are (cash and units, value, equity)."""
    found = {}
    for member, (own, value, equity) in zip(members, books, strict=True):
        body = {"cash": own.cash, "units": in_json(np.asarray(own.units)), "value": value}
        found[member.name] = body | {"equity": equity, "halted": halted.get(member.name)}
    return {"sleeves": found}


class SleevedSession(Session):
    """A replay whose account several sleeves share.

    Args:
      agent: the one that stands for all, from `members_of`.
      broker: of the account, with the sleeves' books.
      journal: an open one.
      capital: money at the start.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
    """

    def __init__(
        self, agent: Agent, broker: Pool, journal: Journal, capital: float, start: int | None = None
    ):
        super().__init__(agent, broker, journal, capital, start)
        self._pool, self._lifts = broker, lifts_of(journal)
        self._sleeved = SleevedCore(self._core, broker.members, broker.correct)
        self._core: Any = self._sleeved
        self._state = self._sleeved.begin()

    def _process(self, passed: Passed) -> None:
        super()._process(passed)
        ts = int(passed.bar.time[0]) * NANOSECONDS
        for name in self._lifts.get(ts, ()):
            self._state = self._sleeved.lift(self._state, name)

    def _record_bar(self, bar: Bar, fills: Sequence[Fill], outcome: Outcome, ts: int) -> None:
        super()._record_bar(bar, fills, outcome, ts)
        self._pool.staged = self._state.memory.staged
        for key, body in keyed(self._state.memory.news, ts // NANOSECONDS):
            self._record("risk", key, body, ts)

    def _record_fills(self, fills: Sequence[Fill], ts: int) -> None:
        super()._record_fills(fills, ts)
        for key, body in self._pool.take_allocations():
            self._record("allocation", key, body, ts)

    def _settle(self, outcome: Outcome, ts: int) -> Halt | None:
        if self._state.account is not None and self._agent.rules.fill == "close":
            self._state = self._sleeved.corrected(self._state)
        halt = super()._settle(outcome, ts)
        if halt is None and self._state.account is not None:
            off = self._off()
            if not off <= TOLERANCE:  # so that NaN is a difference
                key = f"{ts // NANOSECONDS}:sleeves-differ"
                halt = Halt("sleeves-differ", {"relative": off})
                self._record("recon", key, halt._asdict(), ts)
                self._record("halt", key, halt._asdict(), ts)
        return halt

    def _parts(self) -> dict[str, Any]:
        pool, close = self._pool, self._state.close
        books = []
        for member, book in zip(pool.members, pool.books, strict=True):
            own, value = book.position(), book.value(close)
            books.append((Books(own.cash, member.of(own.units)), value, value / book.capital))
        return described(pool.members, self._state.memory.halted, books)

    def _off(self) -> float:
        """Return how far the sleeves' sum, or a sleeve's own account, is from the books."""
        pool, close = self._pool, self._state.close
        price = np.nan_to_num(close)
        cash, units = self._broker.position()
        worth, off = self._value(), 0.0
        off += abs(sum(b.position().cash for b in pool.books) - cash)
        off += float((abs(sum(b.position().units for b in pool.books) - units) * price).sum())
        for member, book, own in zip(
            pool.members, pool.books, self._state.memory.states, strict=True
        ):
            if own.account is None or own.account.ruined:
                continue
            value = book.value(close)
            equity = float(np.exp(own.account.log_equity + own.account.log_equity_low))
            off = max(off, abs(value - book.capital * equity) * worth / value)
            held = member.of(book.position().units * price) / value
            off = max(off, float(np.abs(held - own.account.held).max()) * worth)
        return off / worth


class SleevedLiveSession(LiveSession):
    """A live session whose account several sleeves share.

    Args:
      agent: the one that stands for all, from `members_of`.
      *args: as in `LiveSession`, after the agent.
      members: the sleeves.
      **options: as in `LiveSession`.
    """

    def __init__(self, agent: Agent, *args: Any, members: Sequence[Member], **options: Any):
        self._members = tuple(members)
        self._bases: dict[str, float] = {}  # each sleeve's worth at the first decision
        self._plans: dict[str, dict[str, float]] = {}
        self._crosses: list[dict[str, Any]] = []
        super().__init__(agent, *args, **options)
        self._sleeved = SleevedCore(self._core, members)
        self._core: Any = self._sleeved
        self._state = self._sleeved.begin()

    @property
    def _books(self) -> SleevedLedger:
        found: Any = self._router.ledger
        return found

    def _ledger(self) -> Ledger:
        return SleevedLedger(self._members)

    def _learn(self, event: Event) -> None:
        if event.kind == "resume" and "sleeve" in event.body:
            self._state = self._sleeved.lift(self._state, event.body["sleeve"])

    def _synced(self, bar: Bar, ts: int) -> Books | None:
        books = super()._synced(bar, ts)
        if books is None:
            return None
        # What crosses does so at the price at which a backtest fills: the open after the decision.
        ledger, present = self._books, np.asarray(bar.present)
        with self._journal.transaction():
            for i in np.flatnonzero(present).tolist():
                symbol = self._agent.symbols[i]
                if ledger.waiting.get(symbol):
                    self._cross(symbol, dict(ledger.waiting[symbol]), float(bar.open[i]), ts)
        return books

    def _cross(self, symbol: str, units: dict[str, float], price: float, ts: int) -> None:
        key, body = f"cross-{symbol}@{ts // NANOSECONDS}", {"symbol": symbol, "price": price}
        body |= {"units": units}
        self._record("allocation", key, body, ts)
        self._books.apply("allocation", key, body)

    def _observed(
        self, bar: Bar, books: Books | None, ledger: Ledger | None = None
    ) -> Observed | None:
        if books is None:
            return None
        own: Any = self._router.ledger if ledger is None else ledger
        close = np.where(bar.present, bar.close, self._state.close)
        own.close = {
            symbol: price
            for symbol, price in zip(self._agent.symbols, close.tolist(), strict=True)
            if np.isfinite(price)
        }
        off = own.gap()
        if not off <= TOLERANCE:
            raise Halting("sleeves-differ", relative=off)
        self._sleeved.seen = [
            self._of_sleeve(k, own, member.of(close)) for k, member in enumerate(self._members)
        ]
        return super()._observed(bar, books, ledger)

    def _of_sleeve(self, k: int, ledger: SleevedLedger, close: np.ndarray) -> Observed:
        """Return sleeve k's account at closes `[A_k]`."""
        member, memory = self._members[k], self._state.memory
        books = ledger.books_of(member)
        worth = np.where(books.units == 0.0, 0.0, books.units * close)
        value = books.cash + float(worth.sum())
        base = self._bases.setdefault(member.name, value)
        units, price = ledger.flush_of(member)
        waiting, undone = np.zeros(len(close), bool), np.zeros(len(close), bool)
        for i, symbol in enumerate(member.agent.symbols):
            if symbol not in memory.states[k].working:
                continue
            name = ledger.latest.get((member.name, symbol))
            order = None if name is None else ledger.order(name)
            # One that was withdrawn for another sleeve's order, which has its rest as well.
            rest = order is not None and order.reason == "cancelled" and not order.whole
            rest &= len(self._members) > 1
            waiting[i] = order is not None and (order.state != "done" or rest)
            waiting[i] |= member.name in ledger.waiting.get(symbol, {})
            undone[i] = order is not None and order.reason in UNDONE
        if memory.cuts[k] is not None:
            undone |= memory.cuts[k].retried
        return Observed(
            equity=value / base,
            weight=worth / value,
            waiting=waiting,
            undone=undone,
            traded=np.where(units == 0.0, 0.0, units * np.nan_to_num(price)) / value,
            price=np.where(np.isnan(price), close, price),
        )

    def _sized(self, outcome: Outcome) -> tuple[list[Ticket], list[tuple[str, str]]]:
        """Size each sleeve's orders by its own books; what is left of their sum is an order."""
        memory, symbols = self._state.memory, self._agent.symbols
        self._plans, self._crosses = {}, []
        wanted = {symbol: np.zeros(len(self._members)) for symbol in memory.fresh}
        refused, small = [], self._router.instruments
        # The least order is the venue's, and so of the net.
        free = {symbol: one._replace(min_notional=0.0) for symbol, one in small.items()}
        for k, member in enumerate(self._members):
            own = [order for order in memory.staged[k] if order.symbol in memory.fresh]
            rules, close = member.agent.rules, member.of(self._state.close)
            found, less = tickets(
                own, self._books.books_of(member), close, member.agent.symbols,
                free if len(self._members) > 1 else small, self._agent.costs, rules.borrow,
            )  # fmt: skip
            for ticket in found:
                wanted[ticket.symbol][k] += ticket.units
            names = {order.client_id: order.symbol for order in own}
            refused += [(names[name], code) for name, code in less]
        sized, sent = [], {order.symbol: order for order in outcome.sent}
        missed = [(sent[symbol].client_id, code) for symbol, code in refused if symbol in sent]
        for symbol in [s for s in symbols if s in wanted]:
            units, order = wanted[symbol], sent.get(symbol)
            net, price = float(units.sum()), float(self._state.close[symbols.index(symbol)])
            dust = np.count_nonzero(units) > 1 and abs(net) <= NET * np.abs(units).sum()
            if order is None or dust or abs(net) * price < small[symbol].min_notional * (1 - 1e-9):
                if order is not None and net and not dust:
                    missed.append((order.client_id, "too-small"))
                net = 0.0
            crossed, venue = split(units, net) if units.any() else (units, units)
            here = [
                k
                for k, staged in enumerate(memory.staged)
                if any(order.symbol == symbol for order in staged)
            ]
            body = {"symbol": symbol, "units": self._named(here, crossed), "order": None}
            if order is not None and net:
                sized.append(Ticket(order.client_id, symbol, net))
                self._plans[order.client_id] = self._named(here, venue)
                body["order"] = order.client_id
            # Also of nothing: what waited for a bar or at the venue was decided again.
            if len(self._members) > 1:
                self._crosses.append(body)
        return sorted(sized, key=lambda ticket: ticket.units > 0.0), missed

    def _named(self, places: Sequence[int], values: np.ndarray) -> dict[str, float]:
        return {self._members[k].name: float(values[k]) for k in places}

    def _shared(self, ticket: Ticket) -> dict[str, Any]:
        return {"parts": self._plans[ticket.client_id]}

    def _record_live(
        self,
        bar: Bar,
        outcome: Outcome,
        seen: Observed | None,
        sized: list[Ticket],
        refused: list[tuple[str, str]],
        ts: int,
    ) -> None:
        super()._record_live(bar, outcome, seen, sized, refused, ts)
        if outcome.decision is None:
            return
        at_close = self._agent.rules.fill == "close"
        for body in self._crosses:
            symbol = body["symbol"]
            key = f"{ts // NANOSECONDS}:{symbol}"
            self._record("cross", key, body, ts)
            self._books.apply("cross", key, body)
            units = dict(self._books.waiting[symbol])
            if at_close and units:
                price = float(self._state.close[self._agent.symbols.index(symbol)])
                self._cross(symbol, units, price, ts)
        for key, body in keyed(self._state.memory.news, ts // NANOSECONDS):
            self._record("risk", key, body, ts)

    def _parts(self) -> dict[str, Any]:
        ledger, memory = self._books, self._state.memory
        books = []
        for member in self._members:
            value = ledger.worth(member.name)
            equity = value / self._bases.get(member.name, value)
            books.append((ledger.books_of(member), value, equity))
        return described(self._members, memory.halted, books)


def members_on(
    sleeves: Sequence[Sleeve], bars: Bars, capital: float, terms: Terms, force_agent: bool
) -> tuple[list[Member], Agent, list[Run]]:
    """Return the sleeves of an account, the agent that stands for them, and their runs.

    Args:
      sleeves: as `check_sleeves` accepts them.
      bars: any bars of the account's symbols.
      capital: of the account.
      terms: of the account.
      force_agent: as in `paper_trade`.

    Raises:
      ConfigError: a sleeve that cannot trade; names it.
    """
    limits = dict(terms.limits)
    risk, agents, runs = limits.pop("risk", None), [], []
    expect("risk", risk, Limits | None, "nca.Limits, e.g. nca.Limits(max_drawdown=0.2)")
    for sleeve in sleeves:
        where = f"sleeve {sleeve.name}"
        refuse_subject(sleeve.run, f"{where}: run")
        run = opened(sleeve.run, sleeve.seed, force_agent)
        symbols = sleeve.symbols or symbols_of(run) or bars.symbols
        unknown = [symbol for symbol in symbols if symbol not in bars.symbols]
        if unknown:
            raise ConfigError(
                f"{where}: the feed has no {', '.join(unknown)}; it has {', '.join(bars.symbols)}."
            )
        own = Terms(terms.costs, terms.fill, {**limits, "risk": sleeve.limits}, sleeve.order)
        seen, money = bars.select(*symbols), sleeve.share * capital
        try:
            agents.append(agent_of(sleeve.run, run, seen, money, own))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        runs += [] if run is None else [run]
    amount = None if agents[0].rules.capital is None else float(capital)
    members, agent = members_of(sleeves, agents, bars.symbols, risk, amount)
    return members, agent, runs
