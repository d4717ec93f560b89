"""When a market trades: by a calendar that is known beforehand, or as its own bars show."""

from __future__ import annotations

import dataclasses
import functools
import re
import zoneinfo
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.tseries.holiday import (
    AbstractHolidayCalendar,
    GoodFriday,
    Holiday,
    USLaborDay,
    USMartinLutherKingJr,
    USMemorialDay,
    USPresidentsDay,
    USThanksgivingDay,
    nearest_workday,
    sunday_to_monday,
)

from nca_trader.config.extensions import FORGET, own_code
from nca_trader.config.ranges import describe, expect
from nca_trader.config.registry import Registry
from nca_trader.errors import BarError, ConfigError
from nca_trader.numerics import arrays
from nca_trader.types import Bars, Tensor

HOUR = 3_600_000_000_000  # nanoseconds
DAY_NS, MINUTE = 24 * HOUR, HOUR // 60
FEW_WEEKS = 3  # from the first bar's to the last one's: too few to show the hours of each day
PAUSE, NEAR = 5 * MINUTE, 15  # the shortest pause of a market; bars before and after it
WEEK_HOURS, MONDAY = 7 * 24, 3 * 24 * HOUR  # 1970-01-01 was a Thursday
# A zone for each rule of changing the clock; others with that rule differ by whole hours.
ZONES = (
    "UTC", "America/New_York", "Europe/Berlin", "Australia/Sydney", "Pacific/Auckland",
    "America/Sao_Paulo", "America/Santiago", "America/Mexico_City", "Asia/Jerusalem",
)  # fmt: skip
DAY = np.timedelta64(1, "D")
FILLS = ("next_open", "close")
OUTSIDE = np.iinfo(np.int64).min  # of every session; numpy's NaT
REGULAR = 0.2  # of the weeks: an hour that trades less often is an exception
FIRST_YEAR, JUNETEENTH = 2014, "2022-06-19"  # before 2014 some half days were other ones
LAST_YEAR = 2060  # of the sessions that a name stands for


def expected_times(
    time: np.ndarray, step: np.timedelta64, timezone: str | None = None
) -> tuple[np.ndarray, str]:
    """Return the times at which bars are expected, from the first bar to the last.

    The trading hours are those hours of the week in which at least every fifth week has bars; an
    hour before or after one without trading counts from its earliest to its latest bar ever. Half
    days and holidays thus are missing bars, nights are not. Prices do not matter; the hours are
    those of the whole file.

    Within these hours, a time of the day at which bars of some day open is expected on every day. A
    time between such ones is expected as well, also if it never has a bar, as in thin trading. Only
    a stretch that is empty on all days is a pause of the market, e.g. a lunch, if it lasts `PAUSE`
    and the bars around it are so frequent that chance would leave such a stretch in less than one
    of twenty files. One day alone shows no pause. After a pause, bars may open at other minutes
    than before it, e.g. at 11:30 and then at 13:00 and 14:00.

    The weeks of a short file, up to three, are too few to tell an hour without trading from one
    whose bars are missing. There, an hour counts that half of the other days have.

    Hours are counted by the clock in which they repeat. Daily bars of New York in UTC are of two
    hours, one in summer and one in winter, and of one hour by the clock there.

    Args:
      time: `[N]` datetime64[ns] UTC, ascending.
      step: the bars' length.
      timezone: the zone that is tried first, which is kept if no other is more regular; None: UTC.

    Returns:
      `[M]` datetime64[ns] UTC, the times at which bars open within the trading hours; and the zone
      of the clock.
    """
    length = int(step.astype("timedelta64[ns]").astype(np.int64))
    some = np.unique(time.astype("datetime64[h]")).astype("datetime64[ns]")

    def irregular(zone: str) -> tuple[int, int]:
        seen = _clock(some, zone)
        trades = _trading(seen)
        # An hour that the clock skips is not a closed one.
        skipped = seen[:-1][(np.diff(seen) > HOUR) & (np.diff(some).astype(int) == HOUR)] + HOUR
        trades[(skipped // HOUR) % WEEK_HOURS] = True
        return trades.sum(), (~trades[(seen // HOUR) % WEEK_HOURS]).sum()

    counts = {zone: irregular(zone) for zone in dict.fromkeys((timezone or "UTC", *ZONES))}
    zone, *others = (zone for zone, count in counts.items() if count == min(counts.values()))
    if others and length <= HOUR:  # a pause within the hours has its clock, too
        some = np.unique(time.astype("datetime64[m]")).astype("datetime64[ns]")
        found = {x: _slots(_clock(some, x), max(length, MINUTE)) for x in (zone, *others)}
        zone = max(found, key=lambda x: (found[x][2] * ~found[x][1]).sum())
    seen = _clock(time, zone)
    trades = _trading(seen)
    slot, part = (seen // HOUR) % WEEK_HOURS, seen % HOUR
    earliest, latest = np.full(WEEK_HOURS, HOUR), np.full(WEEK_HOURS, -1)
    np.minimum.at(earliest, slot, part)
    np.maximum.at(latest, slot, part)
    if length <= HOUR and np.ptp(seen // (WEEK_HOURS * HOUR)) < FEW_WEEKS:
        # A few missing bars may be all that a day of the week has of an hour, or of its edge.
        opens = trades.reshape(7, 24).any(axis=1)
        often = np.tile(2 * trades.reshape(7, 24).sum(axis=0) >= opens.sum(), 7)
        usual = trades | ~often
        added = np.repeat(opens, 24) & often & ~trades & np.roll(usual, 1) & np.roll(usual, -1)
        trades |= added
        first = np.tile(earliest.reshape(7, 24).min(axis=0), 7)
        last = np.tile(latest.reshape(7, 24).max(axis=0), 7)
        small = max(PAUSE, 2 * length)
        earliest = np.where(added | (earliest - first < small), first, earliest)
        latest = np.where(added | (last - latest < small), last, latest)
    # Between hours that trade, an hour does from its start to its end.
    earliest[np.roll(trades, 1)] = 0
    latest[np.roll(trades, -1)] = HOUR

    def trading(hours: np.ndarray) -> np.ndarray:
        slots, part = (hours // HOUR) % WEEK_HOURS, hours % HOUR
        return trades[slots] & (part >= earliest[slots]) & (part <= latest[slots])

    if length > HOUR:  # longer bars open by the clock, e.g. at its midnight
        hours = np.arange(seen[0], seen.max() + 1, length)
        grid = _utc((hours - MONDAY).astype("datetime64[ns]"), zone)
        expected = grid[trading(hours)]
        return expected[~np.isnat(expected)], zone
    (of_day, goes_on, _), ticks = _slots(seen, length), time.astype(np.int64)
    usual, expected = np.isin(seen % DAY_NS, of_day), []
    for phase in np.unique(ticks[usual] % length):
        grid = np.arange(ticks[0] + (phase - ticks[0]) % length, ticks[-1] + 1, length)
        hours = _clock(grid.astype("datetime64[ns]"), zone)
        row = np.searchsorted(of_day, hours % DAY_NS, side="right") - 1  # -1: of the day before
        since = (hours - of_day[row]) % DAY_NS
        usual = (since == 0) | (goes_on[row] & (since % length == 0))
        expected.append(grid[usual & trading(hours)])
    return np.sort(np.concatenate(expected)).astype("datetime64[ns]"), zone


def _slots(seen: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the times of the day at which bars open, and whether more are expected in between.

    Args:
      seen: `[N]` nanoseconds of `_clock`.
      length: of a bar, in nanoseconds.

    Returns:
      `[T]` nanoseconds since midnight, rising; `[T]` bool, whether a bar is expected every
      `length` from there to the next of them; `[T]` nanoseconds to the next.
    """
    of_day, count = np.unique(seen % DAY_NS, return_counts=True)
    hour, phase = of_day // HOUR, of_day % length
    days = np.bincount(np.unique(seen // HOUR) % 24, minlength=24)[hour]  # that have that hour
    count = np.minimum(count, days)  # an hour that the clock repeats has two bars a day
    # A bar at an odd second is none of a calendar unless such bars are there every fifth day.
    _, row = np.unique(hour * length + phase, return_inverse=True)
    often = np.bincount(row, count)[row] >= np.maximum(REGULAR * days, np.minimum(2, days))
    often |= phase == phase[np.argmax(count)]
    # Nor is one that a hundred times as many have around it, e.g. on the day of a changed clock.
    often &= 100 * count > (np.bincount(hour, count) / np.maximum(np.bincount(hour), 1))[hour]
    of_day, count, days = of_day[often], count[often], days[often]
    gap = np.diff(of_day, append=of_day[0] + DAY_NS)
    both = np.minimum(days, np.roll(days, -1))
    # The share of the other days that lack a bar which one day has, around each gap.
    near = min(NEAR, max(len(gap) // 2, 1))
    lacking, of = (
        np.convolve(np.pad(x, (near - 1, near), mode="wrap"), np.ones(2 * near), "valid")
        for x in (count * (days - count), count * (days - 1))
    )
    # Quiet times come in clusters: a day that lacks ten bars on end says no more than one of five.
    empty = np.clip(gap // length - 1, 0, max(5, MINUTE // length)) * both
    chance = ((lacking + 1) / (of + 2)) ** empty
    pause = (gap + length >= PAUSE) & (both > 1) & (chance * 20 * (DAY_NS // length) < 1)
    return of_day, (gap % length == 0) & ~pause, gap


def _trading(seen: np.ndarray) -> np.ndarray:
    """Return `[WEEK_HOURS]` bool, the trading hours of bars at these nanoseconds of `_clock`."""
    slot, week = (seen // HOUR) % WEEK_HOURS, seen // (WEEK_HOURS * HOUR)
    pairs = np.unique(np.stack([slot, week], axis=1), axis=0)
    weeks = week.max() - week.min() + 1
    return np.bincount(pairs[:, 0], minlength=WEEK_HOURS) >= REGULAR * weeks


def _clock(time: np.ndarray, zone: str) -> np.ndarray:
    """Return nanoseconds since Monday, 1969-12-29, by the local clock."""
    local = pd.DatetimeIndex(time).tz_localize("UTC").tz_convert(zone).tz_localize(None)
    return local.to_numpy("datetime64[ns]").astype(np.int64) + MONDAY


def _utc(local: np.ndarray, zone: str, ambiguous: Any = "NaT") -> np.ndarray:
    """Convert local times; an ambiguous one becomes NaT, with True `[N]` the earlier one."""
    # A session that opens in a skipped hour opens as soon as the clock has passed it.
    zoned = pd.DatetimeIndex(local).tz_localize(zone, ambiguous, nonexistent="shift_forward")
    return zoned.tz_convert(None).to_numpy("datetime64[ns]")


def _local(day: int, clock: str) -> np.timedelta64:
    """Return the time since the Monday's midnight by the local clock."""
    if not re.fullmatch(r"[0-2]?\d:[0-5]\d", clock):
        raise ConfigError(f"sessions: {clock!r} is not a time of day; write it as 09:30.")
    hours, minutes = map(int, clock.split(":"))
    return np.timedelta64(day * 24 * 60 + hours * 60 + minutes, "m").astype("timedelta64[ns]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sessions:
    """The hours of a market, week by week, by the clock of its own zone.

    Sessions are known beforehand: whether a bar is the last of its session follows from the bar's
    own time, never from the next bar. Presets are `EVERY_DAY` (24/7, a market without a close),
    `FX_WEEK` and `new_york`.

    Attributes:
      zone: IANA zone, e.g. "America/New_York", with its daylight saving time.
      weekly: sessions as (day, open, day, close), days from Monday = 0 of the week in which the
        session opens, so that the Friday after a Sunday is 11; clocks as "09:30".
      half_days: the close of a session that ends early, by the local date of its close.
      holidays: local dates without trading.

    Raises:
      ConfigError: a zone, a clock or a date that does not exist, or a session that ends before it
        begins.

    Example:
      >>> week = tuple((day, "09:00", day, "17:30") for day in range(5))
      >>> Sessions(zone="Europe/Berlin", weekly=week).holidays
      frozenset()
    """

    zone: str
    weekly: tuple[tuple[int, str, int, str], ...]
    half_days: Mapping[str, str] = dataclasses.field(default_factory=dict)
    holidays: frozenset[str] = frozenset()

    def __post_init__(self):
        if self.zone not in zoneinfo.available_timezones():
            raise ConfigError(f"sessions.zone = {self.zone!r} is not a time zone; give e.g. UTC.")
        for day, opens, last, closes in self.weekly:
            if not _local(day, opens) < _local(last, closes):
                raise ConfigError(
                    f"sessions.weekly: day {day} {opens} to day {last} {closes} does not end after "
                    "it begins; days count from Monday = 0 on, and 11 is the Friday after Sunday."
                )
        dates = [*self.half_days, *self.holidays]
        wrong = [date for date in dates if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(date))]
        if wrong:
            raise ConfigError(f"sessions: {wrong[0]!r} is not a date; write it as 2024-07-03.")
        for closes in self.half_days.values():
            _local(0, closes)

    def hours(self, first: np.datetime64, last: np.datetime64) -> Hours:
        """Return the sessions of the weeks from the day `first` to the day `last`."""
        begun = first.astype("datetime64[D]")
        # Back to a Monday, and two weeks more, which a session may last.
        monday = begun - np.timedelta64(int(begun.astype(np.int64) + 3) % 7 + 14, "D")
        after = last.astype("datetime64[D]") + np.timedelta64(1, "D")
        mondays = np.arange(monday, after, np.timedelta64(7, "D"))
        opened = np.concatenate([mondays + _local(day, clock) for day, clock, _, _ in self.weekly])
        closed = np.concatenate([mondays + _local(day, clock) for _, _, day, clock in self.weekly])
        order = np.argsort(closed, kind="stable")
        opened, closed = opened[order], closed[order]
        if self.half_days:
            known = np.array(sorted(self.half_days), dtype="datetime64[D]")
            clocks = [_local(0, self.half_days[str(day)]) for day in known]
            dates = closed.astype("datetime64[D]")
            row = np.minimum(np.searchsorted(known, dates), len(known) - 1)
            closed = np.where(known[row] == dates, (known + np.array(clocks))[row], closed)
        # A part for each date of a session, so that its holidays can be left out.
        date = opened.astype("datetime64[D]")
        count = (closed - np.timedelta64(1, "ns")).astype("datetime64[D]") - date
        count = count.astype(np.int64) + 1
        part = np.repeat(np.arange(len(count)), count)
        date = date[part] + np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
        kept = ~np.isin(date, np.array(sorted(self.holidays), dtype="datetime64[D]"))
        part, date = part[kept], date[kept].astype("datetime64[ns]")
        opened, closed = opened[part], closed[part]
        bounds = np.maximum(opened, date), np.minimum(closed, date + DAY), opened, closed
        return Hours(*(_utc(x, self.zone, np.ones(len(x), bool)).astype(np.int64) for x in bounds))

    def spans(
        self, time: np.ndarray, length: np.timedelta64, width: np.timedelta64 = DAY
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return begin and end of the session, or of the longer bar within it, of each bar.

        Args:
          time: `[N]` datetime64[ns] UTC, the bars' opens, in any order.
          length: the bars' length. A bar that begins before a session and ends within it belongs
            to it.
          width: of a longer bar; a day stands for the session, and for a day without sessions.

        Returns:
          Two arrays `[N]` datetime64[ns] UTC, NaT outside every session.
        """
        if not len(time):
            return time, time
        hours = self.hours(time.min(), time.max() + length) if self.weekly else None
        wide = width.astype("timedelta64[ns]").astype(np.int64)
        stamps = time.astype("datetime64[ns]").astype(np.int64)
        narrow = length.astype("timedelta64[ns]").astype(np.int64)
        begin, end = bins(stamps, narrow, wide, hours)
        begin = np.where(end == OUTSIDE, OUTSIDE, begin)
        return begin.astype("datetime64[ns]"), np.asarray(end).astype("datetime64[ns]")


class Hours(NamedTuple):
    """Sessions in order, `[S]` int64 nanoseconds since 1970 UTC.

    begin, stop: of a part of a session, a local date other than a holiday. opened, closed: of the
    session.
    """

    begin: np.ndarray
    stop: np.ndarray
    opened: np.ndarray
    closed: np.ndarray

    def of(self, time: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return whether bars lie in a session, and its open and close; numpy or traced.

        Args:
          time: the bars' opens, in nanoseconds.
          length: of a bar, in nanoseconds.
        """
        row = arrays(time).searchsorted(self.stop, time, side="right")
        row = arrays(time).minimum(row, len(self.stop) - 1)
        begin, stop, opened, closed = (arrays(time).asarray(x)[row] for x in self)
        # A bar that begins before the session and ends within it belongs to it.
        begun = (time >= begin) | ((begin == opened) & (time + length > begin))
        return begun & (time < stop), opened, closed


EVERY_DAY = Sessions(zone="UTC", weekly=())
FX_WEEK = Sessions(zone="America/New_York", weekly=((6, "17:00", 11, "17:00"),))


def bar_length(time: np.ndarray) -> np.timedelta64:
    """Return the most frequent step between times `[N]`; NaT for fewer than two."""
    if len(time) < 2:
        return np.timedelta64("NaT", "ns")
    # Nights, weekends and gaps lengthen some steps, so the most frequent one counts.
    steps, counts = np.unique(np.diff(time), return_counts=True)
    return steps[np.argmax(counts)]


def session_ends(bars: Bars, sessions: Sessions) -> np.ndarray:
    """Return whether each bar is the last of its session, by the calendar and its own time.

    A bar as long as a day or longer always is; a bar outside every session never is.

    Args:
      bars: N bars.
      sessions: when they trade.

    Returns:
      `[N]` bool.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[:3]
      >>> nca.session_ends(bars, nca.new_york(2014, 2014)).tolist()
      [True, True, True]
    """
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", sessions=sessions)
    return _last(bars, sessions, ahead=0)


def flat_at_close(
    targets: np.ndarray, bars: Bars, sessions: Sessions, fill: str = "next_open"
) -> np.ndarray:
    """Set targets to 0 at the decision whose fill is the last before the session ends.

    With fill "close" that is the decision at the last bar, which fills at its close. With
    "next_open" it is the one at the bar before, which fills at the last bar's open; a decision at
    the last bar fills at the next session's open and is not changed. Where the last bar of a
    session is missing from the data, the order waits for the next one.

    Args:
      targets: `[N]` or `[N, A]` weights, NaN for no order.
      bars: N bars.
      sessions: when they trade.
      fill: "next_open" or "close", as in `backtest`.

    Returns:
      A new array of the shape of `targets`, float64.

    Raises:
      ConfigError: an unknown fill, or daily bars, which have no close within them.
      BarError: targets of another length than the bars.

    Example:
      >>> import numpy as np
      >>> import nca_trader as nca
      >>> minutes = nca.synthetic.make("martingale", num_bars=300).bars  # from 00:00 UTC
      >>> night = nca.Sessions(zone="UTC", weekly=tuple((d, "00:00", d, "02:00") for d in range(7)))
      >>> targets = flat_at_close(np.ones(300), minutes, night)
      >>> np.flatnonzero(targets == 0).tolist()
      [118]
    """
    if fill not in FILLS:
        raise ConfigError(f"fill = {fill!r} is unknown; there are {' and '.join(FILLS)}.")
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", targets=targets)
    out = np.array(targets, dtype=np.float64)
    if len(out) != len(bars):
        raise BarError(
            f"targets have {len(out)} rows, but there are {len(bars)} bars; give one each."
        )
    if len(bars) > 1 and bar_length(bars.time) >= DAY:
        raise ConfigError("daily bars have no close within them to be flat at; give shorter bars.")
    out[_last(bars, sessions, ahead=0 if fill == "close" else 1)] = 0.0
    return out


def _last(bars: Bars, sessions: Sessions, ahead: int) -> np.ndarray:
    """Return `[N]` bool, whether the bar `ahead` bars later is the last of the same session."""
    length = bar_length(bars.time)
    if len(bars) < 2 or not sessions.weekly:  # no length, or a market that never closes
        return np.zeros(len(bars), dtype=bool)
    if length >= DAY:
        return np.full(len(bars), ahead == 0)
    _, closed = sessions.spans(bars.time, length)
    # By the clock alone: the next bar in the data is not known when this one is traded.
    start = bars.time + ahead * length
    return (start < closed) & (start + length >= closed)


# exchange_calendars knows the same days but takes 0.6 s to import and build; it is a test's oracle.
class NewYorkHolidays(AbstractHolidayCalendar):
    """The days without trading of NYSE and NASDAQ, by their rules since 2014."""

    rules = [  # noqa: RUF012
        Holiday("New Year's Day", month=1, day=1, observance=sunday_to_monday),
        USMartinLutherKingJr,
        USPresidentsDay,
        GoodFriday,
        USMemorialDay,
        Holiday("Juneteenth", month=6, day=19, start_date=JUNETEENTH, observance=nearest_workday),
        Holiday("Independence Day", month=7, day=4, observance=nearest_workday),
        USLaborDay,
        USThanksgivingDay,
        Holiday("Christmas", month=12, day=25, observance=nearest_workday),
    ]


def new_york(first: int, last: int, closed: Iterable[str] = ()) -> Sessions:
    """Return the sessions of NYSE and NASDAQ, 09:30 to 16:00, with holidays and half days.

    The rules do not include days of mourning: give such days, e.g. 2018-12-05 and 2025-01-09, as
    `closed`.

    Args:
      first: the first year.
      last: the last year, included.
      closed: further dates without trading, as "2025-01-09".

    Raises:
      ConfigError: years before 2014, or none.

    Example:
      >>> new_york(2024, 2024).half_days
      {'2024-07-03': '13:00', '2024-12-24': '13:00', '2024-11-29': '13:00'}
    """
    if not FIRST_YEAR <= first <= last:
        raise ConfigError(f"years {first} to {last}: the rules hold from {FIRST_YEAR} on.")
    begin, end, half = pd.Timestamp(first, 1, 1), pd.Timestamp(last, 12, 31), []
    days = NewYorkHolidays().holidays(begin, end)
    # New Year's Day on a Saturday is not observed, as the Friday ends a year.
    holidays = {str(day.date()) for day in days if day.weekday() < 5} | set(closed)
    for thanksgiving in USThanksgivingDay.dates(begin, end):
        eves = [pd.Timestamp(thanksgiving.year, month, day) for month, day in ((7, 3), (12, 24))]
        half += [day for day in eves if day.weekday() < 4]  # a Friday is the holiday observed
        half.append(thanksgiving + pd.Timedelta(1, "D"))
    dates = [str(day.date()) for day in half]
    return Sessions(
        zone="America/New_York",
        weekly=tuple((day, "09:30", day, "16:00") for day in range(5)),
        half_days={date: "13:00" for date in dates if date not in holidays},
        holidays=frozenset(holidays),
    )


def own_sessions(value: Any, name: str) -> Sessions:
    """Return the sessions that your own code gives.

    Args:
      value: `Sessions`, or a function without arguments that returns them.
      name: of it, for messages.

    Raises:
      ConfigError: it is something else.
    """
    if callable(value):
        with own_code(name):
            value = value()
    if not isinstance(value, Sessions):
        raise ConfigError(f"{name}: is {describe(value)}; give nca.Sessions(...).")
    return value


SESSIONS: Registry[Sessions] = Registry(
    "sessions",
    {
        "every_day": EVERY_DAY,
        "fx_week": FX_WEEK,
        "new_york": new_york(FIRST_YEAR, LAST_YEAR),
    },
    own_sessions,
)


@functools.lru_cache(maxsize=8)
def hours_of(name: str) -> Hours | None:
    """Return the sessions of `SESSIONS` over all years of bars; None for those without a close."""
    sessions = SESSIONS[name]
    years = np.datetime64("1970-01-01"), np.datetime64(f"{LAST_YEAR}-12-31")
    return sessions.hours(*years) if sessions.weekly else None


FORGET.append(hours_of.cache_clear)


def bins(time: Tensor, length: int, width: int, hours: Hours | None) -> tuple[Tensor, Tensor]:
    """Return begin and end of the longer bar that each bar belongs to, numpy or traced.

    Longer bars count from midnight UTC, or from each session's open, and the last one of a session
    ends with it. One of a day is the session.

    Args:
      time: the bars' opens, in nanoseconds since 1970 UTC.
      length: of a bar, in nanoseconds.
      width: of a longer bar, a multiple of `length` that divides a day.
      hours: the sessions; None for bars around the clock.

    Returns:
      Two arrays like `time`; the end is `OUTSIDE` outside every session.
    """
    if hours is None:
        begin = time // width * width
        return begin, begin + width
    xp = arrays(time)
    inside, begin, end = hours.of(time, length)
    if width < DAY_NS:
        # A bar that begins before the session belongs to its first longer bar.
        begin = begin + xp.maximum(time - begin, 0) // width * width
        end = xp.minimum(begin + width, end)
    return begin, xp.where(inside, end, OUTSIDE)
