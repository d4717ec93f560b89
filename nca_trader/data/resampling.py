"""Aggregates bars to longer ones, and aligns longer bars with shorter ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from nca_trader.config.ranges import expect
from nca_trader.config.reading import parse_step
from nca_trader.data.calendar import EVERY_DAY, Sessions, bar_length
from nca_trader.errors import BarError
from nca_trader.types import Bars


def resample(bars: Bars, every: str, sessions: Sessions | None = None) -> Bars:
    """Aggregate bars to a longer length, each stamped by its close.

    A bin is half-open: [10:00, 11:00) takes the bars that open in it and is stamped 11:00. `time`
    is thus the close, unlike in bars that are read. The last bar at or before a moment is therefore
    always complete. Bins count from midnight UTC. With `sessions` they count from each session's
    open, the last one ends at its close (early on a half day), "1d" is the session, and bars
    outside every session are left out. A bin without a bar is left out, and so is a last one that
    is not complete.

    open, high, low and close are those of the bin's present bars; volume, dividend and funding are
    sums, half_spread is the mean; columns of your own keep their last value. An asset is missing
    where it has no present bar in a bin.

    Args:
      bars: N bars, stamped by their opens.
      every: "5min", "1h", "1d"; must divide a day.
      sessions: when the market trades.

    Returns:
      Bars `[M, A]`.

    Raises:
      BarError: fewer than two bars; a length that is not a multiple of the bars' own; no bin is
        complete.

    Example:
      >>> import pandas as pd
      >>> import nca_trader as nca
      >>> time = pd.date_range("2024-01-02", periods=4, freq="30min", tz="UTC")
      >>> frame = pd.DataFrame({"time": time, "close": [1.0, 1.1, 1.2, 1.1]})
      >>> bars = nca.read_bars(frame, repair="close-only,no-volume")
      >>> hours = nca.resample(bars, "1h")
      >>> hours.high.ravel()
      array([1.1, 1.2])
      >>> nca.align(hours, bars)
      array([-1,  0,  0,  1])
    """
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", every=every)
    expect("every", every, str, 'a text, e.g. "1h"')
    width = parse_step(every)
    length = bar_length(bars.time)
    if width is None or np.isnat(length):
        raise BarError(f"{bars.source or 'bars'}: can't be resampled; give two bars or more.")
    if width < length or width % length:
        raise BarError(
            f"every {every!r} is not a multiple of the bars' own length, {length.astype('m8[s]')}; "
            "give a longer one."
        )
    _, end = (sessions or EVERY_DAY).spans(bars.time, length, width)
    # A bin whose end is after the last bar's close would change as more bars come.
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
        **aggregate(bars, rows, starts),
    )


def align(higher: Bars, bars: Bars) -> np.ndarray:
    """Return the row of the last longer bar that is complete at each bar's close.

    Args:
      higher: from `resample`, stamped by their close.
      bars: N bars, stamped by their opens.

    Returns:
      `[N]` rows of `higher`, -1 before the first.

    Example:
      >>> import nca_trader as nca
      >>> minutes = nca.synthetic.make("martingale", num_bars=150).bars
      >>> align(resample(minutes, "1h"), minutes)[[0, 58, 59, 60, 119]].tolist()
      [-1, -1, 0, 0, 1]
    """
    for name, value in (("higher", higher), ("bars", bars)):
        expect(name, value, Bars, "Bars, e.g. of nca.read_bars")
    close = bars.time + bar_length(bars.time)
    # "right": a longer bar that ends just at this close is complete.
    return np.searchsorted(higher.time, close, side="right") - 1


def aggregate(bars: Bars, rows: np.ndarray, starts: np.ndarray) -> dict[str, Any]:
    """Return the fields `[M, A]` of the bins that begin at `starts` of `rows`."""
    present = bars.present[rows]
    place = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(rows))))

    def total(values: np.ndarray) -> np.ndarray:
        # One after the other, as a feature of a slower time frame adds them: a sum by halves would
        # round otherwise.
        found = np.zeros((len(starts), values.shape[1]), values.dtype)
        np.add.at(found, place, values)
        return found

    count = total(present.astype(np.int64))
    has = count > 0
    last = np.append(starts[1:], len(rows)) - 1
    high = np.maximum.reduceat(np.where(present, bars.high[rows], -np.inf), starts, axis=0)
    low = np.minimum.reduceat(np.where(present, bars.low[rows], np.inf), starts, axis=0)
    # The first present bar's row. Where a bin has none, any row will do: `has` masks it below.
    order = np.where(present, np.arange(len(rows))[:, None], len(rows) - 1)
    first = np.minimum.reduceat(order, starts, axis=0)
    close = bars.close[rows][last]  # a missing bar carries the last close
    fields: dict[str, Any] = {
        "open": np.where(has, np.take_along_axis(bars.open[rows], first, axis=0), close),
        "high": np.where(has, high, close),
        "low": np.where(has, low, close),
        "close": close,
        "volume": total(bars.volume[rows]),
        "present": has,
    }
    for name in ("dividend", "funding"):
        if getattr(bars, name) is not None:
            fields[name] = total(getattr(bars, name)[rows])
    if bars.half_spread is not None:
        spread = np.where(present, bars.half_spread[rows], 0.0)
        fields["half_spread"] = total(spread) / np.maximum(count, 1)
    fields["columns"] = {name: x[rows][last] for name, x in bars.columns.items()}
    return fields
