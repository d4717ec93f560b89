"""Bars in a year: counted where a year of them is there, else from the hours that they show."""

from __future__ import annotations

import numpy as np

SECOND, DAY = np.timedelta64(1, "s"), np.timedelta64(1, "D")
YEAR_DAYS = 365.2425
EXCHANGE_DAYS = 252.0  # sessions of a year on an exchange: 261 weekdays less 9 holidays or so
WEEKDAYS = YEAR_DAYS * 5.0 / 7.0  # of a market with weekends alone
ROUND_THE_CLOCK = 22  # hours of a day that trade, of a market that closes at weekends alone


def bars_per_year(time: np.ndarray) -> float:
    """Bars in a year of their own calendar, from their times `[N]`, datetime64[ns] UTC.

    Over a year or more, and for bars of a week or more, N - 1 steps over the time between first
    and last bar. Over less, bars a trading day (the median) times trading days a year: 365.2425
    where bars stand on Saturdays, or where no day between first and last lacks them; 260.9 where
    weekdays trade round the clock (FX); 252 otherwise, as exchanges do. Two days of minute bars of
    an exchange are thus 98,280 bars a year, and not as many as two days without nights would be.
    NaN of fewer than two bars.
    """
    if len(time) < 2:
        return float("nan")
    span = (time[-1] - time[0]) / DAY
    steps, counts = np.unique(np.diff(time), return_counts=True)
    step = steps[np.argmax(counts)] / DAY
    if span >= YEAR_DAYS - 1.0 or step >= 7.0:
        return (len(time) - 1) * YEAR_DAYS / span
    days, per_day = np.unique(time.astype("datetime64[D]"), return_counts=True)
    whole = per_day[1:-1] if len(per_day) > 2 else per_day  # the first and last may be cut
    a_day = float(np.median(whole) if len(per_day) > 2 else whole.max())
    weekday = (days.astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
    if (weekday == 5).any():
        return YEAR_DAYS * min(a_day, round(1.0 / step)) if step < 1.0 else YEAR_DAYS / step
    if step >= 1.0:
        return EXCHANGE_DAYS / step
    longest = float(steps[-1] / DAY)
    if longest < 1.5 * step and span < 2.0:  # nothing shows that it ever closes
        return YEAR_DAYS / step
    clock = len(np.unique(time.astype("datetime64[h]").astype(np.int64) % 24))
    weekdays = per_day[(weekday < 4) & (days > days[0]) & (days < days[-1])]
    if clock >= ROUND_THE_CLOCK:
        return WEEKDAYS * (float(np.median(weekdays)) if len(weekdays) else round(1.0 / step))
    return EXCHANGE_DAYS * a_day
