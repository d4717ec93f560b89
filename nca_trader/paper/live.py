"""A live session: bars as they close, orders at a venue, and an account that follows its books.

A session that starts on its journal first repeats its bars, on the books that the journal had at
each of them; every decision must be the same again. Then it compares the books with the venue's,
learns the bars that closed in between without trading on them, and goes live.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nca_trader.envs.account.state import Legs
from nca_trader.errors import HaltError
from nca_trader.paper.broker import valued
from nca_trader.paper.clock import NANOSECONDS, PATIENCE, TICK, Clock, Patience, Waits
from nca_trader.paper.core import Agent, Observed, Outcome
from nca_trader.paper.feed import LiveFeed, Notice, Pump, ReplayFeed
from nca_trader.paper.gate import Gate, Passed, Refusal, bar_body, bar_of, completed, in_json
from nca_trader.paper.journal import Event, Journal
from nca_trader.paper.ledger import Books, Ledger
from nca_trader.paper.loop import MAX_IN_A_ROW, Session, not_finite
from nca_trader.paper.risk import Halt, after_resume, broken
from nca_trader.paper.router import Halting, VenueBroker
from nca_trader.paper.venue import Awaited, Ticket, Unreachable, Venue
from nca_trader.progress import Progress, duration
from nca_trader.types import Bar

WARMUP = 500  # bars of history for a strategy, which does not say how many it needs
SKEW = 30  # seconds between the clocks of feed and venue
# Why an order ended although the decision behind it still stands: the next decision sends again.
UNDONE = ("rejected", "expired", "never-arrived", "too-old", "symbol-held")
LOOK = 5.0  # seconds after which an open order's fills are read again


class Stopped(Exception):
    """The session was asked to end while it waited."""


class LiveSession(Session):
    """Trades one account on a live feed at a venue, and keeps one journal.

    Args:
      agent: what trades.
      feed: of the agent's symbols.
      venue: the account.
      journal: an open one.
      capital: money at the start, of a simulated venue; others have their own.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
      warmup: least number of bars of history to begin with.
      patience: how long it waits for answers, and how old a decision may be.
      clock: for waits.

    Raises:
      ConfigError: the journal is another session's; names what differs.
      HaltError: the journal says that trading was halted.
    """

    def __init__(
        self,
        agent: Agent,
        feed: LiveFeed,
        venue: Venue,
        journal: Journal,
        capital: float,
        start: int | None = None,
        warmup: int = WARMUP,
        patience: Patience = PATIENCE,
        clock: Clock | None = None,
    ):
        # Two sessions of one agent must not share client ids: the time of the first start is part
        # of the hash that they carry.
        known = next((e.body.get("opened") for e in journal.events("run_started")), None)
        opened = feed.now() if known is None else known
        names = {"venue": venue.name, "period": feed.period, "opened": opened}
        self._feed, self._warmup, self._patience = feed, warmup, patience
        self._stop: Callable[[], bool] = lambda: False
        self._clock = Waits(clock or Clock(), self._heard)
        # The simulated exchange, which gets the bars, is in this process and answers at once.
        here = hasattr(venue, "quote")
        self._venue: Any = venue if here else Awaited(venue, self._clock.call)
        self._unanswered = 0  # bars in a row at which the venue did not answer
        self._unheard = 0  # bars in a row whose orders never reached the venue
        self._far = 0  # fills in a row at prices that the market did not have
        self._looked = 0.0
        self._base: float | None = None  # the account's worth at the first decision
        super().__init__(agent, None, journal, capital, start, names)
        self._gate = Gate(agent.symbols, True, feed.period, feed.now, self._passed)

    def trade(self, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Trade until the feed ends or `stop()` is true; return `result()`.

        Args:
          stop: called between two bars, and while the session waits for an answer of the venue.

        Raises:
          HaltError: books that differ, a venue that does not answer, unusable bars or decisions.
          StateError: the journal cannot be written, or says that something else happened.
          Unreachable: the venue did not answer at the start.
        """
        self._stop = stop
        try:
            with contextlib.suppress(Stopped):
                self._begin()
                self._follow_feed()
            if self._state.last is not None:
                # A session may end several times at one bar, with more fills each time.
                key = f"{self._state.last}:{self._journal.head.seq}"
                self._counts["fills"] = self._router.ledger.count
                self._record("run_ended", key, self._ending(stop()), self._state.last * NANOSECONDS)
        except Halting as halting:
            raise self._halted(halting) from None
        finally:
            self._feed.close()
            self._clock.close()
        return self.result()

    def _follow_feed(self) -> None:
        """Process bars and notices until the feed ends or the session is stopped."""
        # The feed waits in a thread of its own, so that the kill switch is seen between bars.
        seen, gap_known = -1, False
        with (
            contextlib.closing(Pump(self._feed)) as pump,
            Progress(None, "paper", ticks=False, always=True) as shown,
        ):
            while not self._stop():
                shown.note(self._line(), news=seen != self._counts["bars"])
                seen = self._counts["bars"]
                item = pump.get(TICK)
                if item is pump.END:
                    break
                if isinstance(item, Notice):
                    gap_known = gap_known or item.code == "gap"
                    self.on_notice(item)
                elif item is None:
                    self._idle()
                else:
                    if not gap_known:
                        self._note_gap(int(item.time[0]))
                    gap_known = False
                    self.on_bar(item)

    def _passed(self, seconds: int) -> dict[str, Any] | None:
        """Return the body of the bar that passed at a time, of any session on the journal."""
        return self._journal.body(self.run, "bar", str(seconds))

    def _heard(self) -> None:
        """End the session during a wait, where a halt or a stop was asked for."""
        self._refuse()
        if self._stop():
            raise Stopped

    def _line(self) -> str:
        """Return the line of progress: bars, equity, and the time until the next bar."""
        left = self._left()  # below 0 while a bar is overdue, NaN where it is not known
        waits = f"next bar in {duration(left)}" if left > 0.0 else "waiting for the next bar"
        return f"{self._counts['bars']:,} bars  equity {self._grown():.4f}  {waits}"

    def on_notice(self, notice: Notice) -> None:
        """Journal what the feed says. While it is stale no bar comes, and so no order goes."""
        now = self._feed.now()
        digest = hashlib.sha256(notice.detail.encode()).hexdigest()[:8]
        self._record("feed", f"{now}:{notice.code}:{digest}", notice._asdict(), now)

    def on_bar(self, bar: Bar) -> None:
        """Check one bar, which must have closed by now, and process what the gate lets through."""
        super().on_bar(completed(bar, self._state.close))

    def _reject(self, bar: Bar, refusal: Refusal, ts: int) -> None:
        if refusal.code == "correction":
            self.on_notice(Notice(refusal.code, refusal.say))
        else:
            super()._reject(bar, refusal, ts)

    def _process(self, passed: Passed) -> None:
        """Process one good bar: books, features, decision, orders."""
        bar = passed.bar
        ts = int(bar.time[0]) * NANOSECONDS
        given = self._clock.monotonic()
        # What was held until the next bar is learnt and not traded on, as older bars are.
        young = not passed.late and self._newest_for(int(bar.time[0])) > 0.0
        fresh = young and self._core.ready(self._state, bar)
        books = self._synced(bar, ts, young) if fresh or self._state.account is not None else None
        seen = self._observed(bar, self._router.ledger) if fresh and books is not None else None
        legs, before = self._core.legs(self._state, bar), self._state.close
        try:
            self._state, outcome = self._core.follow(self._state, bar, legs, seen)
        except Exception as error:  # of the agent: no further order, and a person looks
            raise Halting("policy-error", error=f"{type(error).__name__}: {error}") from error
        drifts = self._drifts(bar, legs, before, seen, outcome)
        # A size is of what is held, so what an order replaces has to end first.
        self._router.withdraw([name for name, _ in outcome.closed], ts)
        tickets, refused = self._router.size(
            outcome.sent,
            self._router.books(),
            self._state.close,
            self._agent.costs,
            self._agent.rules.borrow,
        )
        with self._journal.transaction(durable=outcome.decision is not None):
            self._record_live(bar, outcome, seen, tickets, refused, ts, given)
            gated = passed.said(self._agent.symbols)
            self._record_risks(gated + drifts + self._limited(outcome), ts)
            # With its bar: after a kill in between, the next session would trade on.
            halting = self._failing(outcome, ts) or self._missing()
            error = None if halting is None else self._halted(halting)
        if error is not None:
            self._journal.commit()  # a bar without a decision would wait for a later one
            raise error
        # Before this line nothing is sent: a decision counts once it is on disk.
        self._router.deliver(ts)
        self._refuse_silence(tickets, ts)
        if tickets:
            with contextlib.suppress(Unreachable):  # the next bar looks again
                self._router.take(ts)

    def _begin(self) -> None:
        """Repeat the journal, compare books, and learn what closed in between."""
        ledger = self._repeated()
        last, now = self._state.last, self._feed.now()
        # More than the agent needs: features with a long memory come nearer to training's.
        count = max(self._agent.first_decision + 1, self._agent.history, self._warmup)
        if last is not None:
            # A journal's bars are repeated, so only those since then are asked for.
            missed = (now // NANOSECONDS - last) // self._feed.period
            count = max(missed + 1, 2)
        self._router = VenueBroker(
            self._venue,
            self._journal,
            self.run,
            self._agent.symbols,
            self._newest_for,
            self._clock,
            self._patience,
            self._refuse,
            ledger,
        )
        self._refuse()
        self._router.start(now)
        self._refuse_skew()
        history = self._clock.call(self._feed.history, count)
        first = history.time[:1].astype("datetime64[s]").astype(np.int64)
        if last is not None and len(first) and first[0] > last + self._feed.period:
            self.on_notice(Notice("gap", f"no bars from {last} to {first[0]}"))
        for bar in ReplayFeed(history):
            if self._state.last is None or int(bar.time[0]) > self._state.last:
                self.on_bar(bar)
            if self._stop():
                break

    def _note_gap(self, opened: int) -> None:
        """Journal that the feed left out bars before this one, which it did not say itself."""
        last = self._state.last
        if last is not None and self._due(last) - self._feed.period < opened:
            between = f"{np.datetime64(last, 's')} and {np.datetime64(opened, 's')}"
            self.on_notice(Notice("gap", f"the feed has no bar between {between}"))

    def _repeated(self) -> Ledger:
        """Process the journal's bars again, on the books of then; return the books of now."""
        # A bar that was learnt and not traded on is repeated so: its age then is not known now.
        decided = {event.key for event in self._journal.events("decision")}
        ledger = Ledger()
        with self._journal.transaction(durable=False):
            for event in self._journal.events():
                if event.kind == "bar":
                    self._repeat(event, ledger, event.key in decided)
                ledger.apply(event.kind, event.key, event.body)
                self._counts["rejected"] += event.kind == "bar_rejected"
                self._counts["orders"] += event.kind == "order_intent"
        return ledger

    def _repeat(self, event: Event, ledger: Ledger, decided: bool) -> None:
        bar = bar_of(event.body, self._agent.symbols, event.ts_event // NANOSECONDS)
        bar = completed(bar, self._state.close)
        seen = self._observed(bar, ledger) if decided else None
        legs, before = self._core.legs(self._state, bar), self._state.close
        self._state, outcome = self._core.follow(self._state, bar, legs, seen)
        # It passed once, and may only pass again by the same rules.
        self._gate.learn(bar)
        self._drifts(bar, legs, before, seen, outcome)  # in the journal already
        self._counts["bars"] += 1
        if outcome.decision is not None:
            self._record_decision(outcome.decision, event.ts_event)
            self._failures = 0 if outcome.decision.usable else self._failures + 1
        account = self._state.account
        if account is not None and broken(account):  # trading goes on only after `resume`
            self._state = self._state._replace(account=after_resume(account))
            self._failures = 0

    def _synced(self, bar: Bar, ts: int, young: bool) -> Books | None:
        """Return the venue's books; None where it does not answer, which must not last.

        Books are compared at the newest bar alone: after an absence of a hundred bars once. A
        simulated exchange needs each bar, as orders may fill at it.
        """
        books = None
        try:
            quote = getattr(self._venue, "quote", None)
            if quote is not None:  # of a venue that has no market of its own
                quote(ts // NANOSECONDS, self._feed.now(), bar_body(bar, self._agent.symbols))
            if young:
                books = self._router.sync(ts)
                self._refuse_skew()
        except Unreachable as error:
            self._unanswered += 1
            body = {"code": "venue-unreachable", "reason": error.reason}
            self._record("risk", f"{ts // NANOSECONDS}:venue-unreachable", body, ts)
            if self._unanswered >= MAX_IN_A_ROW:
                raise Halting("venue-unreachable", in_a_row=self._unanswered) from None
            return None
        self._unanswered = 0
        self._refuse_far_fills(bar, ts)
        return books

    def _refuse_far_fills(self, bar: Bar, ts: int) -> None:
        """Journal fills at prices that the market did not have; a few in a row halt."""
        news, self._router.news = self._router.news, []
        for fill in news:
            if not fill.client_id.startswith(self._router.prefix):
                continue
            asset = self._agent.symbols.index(fill.symbol)
            self._far = self._far + 1 if self._gate.is_outside(asset, fill.price, bar) else 0
            if self._far:
                market = in_json(np.array([bar.low[asset], bar.high[asset]]))
                body = {"code": "fill-far", "symbol": fill.symbol, "price": fill.price}
                body |= {"client_id": fill.client_id, "market": market}
                self._record("risk", f"{ts // NANOSECONDS}:{fill.execution_id}:far", body, ts)
            if self._far >= MAX_IN_A_ROW:
                raise Halting("fills-far", in_a_row=self._far)

    def _refuse_silence(self, tickets: Sequence[Ticket], ts: int) -> None:
        """Journal that no order of a bar reached the venue; a few such bars in a row halt."""
        if not tickets:
            return
        sent = [self._router.ledger.order(ticket.client_id) for ticket in tickets]
        arrived = any(order is None or order.reason != "never-arrived" for order in sent)
        self._unheard = 0 if arrived else self._unheard + 1
        if not self._unheard:
            return
        body = {"code": "orders-unanswered", "orders": len(sent), "in_a_row": self._unheard}
        self._record("risk", f"{ts // NANOSECONDS}:orders-unanswered", body, ts)
        if self._unheard >= MAX_IN_A_ROW:
            raise Halting("orders-unanswered", in_a_row=self._unheard)

    def _observed(self, bar: Bar, ledger: Ledger) -> Observed:
        """Return the account of a ledger at the close of `bar`."""
        symbols, working = self._agent.symbols, self._state.working
        close = np.where(bar.present, bar.close, self._state.close)
        orders = [ledger.order(working[s].client_id) if s in working else None for s in symbols]
        books, (units, price) = ledger.books(symbols), ledger.flush(symbols)
        worth = valued(books.units, close)
        value = books.cash + float(worth.sum())
        if self._base is None:
            self._base = value
        return Observed(
            # The first decision begins at equity 1, whatever the account was worth then.
            equity=value / self._base,
            weight=worth / value,
            waiting=np.array([o is not None and o.state != "done" for o in orders]),
            undone=np.array([o is not None and o.reason in UNDONE for o in orders]),
            traded=valued(units, np.nan_to_num(price)) / value,
            price=np.where(np.isnan(price), close, price),
            value=value,
        )

    def _record_live(
        self,
        bar: Bar,
        outcome: Outcome,
        seen: Observed | None,
        tickets: Sequence[Ticket],
        refused: Sequence[tuple[str, str]],
        ts: int,
        given: float,
    ) -> None:
        """Record all that is known at the bar's close, before anything is sent."""
        key = str(ts // NANOSECONDS)
        self._record_started(ts)
        self._counts["bars"] += 1
        self._record("bar", key, bar_body(bar, self._agent.symbols), ts)
        if outcome.decision is None or seen is None:
            return
        self._record_snapshot(seen, ts)
        self._record_decision(outcome.decision, ts)
        orders = {order.client_id: order for order in outcome.sent}
        for name, code in refused:
            body = {"code": code, "client_id": name, "symbol": orders[name].symbol}
            self._record("risk", f"{key}:{name}:{code}", body, ts)
        for ticket in tickets:
            order = orders[ticket.client_id]
            self._counts["orders"] += 1
            more = {"weight": order.weight, "buy_only": order.buy_only}
            self._router.intend(ticket, ts // NANOSECONDS, more, ts, given)

    def _record_snapshot(self, seen: Observed, ts: int) -> None:
        books = self._router.books()
        body = {
            "equity": seen.equity,
            "log_equity": [float(np.log(seen.equity)), 0.0] if seen.equity > 0.0 else None,
            "weight": in_json(seen.weight),
            "cash": books.cash,
            "units": in_json(books.units),
            "value": seen.value,
        }
        self._record("snapshot", str(ts // NANOSECONDS), body, ts)

    def _drifts(
        self, bar: Bar, legs: Legs, before: np.ndarray, seen: Observed | None, outcome: Outcome
    ) -> list[dict[str, Any]]:
        """Return what drifts at a bar: `before` `[A]` are the closes of the bar before.

        An order goes out after a close, so the market's price of its fill is the next open.
        """
        if outcome.decision is None or seen is None:
            return []
        present = np.asarray(bar.present)
        quote = legs.at_open._replace(price=np.where(present, bar.open, before))
        found = []
        for asset in np.flatnonzero(seen.traded).tolist():
            price = float(seen.price[asset])
            # Back to units, which the watch turns into a fraction by its own price.
            units = float(seen.traded[asset] * seen.value / price)
            found += self._drift.filled(asset, units, price, quote, seen.value)
        found += self._drift.decided(outcome.decision.features, present)
        return found + self._drift.turned(float(np.abs(seen.traded).sum()))

    def _failing(self, outcome: Outcome, ts: int) -> Halting | None:
        """Return why to halt where decisions are unusable in a row, or too much is lost."""
        decision, account = outcome.decision, self._state.account
        if decision is None or account is None:
            return None
        if account.ruined:
            return Halting("ruined", equity=float(np.exp(account.log_equity)))
        self._failures = 0 if decision.usable else self._failures + 1
        if not decision.usable:
            self._record("risk", str(ts // NANOSECONDS), not_finite(decision), ts)
        if self._failures >= MAX_IN_A_ROW:
            return Halting("policy-not-finite", in_a_row=self._failures)
        loss = broken(account)
        return None if loss is None else Halting(loss[0], **loss[1])

    def _missing(self) -> Halting | None:
        """Return why to halt where a position has had no bar for as long as training knows.

        There such an asset counts as gone and is paid out, as the simulated exchange does too.
        Another venue still holds it, and no decision of the agent is about such a position.
        """
        after = self._agent.rules.delist_after
        if after is None:
            return None
        # Equal and not above: it halts once, and a person who resumes has seen it.
        gone = (self._state.missing == after) & (self._router.books().units != 0.0)
        names = [self._agent.symbols[i] for i in np.flatnonzero(gone).tolist()]
        return Halting("bars-missing", symbols=names, in_a_row=after) if names else None

    def _refuse_skew(self) -> None:
        """Halt where the venue's clock and the feed's are apart: ages would be wrong."""
        if hasattr(self._venue, "quote"):  # it has the session's own clock
            return
        off = (self._venue.now() - self._feed.now()) / NANOSECONDS
        if abs(off) > SKEW:
            raise Halting("clock-skew", seconds=off)

    def _idle(self) -> None:
        """Between two bars: look at the kill switch, and now and then at open orders."""
        self._refuse()
        now = self._clock.monotonic()
        # A venue limits how often it is asked, and without open orders nothing can happen.
        if now - self._looked < LOOK or not self._router.ledger.open:
            return
        self._looked = now
        with contextlib.suppress(Unreachable):
            self._router.take(self._feed.now())

    def _grown(self) -> float:
        """Return the account's worth as a multiple of that at the first decision."""
        return 1.0 if self._base is None else self._value() / self._base

    def _left(self) -> float:
        """Return the seconds until the next bar closes; NaN if unknown."""
        if self._state.last is None:
            return float("nan")
        return self._newest_for(self._state.last)

    def _newest_for(self, opened: int) -> float:
        """Return the seconds for which no later bar than one is due; below 0 if one is."""
        return self._due(opened) - self._feed.now() / NANOSECONDS

    def _due(self, opened: int) -> float:
        """Return when the feed can give the bar after one, in seconds since 1970 UTC."""
        due = getattr(self._feed, "due", None)
        return opened + 2.0 * self._feed.period if due is None else due(opened)

    def _value(self) -> float:
        """Return cash and positions in money at the last closes."""
        books = self._router.books()
        return float(books.cash + valued(books.units, self._state.close).sum())

    def _now(self) -> int:
        return self._feed.now()

    def _halted(self, halting: Halting) -> HaltError:
        """Record a halt; return its error."""
        halt, now = Halt(halting.code, halting.detail), self._now()
        self._record("halt", f"{now}:{halt.code}", halt._asdict(), now)
        return self._halt_error(halt)
