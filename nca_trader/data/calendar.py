"""When a market trades, as its own bars show it: what makes a gap missing bars."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from nca_trader.errors import BarError

HOUR = 3_600_000_000_000  # nanoseconds
WEEK_HOURS = 7 * 24
REGULAR = 0.2  # of the weeks: an hour that trades more seldom is an exception


def parse_step(every: str | None) -> np.timedelta64 | None:
    """A bar's length, e.g. of "1min", "4h", "1d".

    Raises:
      BarError: it is none, or doesn't divide a day.
    """
    if every is None:
        return None
    try:
        step = pd.Timedelta(re.sub(r"d$", "D", every))  # pandas gives up the small one
    except ValueError:
        step = pd.NaT
    day = pd.Timedelta(1, "D")
    if not isinstance(step, pd.Timedelta) or not pd.Timedelta(0) < step <= day or day % step:
        raise BarError(f"every {every!r} is no part of a day; give a bar's length, e.g. 1min, 1h.")
    return step.to_timedelta64().astype("timedelta64[ns]")


def expected_times(time: np.ndarray, step: np.timedelta64, timezone: str | None) -> np.ndarray:
    """Times `[M]`, datetime64[ns] UTC, every `step` of the trading hours, from first to last bar.

    The trading hours are those hours of the week, by the clock of `timezone` (None: UTC), in which
    at least every fifth week has bars; an hour before or after one without trading counts from its
    earliest to its latest bar ever. So half days and holidays are missing bars, nights are none.
    Only times are looked at, no prices; the hours are those of the whole file.
    """
    first, last = time[[0, -1]]
    grid = np.arange(first, last + step, step)
    seen, hours = _clock(time, timezone), _clock(grid, timezone)
    slot, slots = (seen // HOUR) % WEEK_HOURS, (hours // HOUR) % WEEK_HOURS
    week = seen // (WEEK_HOURS * HOUR)
    weeks = week[-1] - week[0] + 1
    pairs = np.unique(np.stack([slot, week], axis=1), axis=0)
    trades = np.bincount(pairs[:, 0], minlength=WEEK_HOURS) >= REGULAR * weeks
    part = seen % HOUR
    earliest, latest = np.full(WEEK_HOURS, HOUR), np.full(WEEK_HOURS, -1)
    np.minimum.at(earliest, slot, part)
    np.maximum.at(latest, slot, part)
    # Between hours that trade, an hour does from its start to its end.
    earliest[np.roll(trades, 1)] = 0
    latest[np.roll(trades, -1)] = HOUR
    inside = (hours % HOUR >= earliest[slots]) & (hours % HOUR <= latest[slots])
    return grid[trades[slots] & inside]


def _clock(time: np.ndarray, timezone: str | None) -> np.ndarray:
    """Nanoseconds since Monday, 1969-12-29, by the clock on the wall."""
    local = pd.DatetimeIndex(time)
    if timezone is not None:
        local = local.tz_localize("UTC").tz_convert(timezone).tz_localize(None)
    return local.to_numpy("datetime64[ns]").astype(np.int64) + 3 * 24 * HOUR
