"""The two kinds of session: a replay of a file, and a live one; the loop is the same for both.

A replay's account is modelled as in a backtest. The simulated exchange is sent its target weights,
and its cash and units are compared with the model at every bar. A live session's account is what
its venue reports: the loop orders units by it, and the agent decides on it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nca_trader.envs.account.risk import bars_of_size
from nca_trader.envs.account.state import Account, BarReturns
from nca_trader.paper.clock import NANOSECONDS, TICK, Clock, Patience, Waits
from nca_trader.paper.feeds.feed import LiveFeed, Notice, Pump, ReplayFeed
from nca_trader.paper.journal.bars import in_json
from nca_trader.paper.journal.journal import Journal
from nca_trader.paper.journal.ledger import Ledger
from nca_trader.paper.session.core import Core, Observed, Response, Seen, State, View
from nca_trader.paper.session.gate import Gate
from nca_trader.paper.session.halts import Halt, KillSwitch
from nca_trader.paper.session.router import OrderRouter, tickets
from nca_trader.paper.venue import BY_VENUE, Awaited, Fill, Unreachable, Venue, value_of
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.progress import Progress, duration
from nca_trader.types import Bar, Bars

TOLERANCE = 1e-9  # relative, between the account and the exchange
MAX_IN_A_ROW = 3  # bad bars, or failures of the policy, before trading halts
SKEW = 30  # seconds between the clocks of feed and venue
# Why an order ended although the decision behind it still stands: the next decision sends again.
UNDONE = ("rejected", "expired", "never-arrived", "too-old", "symbol-held", "abandoned")


def equity_of(account: Account) -> float:
    """Return equity as a fraction of the start's, by the formula of a backtest."""
    return float(np.exp(account.log_equity + account.log_equity_low))


class Replay:
    """The bars of a file, and an account by the arithmetic of a backtest, next to an exchange.

    Args:
      core: of the session.
      feed: of the file.
      exchange: in memory; it starts with `capital` in cash and no positions.
      journal: of the session.
      capital: money at the start.

    Attributes:
      gate: that its bars pass.
    """

    faults = ()  # errors of the agent that halt; of a replay its user sees them

    def __init__(
        self, core: Core, feed: ReplayFeed, exchange: Exchange, journal: Journal, capital: float
    ):
        self._core, self._feed, self._exchange, self._capital = core, feed, exchange, capital
        self._journal, self._run = journal, core.run
        self._symbols = core.agent.symbols
        self.gate = Gate(self._symbols)
        # Orders that fill at a close do so after the decision there, and change its equity.
        self.settles_late = core.agent.rules.fill == "close"
        self.orders = self.fills = 0
        self._moved = 0.0  # money traded since the last decision

    def begin(self, repeat: Callable[[], tuple[State, Response]]) -> tuple[()]:
        """Do nothing: the feed gives the bars of the journal again."""
        return ()

    def progress(self) -> Progress:
        """Return the line that counts bars."""
        return Progress(len(self._feed), "paper", "bars", compiles=True)

    def items(self, shown: Progress, state: Callable[[], State]) -> Iterator[Bar]:
        """Yield the bars of the file."""
        for bar in self._feed:
            yield bar
            shown.update()

    def now(self, last: int | None) -> int:
        """Return the time of what happens after the bar at `last`; its own, in nanoseconds."""
        if last is not None:
            return last * NANOSECONDS
        # Before the first bar of a start: where the journal ends, or where the feed begins.
        known = (event.ts_event for event in self._journal.events("bar"))
        return max(known, default=self._journal.now())

    def moment(self, last: int) -> str:
        """Return the key of what ends trading: a session that resumes comes to it again."""
        return str(last)

    def observe(self, state: State, bar: Bar, legs: BarReturns, late: bool, ts: int) -> Seen | None:
        """Move exchange and account through a bar; None before trading starts."""
        if state.account is None and not self._core.ready(state, bar):
            return None
        # The exchange moves first: what it fills at the open was ordered at the last close.
        fills, flows = self._exchange.quote(bar, ts)
        view = self._core.modelled(state, bar, legs)
        close = np.where(bar.present, bar.close, state.close)
        return self._seen(view, fills, close, sum(flow.amount for flow in flows))

    def _seen(
        self, view: View, fills: Sequence[Fill], close: np.ndarray, cash: float = 0.0
    ) -> Seen:
        # Not of a margin call or a delisting.
        own = [fill for fill in fills if fill.client_id.startswith("nca-")]
        trades = [(self._symbols.index(fill.symbol), fill.units, fill.price) for fill in own]
        self._moved += sum(abs(fill.units * fill.price) for fill in fills)
        return Seen(view, self.value(close), trades, self._moved, fills, cash)

    def record(self, seen: Seen, ts: int) -> None:
        """Journal the fills and payments of a bar."""
        for fill in seen.fills:
            self.fills += 1
            self._write("fill", fill.execution_id, fill._asdict(), ts)
        if seen.cash:
            self._write("cash", str(ts // NANOSECONDS), {"amount": seen.cash}, ts)

    def intend(self, outcome: Response, close: np.ndarray, ts: int) -> None:
        """Journal the orders of a decision, in its transaction."""
        self._moved = 0.0
        for name, reason in outcome.closed:
            self._write("order_terminal", name, {"reason": reason}, ts)
        for order in outcome.sent:
            self.orders += 1
            self._write("order_intent", order.client_id, order._asdict(), ts)

    def send(self, outcome: Response, state: State, ts: int) -> Seen | None:
        """Send the orders of a decision; return what they did at this close."""
        if outcome.decision is None:
            return None
        accepted, fills = self._exchange.work(outcome.working)
        seen = None
        if self.settles_late:
            seen = self._seen(View(state.account), fills, state.close)
        if accepted or fills:
            with self._journal.transaction(durable=False):
                for name in accepted:
                    self._write("order_ack", name, {}, ts)
                if seen is not None:
                    self.record(seen, ts)
        return seen

    def snapshot(self, state: State, seen: Seen) -> dict[str, Any]:
        """Return the body of the snapshot of a close."""
        account: Any = state.account
        cash, units = self._exchange.position()
        return {
            "equity": equity_of(account),
            "log_equity": [float(account.log_equity), float(account.log_equity_low)],
            "weight": in_json(np.asarray(account.held)),
            "cash": cash,
            "units": in_json(units),
            "value": seen.value,
        }

    def fault(self, state: State, seen: Seen | None) -> Halt | None:
        """Return the halt where account and exchange disagree."""
        if state.account is None or seen is None:
            return None
        expected, value = self._capital * equity_of(state.account), seen.value
        _, units = self._exchange.position()
        held = np.asarray(state.account.held)
        # Both are compared: equity alone would not show a position in the wrong asset.
        weights = value_of(units, state.close) / value
        off = max(abs(value - expected) / expected, float(np.abs(weights - held).max()))
        if off <= TOLERANCE:  # so that NaN is a disagreement
            return None
        detail: dict[str, Any] = {"broker": value, "account": expected}
        return Halt("books-differ", **detail, weights=[in_json(weights), in_json(held)])

    def value(self, close: np.ndarray) -> float:
        """Return cash and positions in money at prices `close` `[A]`."""
        cash, units = self._exchange.position()
        return float(cash + value_of(units, close).sum())

    def withdraw_all(self) -> None:
        """Do nothing: no order leaves this process."""

    def close(self) -> None:
        """Do nothing: the exchange is the caller's."""

    def _write(self, kind: str, key: str, body: dict[str, Any], ts: int) -> None:
        self._journal.record(self._run, kind, key, body, ts)


class Live:
    """A feed whose bars close while it is read, and the account as its venue has it.

    Args:
      core: of the session.
      feed: of the agent's symbols.
      venue: the account. One of this process, which gets the bars, has a method `quote`.
      journal: of the session.
      switch: ends every wait.
      warmup: least number of bars of the feed's history to begin with.
      patience: how long it waits for answers, and how old a decision may be.
      clock: for waits.

    Attributes:
      gate: that its bars pass. router: of its orders.
    """

    settles_late = False
    faults = (Exception,)  # of the agent: no further order, and a person looks
    LOOK = 5.0  # seconds after which an open order's fills are read again

    def __init__(
        self,
        core: Core,
        feed: LiveFeed,
        venue: Venue,
        journal: Journal,
        switch: KillSwitch,
        warmup: int,
        patience: Patience,
        clock: Clock,
    ):
        self._core, self._symbols, run = core, core.agent.symbols, core.run
        self._feed, self._venue, self._journal = feed, venue, journal
        self._switch, self._warmup = switch, warmup
        self._clock = Waits(clock, switch.heard)
        # A venue of this process has the session's own clock, and answers at once.
        self._quote: Callable[..., Any] | None = getattr(venue, "quote", None)
        self.router = OrderRouter(
            Awaited(venue, operator.call if self._quote else self._clock.call),  # pyright: ignore
            journal,
            run,
            self._symbols,
            self._newest_for,
            self._clock,
            patience,
            switch.refuse,
            Ledger(),  # which the journal's events fill
            # It closes positions as training does.
            BY_VENUE if self._quote else (),
        )
        self.gate = Gate(
            self._symbols, True, feed.period, feed.now, lambda s: journal.body(run, "bar", str(s))
        )
        self._given = 0.0  # when the bar came that is traded on, on the clock of waits
        self._unanswered = 0  # bars in a row at which the venue did not answer
        self._far = 0  # fills in a row at prices that the market did not have
        self._looked = 0.0
        self._base: float | None = None  # the account's worth at the first decision

    def _due(self, opened: int) -> float:
        """Return when the feed can give the bar after one, in seconds since 1970 UTC."""
        due = getattr(self._feed, "due", None)
        return opened + 2.0 * self._feed.period if due is None else due(opened)

    def _newest_for(self, opened: int) -> float:
        """Return the seconds for which no later bar than one is due; below 0 if one is."""
        return self._due(opened) - self._feed.now() / NANOSECONDS

    @property
    def orders(self) -> int:
        """Orders of all time."""
        return self.router.ledger.orders

    @property
    def fills(self) -> int:
        """Fills of all time."""
        return self.router.ledger.count

    def begin(self, repeat: Callable[[], tuple[State, Response]]) -> Iterator[Bar | Notice]:
        """Take over the venue's positions and cash, or compare them with the journal's.

        Args:
          repeat: processes the journal's bars again; returns the state after the last one, and what
            followed from it: the process may have ended before its orders were written.

        Returns:
          The bars that closed since then, as many as the agent needs.
        """
        state, outcome = repeat()
        self._switch.refuse()
        ts, self._given = self._feed.now(), self._clock.monotonic()
        # After a halt that a person lifted its targets are owed, and ordered at the next bar.
        goes_on = self.router.ledger.since is not None
        self.router.start(ts)
        self._refuse_skew()
        if goes_on and state.last is not None:
            self._write_orders(outcome, state, state.last * NANOSECONDS)
            self.router.deliver(ts)
        return self._missed(state.last)

    def _missed(self, last: int | None) -> Iterator[Bar | Notice]:
        agent = self._core.agent
        needed = max(agent.first_decision + 1, agent.history, bars_of_size(agent.rules))
        count = max(needed, self._warmup)
        if last is not None:
            # A journal's bars are repeated, so only those since then are asked for.
            missed = (self._feed.now() // NANOSECONDS - last) // self._feed.period
            needed, count = 0, max(missed + 1, 2)
        history = self._past(needed, count)
        first = history.seconds[:1]
        if last is not None and len(first) and first[0] > last + self._feed.period:
            yield Notice("gap", f"no bars from {last} to {first[0]}")
        for bar in history.each():
            if last is None or int(bar.time[0]) > last:
                yield bar
        self._switch.heard()

    def _past(self, needed: int, count: int) -> Bars:
        """Return the last `count` bars, or twice as many until each asset has `needed` of them.

        It asks no further once that finds no more of the assets that lack some.
        """
        found = -1
        while True:
            bars = self._clock.call(self._feed.history, count)
            there = np.minimum(bars.present.sum(0), needed).sum()
            if there in (found, bars.num_assets * needed):
                return bars
            found, count = there, 2 * count

    def progress(self) -> Progress:
        """Return the line that says what the session does."""
        return Progress(None, "paper", ticks=False, always=True)

    def items(self, shown: Progress, state: Callable[[], State]) -> Iterator[Bar | Notice]:
        """Yield what the feed gives, and look at open orders in between."""
        rows, said = -1, False
        # In a thread of its own, so that the kill switch is seen between bars.
        with contextlib.closing(Pump(self._feed)) as pump:
            while True:
                now = state()
                shown.note(self._line(now), news=rows != now.rows)
                rows, item = now.rows, pump.get(TICK)
                if item is pump.END:
                    return
                if item is None:
                    self._switch.heard()
                    self._look()
                    continue
                if isinstance(item, Notice):
                    said = said or item.code == "gap"
                else:
                    if not said and now.last is not None:
                        yield from self._gap(now.last, int(item.time[0]))
                    said = False
                yield item

    def _gap(self, last: int, opened: int) -> Iterator[Notice]:
        """Yield that the feed left out bars before this one, which it did not say itself."""
        if self._due(last) - self._feed.period < opened:
            between = f"{np.datetime64(last, 's')} and {np.datetime64(opened, 's')}"
            yield Notice("gap", f"the feed has no bar between {between}")

    def _line(self, state: State) -> str:
        """Return the line of progress: bars, equity, and the time until the next bar."""
        left = float("nan") if state.last is None else self._newest_for(state.last)
        # Below 0 while a bar is overdue, NaN where it is not known.
        waits = f"next bar in {duration(left)}" if left > 0.0 else "waiting for the next bar"
        grown = 1.0 if self._base is None else self.value(state.close) / self._base
        return f"{state.rows:,} bars  equity {grown:.4f}  {waits}"

    def now(self, last: int | None) -> int:
        """Return the feed's clock, nanoseconds since 1970 UTC."""
        return self._feed.now()

    def moment(self, last: int) -> str:
        """Return the key of what ends trading: it may end several times at one bar."""
        return f"{last}:{self._journal.head.seq}"

    def observe(self, state: State, bar: Bar, legs: BarReturns, late: bool, ts: int) -> Seen | None:
        """Read what the venue has; None where nothing is to be decided.

        Positions and cash are compared at the newest bar alone: after an absence of a hundred bars
        once. A simulated exchange needs each bar, as orders may fill at it.

        Raises:
          Halt: they differ, the venue does not answer, or fills are far from the market.
        """
        self._given = self._clock.monotonic()
        # What was held until the next bar is learnt and not traded on, as older bars are.
        young = not late and self._newest_for(int(bar.time[0])) > 0.0
        fresh = young and self._core.ready(state, bar)
        if not fresh and state.account is None:
            return None
        try:
            if self._quote is not None:
                self._quote(bar, self._feed.now())
                if not young:  # what it filled or paid out at this bar
                    self.router.take(ts)
            if young:
                self.router.sync(ts)
                self._refuse_skew()
        except Unreachable as why:
            self._unanswered += 1
            body = {"code": "venue-unreachable", "reason": why.reason}
            self.router.write("risk", self.router.key(ts, "venue-unreachable"), body, ts)
            if self._unanswered >= MAX_IN_A_ROW:
                raise Halt("venue-unreachable", in_a_row=self._unanswered, last=str(why)) from None
            return None
        self._unanswered = 0
        self._refuse_far_fills(bar, ts)
        self._refuse_failures()  # a venue may take an order, and reject it later
        return self.seen(state, bar, legs) if fresh else None

    def seen(self, state: State, bar: Bar, legs: BarReturns) -> Seen:
        """Return the account at the close of `bar`, by the books as they are."""
        ledger, working = self.router.ledger, state.working
        close = np.where(bar.present, bar.close, state.close)
        ids = [working[s].client_id if s in working else None for s in self._symbols]
        orders = [None if name is None else ledger.order(name) for name in ids]
        books, (units, price, closed) = self.router.books(), ledger.flush(self._symbols)
        worth = value_of(books.units, close)
        value = books.cash + float(worth.sum())
        if self._base is None and not value > 0.0:
            raise Halt("ruined", value=value)
        self._base = value if self._base is None else self._base
        price = np.where(np.isnan(price), close, price)
        observed = Observed(
            # The first decision begins at equity 1, whatever the account was worth then.
            equity=value / self._base,
            weight=worth / (value or np.inf),  # of nothing every part is 0
            waiting=np.array([o is not None and o.state != "done" for o in orders]),
            # One that the journal does not have was not written before the process ended.
            undone=np.array(
                [
                    name is not None and (order is None or order.reason in UNDONE)
                    for name, order in zip(ids, orders, strict=True)
                ]
            ),
            traded=value_of(units, price) / (value or np.inf),
            price=price,
            value=value,
            closed=closed,
        )
        trades = [(i, units.item(i), price.item(i)) for i in np.flatnonzero(units).tolist()]
        view = self._core.reported(state, bar, legs, observed)
        moved = float(np.abs(value_of(units, price)).sum())
        return Seen(view, value, trades, moved, equity=observed.equity)

    def record(self, seen: Seen, ts: int) -> None:
        """Do nothing: fills and payments are in the journal before their bar."""

    def intend(self, outcome: Response, close: np.ndarray, ts: int) -> None:
        """Journal the orders of a decision, in its transaction; none is sent before.

        A size is of what is held. So what an order replaces has to end first, and the new one is
        written after that, by `send`.
        """
        if not outcome.closed:
            self._size(outcome, close, ts)

    def send(self, outcome: Response, state: State, ts: int) -> None:
        """Send the orders of a decision, and read what the venue says at once."""
        self._write_orders(outcome, state, ts)
        self.router.deliver(ts)
        self._refuse_failures()
        known = (self.router.ledger.order(order.client_id) for order in outcome.sent)
        if any(order is not None and order.ticket.units for order in known):
            with contextlib.suppress(Unreachable):  # the next bar looks again
                self.router.take(ts)

    def snapshot(self, state: State, seen: Seen) -> dict[str, Any]:
        """Return the body of the snapshot of a close."""
        books, equity = self.router.books(), seen.equity
        assert equity is not None
        return {
            "equity": equity,
            "log_equity": [float(np.log(equity)), 0.0] if equity > 0.0 else None,
            "weight": in_json(value_of(books.units, state.close) / (seen.value or np.inf)),
            "cash": books.cash,
            "units": in_json(books.units),
            "value": seen.value,
        }

    def fault(self, state: State, seen: Seen | None) -> Halt | None:
        """Return the halt where a position has had no bar for as long as training knows.

        There such an asset counts as gone and is paid out, as the simulated exchange does too.
        Another venue still holds it, and no decision of the agent is about such a position.
        """
        after = self._core.agent.rules.delist_after
        if after == np.inf:
            return None
        # Equal and not above: it halts once, and a person who resumes has seen it.
        gone = (state.missing == after) & (self.router.books().units != 0.0)
        names = [self._symbols[i] for i in np.flatnonzero(gone).tolist()]
        return Halt("bars-missing", symbols=names, in_a_row=after) if names else None

    def value(self, close: np.ndarray) -> float:
        """Return cash and positions in money at prices `close` `[A]`."""
        books = self.router.books()
        return float(books.cash + value_of(books.units, close).sum())

    def withdraw_all(self) -> None:
        """Cancel what waits at the venue, after a halt; `resume` finds out what came of it.

        An order that waits for the next day's open would fill after the halt.
        """
        cancel_all = functools.partial(self.router.cancel_all, self._venue)
        if self._quote is not None:
            cancel_all()
        else:
            self._clock.last(cancel_all)

    def close(self) -> None:
        """End the feed, and await what the venue was asked."""
        self._feed.close()
        self._clock.close()

    def _look(self) -> None:
        """Look at open orders now and then."""
        now = self._clock.monotonic()
        # A venue limits how often it is asked, and without open orders nothing can happen.
        if now - self._looked < self.LOOK or not self.router.ledger.open:
            return
        self._looked = now
        with contextlib.suppress(Unreachable):
            self.router.take(self._feed.now())

    def _write_orders(self, outcome: Response, state: State, ts: int) -> None:
        """Withdraw what a decision replaces, and journal the orders that it lacks."""
        if outcome.closed:
            self.router.withdraw([name for name, _ in outcome.closed], ts)
        if any(self.router.ledger.order(order.client_id) is None for order in outcome.sent):
            with self._journal.transaction():
                self._size(outcome, state.close, ts)

    def _size(self, outcome: Response, close: np.ndarray, ts: int) -> None:
        """Journal target weights as orders in units, and those that cannot be sent."""
        rules, known = self._core.agent.rules, self.router.ledger.order
        orders = {o.client_id: o for o in outcome.sent if known(o.client_id) is None}
        given = (self.router.books(), close, self._symbols, self.router.instruments)
        made, refused = tickets([*orders.values()], *given, rules.costs, rules.borrow)
        for name, code in refused:
            body = {"code": code, "client_id": name, "symbol": orders[name].symbol}
            self.router.write("risk", f"{ts // NANOSECONDS}:{name}:{code}", body, ts)
        for ticket in made:
            order = orders[ticket.client_id]
            more = {"weight": order.weight, "buy_only": order.buy_only}
            self.router.intend(ticket, ts // NANOSECONDS, more, ts, self._given)

    def _refuse_far_fills(self, bar: Bar, ts: int) -> None:
        """Journal fills at prices that the market did not have; a few in a row halt."""
        news, self.router.news = self.router.news, []
        for fill in news:
            ours = fill.client_id.startswith(self.router.prefix)
            if not (ours and fill.symbol in self._symbols):
                continue
            asset = self._symbols.index(fill.symbol)
            self._far = self._far + 1 if self.gate.is_outside(asset, fill.price, bar) else 0
            if self._far:
                market = in_json(np.array([bar.low[asset], bar.high[asset]]))
                body = {"code": "fill-far", "symbol": fill.symbol, "price": fill.price}
                body |= {"client_id": fill.client_id, "market": market}
                key = f"{ts // NANOSECONDS}:{fill.execution_id}:far"
                self.router.write("risk", key, body, ts)
            if self._far >= MAX_IN_A_ROW:
                raise Halt("fills-far", in_a_row=self._far)

    def _refuse_failures(self) -> None:
        """Journal that every order of a bar failed; a few such bars in a row halt.

        What failed is read from the journal, so that a restart counts on.
        """
        failed = self.router.ledger.failed
        if not failed:
            return
        bar, reasons = failed[0][0].bar, sorted({order.reason for order in failed[0]})
        code = "orders-unanswered" if reasons == ["never-arrived"] else "orders-refused"
        detail = {"orders": len(failed[0]), "in_a_row": len(failed), "reasons": reasons}
        # The same bar may be looked at again, and is written once.
        key = f"{bar}:{code}:{len(failed)}:{len(failed[0])}"
        self.router.write("risk", key, {"code": code, **detail}, bar * NANOSECONDS)
        if len(failed) >= MAX_IN_A_ROW:
            raise Halt(code, **detail)

    def _refuse_skew(self) -> None:
        """Halt where the venue's clock and the feed's are apart: ages would be wrong."""
        if self._quote is not None:
            return
        off = (self.router.venue.now() - self._feed.now()) / NANOSECONDS
        if abs(off) > SKEW:
            raise Halt("clock-skew", seconds=off)
