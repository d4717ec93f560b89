"""A paper session: bars in, orders out, every step in the journal before it takes effect.

A session that resumes on its journal processes the same bars again. Every event that the journal
holds must repeat exactly and is not written twice; then the session goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nca_trader.agents.strategy import Strategy
from nca_trader.agents.targets import refuse_no_targets
from nca_trader.cloud import CloudPath
from nca_trader.config.env import SIZES, capital_problems
from nca_trader.config.fingerprint import codes_of
from nca_trader.config.ranges import expect, moment
from nca_trader.config.reading import replayed
from nca_trader.config.records import plain
from nca_trader.envs.account.state import Quote, Rules, rules_of, with_limits
from nca_trader.errors import BarError, ConfigError, HaltError, argument
from nca_trader.paper.agents import function_agent, run_agent, strategy_agent
from nca_trader.paper.broker import Broker, Fill, SimulatedBroker
from nca_trader.paper.core import Agent, Core, Decision, Outcome
from nca_trader.paper.drift import DriftWatch
from nca_trader.paper.feed import NANOSECONDS, Feed, LiveFeed, ReplayFeed, parse_feed
from nca_trader.paper.gate import Gate, Passed, Refusal
from nca_trader.paper.journal import Journal, canonical
from nca_trader.paper.risk import KillSwitch, after_resume, broken, refuse_halted, remedy, said
from nca_trader.progress import Progress
from nca_trader.runs.exported import read_run
from nca_trader.runs.manifest import Run, seen_rows
from nca_trader.runs.universe import run_on, trades_others, trained_symbols
from nca_trader.types import PRICES, Bar, Bars, Costs

TOLERANCE = 1e-9  # relative, between the account and the broker
DEFAULT_CAPITAL = 100_000.0  # money
MAX_IN_A_ROW = 3  # bad bars, or failures of the policy, before trading halts

# Rules that earlier journals do not name. Where one is off it is left out of a session's identity,
# which stays that of those journals.
LATER = (*SIZES, "sizing", "dead_band")


class Halt(NamedTuple):
    """Why trading must stop. code: stable. detail: numbers."""

    code: str
    detail: dict[str, Any]


class Session:
    """Trades one agent with one broker, and keeps one journal.

    Args:
      agent: what trades.
      broker: it starts with `capital` in cash and no positions; None where a venue keeps the books.
      journal: an open one.
      capital: money at the start.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
      live: what else makes a live session this one.

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
    ):
        self._agent, self._journal = agent, journal
        self._broker: Any = broker  # a live session has a venue instead
        self._capital = capital
        limits = agent.rules.risk
        own = codes_of(dict.fromkeys(agent.costs.own or (), "costs"))
        # All that makes a session this one and no other: a journal belongs to one session.
        self._started = {
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
            **(live or {}),
        }
        self.run = hashlib.sha256(canonical(self._started).encode()).hexdigest()[:16]
        for event in journal.events("run_started"):
            there, here = (_flat(x) for x in (event.body, json.loads(canonical(self._started))))
            names = [n for n in sorted({*there, *here}) if there.get(n) != here.get(n)]
            differs = "; ".join(f"{n} {there.get(n)} there, {here.get(n)} here" for n in names)
            if differs:
                raise ConfigError(
                    f"{journal.path}: is the journal of another session ({differs}); name another "
                    "journal, or give that session's own options."
                )
        refuse_halted(journal)
        # A session that resumes comes to these again, and goes on.
        self._lifted = {event.key for event in journal.events("halt")}
        self.switch = KillSwitch(journal.path)
        self._core = Core(agent, self.run, start)
        self._state = self._core.begin()
        self._refuse()
        self._gate = Gate(agent.symbols)
        self._drift = DriftWatch(agent.usual, agent.features, agent.costs, agent.rules)
        self._failures = 0
        self._counts = {"bars": 0, "rejected": 0, "decisions": 0, "orders": 0, "fills": 0}

    def trade(self, feed: Feed, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Process every bar of `feed`, or until `stop()` after one; return `result()`.

        Raises:
          HaltError: account and broker disagree, the account is bankrupt, or several bars or
            decisions in a row are unusable.
          StateError: the journal cannot be written, or says that something else happened.
        """
        for bar in feed:
            self.on_bar(bar)
            if stop():
                break
        if self._state.last is not None:
            ts = self._state.last * NANOSECONDS
            self._record("run_ended", str(self._state.last), dict(self._counts), ts)
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
        found, worth = [], self._value()
        for fill in fills:
            if fill.client_id.startswith("nca-"):  # not of a margin call or a delisting
                asset = self._agent.symbols.index(fill.symbol)
                quoted = quote._replace(price=price)
                found += self._drift.filled(asset, fill.units, fill.price, quoted, worth)
        if decision is not None and present is not None:
            found += self._drift.decided(decision.features, present)
            traded = sum(abs(fill.units * fill.price) for fill in fills)
            found += self._drift.turned(traded / self._value() if traded else 0.0)
        self._record_risks(found, ts)

    def _record_risks(self, found: Sequence[dict[str, Any]], ts: int) -> None:
        """Record what the gate, the limits or the drift watch say of a bar, one event each."""
        for body in found:
            key = ":".join([str(ts // NANOSECONDS), body["code"], body.get("feature", "")])
            self._record("risk", key.rstrip(":"), body, ts)

    def _limited(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Return what the limits made of a decision."""
        if outcome.decision is None or self._state.account is None:
            return []
        return said(self._state.account, outcome.decision.target, self._agent.symbols)

    def _record(self, kind: str, key: str, body: dict[str, Any], ts: int) -> None:
        self._journal.record(self.run, kind, key, body, ts)

    def _record_bar(self, bar: Bar, fills: Sequence[Fill], outcome: Outcome, ts: int) -> None:
        """Record all that is known at the bar's close, before anything is sent."""
        key = str(ts // NANOSECONDS)
        if self._counts["bars"] == 0:
            self._record("run_started", "", self._started, ts)
        self._counts["bars"] += 1
        self._record("bar", key, bar_body(bar, self._agent.symbols), ts)
        self._record_fills(fills, ts)
        decision = outcome.decision
        if decision is None:
            return
        self._counts["decisions"] += 1
        body = {name: in_json(value) for name, value in decision.body.items()}
        self._record("decision", key, body, ts)
        self._record_risks(self._limited(outcome), ts)
        for name, reason in outcome.closed:
            self._record("order_terminal", name, {"reason": reason}, ts)
        for order in outcome.sent:
            self._counts["orders"] += 1
            self._record("order_intent", order.client_id, order._asdict(), ts)

    def _record_fills(self, fills: Sequence[Fill], ts: int) -> None:
        for fill in fills:
            self._counts["fills"] += 1
            self._record("fill", fill.execution_id, fill._asdict(), ts)

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
            **self._parts(),
        }
        self._record("snapshot", key, body, ts)
        halt, loss = None, None
        if account.ruined:  # the broker's positions go on below the floor: nothing to compare
            halt = Halt("ruined", {"equity": equity, "broker": value})
        else:
            expected = self._capital * equity
            # Both are compared: equity alone would not show a position in the wrong asset.
            weights = np.where(units == 0.0, 0.0, units * self._state.close) / value
            off = max(abs(value - expected) / expected, float(np.abs(weights - held).max()))
            self._failures = 0 if decision.usable else self._failures + 1
            if not off <= TOLERANCE:  # so that NaN is a disagreement
                detail = {"broker": value, "account": expected}
                halt = Halt("books-differ", detail | {"weights": [in_json(weights), in_json(held)]})
            elif not decision.usable:
                self._record("risk", key, {"code": "policy-not-finite"}, ts)
                if self._failures >= MAX_IN_A_ROW:
                    halt = Halt("policy-not-finite", {"in_a_row": self._failures})
            if halt is None and (loss := broken(account)) is not None:
                halt = Halt(*loss)
        if halt is not None:
            if loss is None:  # what a limit says is in the journal
                kind = "recon" if halt.code == "books-differ" else "risk"
                self._record(kind, f"{key}:{halt.code}", halt._asdict(), ts)
            self._record("halt", f"{key}:{halt.code}", halt._asdict(), ts)
        return halt

    def _parts(self) -> dict[str, Any]:
        """Return what a snapshot says of the account's sleeves, if it has any."""
        return {}

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
            if self._gate.in_a_row >= MAX_IN_A_ROW:
                halt = Halt("bad-bars", {"in_a_row": self._gate.in_a_row, "last": refusal.code})
                self._record("halt", key, halt._asdict(), ts)
        if halt is not None:
            self._stop_or_go_on(halt, key)

    def _stop_or_go_on(self, halt: Halt, key: str) -> None:
        """Stop at a halt, or go on where it was lifted after an earlier session stopped at it."""
        if key not in self._lifted:
            self._journal.commit()  # a deferred halt could be lost, and trading would resume
            raise self._halt_error(halt)
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
        return float(cash + np.where(units == 0.0, 0.0, units * self._state.close).sum())

    def _halt_error(self, halt: Halt) -> HaltError:
        last = self._state.last
        when = "before the first bar" if last is None else f"at {np.datetime64(last, 's')}"
        detail = ", ".join(f"{name} {value}" for name, value in halt.detail.items())
        return HaltError(
            f"{self._journal.path}: halted {when}, {halt.code} ({detail}); the last events of "
            f"the journal show why. Correct the cause, then {remedy(self._journal.path)}."
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


def _equity(account: Any) -> float:
    """Return equity as a fraction of the start's, by the formula of a backtest."""
    return float(np.exp(account.log_equity + account.log_equity_low))


def in_json(value: Any) -> Any:
    """Return numpy values in JSON's types; numbers that are not finite become None."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f" or np.isfinite(value).all():
            return value.tolist()
        value = value.tolist()
    if isinstance(value, list):
        return [in_json(item) for item in value]
    if isinstance(value, dict):
        return {name: in_json(item) for name, item in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


def bar_body(bar: Bar, symbols: tuple[str, ...]) -> dict[str, Any]:
    """Return open, high, low, close, volume by symbol; None for an asset that has no bar.

    Where the feed has half-spreads, dividends or funding, the three follow; None if it lacks one.
    """
    more = (bar.half_spread, bar.dividend, bar.funding)
    rows = [*(getattr(bar, name) for name in PRICES), bar.volume]
    rows += [] if all(x is None for x in more) else [np.nan if x is None else x for x in more]
    fields = np.empty((len(symbols), len(rows)))
    for column, row in enumerate(rows):
        fields[:, column] = row
    each = zip(symbols, in_json(fields), bar.present, strict=True)
    return {symbol: row if there else None for symbol, row, there in each}


def _recent(live: LiveFeed, symbols: tuple[str, ...] | None) -> ReplayFeed:
    """Return the newest bars of a live feed, to make an agent for them.

    Raises:
      ConfigError: the agent trades other symbols only.
    """
    if symbols is not None and live.symbols != symbols:
        raise ConfigError(
            f"the feed has {', '.join(live.symbols)} and this agent trades {', '.join(symbols)} "
            "alone; give a feed of these, in this order."
        )
    return ReplayFeed(live.history(2))


class Terms(NamedTuple):
    """What an account is given; None are the run's own. As in `paper_trade`."""

    costs: Costs | None
    fill: str | None
    limits: Mapping[str, Any]
    order: str | None = None


def is_own(run: Any) -> bool:
    """Whether `run` is a strategy or a function of bars, and not the path of a run."""
    return isinstance(run, Strategy | functools.partial) or inspect.isroutine(run)


def refuse_subject(run: Any, name: str = "run") -> None:
    """Raise ConfigError where `run` is nothing that can trade."""
    if not is_own(run):
        accepted = "a path, a Strategy or a function of bars"
        expect(name, run, str | os.PathLike | CloudPath, accepted)


def opened(run: Any, seed: int | None, force_agent: bool) -> Run | None:
    """Return the run at a path; None for a strategy or a function of bars."""
    return None if is_own(run) else read_run(run, seed=seed, force_agent=force_agent)


def symbols_of(run: Run | None) -> tuple[str, ...] | None:
    """Return the symbols that a run is tied to; None where it trades any."""
    return None if run is None or trades_others(run) else run.spec.symbols


def agent_of(run: Any, opened_run: Run | None, bars: Bars, capital: float, terms: Terms) -> Agent:
    """Return the agent of what trades, for the symbols of `bars`.

    Raises:
      ConfigError: terms that are not valid; a strategy that raises or has stops.
    """
    limits, order = terms.limits, terms.order
    base = Rules() if opened_run is None else rules_of(opened_run.env_config)
    costs = terms.costs or (Costs() if opened_run is None else opened_run.env_config.costs)
    known = {name: limit for name, limit in limits.items() if name in Rules._fields}
    if "capital" not in known and any(capital_problems(base._replace(**known), costs)):
        limits = {**limits, "capital": float(capital)}  # lots and fees are amounts of money
    if opened_run is None:
        refuse_no_targets(run)
        order = order or (run.order if isinstance(run, Strategy) else "rebalance")
    rules = with_limits(base, terms.fill, order, costs, dict(limits))
    if opened_run is not None and opened_run.replacement is None:
        agent = run_agent(run_on(opened_run, bars), costs, rules)
    else:
        rule: Any = run if opened_run is None else opened_run.replacement
        make: Any = strategy_agent if isinstance(rule, Strategy) else function_agent
        agent = make(rule, bars, costs, rules)
    if agent.rules.capital is not None:  # lots and fees are those of the money that is traded
        agent = agent._replace(rules=agent.rules._replace(capital=float(capital)))
    return agent


def paper_trade(
    run: Any,
    feed: str,
    journal: str | os.PathLike[str],
    broker: str = "simulated",
    start: str | None = None,
    capital: float = DEFAULT_CAPITAL,
    stop: Callable[[], bool] = lambda: False,
    reading: Mapping[str, Any] | None = None,
    seed: int | None = None,
    force_agent: bool = False,
    costs: Costs | None = None,
    fill: str | None = None,
    order: str | None = None,
    warmup: int | None = None,
    **limits: Any,
) -> dict[str, Any]:
    """Paper-trade a run or a strategy; bad input is refused before anything is written.

    Args:
      run: a run folder, an exported file, a `Strategy` without stops and targets, or a function of
        bars. The function is called on all bars so far at each decision. Or a list of `Sleeve`s
        that share the account; `limits` are then the account's, on the sum of them.
      feed: `replay:FILE`, or a live feed: `alpaca:SYM,..`, `ccxt:EXCHANGE:SYM`, or `module:name`, a
        callable of yours that returns one; see the guide on paper trading. Every symbol of it is
        traded, but for a run whose policy is tied to the symbols that trained it: these are
        selected.
      journal: SQLite file, made if it does not exist.
      broker: "simulated"; with a live feed it is a process of its own, with its books next to the
        journal. Or "alpaca", "ccxt:binance", or `module:name` of a venue of yours.
      start: date before which nothing is decided; None is as early as can be.
      capital: money at the start.
      stop: called after each bar; True ends the session there, and a later call resumes it.
      reading: options of `read_bars` for the feed's file.
      seed: number of the run's agent that trades; None is the mean of all.
      force_agent: whether the run's agent trades also where its deployment.json names a baseline.
      costs: of trading and holding; None are the run's, and nothing for a strategy.
      fill: as in `nca_trader.backtest`.
      order: as in `nca_trader.backtest`.
      warmup: least number of bars of a live feed's history to begin with; None is 500.
      **limits: as in `nca_trader.backtest`.

    Returns:
      `Session.result()`, and more keys. `in_sample`: the number of bars traded so far up to the
      last that trained or selected the agent. `durability`: what a commit survives. `seed`: of the
      agent. `agent`: the agent and the others of its run, in words. Of a run also `symbols` and
      `trained_symbols`.

    Raises:
      ConfigError: an argument that is not valid; a strategy that raises, has stops or looks ahead.
      BarError: the feed's file cannot be read, or is too short.
      HaltError: see `Session.trade`.
      StateError: the journal is damaged, or says that something else happened.

    Example:
      >>> import pathlib, tempfile
      >>> import nca_trader as nca
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> nca.write_bars(nca.sample_bars("sp500")[:300], folder / "bars.csv")
      >>> rule, feed = nca.rules.sma_cross(5, 20), f"replay:{folder}/bars.csv"
      >>> nca.paper_trade(rule, feed, folder / "paper.db")["fills"] > 5
      True
    """
    sleeves = isinstance(run, list | tuple)
    subject: Any = run  # the type checker takes it for the union of these
    if sleeves:
        from nca_trader.paper.sleeves import check_sleeves

        if seed is not None or order is not None:
            raise ConfigError("sleeves: each has its own seed and order; give them there.")
        check_sleeves(run)
    else:
        refuse_subject(run)
    expect("journal", journal, str | os.PathLike | CloudPath, "a path")
    expect("capital", capital, Real, "a sum of money")
    live = None
    if replayed(feed, broker) is None:
        from nca_trader.paper.sources import open_feed  # it imports the adapters of venues

        live = open_feed(feed, (reading or {}).get("every"))
    # Rounded up: bars are compared in whole seconds, and none that opens before `start` counts.
    first = None if start is None else int(np.ceil(moment(start, "start").timestamp()))
    account = Terms(costs, fill, limits)
    members: Any = None
    if sleeves:
        from nca_trader.paper.sleeved import members_on

        source = _recent(live, None) if live else parse_feed(feed, None, reading)
        members, agent, seen_of = members_on(run, source.bars, capital, account, force_agent)
        opened_run = None
    else:
        opened_run = opened(subject, seed, force_agent)
        # As a backtest of the same file: every symbol of it, where the policy can trade others.
        tied = symbols_of(opened_run)
        source = _recent(live, tied) if live else parse_feed(feed, tied, reading)
        agent = agent_of(subject, opened_run, source.bars, capital, account._replace(order=order))
        seen_of = [] if opened_run is None else [opened_run]
    if live:
        from nca_trader.paper.live import trade_live

        how = (capital, first, warmup, stop, members)
        result = trade_live(agent, live, broker, Path(journal), *how)
        named = {"in_sample": 0, "seed": None, "agent": ""}
        if opened_run is not None:
            named |= {"seed": opened_run.selected, "agent": opened_run.described}
        return result | named
    if len(source) <= agent.first_decision:
        raise BarError(
            f"{source.source}: {len(source)} bars, and the agent's first decision needs "
            f"{agent.first_decision + 1} (warm-up and receptive field); give a longer file."
        )
    if first is not None and first > source.last:
        raise BarError(
            f"{source.source}: ends at {np.datetime64(source.last, 's')}, before "
            f"{argument('start', start)}; give a later file or an earlier start."
        )
    simulated: Any = SimulatedBroker
    session_of: Any = Session
    if members:
        from nca_trader.paper.sleeve_books import Pool
        from nca_trader.paper.sleeved import SleevedSession

        simulated, session_of = functools.partial(Pool, members=members), SleevedSession
    books = simulated(capital, agent.costs, agent.symbols, agent.rules)
    # By the feed's clock, so that two replays of one file write the same chain. In batches where no
    # order leaves the process: what a kill takes back, the next session repeats.
    kept = Journal(Path(journal), clock=source.now, batch=not books.remembers)
    with contextlib.closing(kept) as opened_journal:
        session = session_of(agent, books, opened_journal, capital, first)
        with session.switch.listening():
            with Progress(len(source), "paper", "bars") as shown:

                def asked() -> bool:
                    shown.update()  # called after each bar
                    return stop()

                result = session.trade(source, asked)
        result["durability"] = opened_journal.durability
    if not seen_of:
        return result | {"in_sample": 0, "seed": None, "agent": ""}
    times = source.bars.time.astype("datetime64[s]").astype(np.int64)
    begun = agent.first_decision if first is None else int(np.searchsorted(times, first))
    begun = max(begun, agent.first_decision)
    seen = max(seen_rows(source.bars, each) for each in seen_of)
    in_sample = min(max(min(seen, result["bars"]) - begun, 0), result["decisions"])
    result |= {"in_sample": in_sample, "seed": None, "agent": ""}
    if opened_run is None:
        return result
    named = {"seed": opened_run.selected, "agent": opened_run.described}
    named |= {"symbols": list(agent.symbols), "trained_symbols": trained_symbols(opened_run)}
    if opened_run.replacement is not None and opened_run.deployment is not None:
        named["agent"] = opened_run.deployment.sentence
    return result | named
