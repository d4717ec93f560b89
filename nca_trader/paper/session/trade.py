"""Runs a paper session: opens what trades, the feed, the books and the journal."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from nca_trader.agents.base import history_of
from nca_trader.cloud import CloudPath
from nca_trader.config import AccountConfig
from nca_trader.config.account import gather_account
from nca_trader.config.extensions import call_named, load
from nca_trader.config.ranges import expect, moment
from nca_trader.config.reading import parse_step, replayed_file, source_of
from nca_trader.data.bars import read_bars
from nca_trader.data.features import refuse_absent
from nca_trader.data.time_frames import refuse_other_length
from nca_trader.errors import BarError, ConfigError, argument
from nca_trader.paper.clock import PATIENCE, Clock, Patience
from nca_trader.paper.feeds.feed import LiveFeed, ReplayFeed
from nca_trader.paper.feeds.fetch import open_vendor, symbols_of
from nca_trader.paper.journal.journal import Journal, canonical
from nca_trader.paper.session.account import Live, Replay
from nca_trader.paper.session.core import Agent, Core
from nca_trader.paper.session.halts import KillSwitch, Lifts, lifts_of, refuse_halted
from nca_trader.paper.session.loop import Session
from nca_trader.paper.session.subjects import (
    refuse_other_session,
    refuse_subject,
    started_body,
    subject_on,
)
from nca_trader.paper.venue import Venue
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.runs.manifest import seen_rows
from nca_trader.types import Costs

DEFAULT_CAPITAL = 100_000.0  # money
WARMUP = 500  # bars of history for a strategy, which does not say how many it needs


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


def paper_trade(
    run: Any,
    feed: str,
    journal: str | os.PathLike[str],
    broker: str = "simulated",
    start: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    reading: Mapping[str, Any] | None = None,
    seed: int | None = None,
    force_agent: bool = False,
    warmup: int | None = None,
    allow_code: bool = False,
    *,
    account: AccountConfig | Costs | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Paper-trade a run or a strategy; bad input is refused before anything is written.

    Args:
      run: a run folder, an exported file, a `Strategy` without stops and targets, or a function of
        bars. The function is called on all bars so far at each decision.
      feed: `replay:FILE`, or a live feed: `alpaca:SYM,..`, `ccxt:EXCHANGE:SYM`, or `module:name`, a
        callable of yours that returns one; see the guide on paper trading. Every symbol of it is
        traded, but for a run whose policy is tied to the symbols that trained it: these are
        selected.
      journal: SQLite file, made if it does not exist.
      broker: "simulated"; with a live feed its books are a file next to the journal. Or "alpaca",
        or `module:name` of a venue of yours.
      start: date before which nothing is decided; None is as early as can be.
      stop: called after each bar; True ends the session there, and a later call resumes it.
      reading: options of `read_bars` for the feed's file.
      seed: number of the run's agent that trades; None is the mean of all.
      force_agent: whether the run's agent trades also where its deployment.json names a baseline.
      warmup: least number of bars of a live feed's history to begin with; None is 500.
      allow_code: whether own code that the run names may load, see `Run`.
      account: all that the account is given in one record, or only its costs. Costs that are not
        given are the run's, and nothing for a strategy.
      **settings: other fields of `nca.AccountConfig` by name, in the place of the record, as in
        `nca.backtest`; `capital`, money at the start, is 100,000 where it is not given. There is
        no `delay`, as a venue has its own.

    Returns:
      `Session.result()`, and more keys. `in_sample`: the number of bars traded so far up to the
      last that trained or selected the agent. `durability`: what a commit survives. `seed`: of the
      agent. `agent`: the agent and the others of its run, in words. Of a run also `symbols` and
      `trained_symbols`.

    Raises:
      ConfigError: an argument that is not valid; a strategy that raises, has stops or looks ahead;
        of a live feed, a run whose base states no memory.
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
    refuse_subject(run)
    given = gather_account(account, settings)
    # Apart from the account: lots and fees alone need it there, and a session always has one.
    capital = given.capital if given.capital is not None else DEFAULT_CAPITAL
    given = dataclasses.replace(given, capital=None)
    expect("journal", journal, str | os.PathLike | CloudPath, "a path")
    expect("capital", capital, Real, "a sum of money")
    file, live = replayed_file(feed, broker), None
    if file is None:
        live = open_feed(feed, (reading or {}).get("every"))
    # Rounded up: bars are compared in whole seconds, and none that opens before `start` counts.
    first = None if start is None else int(np.ceil(moment(start, "start").timestamp()))

    def feed_of(tied: tuple[str, ...] | None) -> ReplayFeed:
        if live is not None:
            return _recent(live, tied)
        return ReplayFeed(read_bars(str(file), **(reading or {})), tied)

    subject, source = subject_on(run, feed_of, capital, given, seed, force_agent, allow_code)
    agent, one = subject.agent, subject.run
    for each in subject.runs:
        if live and each.replacement in (None, each.base):
            history_of(each.spec.base)  # refuses a base whose memory has no end
        if live and each.spec.bar_seconds not in (0, live.period):
            raise ConfigError(
                f"the feed has bars of {live.period} s, and {each.name} sees slower time frames of "
                f"bars of {each.spec.bar_seconds} s; give a feed of these."
            )
        refuse_other_length(source.bars, each.spec.bar_seconds)
    there = {*source.bars.columns, *getattr(live, "columns", ())}
    refuse_absent(agent.features, sorted(there), f"{argument('feed', feed)} has")
    # Refused before a journal exists, which would be another session's by the next call.
    if not live and len(source) <= agent.first_decision:
        raise BarError(
            f"{source.source}: {len(source)} bars, and the agent's first decision needs "
            f"{agent.first_decision + 1} (warm-up and receptive field); give a longer file."
        )
    if not live and first is not None and first > source.last:
        raise BarError(
            f"{source.source}: ends at {np.datetime64(source.last, 's')}, before "
            f"{argument('start', start)}; give a later file or an earlier start."
        )
    traded = live or source
    # By the feed's clock, so that two replays of one file write the same chain. In batches where no
    # order leaves the process: what a kill takes back, the next session repeats.
    with contextlib.closing(Journal(Path(journal), traded.now, batch=not live)) as kept:
        if live:
            # An exchange whose books hold orders cannot belong to an empty journal.
            fresh = kept.head.seq == 0
            venue = open_venue(broker, live, kept.path, fresh, capital, agent.rules)
        else:
            venue = Exchange(None, capital, agent.symbols, agent.rules)
        with contextlib.closing(venue):
            session = open_session(agent, traded, venue, kept, capital, first, warmup)
            with session.switch.listening():
                result = session.trade(stop)
            result |= {"durability": kept.durability, "in_sample": 0, "seed": None, "agent": ""}
    if one is not None:
        result |= {"seed": one.selected, "agent": one.described}
    if live or not subject.runs:
        return result
    begun = 0 if first is None else int(np.searchsorted(source.bars.seconds, first))
    begun = max(begun, agent.first_decision)
    # Of a blend's runs the one that saw most.
    seen = max(seen_rows(source.bars, each) for each in subject.runs)
    result["in_sample"] = min(max(min(seen, result["bars"]) - begun, 0), result["decisions"])
    if one is not None:
        result |= {"symbols": list(agent.symbols), "trained_symbols": one.trained_symbols}
        if one.replacement is not None and one.deployment is not None:
            result["agent"] = one.deployment.sentence
    return result


def open_session(
    agent: Agent,
    feed: ReplayFeed | LiveFeed,
    venue: Any,
    journal: Journal,
    capital: float,
    start: int | None = None,
    warmup: int | None = None,
    patience: Patience = PATIENCE,
    clock: Clock | None = None,
    lifts: Lifts | None = None,
) -> Session:
    """Return the session of one account at one venue, which keeps one journal.

    Args:
      agent: what trades.
      feed: of the agent's symbols: bars of a file, or a live feed.
      venue: the account; of a replay the simulated exchange, in memory.
      journal: an open one.
      capital: money at the start, of a simulated venue; others have their own.
      start: seconds since 1970 UTC before which nothing is decided; None is as early as can be.
      warmup: least number of bars of a live feed's history to begin with; None is 500.
      patience: how long it waits for answers, and how old a decision may be.
      clock: for waits.
      lifts: halts that people lifted; None are those in the journal, which must not end halted.

    Raises:
      ConfigError: the journal is another session's; names what differs.
      HaltError: the journal says that trading was halted.
    """
    names = {}
    if not isinstance(feed, ReplayFeed):
        # Two sessions of one agent must not share client ids: the time of the first start is part
        # of the hash that they carry.
        known = next((e.body.get("opened") for e in journal.events("run_started")), None)
        opened = feed.now() if known is None else known
        names = {"venue": venue.name, "period": feed.period, "opened": opened}
    # All that makes a session this one and no other: a journal belongs to one session.
    started = started_body(agent, capital, start, names)
    run = hashlib.sha256(canonical(started).encode()).hexdigest()[:16]
    refuse_other_session(journal, started)
    if lifts is None:
        refuse_halted(journal)
        # A replay that resumes comes to these again, and goes on.
        stops = [*journal.events("halt"), *journal.events("resume")]
        lifts = lifts_of(sorted(stops, key=lambda event: event.seq))
    core, switch = Core(agent, run, start), KillSwitch(journal.path)
    if isinstance(feed, ReplayFeed):
        account = Replay(core, feed, venue, journal, capital)
    else:
        least = WARMUP if warmup is None else warmup
        account = Live(core, feed, venue, journal, switch, least, patience, clock or Clock())
    return Session(core, account, journal, started, switch, lifts)


def open_feed(text: str, every: str | None) -> LiveFeed:
    """Return the live feed that `--feed` names.

    Args:
      text: "alpaca:SYM,..", "ccxt:EXCHANGE:SYM" or "module:name", a callable that returns a feed.
      every: length of a bar; your own feed knows its own.

    Raises:
      ConfigError: it cannot be opened.
    """
    kind, rest = source_of(text, "feed")
    if kind == "module":
        return _made(text, "feed", ("symbols", "period", "history", "now", "close"))
    if every is None or parse_step(every) is None:
        raise ConfigError(f"{argument('every')} is missing; give the length of a bar, e.g. 1min.")
    exchange, _, symbols = rest.partition(":") if kind == "ccxt" else ("", "", rest)
    return open_vendor(
        f"{kind}:{exchange}".rstrip(":"), symbols_of(symbols, argument("feed")), every
    )


def open_venue(
    text: str,
    feed: LiveFeed,
    journal: Path,
    fresh: bool,
    capital: float,
    rules: AccountConfig,
) -> Venue:
    """Return the venue that `--broker` names.

    Args:
      text: "simulated", "alpaca", or "module:name", a callable that returns a venue.
      feed: whose symbols it must trade.
      journal: next to which a simulated exchange keeps its books.
      fresh: whether the journal is new.
      capital: of a simulated exchange.
      rules: likewise.

    Raises:
      ConfigError: it cannot be opened.
    """
    kind, _ = source_of(text, "broker")
    if kind == "simulated":
        books = Path(f"{journal}.books")
        exchange = Exchange(books, capital, feed.symbols, rules)
        if fresh and exchange.used:
            exchange.close()
            raise ConfigError(
                f"{books}: holds orders of an earlier session whose journal is gone; remove it, or "
                "name another journal."
            )
        return exchange
    if kind == "module":
        methods = ("submit", "cancel", "look_up", "working", "activity", "holdings", "now")
        return _made(text, "broker", ("name", "instrument", *methods, "close"))
    from nca_trader.paper.venues import alpaca  # imports alpaca-py, an extra

    return alpaca.open_venue(feed.symbols)


def _made(text: str, what: str, needed: tuple[str, ...]) -> Any:
    """Return what the user's callable returns, if it has every name that the seam needs."""
    where = argument(what, text)
    try:
        found = load(f"{what}s", text)
        # With arguments in the text it has been called by `load`.
        if not text.endswith(")"):
            found = call_named(found, text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    # By names and no types: a user's class need not inherit from ours.
    missing = [name for name in needed if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"{where}: what it returns has no {', '.join(missing)}; see its guide.")
    return found
