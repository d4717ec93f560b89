"""Bars of a longer length, stamped by their close, and their join without look-ahead."""

from __future__ import annotations

import dataclasses

import numpy as np

from nca_trader.config.ranges import expect
from nca_trader.config.reading import parse_step
from nca_trader.data.calendar import DAY, Sessions, bar_length
from nca_trader.errors import BarError
from nca_trader.types import Bars


def resample(bars: Bars, every: str, sessions: Sessions | None = None) -> Bars:
    """Bars of the length `every`, each stamped by its close.

    A bin is half-open: [10:00, 11:00) takes the bars that open in it and is stamped 11:00. `time`
    is thus the close, other than that of bars that are read, so that whoever looks up the last one
    at or before a moment finds only bars that are over. Bins count from midnight UTC; with
    `sessions` from each session's open, the last one ends at its close (early on a half day), "1d"
    is the session, and bars outside every session are left out. A bin without a bar is left out, a
    last one that is not over yet as well.

    open, high, low and close are of the present bars of the bin, volume, dividend and funding
    their sums, half_spread their mean. An asset is missing where it has no present bar in a bin.

    Args:
      bars: N bars, stamped by their opens. every: "5min", "1h", "1d"; a part of a day.
      sessions: when the market trades.

    Raises:
      BarError: fewer than two bars; a length that is no multiple of the bars' own; no bin is over.
    """
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", every=every)
    expect("every", every, str, 'a text, e.g. "1h"')
    width = parse_step(every)
    length = bar_length(bars.time)
    if width is None or np.isnat(length):
        raise BarError(f"{bars.source or 'bars'}: can't be resampled; give two bars or more.")
    if width < length or width % length:
        raise BarError(
            f"every {every!r} is no multiple of the bars' own length, {length.astype('m8[s]')}; "
            "give a longer one."
        )
    end = _bin_ends(bars.time, length, width, sessions)
    inside = ~np.isnat(end) & (end <= bars.time[-1] + length)
    if not inside.any():
        raise BarError(f"{bars.source or 'bars'}: no bar of {every} is over; give more bars.")
    rows = np.flatnonzero(inside)
    starts = np.flatnonzero(np.concatenate(([True], np.diff(end[rows]) > np.timedelta64(0, "ns"))))
    note = f"Bars of {every}, stamped by their close."
    return dataclasses.replace(
        bars,
        time=end[rows][starts],
        note=f"{bars.note} {note}".strip(),
        **_aggregate(bars, rows, starts),
    )


def align(higher: Bars, bars: Bars) -> np.ndarray:
    """`[N]` the row of the last bar of `higher` that is over at each bar's close; -1 before one.

    Args:
      higher: from `resample`, stamped by their close. bars: N bars, stamped by their opens.
    """
    for name, value in (("higher", higher), ("bars", bars)):
        expect(name, value, Bars, "Bars, e.g. of nca.read_bars")
    close = bars.time + bar_length(bars.time)
    return np.searchsorted(higher.time, close, side="right") - 1


def _bin_ends(
    time: np.ndarray, length: np.timedelta64, width: np.timedelta64, sessions: Sessions | None
) -> np.ndarray:
    """`[N]` the close of the bin of each bar, NaT outside the sessions."""
    if sessions is None or not sessions.weekly:
        midnight = time.astype("datetime64[D]").astype("datetime64[ns]")
        return midnight + ((time - midnight) // width + 1) * width
    opened, closed = sessions.spans(time, length)
    if width >= DAY:
        return closed
    # A bar that begins before the session is one of its first bin.
    since = np.maximum(time - opened, np.timedelta64(0, "ns"))
    known = ~np.isnat(opened)
    end = closed.copy()
    end[known] = np.minimum(opened[known] + (since[known] // width + 1) * width, closed[known])
    return end


def _aggregate(bars: Bars, rows: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    """The fields `[M, A]` of the bins that begin at `starts` of `rows`."""
    present = bars.present[rows]
    count = np.add.reduceat(present.astype(np.int64), starts, axis=0)
    has = count > 0
    last = np.append(starts[1:], len(rows)) - 1
    high = np.maximum.reduceat(np.where(present, bars.high[rows], -np.inf), starts, axis=0)
    low = np.minimum.reduceat(np.where(present, bars.low[rows], np.inf), starts, axis=0)
    # The first present bar's row; any other where there is none.
    order = np.where(present, np.arange(len(rows))[:, None], len(rows) - 1)
    first = np.minimum.reduceat(order, starts, axis=0)
    close = bars.close[rows][last]  # a missing bar carries the last close
    fields = {
        "open": np.where(has, np.take_along_axis(bars.open[rows], first, axis=0), close),
        "high": np.where(has, high, close),
        "low": np.where(has, low, close),
        "close": close,
        "volume": np.add.reduceat(bars.volume[rows], starts, axis=0),
        "present": has,
    }
    for name in ("dividend", "funding"):
        if getattr(bars, name) is not None:
            fields[name] = np.add.reduceat(getattr(bars, name)[rows], starts, axis=0)
    if bars.half_spread is not None:
        spread = np.where(present, bars.half_spread[rows], 0.0)
        fields["half_spread"] = np.add.reduceat(spread, starts, axis=0) / np.maximum(count, 1)
    return fields
