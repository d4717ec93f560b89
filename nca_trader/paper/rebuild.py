"""A journal traded again from its own bars, and compared with itself event by event."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nca_trader.cloud import local
from nca_trader.config.records import difference
from nca_trader.errors import ConfigError, HaltError, StateError
from nca_trader.machine import scratch
from nca_trader.paper.feed import ReplayFeed
from nca_trader.paper.journal import Event, canonical, read_events, verify
from nca_trader.paper.loop import refuse_sleeves
from nca_trader.paper.risk import lifts_of
from nca_trader.paper.session import trade_replay
from nca_trader.paper.subjects import Terms, refuse_subject, subject_on
from nca_trader.types import PRICES, Bars, Costs

# What follows from the bars and the agent alone. The rest depends on when a session was stopped, or
# on what a venue or a feed said.
REBUILT = frozenset(
    "run_started bar decision order_intent order_terminal fill cash snapshot".split()
)
EXTRAS = ("half_spread", "dividend", "funding")  # of a bar's row, after its volume


class Rebuilt(NamedTuple):
    """The comparison of a journal with one rebuilt from its bars.

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


def rebuild(
    path: str | os.PathLike[str],
    run: Any,
    seed: int | None = None,
    force_agent: bool = False,
    costs: Costs | None = None,
    fill: str | None = None,
    order: str | None = None,
    **limits: Any,
) -> Rebuilt:
    """Trade a journal's own bars again, and compare every event that follows from them.

    Features are computed, decisions made and orders filled as in a new session; logits, targets,
    orders, fills and equity must be the same to the last bit. A halt that a person lifted is lifted
    after the same bar. Capital and start are the journal's.

    Args:
      path: a journal of the simulated broker.
      run: what traded, as in `paper_trade`.
      seed: as it was given to `paper_trade`.
      force_agent: likewise.
      costs: likewise.
      fill: likewise.
      order: likewise.
      **limits: likewise.

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
    refuse_sleeves(path, started.body)
    capital, start = started.body["capital"], started.body["start"]
    # They were accepted once, so they are not judged again.
    bars, terms = _bars_of(path, started.body["symbols"]), Terms(costs, fill, limits, order)

    def feed_of(tied: tuple[str, ...] | None) -> ReplayFeed:
        return ReplayFeed(bars if tied is None else bars.select(*tied))

    subject, source = subject_on(run, feed_of, capital, terms, seed, force_agent)
    # What a person let go on goes on here too, after the same bar.
    lifts = lifts_of(read_events(path))
    with scratch() as folder:
        again = folder / "paper.db"
        with contextlib.suppress(HaltError):  # where the journal's session halted too
            trade_replay(subject, source, again, capital, start, lifts=lifts)
        return _compared(_repeatable(path), _repeatable(again), path)


def _repeatable(path: Path) -> Iterator[Event]:
    return (event for event in read_events(path) if event.kind in REBUILT)


def _compared(there: Iterator[Event], here: Iterator[Event], path: Path) -> Rebuilt:
    counts: dict[str, int] = {"bar": 0, "decision": 0}
    for number, event in enumerate(there):
        found = next(here, None)
        what = f"seq {event.seq}, {event.kind} {event.key}"
        differs = ""
        if found is None or (found.kind, found.key) != (event.kind, event.key):
            instead = "nothing" if found is None else f"{found.kind} {found.key}"
            differs = f"{what}: the replay has {instead} there"
        elif canonical(found.body) != canonical(event.body) or found.ts_event != event.ts_event:
            # Equal to Python and not in text: a zero has lost its sign.
            place, left, right = difference(event.body, found.body) or ("", "0.0", "-0.0")
            if event.kind == "run_started":
                raise ConfigError(
                    f"{path}: is a session of another agent or account ({place} {left} there, "
                    f"{right} here); give the run and the options that wrote it."
                )
            differs = f"{what}: {place or 'its time'} is {left!r} there and {right!r} here"
        if differs:
            return Rebuilt(counts["bar"], counts["decision"], number, differs)
        counts[event.kind] = counts.get(event.kind, 0) + 1
    return Rebuilt(counts["bar"], counts["decision"], sum(counts.values()), "")


def _bars_of(path: Path, symbols: list[str]) -> Bars:
    """Return the bars that a journal holds."""
    times, rows = [], []
    missing = [np.nan] * (len(PRICES) + 1 + len(EXTRAS))
    for event in read_events(path, "bar"):
        times.append(event.ts_event)
        row = [event.body[symbol] or missing for symbol in symbols]
        # A bar without extras ends at its volume.
        rows.append([[*r, *missing[len(r) :]] for r in row])
    values = np.array(rows, dtype=float).transpose(2, 0, 1)
    present = np.isfinite(values[3])
    fields = dict(zip((*PRICES, "volume"), values, strict=False))
    # A missing bar carries the last close.
    last = np.maximum.accumulate(np.where(present, np.arange(len(times))[:, None], -1), axis=0)
    carried = np.take_along_axis(fields["close"], np.maximum(last, 0), axis=0)
    for name in PRICES:
        fields[name] = np.where(present, fields[name], np.where(last < 0, np.nan, carried))
    fields["volume"] = np.where(present, fields["volume"], 0.0)
    extras = dict(zip(EXTRAS, values[len(PRICES) + 1 :], strict=True))
    fields |= {name: value for name, value in extras.items() if np.isfinite(value).any()}
    return Bars(
        time=np.array(times, dtype="datetime64[ns]"),
        symbols=tuple(symbols),
        present=present,
        source=str(path),
        **fields,
    )
