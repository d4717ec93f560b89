"""The loop of a paper session: bars in, orders out, each step in the journal before its effect.

A session that resumes on its journal processes the same bars again. Every event that the journal
holds must repeat exactly and is not written twice; then the session goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nca_trader.config.env import SIZES
from nca_trader.config.records import plain
from nca_trader.envs.account.state import Quote, Rules
from nca_trader.errors import ConfigError, HaltError
from nca_trader.paper.broker import Broker, Fill, valued
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.core import Agent, Core, Decision, Outcome
from nca_trader.paper.drift import DriftWatch
from nca_trader.paper.feed import Feed
from nca_trader.paper.gate import Gate, Passed, Refusal, bar_body, in_json
from nca_trader.paper.journal import Journal, canonical
from nca_trader.paper.risk import (
    Halt,
    KillSwitch,
    Lifts,
    after_resume,
    broken,
    lifts_of,
    refuse_halted,
    remedy,
    said,
)
from nca_trader.runs.consent import codes_of
from nca_trader.types import Bar

TOLERANCE = 1e-9  # relative, between the account and the broker
MAX_IN_A_ROW = 3  # bad bars, or failures of the policy, before trading halts


class Session:
    """Trades one account with one broker, and keeps one journal.

    Args:
      agent: what trades.
      broker: it starts with `capital` in cash and no positions; None where a venue keeps the books.
      journal: an open one.
      capital: money at the start.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
      live: what else makes a live session this one.
      lifts: halts that people lifted; None are those in the journal.

    Raises:
      ConfigError: the journal is another session's; names what differs.
      HaltError: the journal says that trading was halted.
    """

    def __init__(
        self,
        agent: Agent,
        broker: Broker | None,
        journal: Journal,
        capital: float,
        start: int | None = None,
        live: Mapping[str, Any] | None = None,
        lifts: Lifts | None = None,
    ):
        self._agent, self._journal = agent, journal
        self._broker: Any = broker  # a live session has a venue instead
        self._capital = capital
        # All that makes a session this one and no other: a journal belongs to one session.
        self._started = started_body(agent, capital, start, live or {})
        self.run = hashlib.sha256(canonical(self._started).encode()).hexdigest()[:16]
        refuse_other_session(journal, self._started)
        refuse_halted(journal)
        # A session that resumes comes to these again, and goes on.
        stops = sorted([*journal.events("halt"), *journal.events("resume")], key=lambda e: e.seq)
        self._lifts = lifts_of(stops) if lifts is None else lifts
        self.switch = KillSwitch(journal.path)
        self._core = Core(agent, self.run, start)
        self._state = self._core.begin()
        self._refuse()
        self._gate = Gate(agent.symbols)
        self._drift = DriftWatch(agent.usual, agent.features, agent.costs, agent.rules)
        self._watched = False  # whether this process has said what is watched
        self._moved = 0.0  # money traded since the last decision
        self._failures = 0
        self._counts = {"bars": 0, "rejected": 0, "decisions": 0, "orders": 0, "fills": 0}

    def trade(self, feed: Feed, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Process every bar of `feed`, or until `stop()` after one; return `result()`.

        Raises:
          HaltError: account and broker disagree, the account is bankrupt, or several bars or
            decisions in a row are unusable.
          StateError: the journal cannot be written, or says that something else happened.
        """
        stopped = False
        for bar in feed:
            self.on_bar(bar)
            # After a bar and not before: each bar is processed whole.
            if stopped := stop():
                break
        if self._state.last is not None:
            ts = self._state.last * NANOSECONDS
            self._record("run_ended", str(self._state.last), self._ending(stopped), ts)
        return self.result()

    def on_bar(self, bar: Bar) -> None:
        """Check one closed bar, and process those that the gate lets through."""
        self._refuse()
        passed, refusal = self._gate.admit(bar)
        if refusal is not None:
            self._reject(bar, refusal, int(bar.time[0]) * NANOSECONDS)
        for each in passed:
            self._process(each)

    def _process(self, passed: Passed) -> None:
        """Process one good bar: fills, features, decision, orders, reconciliation."""
        bar = passed.bar
        ts = int(bar.time[0]) * NANOSECONDS
        at_close = self._agent.rules.fill == "close"
        present, legs = np.asarray(bar.present), self._core.legs(self._state, bar)
        # A missing asset is worth its last close; the quote says that it does not trade.
        opened = np.where(present, bar.open, self._state.close)
        fills, paid = [], 0.0
        # Before trading starts the broker has neither orders nor positions, and is not asked.
        if self._state.account is not None:
            closed = np.where(present, bar.close, self._state.close)
            # The broker moves first: what it fills at the open was ordered at the last close.
            at_open = self._broker.open(opened, legs, ts)
            after = self._broker.close(closed, legs, ts)
            fills, paid = at_open.fills + after.fills, at_open.cash + after.cash
        self._state, outcome = self._core.step(self._state, bar, legs)
        # Where nothing is sent, the bar is complete: one transaction holds all of it.
        settled = not (at_close or outcome.sent)
        halt = None
        # Without a decision nothing is ordered, and a resumed session repeats the bar.
        with self._journal.transaction(durable=outcome.decision is not None):
            self._record_bar(bar, fills, outcome, ts)
            if paid:
                self._record("cash", str(ts // NANOSECONDS), {"amount": paid}, ts)
            self._watch(fills, opened, legs.at_open, ts, outcome.decision, present)
            if settled:
                halt = self._settle(outcome, ts)
        self._refuse()
        # Before this line nothing is sent: a decision counts once it is on disk.
        accepted = self._broker.work(outcome.working)
        if not settled:
            closed = self._state.close
            fills = self._broker.advance(closed, legs.at_close, ts) if at_close else []
            with self._journal.transaction(durable=self._broker.remembers):
                for name in accepted:
                    self._record("order_ack", name, {}, ts)
                self._record_fills(fills, ts)
                halt = self._settle(outcome, ts)
                self._watch(fills, closed, legs.at_close, ts)
        if halt is not None:
            self._stop_or_go_on(halt, f"{ts // NANOSECONDS}:{halt.code}")
        if ts in self._lifts.refused:
            self._begin_again()

    def _ending(self, stopped: bool) -> dict[str, Any]:
        """Return the body of `run_ended`: counts, and `stopped` where the feed had more bars."""
        return dict(self._counts) | ({"stopped": True} if stopped else {})

    def result(self) -> dict[str, Any]:
        """Return counts so far, `equity` in units of the capital, `value` in money, the head."""
        account = self._state.account
        head = self._journal.head
        return {
            **self._counts,
            "equity": 1.0 if account is None else _equity(account),
            "value": self._capital if account is None else self._value(),
            "events": head.seq,
            "head": head.hash,
            "run": self.run,
        }

    def _watch(
        self,
        fills: Sequence[Fill],
        price: np.ndarray,
        quote: Quote,
        ts: int,
        decision: Decision | None = None,
        present: np.ndarray | None = None,
    ) -> None:
        """Record what drifts: of the fills at market prices `price` `[A]`, and of a decision."""
        found, value = [], self._value()
        for fill in fills:
            if fill.client_id.startswith("nca-"):  # not of a margin call or a delisting
                asset = self._agent.symbols.index(fill.symbol)
                quoted = quote._replace(price=price)
                found += self._drift.filled(asset, fill.units, fill.price, quoted, value)
        if decision is not None and present is not None:
            found += self._drift.decided(decision.features, present)
            found += self._drift.turned(self._moved / value)
            self._moved = 0.0
        self._record_risks(found, ts)

    def _record_risks(self, found: Sequence[dict[str, Any]], ts: int) -> None:
        """Record what the gate, the limits or the drift watch say of a bar, one event each."""
        for body in found:
            parts = (body["code"], body.get("feature"))
            key = ":".join([str(ts // NANOSECONDS), *(part for part in parts if part)])
            self._record("risk", key, body, ts)

    def _limited(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Return what the limits made of a decision."""
        if outcome.decision is None or self._state.account is None:
            return []
        return said(self._state.account, outcome.decision.target, self._agent.symbols)

    def _record_started(self, ts: int) -> None:
        """Record what the session is at its first bar, and what its drift watch watches."""
        if self._counts["bars"] == 0:
            self._record("run_started", "", self._started, ts)
        if self._watched:
            return
        self._watched, status = True, self._drift.status
        before = list(self._journal.events("watched"))
        # Again only where it changed, e.g. after somebody saved a backtest in the run folder.
        if not before or before[-1].body != status:
            key = f"{ts // NANOSECONDS}:{len(before)}"
            self._record("watched", key, status, ts)

    def _record(self, kind: str, key: str, body: dict[str, Any], ts: int) -> None:
        self._journal.record(self.run, kind, key, body, ts)

    def _record_bar(self, bar: Bar, fills: Sequence[Fill], outcome: Outcome, ts: int) -> None:
        """Record all that is known at the bar's close, before anything is sent."""
        key = str(ts // NANOSECONDS)
        self._record_started(ts)
        self._counts["bars"] += 1
        self._record("bar", key, bar_body(bar, self._agent.symbols), ts)
        self._record_fills(fills, ts)
        decision = outcome.decision
        if decision is None:
            return
        self._record_decision(decision, ts)
        self._record_risks(self._limited(outcome), ts)
        for name, reason in outcome.closed:
            self._record("order_terminal", name, {"reason": reason}, ts)
        for order in outcome.sent:
            self._counts["orders"] += 1
            self._record("order_intent", order.client_id, order._asdict(), ts)

    def _record_decision(self, decision: Decision, ts: int) -> None:
        self._counts["decisions"] += 1
        body = {name: in_json(value) for name, value in decision.body.items()}
        self._record("decision", str(ts // NANOSECONDS), body, ts)

    def _record_fills(self, fills: Sequence[Fill], ts: int) -> None:
        for fill in fills:
            self._counts["fills"] += 1
            self._record("fill", fill.execution_id, fill._asdict(), ts)
            self._moved += abs(fill.units * fill.price)

    def _settle(self, outcome: Outcome, ts: int) -> Halt | None:
        """Record the account and the broker's positions; return why to halt, if so."""
        account, decision = self._state.account, outcome.decision
        if account is None or decision is None:
            return None
        key = str(ts // NANOSECONDS)
        cash, units = self._broker.position()
        held, equity, value = np.asarray(account.held), _equity(account), self._value()
        body = {
            "equity": equity,
            "log_equity": [float(account.log_equity), float(account.log_equity_low)],
            "weight": in_json(held),
            "cash": cash,
            "units": in_json(units),
            "value": value,
        }
        self._record("snapshot", key, body, ts)
        halt, loss = None, None
        if account.ruined:  # the broker's positions go on below the floor: nothing to compare
            halt = Halt("ruined", {"equity": equity, "broker": value})
        else:
            expected = self._capital * equity
            # Both are compared: equity alone would not show a position in the wrong asset.
            weights = valued(units, self._state.close) / value
            off = max(abs(value - expected) / expected, float(np.abs(weights - held).max()))
            self._failures = 0 if decision.usable else self._failures + 1
            if not off <= TOLERANCE:  # so that NaN is a disagreement
                detail = {"broker": value, "account": expected}
                halt = Halt("books-differ", detail | {"weights": [in_json(weights), in_json(held)]})
            elif not decision.usable:
                self._record("risk", key, not_finite(decision), ts)
                if self._failures >= MAX_IN_A_ROW:
                    halt = Halt("policy-not-finite", {"in_a_row": self._failures})
            if halt is None and (loss := broken(account)) is not None:
                halt = Halt(*loss)
        if halt is not None:
            if loss is None:  # what a limit says is in the journal
                kind = "recon" if halt.code.endswith("-differ") else "risk"
                self._record(kind, f"{key}:{halt.code}", halt._asdict(), ts)
            self._record("halt", f"{key}:{halt.code}", halt._asdict(), ts)
        return halt

    def _reject(self, bar: Bar, refusal: Refusal, ts: int) -> None:
        self._counts["rejected"] += 1
        body = {
            "reason": refusal.code,
            "say": refusal.say,
            "held": refusal.held,
            "bar": bar_body(bar, self._agent.symbols),
        }
        digest = hashlib.sha256(canonical(body).encode()).hexdigest()[:8]
        # A feed may send several bad bars of one time; the digest keeps their keys apart.
        key = f"{ts // NANOSECONDS}:{digest}"
        halt = None
        with self._journal.transaction():
            self._record("bar_rejected", key, body, ts)
            if refusal.bad and self._gate.in_a_row >= MAX_IN_A_ROW:
                halt = Halt("bad-bars", {"in_a_row": self._gate.in_a_row, "last": refusal.code})
                self._record("halt", key, halt._asdict(), ts)
        if halt is not None:
            self._stop_or_go_on(halt, key)

    def _stop_or_go_on(self, halt: Halt, key: str) -> None:
        """Stop at a halt, or go on where it was lifted after an earlier session stopped at it."""
        if key not in self._lifts.halts:
            self._journal.commit()  # a deferred halt could be lost, and trading would resume
            raise self._halt_error(halt)
        self._begin_again()

    def _begin_again(self) -> None:
        """Count failures and losses from here, as after a halt that a person lifted."""
        self._failures = self._gate.in_a_row = 0
        if self._state.account is not None:
            self._state = self._state._replace(account=after_resume(self._state.account))

    def _refuse(self) -> None:
        """Halt where somebody asked for it."""
        asked = self.switch.asked()
        if asked is None:
            return
        halt, last = Halt("asked", asked), self._state.last
        # Between two bars; another request at the same bar is another halt.
        key = f"{last}:asked:{self._journal.head.seq}"
        self._record("halt", key, halt._asdict(), self._now())
        self._journal.commit()
        raise self._halt_error(halt)

    def _now(self) -> int:
        """Return the time of what happens between two bars, in nanoseconds since 1970 UTC."""
        if self._state.last is not None:
            return self._state.last * NANOSECONDS
        # Before the first bar of a start: where the journal ends, or where the feed begins.
        known = (event.ts_event for event in self._journal.events("bar"))
        return max(known, default=self._journal.now())

    def _value(self) -> float:
        """Return the broker's cash and positions in money at the last closes."""
        cash, units = self._broker.position()
        return float(cash + valued(units, self._state.close).sum())

    def _halt_error(self, halt: Halt) -> HaltError:
        last = self._state.last
        when = "before the first bar" if last is None else f"at {np.datetime64(last, 's')}"
        detail = ", ".join(f"{name} {value}" for name, value in halt.detail.items())
        return HaltError(
            f"{self._journal.path}: halted {when}, {halt.code} ({detail}); the last events of "
            f"the journal show why. Correct the cause, then {remedy(self._journal.path)}."
        )


def not_finite(decision: Decision) -> dict[str, Any]:
    """Return the body of the event of a decision that is not a number; names the blend's parts."""
    found: dict[str, Any] = {"code": "policy-not-finite"}
    return found | ({"parts": decision.unfit} if decision.unfit else {})


def _equity(account: Any) -> float:
    """Return equity as a fraction of the start's, by the formula of a backtest."""
    return float(np.exp(account.log_equity + account.log_equity_low))


# Rules that earlier journals do not name. Where one is off it is left out of a session's identity,
# which stays that of those journals.
LATER = (*SIZES, "sizing", "dead_band")


def started_body(
    agent: Agent, capital: float, start: int | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of `run_started`, whose hash is the session's.

    Args:
      agent: what trades.
      capital: money at the start.
      start: seconds since 1970 UTC before which nothing is decided.
      more: what else makes a live session this one.
    """
    limits = agent.rules.risk
    own = codes_of(dict.fromkeys(agent.costs.own or (), "costs"))
    return {
        "symbols": list(agent.symbols),
        "first_decision": agent.first_decision,
        "costs": plain(agent.costs),
        "rules": {
            name: rule
            for name, rule in agent.rules._asdict().items()
            if name != "risk" and (name not in LATER or rule != Rules._field_defaults[name])
        },
        "capital": float(capital),
        "start": start,
        **({} if limits is None else {"limits": plain(limits)}),
        # Of costs given to the session; what a run names is checked with the run.
        **({} if own is None else {"cost_code": plain(own)}),
        **agent.identity,
        **more,
    }


def refuse_other_session(journal: Journal, started: Mapping[str, Any]) -> None:
    """Raise ConfigError where a journal is of another session than `started`; name what differs."""
    # Through JSON once, so that both sides have its types.
    mine = json.loads(canonical(started))
    for event in journal.events("run_started"):
        refuse_sleeves(journal.path, event.body)
        there, here = _flat(event.body), _flat(mine)
        names = [n for n in sorted({*there, *here}) if there.get(n) != here.get(n)]
        differs = "; ".join(f"{n} {there.get(n)} there, {here.get(n)} here" for n in names)
        if differs:
            raise ConfigError(
                f"{journal.path}: is the journal of another session ({differs}); name another "
                "journal, or give that session's own options."
            )


def refuse_sleeves(path: Path, started: Mapping[str, Any]) -> None:
    """Raise ConfigError where a journal is of several agents with books of their own."""
    if "sleeves" in started:
        raise ConfigError(
            f"{path}: is a journal of sleeves, which version 0.2.0 trades and this one does not; "
            "begin another with nca.blend."
        )


def _flat(body: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names, so that a message has only those that differ."""
    found: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
