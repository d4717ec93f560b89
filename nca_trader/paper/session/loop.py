"""The loop of a paper session: bars in, orders out, each step in the journal before its effect.

A bar is observed at the venue, decided on, journalled and then ordered. A replay and a live session
are the same loop, and what differs is in `session.account`.

A session that resumes repeats what its journal holds. A replay gets the same bars from its file; a
live session takes them from the journal, on the positions and cash that it had at each of them.
Every event must repeat exactly, and is not written twice. Then a live session compares its books
with the venue's, learns the bars that closed in between without trading on them, and goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from nca_trader.envs.account.state import BarReturns
from nca_trader.errors import HaltError
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.feeds.feed import Notice
from nca_trader.paper.journal.bars import bar_of, complete
from nca_trader.paper.journal.journal import Event, Journal
from nca_trader.paper.session.account import MAX_IN_A_ROW, Live, Replay, equity_of
from nca_trader.paper.session.core import Core, Decision, Response, Seen, State, View
from nca_trader.paper.session.drift import DriftWatch
from nca_trader.paper.session.gate import Passed, Refusal
from nca_trader.paper.session.halts import (
    Halt,
    KillSwitch,
    Lifts,
    Stopped,
    after_resume,
    broken,
    halted,
    said,
)
from nca_trader.paper.session.record import Record, digest
from nca_trader.paper.venue import Unreachable
from nca_trader.types import Bar


class Session:
    """Trades one account at one venue, and keeps one journal; `trade.open_session` makes it.

    Args:
      core: of the agent.
      account: of a replay or of a live session, with its feed and its venue.
      journal: an open one.
      started: the body of its first event.
      switch: says that somebody asked for a halt or the end.
      lifts: halts that people lifted.
    """

    def __init__(
        self,
        core: Core,
        account: Replay | Live,
        journal: Journal,
        started: dict[str, Any],
        switch: KillSwitch,
        lifts: Lifts,
    ):
        agent = core.agent
        self._core, self._agent, self.run = core, agent, core.run
        self._account: Any = account
        self._journal, self._lifts, self.switch = journal, lifts, switch
        self._capital = started["capital"]
        self._state = core.begin()
        self._drift = DriftWatch(agent.usual, agent.features, agent.rules)
        self._record = Record(journal, self.run, agent.symbols, started, self._drift.status)
        self._failures = 0

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
        self.switch.stop = stop
        try:
            self._trade()
        except HaltError:  # in the journal by now
            self._account.withdraw_all()
            raise
        except Unreachable as error:
            raise error.with_remedy("give the same command again when it answers") from None
        finally:
            self._account.close()
        return self.result()

    def _trade(self) -> None:
        """Trade until the feed ends or the session is stopped, and record the end or the halt."""
        try:
            with contextlib.suppress(Stopped):
                self._follow(self._account.begin(self.repeat))
                shown = self._account.progress()
                with shown, contextlib.suppress(Stopped):
                    items = self._account.items(shown, lambda: self._state)
                    with contextlib.closing(items):
                        self._follow(items)
            if self._state.last is not None:
                ending, body = self._account.moment(self._state.last), self.counts
                if self.switch.stopped:  # also at a replay's last bar, which a later one ends at
                    ending, body = f"{ending}:stopped", body | {"stopped": True}
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
            "value": self._capital if account is None else self._account.value(self._state.close),
            "events": head.seq,
            "head": head.hash,
            "run": self.run,
        }

    def on_bar(self, bar: Bar) -> None:
        """Check one closed bar, and process those that the gate lets through."""
        self.switch.refuse()
        if not np.asarray(bar.present).all():
            bar = complete(bar, self._state.close)
        passed, refusal = self._account.gate.admit(bar)
        if refusal is not None and refusal.code == "correction":
            self.on_notice(Notice(refusal.code, refusal.say))
        elif refusal is not None:
            self._reject(bar, refusal, int(bar.time[0]) * NANOSECONDS)
        for each in passed:
            self._process(each)

    def on_notice(self, notice: Notice) -> None:
        """Journal what the feed says. While it is stale no bar comes, and so no order goes."""
        now = self._now()
        key = f"{now}:{notice.code}:{digest(notice.detail)}"
        self._record.event("feed", key, notice._asdict(), now)

    def _follow(self, items: Iterable[Bar | Notice]) -> None:
        """Process bars and notices until they end or the session is stopped."""
        for item in items:
            if isinstance(item, Notice):
                self.on_notice(item)
            else:
                self.on_bar(item)
            # After a bar and not before: each bar is processed whole.
            self.switch.end()

    def _process(self, passed: Passed) -> None:
        """Process one good bar: observe, decide, record, send."""
        bar, ts = passed.bar, int(passed.bar.time[0]) * NANOSECONDS
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
                self._account.intend(outcome, self._state.close, ts)
            drifts = self._drifts(before, bar, legs, seen, outcome)
            self._record.risks([*passed.risks, *drifts, *self._limited(outcome)], ts)
            if not late:
                # With its bar: after a kill in between, the next session would trade on.
                halt = self._settle(outcome, seen, ts)
        self._stop_or_go_on(halt)
        self.switch.refuse()
        # Before this line nothing is sent: a decision counts once it is on disk.
        filled = self._account.send(outcome, self._state, ts)
        if late and filled is not None:
            quote = legs.at_close._replace(price=self._state.close)
            with self._journal.transaction(durable=False):
                self._record.risks(self._drift.traded(filled, quote), ts)
                halt = self._settle(outcome, filled, ts)
            self._stop_or_go_on(halt)
        if ts in self._lifts.refused:
            self._begin_again()

    def _decided(self, bar: Bar, legs: BarReturns, seen: Seen | None) -> Response:
        view = View() if seen is None else seen.view
        try:
            self._state, outcome = self._core.step(self._state, bar, legs, view)
        except self._account.faults as error:  # no further order, and a person looks
            raise Halt("policy-error", error=f"{type(error).__name__}: {error}") from error
        return outcome

    def repeat(self) -> tuple[State, Response]:
        """Process a live journal's bars again, on the books that it had at each of them.

        Returns:
          The state after the last one, and what followed from it.

        Raises:
          StateError: a decision is another one than in the journal.
        """
        # A bar that was learnt and not traded on is repeated so: its age then is not known now.
        decided = {event.key for event in self._journal.events("decision")}
        last = Response()
        with self._journal.transaction(durable=False):
            for event in self._journal.events():
                if event.kind == "bar":
                    last = self._repeat_bar(event, event.key in decided)
                self._account.router.ledger.apply(event.kind, event.key, event.body)
                self._record.counts["rejected"] += event.kind == "bar_rejected"
                if event.kind == "resume":
                    self._failures = 0
        return self._state, last

    def _repeat_bar(self, event: Event, decided: bool) -> Response:
        bar = bar_of(event.body, self._agent.symbols, event.ts_event // NANOSECONDS)
        bar = complete(bar, self._state.close)
        before, legs = self._state, self._core.legs(self._state, bar)
        seen = self._account.seen(before, bar, legs) if decided else None
        view = View() if seen is None else seen.view
        self._state, outcome = self._core.step(before, bar, legs, view)
        # It passed once, and may only pass again by the same rules.
        self._account.gate.learn(bar)
        self._drifts(before, bar, legs, seen, outcome)  # in the journal already
        self._record.counts["bars"] += 1
        if outcome.decision is not None:
            self._record.decision(outcome.decision, event.ts_event)
            self._failures = 0 if outcome.decision.usable else self._failures + 1
        account = self._state.account
        if account is not None and broken(account):  # trading goes on only after `resume`
            self._begin_again()
        return outcome

    def _limited(self, outcome: Response) -> list[dict[str, Any]]:
        """Return what the limits made of a decision."""
        if outcome.decision is None or self._state.account is None:
            return []
        return said(self._state.account, outcome.decision.target, self._agent.symbols)

    def _drifts(
        self, before: State, bar: Bar, legs: BarReturns, seen: Seen | None, outcome: Response
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
            halt.key = f"{self._account.moment(self._state.last)}:{halt.code}"
            self._record.event("halt", halt.key, halt.body, self._now())
        return halt

    def _verdict(self, decision: Decision | None, seen: Seen | None) -> Halt | None:
        """Return why to halt: bankruptcy, books, failures of the policy, or a limit."""
        account = self._state.account
        if decision is None or account is None:
            return self._account.fault(self._state, seen)
        if account.bankrupt:  # positions at the venue go on below the floor: nothing to compare
            return Halt(
                "ruined", equity=equity_of(account), value=self._account.value(self._state.close)
            )
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
            if refusal.bad and self._account.gate.in_a_row >= MAX_IN_A_ROW:
                halt = Halt("bad-bars", in_a_row=self._account.gate.in_a_row, last=refusal.code)
                halt.key = key
                self._record.event("halt", key, halt.body, ts)
        self._stop_or_go_on(halt)

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
        self._failures = self._account.gate.in_a_row = 0
        if self._state.account is not None:
            self._state = self._state._replace(account=after_resume(self._state.account))

    def _halted(self, halt: Halt) -> HaltError:
        """Record a halt between two bars; return its error."""
        # Another one at the same bar is another halt.
        key, now = f"{self._now()}:{halt.code}:{self._journal.head.seq}", self._now()
        self._record.event("halt", key, halt.body, now)
        self._journal.commit()
        return halted(self._journal, halt, self._state.last)

    def _now(self) -> int:
        """Return the time of what happens between two bars, in nanoseconds since 1970 UTC."""
        return self._account.now(self._state.last)
