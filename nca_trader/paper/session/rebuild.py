"""The proof of a journal: its session traded again on its own bars, each event compared."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nca_trader.cloud import local
from nca_trader.config import AccountConfig
from nca_trader.config.account import gather_account
from nca_trader.errors import ConfigError, HaltError, StateError
from nca_trader.machine import scratch
from nca_trader.paper.clock import NANOSECONDS
from nca_trader.paper.feeds.feed import ReplayFeed
from nca_trader.paper.journal.bars import INCOME, bar_of, complete
from nca_trader.paper.journal.chain import Head, HeadFile, connect_reader
from nca_trader.paper.journal.journal import Diverged, Journal, read_events, verify
from nca_trader.paper.session.halts import lifts_of
from nca_trader.paper.session.subjects import Subject, refuse_subject, subject_on
from nca_trader.paper.session.trade import open_session
from nca_trader.paper.venues.exchange import Exchange
from nca_trader.types import PRICES, Bars, Costs

# What follows from the bars and the agent alone. The rest depends on when a session was stopped, or
# on what a feed said. Of a live session bars and the venue's answers are taken from the journal.
DECIDED = frozenset({"decision"})
REBUILT = frozenset(
    "run_started bar decision order_intent order_terminal fill cash snapshot".split()
)


class Rebuilt(NamedTuple):
    """The comparison of a journal with its session traded again.

    bars, decisions, events: that agree. difference: the first event that does not, in words.
    """

    bars: int
    decisions: int
    events: int
    difference: str

    @property
    def sentence(self) -> str:
        """The result in words."""
        agree = f"{self.bars} bars, {self.decisions} decisions, {self.events} events agree"
        return agree + (f"; then {self.difference}" if self.difference else ", bit for bit")


class _Proof(Journal):
    """The copy of a journal on which its session is traded again, up to the end of `there`."""

    def __init__(self, path: Path, clock: Any, there: Counter[str]):
        super().__init__(path, clock, batch=True)
        self.there, self.agreed = there, Counter[str]()

    def record(self, run: str, kind: str, key: str, body: Mapping[str, Any], ts_event: int) -> bool:
        if not self.there[kind]:
            return False
        added = super().record(run, kind, key, body, ts_event)
        if self._in_block:  # outside, it calls itself in a transaction
            if added:
                ended = self.agreed == self.there
                more = f"the session has {kind} {key}, the journal has not"
                raise Diverged(self.path, "" if ended else more)
            self.agreed[kind] += 1
        return added


class _Past:
    """The feed and venue of a live session that has ended: neither gives anything."""

    def __init__(self, started: Mapping[str, Any]):
        self.symbols, self.period = tuple(started["symbols"]), started["period"]
        self.name, self._now = started["venue"], started["opened"]

    def now(self) -> int:
        """Return when the session first opened."""
        return self._now


def rebuild(
    path: str | os.PathLike[str],
    run: Any,
    seed: int | None = None,
    force_agent: bool = False,
    *,
    account: AccountConfig | Costs | None = None,
    **settings: Any,
) -> Rebuilt:
    """Trade a journal's own bars again, and compare every event that follows from them.

    Features are computed and decisions made as in a new session; logits and targets must be the
    same to the last bit. Of a replay orders are filled again too, and orders, fills and equity must
    be the same. A halt that a person lifted is lifted after the same bar. Of a live session each
    decision is made on the positions and cash that the journal had at its bar.

    Args:
      path: a journal.
      run: what traded, as in `paper_trade`.
      seed: as it was given to `paper_trade`.
      force_agent: likewise.
      account: likewise.
      **settings: likewise.

    Raises:
      ConfigError: run, costs or rules are not the journal's, by their hashes; names what differs.
      StateError: the journal is damaged, or holds no bar.
    """
    path = local(path, "a journal")
    verify(path)
    refuse_subject(run)
    started = next(read_events(path, "run_started"), None)
    if started is None:
        raise StateError(f"{path}: holds no bar yet; there is nothing to replay.")
    body = started.body
    # They were accepted once, so they are not judged again.
    bars = _bars_of(path, tuple(body["symbols"]))
    given = gather_account(account, settings)

    def feed_of(tied: tuple[str, ...] | None) -> ReplayFeed:
        return ReplayFeed(bars, tied)

    subject, source = subject_on(run, feed_of, body["capital"], given, seed, force_agent)
    compared = DECIDED if "venue" in body else REBUILT
    with scratch() as folder:
        copy = _copied(path, folder / path.name)
        there = Counter(event.kind for event in read_events(copy) if event.kind in compared)
        with contextlib.closing(_Proof(copy, source.now, there)) as journal:
            try:
                difference, repeated = _traded_again(journal, subject, source, body)
            except ConfigError as error:  # names the user's file and not the copy
                raise ConfigError(str(error).replace(str(copy), str(path))) from None
            agreed = journal.agreed
    lacks = there - agreed
    if not difference and lacks:
        kinds = ", ".join(f"{number} of kind {kind}" for kind, number in sorted(lacks.items()))
        difference = f"the journal has events that do not follow: {kinds}"
    return Rebuilt(agreed["bar"] or repeated, agreed["decision"], agreed.total(), difference)


def _traded_again(
    journal: _Proof, subject: Subject, source: ReplayFeed, started: Mapping[str, Any]
) -> tuple[str, int]:
    """Trade again on a copy of a journal; return the first difference, "" for none, and bars."""
    agent, capital, start = subject.agent, started["capital"], started["start"]
    # What a person let go on goes on here too, after the same bar.
    lifts = lifts_of(journal.events())
    live = "venue" in started
    past: Any = _Past(started) if live else source
    venue: Any = past
    if not live:
        venue = Exchange(None, capital, agent.symbols, agent.rules)
    session = open_session(agent, past, venue, journal, capital, start, lifts=lifts)
    difference = ""
    try:
        if live:
            session.repeat()
        else:
            with contextlib.suppress(HaltError):  # where the journal's session halted too
                session.trade()
    except Diverged as diverged:
        difference = diverged.difference
    return difference, session.counts["bars"]


def _copied(path: Path, copy: Path) -> Path:
    """Copy a journal, which a session may be writing; return the copy."""
    with (
        contextlib.closing(connect_reader(path)) as there,
        contextlib.closing(sqlite3.connect(copy)) as here,
    ):
        there.backup(here)
        seq, link = here.execute("SELECT seq, hash FROM event ORDER BY seq DESC").fetchone()
    head, file = Head(seq, link.hex()), HeadFile(copy)
    file.begin(copy, head)
    file.close()
    return copy


def _bars_of(path: Path, symbols: tuple[str, ...]) -> Bars:
    """Return the bars that a journal holds."""
    bars, close = [], np.full(len(symbols), np.nan)
    for event in read_events(path, "bar"):
        bar = complete(bar_of(event.body, symbols, event.ts_event // NANOSECONDS), close)
        bars.append(bar)
        close = bar.close
    none = np.full(len(symbols), np.nan)
    # A journal may hold bars with spreads, dividends or funding, and bars without.
    fields: dict[str, Any] = {
        name: np.stack([none if (x := getattr(bar, name)) is None else x for bar in bars])
        for name in (*PRICES, "volume", *INCOME)
    }
    known = {name: x for name, x in fields.items() if name not in INCOME or np.isfinite(x).any()}
    own = {
        name: [(bar.columns or {}).get(name, none) for bar in bars]
        for name in bars[-1].columns or ()
    }
    return Bars(
        time=np.array([bar.time[0] for bar in bars], "datetime64[s]").astype("datetime64[ns]"),
        symbols=symbols,
        present=np.stack([bar.present for bar in bars]),
        source=str(path),
        columns={name: np.stack(x) for name, x in own.items()},
        **known,
    )
