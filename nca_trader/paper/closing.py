"""When bars close, and how a venue's shorter bars make those of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
import pandas as pd

from nca_trader.data.calendar import EVERY_DAY, Sessions
from nca_trader.types import PRICES, Bar, Bars

DAY_SECONDS = 86_400
AHEAD = 14 * DAY_SECONDS  # how far ahead the next bar is looked for: no market closes for longer


class Row(NamedTuple):
    """A closed bar of one symbol as a venue gives it. time: seconds since 1970 UTC of its open."""

    symbol: str
    time: int
    open: float
    high: float
    low: float
    close: float
    volume: float


class Source(Protocol):
    """Closed bars of a venue. One thread uses it.

    symbols: their names. step: seconds of its bars, a divisor of the run's. delay: seconds after a
    bar's end until it is asked for. settle: seconds after its end from which on a bar that the
    venue does not have is missing.
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
        if not self._sessions.weekly or self.period >= DAY_SECONDS:
            return time // self.period * self.period
        stamps = time.astype("datetime64[s]").astype("datetime64[ns]")
        opened, _ = self._sessions.spans(stamps, np.timedelta64(1, "s"))
        known = ~np.isnat(opened)
        begin = opened.astype("datetime64[s]").astype(np.int64)
        begin[~known] = 0
        return np.where(known, begin + (time - begin) // self.period * self.period, -1)

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
            stamps = time.astype("datetime64[s]").astype("datetime64[ns]")
            opened, _ = self._sessions.spans(stamps, np.timedelta64(unit, "s"))
            time = time[~np.isnat(opened)]
        found = np.unique(self.opens(time))
        return found[(found > after) & (found <= last) & (found >= 0)]

    def following(self, after: int) -> int:
        """Return the open of the next bar after `after`."""
        if not self._sessions.weekly:
            return int(after // self.period * self.period + self.period)
        found = self.expected(after, after + AHEAD + self.period)
        return int(found[0]) if len(found) else after + AHEAD


def aggregated(rows: Iterable[Row], grid: Grid) -> pd.DataFrame:
    """Return one line for each bar and symbol: open, symbol and the five values, in order of time.

    A value that is not a number makes the whole bar one, and so a fault that a gate sees.
    """
    frame = pd.DataFrame(list(rows), columns=list(Row._fields))
    frame["time"] = grid.opens(frame["time"].to_numpy(np.int64))
    frame = frame[frame["time"] >= 0]
    groups = frame.groupby(["time", "symbol"], sort=True)
    first, last = groups.nth(0), groups.nth(-1)
    keys = ["time", "symbol"]
    out = first.set_index(keys)[["open"]].sort_index()
    out["high"], out["low"] = groups["high"].max(), groups["low"].min()
    out["close"] = last.set_index(keys)["close"].sort_index()
    out["volume"] = groups["volume"].sum()
    bad = frame[list(PRICES)].isna().any(axis=1).groupby([frame["time"], frame["symbol"]]).any()
    out.loc[bad.reindex(out.index).to_numpy(bool), list(PRICES)] = np.nan
    return out.reset_index()


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
    unique = {(row.symbol, row.time): row for row in sorted(rows, key=lambda r: r.time)}
    frame = aggregated(unique.values(), grid)
    time, at = np.unique(frame["time"].to_numpy(np.int64), return_inverse=True)
    column = frame["symbol"].map({name: i for i, name in enumerate(symbols)}).to_numpy(np.int64)
    shape = (len(time), len(symbols))
    present = np.zeros(shape, bool)
    present[at, column] = True
    fields = {}
    for name in (*PRICES, "volume"):
        fields[name] = np.full(shape, np.nan)
        fields[name][at, column] = frame[name].to_numpy(np.float64)
    earlier = np.full(len(symbols), np.nan) if before is None else before
    close = pd.DataFrame(np.vstack([earlier, fields["close"]])).ffill().to_numpy()[1:]
    for name in PRICES:
        fields[name] = np.where(present, fields[name], close)
    fields["volume"] = np.where(present, fields["volume"], 0.0)
    return Bars(
        time=time.astype("datetime64[s]").astype("datetime64[ns]"),
        symbols=tuple(symbols),
        present=present,
        source=source,
        **fields,
    )


def bar_of(bars: Bars, row: int) -> Bar:
    """Return one row of bars as a `Bar`, fields `[A]`."""
    return jax.tree.map(lambda field: np.array(field[row]), bars.as_bar())
