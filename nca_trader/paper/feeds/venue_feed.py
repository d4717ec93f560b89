"""Live bars of a venue: asked for as each one closes, early where a stream has them.

Every bar is complete by the venue's own list of bars, or by a stream that has the bar of each
symbol. A stream that drops or falls silent therefore loses nothing: the bar is asked for anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nca_trader.config.reading import parse_step
from nca_trader.data.calendar import EVERY_DAY, Sessions
from nca_trader.data.resampling import aggregate
from nca_trader.paper.clock import NANOSECONDS, Clock, jitter
from nca_trader.paper.feeds.feed import Notice
from nca_trader.paper.venue import Unreachable
from nca_trader.types import PRICES, Bar, Bars

DAY_SECONDS = 86_400
SECOND = np.timedelta64(1_000_000_000, "ns")
AHEAD = 14 * DAY_SECONDS  # how far ahead the next bar is looked for: no market closes for longer
STALE = 2  # bars without data
LONGEST = 30.0  # seconds between two attempts, at most
REMEMBERED = 100  # bars that a correction is compared with
EARLY = 1  # seconds by which a venue's clock may be ahead


class VenueFeed:
    """A `LiveFeed` of a source's bars.

    Args:
      source: of the bars.
      grid: the run's bars.
      clock: of this machine.
      get: waits for a message for some seconds and returns it, or None; for tests.
    """

    def __init__(
        self,
        source: Source,
        grid: Grid,
        clock: Clock | None = None,
        get: Callable[[float], Row | None] | None = None,
    ):
        self.symbols, self.period = source.symbols, grid.period
        self.source, self.grid, self._clock = source, grid, clock or Clock()
        self._messages: queue.Queue[Row | None] = queue.Queue()
        self._get = get or self._wait
        self._closed = self._stale = False
        self._rows: dict[int, dict[tuple[str, int], Row]] = {}  # by the open of their bar
        self._last: int | None = None  # the open of the last bar that was given
        self._closes: np.ndarray | None = None  # the last ones: a missing bar repeats them
        self._settled = 0.0  # bars that closed by then are complete
        self._failures = 0
        # Found once for each bar, since calendars are slow.
        self._following = functools.lru_cache(1)(grid.following)

    def now(self) -> int:
        """Return nanoseconds since 1970 UTC."""
        return self._clock.now()

    def history(self, count: int) -> Bars:
        """Return the last `count` closed bars, or as many as there are.

        Raises:
          Unreachable: the venue does not answer.
        """
        # The newest row may still be open, and is left out.
        stop = self._seconds() // self.source.step * self.source.step
        span, before = count * self.period, -1
        while True:
            span *= 2
            # From midnight on, so that bars which count from it are whole.
            start = max(stop - span, 0) // DAY_SECONDS * DAY_SECONDS
            rows = self.source.fetch(start, stop)
            closed = self._closed_by(rows, start, stop)
            if len(closed) >= count or start == 0 or len(rows) == before:
                break
            # Days without a session may lie in between: a short span without more is not the end.
            before = len(rows) if span > 30 * DAY_SECONDS else -1
        bars = closed[-count:] if len(closed) > count else closed
        if len(bars):
            self._closes = bars.close[-1]
            self._last = int(bars.seconds[-1])
        return bars

    def __iter__(self) -> Iterator[Bar | Notice]:
        """Yield each bar after it closes, and notices between bars, until `close`."""
        if self._last is None:
            # Without history, the feed begins with the bar after the last one that has closed.
            past = self.grid.expected(self._seconds() - 14 * DAY_SECONDS, self._seconds())
            self._last = int(past[-1]) if len(past) else self._seconds() - self.period
        whole = self.source.step == self.period
        if whole:  # parts of a bar would not show what a dropped stream lost of it
            self.source.stream(self._messages.put)
        due = self.due(self._last)
        while not self._closed:
            wait = due - self._now()
            if wait > 0.0:
                # Never longer than a minute: a clock that was set must not let a session sleep.
                row = self._get(min(wait, 60.0))
                if row is not None:
                    yield from self._take([row])
            else:
                yield from self._ask()
            yield from self._give()
            if wait <= 0.0:  # the next attempt, if the bar is still not there
                due = max(self.due(self._last), self._now() + self._pause())
            else:
                due = max(self.due(self._last), due)

    def close(self) -> None:
        """End connections and threads."""
        self._closed = True
        self._messages.put(None)
        self.source.close()

    def _wait(self, seconds: float) -> Row | None:
        try:
            return self._messages.get(timeout=seconds)
        except queue.Empty:
            return None

    def _now(self) -> float:
        return self._clock.now() / NANOSECONDS

    def _seconds(self) -> int:
        return self._clock.now() // NANOSECONDS

    def due(self, opened: int) -> float:
        """Return when the bar after the one that opens at `opened` is asked for."""
        return self._following(opened) + self.period + self.source.delay

    def _pause(self) -> float:
        """Return the seconds until the next attempt."""
        return pause_after(self._failures, self.symbols) if self._failures else self.source.delay

    def _ask(self) -> Iterator[Notice]:
        """Ask for every bar since the last one that was given."""
        assert self._last is not None
        asked = self._seconds()
        stop = asked // self.source.step * self.source.step
        try:
            # The last bar as well: it may have been corrected.
            rows = self.source.fetch(self._last, stop)
        except Unreachable as error:
            self._failures += 1
            # Once per outage: a notice for each attempt would fill the journal.
            if self._failures == 1:
                yield Notice("unreachable", str(error))
            return
        self._failures = 0
        # A bar that is not in the answer by then will not come.
        self._settled = max(self._settled, asked - min(self.source.settle, self.period))
        yield from self._take(rows)

    def _take(self, rows: list[Row]) -> Iterator[Notice]:
        """Keep rows of bars to come; say which differ from bars that were given."""
        assert self._last is not None
        if not rows:
            return
        opens = self.grid.opens(np.array([row.time for row in rows], np.int64)).tolist()
        limit = self._now() + EARLY
        for row, at in zip(rows, opens, strict=True):
            # Rows outside of the sessions, e.g. before the market opens, belong to no bar.
            if at < 0 or row.symbol not in self.symbols:
                continue
            name = f"{row.symbol} {_stamp(row.time)}"
            if row.time + self.source.step > limit:
                yield Notice("unfinished", f"{name} is not over")
            elif at > self._last:
                self._rows.setdefault(at, {})[row.symbol, row.time] = row
            elif at in self._rows:
                # Rows of bars that were given are kept for a while, to see what changes in them.
                known = self._rows[at].get((row.symbol, row.time))
                if known is None:
                    yield Notice("late", f"{name} came after its bar was given")
                elif known != row:
                    parts = [
                        f"{field} {old:g} is now {new:g}"
                        for field, old, new in zip(Row._fields[2:], known[2:], row[2:], strict=True)
                        if old != new
                    ]
                    yield Notice("correction", f"{name}: {', '.join(parts)}")
                self._rows[at][row.symbol, row.time] = row

    def _give(self) -> Iterator[Bar | Notice]:
        """Yield the bars that are complete, in order."""
        assert self._last is not None
        now = self._seconds()
        if now < self.due(self._last) - self.source.delay:
            return
        ahead = self.grid.expected(self._last, now).tolist()
        if len(ahead) >= STALE and not self._stale:
            self._stale = True
            yield Notice("stale", f"no bar since {_stamp(self._last)}")
        for i, at in enumerate(ahead):
            rows = self._rows.get(at, {})
            # With the last part of every symbol the bar is whole, and nothing needs to settle.
            end = at + self.period - self.source.step
            every = {symbol for symbol, time in rows if time == end} == set(self.symbols)
            if not every and at + self.period > self._settled:
                return
            self._last = at
            self._rows.setdefault(at, {})
            # At the last of them, so that the session trades on the newest bar alone.
            if self._stale and i == len(ahead) - 1:
                self._stale = False
                yield Notice("reconnected", f"all bars until {_stamp(at)} are here")
            if not rows:
                yield Notice("gap", f"{_stamp(at)} has no bar of any symbol")
                continue
            yield self._bar(list(rows.values()))
            for old in sorted(self._rows)[: -REMEMBERED or None]:
                if old <= at:
                    del self._rows[old]

    def _bar(self, rows: list[Row]) -> Bar:
        bars = bars_of(rows, self.grid, self.symbols, before=self._closes)
        self._closes = bars.close[-1]
        return next(bars.each())

    def _closed_by(self, rows: list[Row], start: int, stop: int) -> Bars:
        """Return the bars of rows from `start` on that are over by `stop`."""
        bars = bars_of(rows, self.grid, self.symbols, "history")
        # The rows may begin within a bar of a session that began before them.
        first, last = np.searchsorted(bars.seconds, [start, stop - self.period + 1])
        return bars[int(first) : int(last)]


def pause_after(failures: int, symbols: Sequence[str]) -> float:
    """Return the seconds until the next attempt: longer after each failure, and of each feed."""
    # The exponent is capped too, as a venue may be down for days.
    return max(1.0, jitter(min(LONGEST, 2.0 ** min(failures, 10)), f"{symbols}{failures}"))


def seconds_of(every: str) -> int:
    """Return the whole seconds of a bar's length, e.g. 300 of "5min".

    Raises:
      BarError: it is not a length that divides a day.
    """
    length = parse_step(every)
    assert length is not None  # as a text is never
    return int(length / np.timedelta64(1, "s"))


def _stamp(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


class Row(NamedTuple):
    """A closed bar of one symbol as a venue gives it.

    time: seconds since 1970 UTC of its open. dividend: as in `Bars`.
    """

    symbol: str
    time: int
    open: float
    high: float
    low: float
    close: float
    volume: float
    dividend: float = 0.0


class Source(Protocol):
    """Closed bars of a venue. One thread uses it.

    symbols: their names. step: seconds of its bars, a divisor of the run's. delay: seconds after a
    bar's end until it is asked for. settle: seconds after its end, at most a period of the run's,
    from which on a bar that the venue does not have is missing.
    """

    symbols: tuple[str, ...]
    step: int
    delay: float
    settle: float

    def fetch(self, start: int, stop: int) -> list[Row]:
        """Return the bars that open at or after `start` and end by `stop`, in seconds.

        Raises:
          Unreachable: the venue does not answer.
        """
        ...

    def stream(self, post: Callable[[Row], None]) -> None:
        """Let a thread `post` each bar as it closes, and again when it is corrected."""
        ...

    def close(self) -> None:
        """End connections and threads."""
        ...


class Grid:
    """The opens of a run's bars. Every bar closes `period` seconds after its open.

    Bars count from midnight UTC; with sessions they count from each session's open, and the last
    one may hold less than a period. A bar of a day is named by its date at 00:00 UTC.

    Args:
      period: seconds of a bar; divides a day.
      sessions: when the market trades.

    >>> grid = Grid(3600)
    >>> grid.opens(np.array([0, 3599, 3600])).tolist()
    [0, 0, 3600]
    >>> grid.expected(0, 10800).tolist()
    [3600, 7200]
    """

    def __init__(self, period: int, sessions: Sessions = EVERY_DAY):
        self.period, self._sessions = period, sessions

    def opens(self, time: np.ndarray) -> np.ndarray:
        """Return the open of each time's bar, -1 outside the sessions.

        Args:
          time: `[N]` seconds since 1970 UTC.
        """
        if self.period >= DAY_SECONDS:
            return time // self.period * self.period
        width = np.timedelta64(self.period, "s").astype("timedelta64[ns]")
        begin, end = self._sessions.spans(_times(time), SECOND, width)
        return np.where(np.isnat(end), -1, begin.astype("datetime64[s]").astype(np.int64))

    def expected(self, after: int, until: int) -> np.ndarray:
        """Return the opens after `after` of the bars that close by `until`, in seconds."""
        last = until - self.period
        if last <= after:
            return np.empty(0, np.int64)
        if not self._sessions.weekly:
            first = after // self.period * self.period + self.period
            return np.arange(first, last + 1, self.period)
        # A session may open at any minute, and a bar of a day holds it at any hour.
        unit = 3600 if self.period >= DAY_SECONDS else 60
        stop = last + self.period if self.period >= DAY_SECONDS else last + 1
        time = np.arange(after // unit * unit, stop, unit)
        if self.period >= DAY_SECONDS:
            stamps = _times(time)
            opened, _ = self._sessions.spans(stamps, np.timedelta64(unit, "s"))
            time = time[~np.isnat(opened)]
        found = np.unique(self.opens(time))
        return found[(found > after) & (found <= last) & (found >= 0)]

    def following(self, after: int) -> int:
        """Return the open of the next bar after `after`."""
        found = self.expected(after, after + AHEAD + self.period)
        return int(found[0]) if len(found) else after + AHEAD


def bars_of(
    rows: Iterable[Row],
    grid: Grid,
    symbols: Sequence[str],
    source: str = "",
    before: np.ndarray | None = None,
) -> Bars:
    """Return bars `[N, A]`; where a symbol has none at a time of others, its bar is missing.

    Args:
      rows: in any order; of two of the same symbol and time the later one counts.
      grid: the bars' opens.
      symbols: `A` names.
      source: of the bars.
      before: `[A]` the closes before the first bar, which a missing bar repeats; None: NaN.
    """
    # A stream and an answer may both have a row; the later one is the corrected one.
    kept = [*{(row.symbol, row.time): row for row in rows}.values()]
    time, at = np.unique(np.array([row.time for row in kept], np.int64), return_inverse=True)
    column = np.array([symbols.index(row.symbol) for row in kept], np.int64)
    numbers = np.array([row[2:] for row in kept], np.float64).reshape(
        len(kept), len(Row._fields) - 2
    )
    values = np.full((numbers.shape[1], len(time), len(symbols)), np.nan)
    values[:, at, column] = numbers.T
    present = np.zeros(values.shape[1:], bool)
    present[at, column] = True
    *prices, volume, dividend = values
    # Of a value that is not a number the whole row becomes one, so that a gate sees the fault in a
    # longer bar, whose open and close are of other rows.
    broken = np.isnan(prices).any(0)
    earlier = np.full(len(symbols), np.nan) if before is None else before
    known = np.vstack([earlier, np.where(broken, np.nan, prices[-1])])
    # `[N + 1, A]` the row of the last close up to each: that of a missing bar.
    last = np.where(np.isnan(known), 0, np.arange(len(known))[:, None])
    close = np.take_along_axis(known, np.maximum.accumulate(last), 0)[1:]
    fields: dict[str, Any] = {
        name: np.where(present, np.where(broken, np.nan, price), close)
        for name, price in zip(PRICES, prices, strict=True)
    }
    fields |= {"volume": np.where(present, volume, 0.0), "present": present}
    if np.nan_to_num(dividend).any():
        fields["dividend"] = np.where(present, dividend, 0.0)
    parts = Bars(time=_times(time), symbols=tuple(symbols), source=source, **fields)
    opens = grid.opens(time)
    inside = np.flatnonzero(opens >= 0)
    if not len(inside):
        return parts[:0]
    starts = np.flatnonzero(np.diff(opens[inside], prepend=-1))
    longer = aggregate(parts, inside, starts)
    return dataclasses.replace(parts, time=_times(opens[inside][starts]), **longer)


def _times(seconds: np.ndarray) -> np.ndarray:
    return seconds.astype("datetime64[s]").astype("datetime64[ns]")
