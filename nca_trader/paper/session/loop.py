"""The loop of a paper session: bars in, orders out, each step in the journal before its effect.

A bar is observed at the venue, decided on, journalled and then ordered. A replay and a live session
are the same loop on two feeds and two views of the account, see `paper.account`.

A session that resumes repeats what its journal holds. A replay gets the same bars from its file; a
live session takes them from the journal, on the positions and cash that it had at each of them.
Every event must repeat exactly, and is not written twice. Then a live session compares its books
with the venue's, learns the bars that closed in between without trading on them, and goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from nca_trader.envs.account.risk import bars_of_size
from nca_trader.envs.account.state import Legs
from nca_trader.errors import HaltError
from nca_trader.paper.clock import NANOSECONDS, PATIENCE, TICK, Clock, Patience, Waits
from nca_trader.paper.feeds.feed import Feed, LiveFeed, Notice, Pump, ReplayFeed, Timetable
from nca_trader.paper.journal.bars import bar_of, completed
from nca_trader.paper.journal.journal import Event, Journal, canonical
from nca_trader.paper.journal.ledger import Ledger
from nca_trader.paper.session.account import MAX_IN_A_ROW, Modelled, Reported, equity_of
from nca_trader.paper.session.core import Agent, Core, Decision, Response, Seen, State, View
from nca_trader.paper.session.drift import DriftWatch
from nca_trader.paper.session.gate import Gate, Passed, Refusal
from nca_trader.paper.session.halts import (
    Halt,
    KillSwitch,
    Lifts,
    after_resume,
    broken,
    halted,
    lifts_of,
    refuse_halted,
    said,
)
from nca_trader.paper.session.record import Record, digest
from nca_trader.paper.session.router import OrderRouter
from nca_trader.paper.session.subjects import refuse_other_session, started_body
from nca_trader.paper.venue import Awaited, Unreachable, Venue
from nca_trader.progress import Progress, duration
from nca_trader.types import Bar, Bars

WARMUP = 500  # bars of history for a strategy, which does not say how many it needs


class Stopped(Exception):
    """The session was asked to end while it waited."""


class Session:
    """Trades one account at one venue, and keeps one journal.

    Args:
      agent: what trades.
      feed: of the agent's symbols. One with a `history` is live.
      venue: the account; of a replay the simulated exchange, in memory.
      journal: an open one.
      capital: money at the start, of a simulated venue; others have their own.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
      warmup: least number of bars of a live feed's history to begin with.
      patience: how long it waits for answers, and how old a decision may be.
      clock: for waits.
      lifts: halts that people lifted; None are those in the journal, which must not end halted.

    Raises:
      ConfigError: the journal is another session's; names what differs.
      HaltError: the journal says that trading was halted.
    """

    def __init__(
        self,
        agent: Agent,
        feed: Feed | LiveFeed,
        venue: Venue,
        journal: Journal,
        capital: float,
        start: int | None = None,
        warmup: int = WARMUP,
        patience: Patience = PATIENCE,
        clock: Clock | None = None,
        lifts: Lifts | None = None,
    ):
        self._agent, self._journal, self._capital = agent, journal, capital
        self._feed: Any = feed
        self._venue = venue
        self._live, self._warmup = hasattr(feed, "history"), warmup
        names = {}
        if self._live:
            # Two sessions of one agent must not share client ids: the time of the first start is
            # part of the hash that they carry.
            known = next((e.body.get("opened") for e in journal.events("run_started")), None)
            opened = self._feed.now() if known is None else known
            names = {"venue": venue.name, "period": self._feed.period, "opened": opened}
        # All that makes a session this one and no other: a journal belongs to one session.
        started = started_body(agent, capital, start, names)
        self.run = hashlib.sha256(canonical(started).encode()).hexdigest()[:16]
        refuse_other_session(journal, started)
        if lifts is None:
            refuse_halted(journal)
        # A replay that resumes comes to these again, and goes on.
        stops = sorted([*journal.events("halt"), *journal.events("resume")], key=lambda e: e.seq)
        self._lifts = lifts_of(stops) if lifts is None else lifts
        self.switch = KillSwitch(journal.path)
        self._stop: Callable[[], bool] = lambda: False
        self._stopped = False
        self._clock = Waits(clock or Clock(), self._heard)
        self._core = Core(agent, self.run, start)
        self._state = self._core.begin()
        self._drift = DriftWatch(agent.usual, agent.features, agent.rules)
        self._record = Record(journal, self.run, agent.symbols, started, self._drift.status)
        self._times = Timetable(self._feed)
        self._failures = 0
        self._last = Response()  # of the newest bar that was repeated
        if self._live:
            now, passed = self._feed.now, self._record.passed
            self._gate = Gate(agent.symbols, True, self._feed.period, now, passed)
            self._account: Any = self._reported(venue, patience)
        else:
            self._gate = Gate(agent.symbols)
            self._account = Modelled(self._core, venue, journal, self.run, capital)  # pyright: ignore

    def _reported(self, venue: Venue, patience: Patience) -> Reported:
        # The simulated exchange, which gets the bars, is in this process and answers at once.
        here = hasattr(venue, "quote")
        router = OrderRouter(
            Awaited(venue, operator.call if here else self._clock.call),  # pyright: ignore
            self._journal,
            self.run,
            self._agent.symbols,
            self._times.newest_for,
            self._clock,
            patience,
            self._refuse,
            Ledger(),  # which the journal's events fill
        )
        now, monotonic = self._feed.now, self._clock.monotonic
        return Reported(self._core, router, self._gate, now, self._times.newest_for, monotonic)

    def trade(self, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Trade until the feed ends or `stop()` is true; return `result()`.

        Args:
          stop: called after each bar, and while the session waits for a bar or an answer.

        Raises:
          HaltError: books that differ, an account that is bankrupt, a venue that does not answer,
            several unusable bars or decisions in a row, or somebody asked for it.
          StateError: the journal cannot be written, or says that something else happened.
          Unreachable: the venue did not answer at the start.
        """
        self._stop = stop
        try:
            self._trade()
        except HaltError:  # in the journal by now
            self._withdraw_all()
            raise
        except Unreachable as error:
            raise error.with_remedy("give the same command again when it answers") from None
        finally:
            if self._live:
                self._feed.close()
            self._clock.close()
        return self.result()

    def _trade(self) -> None:
        """Trade until the feed ends or the session is stopped, and record the end or the halt."""
        try:
            with contextlib.suppress(Stopped):
                self._begin()
                self._follow_feed()
            if self._state.last is not None:
                ending, body = str(self._state.last), self.counts
                if self._stopped:  # also at a replay's last bar, which a later one ends at
                    ending, body = f"{ending}:stopped", body | {"stopped": True}
                if self._live:  # may end several times at one bar, with more fills each time
                    ending = f"{ending}:{self._journal.head.seq}"
                self._record.event("run_ended", ending, body, self._state.last * NANOSECONDS)
        except Halt as halt:
            raise self._halted(halt) from None

    @property
    def counts(self) -> dict[str, int]:
        """Bars, refused bars, decisions, orders and fills so far."""
        return self._record.counts | {"orders": self._account.orders, "fills": self._account.fills}

    def result(self) -> dict[str, Any]:
        """Return counts so far, `equity` in units of the capital, `value` in money, the head."""
        account = self._state.account
        head = self._journal.head
        return {
            **self.counts,
            "equity": 1.0 if account is None else equity_of(account),
            "value": self._capital if account is None else self._value(),
            "events": head.seq,
            "head": head.hash,
            "run": self.run,
        }

    def on_bar(self, bar: Bar) -> None:
        """Check one closed bar, and process those that the gate lets through."""
        self._refuse()
        if not np.asarray(bar.present).all():
            bar = completed(bar, self._state.close)
        passed, refusal = self._gate.admit(bar)
        if refusal is not None and refusal.code == "correction":
            self.on_notice(Notice(refusal.code, refusal.say))
        elif refusal is not None:
            self._reject(bar, refusal, int(bar.time[0]) * NANOSECONDS)
        for each in passed:
            self._process(each)

    def on_notice(self, notice: Notice) -> None:
        """Journal what the feed says. While it is stale no bar comes, and so no order goes."""
        now = self._feed.now()
        key = f"{now}:{notice.code}:{digest(notice.detail)}"
        self._record.event("feed", key, notice._asdict(), now)

    def _follow_feed(self) -> None:
        """Process bars and notices until the feed ends or the session is stopped."""
        seen, gap_known = -1, False
        # A live feed waits in a thread of its own, so that the kill switch is seen between bars.
        with contextlib.closing(Pump(self._feed, self._live)) as pump, self._progress() as shown:
            while True:
                if self._live:
                    shown.note(self._line(), news=seen != self._record.counts["bars"])
                    seen = self._record.counts["bars"]
                item = pump.get(TICK)
                if item is pump.END:
                    break
                if item is None:
                    self._refuse()
                    self._account.idle()
                elif isinstance(item, Notice):
                    gap_known = gap_known or item.code == "gap"
                    self.on_notice(item)
                else:
                    if self._live and not gap_known:
                        self._note_gap(int(item.time[0]))
                    gap_known = False
                    self.on_bar(item)
                if not self._live:
                    shown.update()
                # After a bar and not before: each bar is processed whole.
                if self._is_stopped():
                    break

    def _process(self, passed: Passed) -> None:
        """Process one good bar: observe, decide, record, send."""
        bar, given = passed.bar, self._clock.monotonic()
        ts = int(bar.time[0]) * NANOSECONDS
        before, legs = self._state, self._core.legs(self._state, bar)
        seen = self._account.observe(before, bar, legs, passed.late, ts)
        outcome = self._decided(bar, legs, seen)
        halt, late = None, self._account.settles_late
        # Without a decision nothing is ordered, and a resumed session repeats the bar.
        with self._journal.transaction(durable=outcome.decision is not None):
            self._record.bar(bar, ts)
            if seen is not None:
                self._account.record(seen, ts)
            if outcome.decision is not None:
                self._record.decision(outcome.decision, ts)
                self._account.intend(outcome, self._state.close, ts, given)
            drifts = self._drifts(before, bar, legs, seen, outcome)
            gated = passed.said(self._agent.symbols)
            self._record.risks(gated + drifts + self._limited(outcome), ts)
            if not late:
                # With its bar: after a kill in between, the next session would trade on.
                halt = self._settle(outcome, seen, ts)
        self._stop_or_go_on(halt)
        if self._live or outcome.sent:
            self._refuse()
        # Before this line nothing is sent: a decision counts once it is on disk.
        filled = self._account.send(outcome, self._state, ts, given)
        if late and filled is not None:
            quote = legs.at_close._replace(price=self._state.close)
            with self._journal.transaction(durable=False):
                self._record.risks(self._drift.traded(filled, quote), ts)
                halt = self._settle(outcome, filled, ts)
            self._stop_or_go_on(halt)
        if ts in self._lifts.refused:
            self._begin_again()

    def _decided(self, bar: Bar, legs: Legs, seen: Seen | None) -> Response:
        view = View() if seen is None else seen.view
        try:
            self._state, outcome = self._core.step(self._state, bar, legs, view)
        except Exception as error:  # of the agent: no further order, and a person looks
            if not self._live:
                raise
            raise Halt("policy-error", error=f"{type(error).__name__}: {error}") from error
        return outcome

    def _begin(self) -> None:
        """Repeat a live journal, compare books, and learn what closed in between."""
        if not self._live:  # the feed gives the bars of the journal again
            return
        self.repeat()
        last, now = self._state.last, self._feed.now()
        sized = bars_of_size(self._agent.rules.scale)
        needed = max(self._agent.first_decision + 1, self._agent.history, sized)
        count = max(needed, self._warmup)
        if last is not None:
            # A journal's bars are repeated, so only those since then are asked for.
            missed = (now // NANOSECONDS - last) // self._feed.period
            needed, count = 0, max(missed + 1, 2)
        self._refuse()
        self._account.start(now, self._state, self._last)
        history = self._past(needed, count)
        first = history.time[:1].astype("datetime64[s]").astype(np.int64)
        if last is not None and len(first) and first[0] > last + self._feed.period:
            self.on_notice(Notice("gap", f"no bars from {last} to {first[0]}"))
        for bar in ReplayFeed(history):
            if self._state.last is None or int(bar.time[0]) > self._state.last:
                self.on_bar(bar)
            self._heard()
        self._heard()

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

    def repeat(self) -> None:
        """Process a live journal's bars again, on the books that it had at each of them.

        Raises:
          StateError: a decision is another one than in the journal.
        """
        # A bar that was learnt and not traded on is repeated so: its age then is not known now.
        decided = {event.key for event in self._journal.events("decision")}
        with self._journal.transaction(durable=False):
            for event in self._journal.events():
                if event.kind == "bar":
                    self._repeat_bar(event, event.key in decided)
                self._account.router.ledger.apply(event.kind, event.key, event.body)
                self._record.counts["rejected"] += event.kind == "bar_rejected"
                if event.kind == "resume":
                    self._failures = 0

    def _repeat_bar(self, event: Event, decided: bool) -> None:
        bar = bar_of(event.body, self._agent.symbols, event.ts_event // NANOSECONDS)
        bar = completed(bar, self._state.close)
        before, legs = self._state, self._core.legs(self._state, bar)
        seen = self._account.seen(before, bar, legs) if decided else None
        view = View() if seen is None else seen.view
        self._state, outcome = self._core.step(before, bar, legs, view)
        self._last = outcome
        # It passed once, and may only pass again by the same rules.
        self._gate.learn(bar)
        self._drifts(before, bar, legs, seen, outcome)  # in the journal already
        self._record.counts["bars"] += 1
        if outcome.decision is not None:
            self._record.decision(outcome.decision, event.ts_event)
            self._failures = 0 if outcome.decision.usable else self._failures + 1
        account = self._state.account
        if account is not None and broken(account):  # trading goes on only after `resume`
            self._begin_again()

    def _limited(self, outcome: Response) -> list[dict[str, Any]]:
        """Return what the limits made of a decision."""
        if outcome.decision is None or self._state.account is None:
            return []
        return said(self._state.account, outcome.decision.target, self._agent.symbols)

    def _drifts(
        self, before: State, bar: Bar, legs: Legs, seen: Seen | None, outcome: Response
    ) -> list[dict[str, Any]]:
        if outcome.decision is None or seen is None:
            return []
        return self._drift.passed(bar, legs.at_open, before.close, seen, outcome.decision.features)

    def _settle(self, outcome: Response, seen: Seen | None, ts: int) -> Halt | None:
        """Record the account; return the halt where it must not trade on, which is recorded."""
        decision, key = outcome.decision, str(ts // NANOSECONDS)
        if decision is not None and seen is not None:
            self._record.event("snapshot", key, self._account.snapshot(self._state, seen), ts)
            if not decision.usable:
                self._record.event("risk", key, decision.fault, ts)
        halt = self._verdict(decision, seen)
        if halt is not None:
            self._record_halt(halt)
        return halt

    def _verdict(self, decision: Decision | None, seen: Seen | None) -> Halt | None:
        """Return why to halt: bankruptcy, books, failures of the policy, or a limit."""
        account = self._state.account
        if decision is None or account is None:
            return self._account.fault(self._state, seen)
        if account.ruined:  # positions at the venue go on below the floor: nothing to compare
            return Halt("ruined", equity=equity_of(account), value=self._value())
        self._failures = 0 if decision.usable else self._failures + 1
        if (halt := self._account.fault(self._state, seen)) is not None:
            return halt
        if self._failures >= MAX_IN_A_ROW:
            return Halt("policy-not-finite", in_a_row=self._failures)
        return broken(account)

    def _reject(self, bar: Bar, refusal: Refusal, ts: int) -> None:
        halt = None
        with self._journal.transaction():
            key = self._record.rejected(bar, refusal, ts)
            if refusal.bad and self._gate.in_a_row >= MAX_IN_A_ROW:
                halt = Halt("bad-bars", in_a_row=self._gate.in_a_row, last=refusal.code)
                halt.key = key
                self._record.event("halt", key, halt.body, ts)
        self._stop_or_go_on(halt)

    def _record_halt(self, halt: Halt) -> None:
        now = self._now()
        # Of a replay the bar's time: a session that resumes comes to it again.
        at = str(now) if self._live else str(now // NANOSECONDS)
        halt.key = f"{at}:{halt.code}"
        self._record.event("halt", halt.key, halt.body, now)

    def _stop_or_go_on(self, halt: Halt | None) -> None:
        """Stop at a halt, or go on where it was lifted after an earlier session stopped at it."""
        if halt is None:
            return
        if halt.key not in self._lifts.halts:
            self._journal.commit()  # a deferred halt could be lost, and trading would resume
            raise halted(self._journal, halt, self._state.last)
        self._begin_again()

    def _begin_again(self) -> None:
        """Count failures and losses from here, as after a halt that a person lifted."""
        self._failures = self._gate.in_a_row = 0
        if self._state.account is not None:
            self._state = self._state._replace(account=after_resume(self._state.account))

    def _withdraw_all(self) -> None:
        """Cancel what waits at the venue, after a halt; `resume` finds out what came of it.

        An order that waits for the next day's open would fill after the halt.
        """
        if not self._live:
            return
        cancel_all = functools.partial(self._account.router.cancel_all, self._venue)
        if hasattr(self._venue, "quote"):  # of this process
            cancel_all()
        else:
            self._clock.last(cancel_all)

    def _refuse(self) -> None:
        """Halt where somebody asked for it."""
        asked = self.switch.asked()
        if asked is not None:
            raise Halt("asked", **asked)

    def _heard(self) -> None:
        """End the session during a wait, where a halt or a stop was asked for."""
        self._refuse()
        if self._is_stopped():
            raise Stopped

    def _is_stopped(self) -> bool:
        self._stopped = self._stopped or self._stop()
        return self._stopped

    def _halted(self, halt: Halt) -> HaltError:
        """Record a halt between two bars; return its error."""
        # Another one at the same bar is another halt.
        key, now = f"{self._now()}:{halt.code}:{self._journal.head.seq}", self._now()
        self._record.event("halt", key, halt.body, now)
        self._journal.commit()
        return halted(self._journal, halt, self._state.last)

    def _now(self) -> int:
        """Return the time of what happens between two bars, in nanoseconds since 1970 UTC."""
        if self._live:
            return self._feed.now()
        if self._state.last is not None:
            return self._state.last * NANOSECONDS
        # Before the first bar of a start: where the journal ends, or where the feed begins.
        known = (event.ts_event for event in self._journal.events("bar"))
        return max(known, default=self._journal.now())

    def _value(self) -> float:
        """Return cash and positions in money at the last closes."""
        return self._account.value(self._state.close)

    def _note_gap(self, opened: int) -> None:
        """Journal that the feed left out bars before this one, which it did not say itself."""
        last = self._state.last
        if last is not None and self._times.due(last) - self._feed.period < opened:
            between = f"{np.datetime64(last, 's')} and {np.datetime64(opened, 's')}"
            self.on_notice(Notice("gap", f"the feed has no bar between {between}"))

    def _progress(self) -> Progress:
        if self._live:
            return Progress(None, "paper", ticks=False, always=True)
        return Progress(len(self._feed), "paper", "bars", compiles=True)

    def _line(self) -> str:
        """Return the line of progress: bars, equity, and the time until the next bar."""
        last, base = self._state.last, self._account.base
        left = float("nan") if last is None else self._times.newest_for(last)
        # Below 0 while a bar is overdue, NaN where it is not known.
        waits = f"next bar in {duration(left)}" if left > 0.0 else "waiting for the next bar"
        grown = 1.0 if base is None else self._value() / base
        return f"{self._record.counts['bars']:,} bars  equity {grown:.4f}  {waits}"
