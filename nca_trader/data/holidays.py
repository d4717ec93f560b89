"""The New York exchanges' holidays and half days, by their rules since 2014."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from nca_trader.data.calendar import Sessions
from nca_trader.errors import ConfigError

# exchange_calendars knows the same days but takes 0.6 s to import and build; it is a test's oracle.
MONDAY, THURSDAY = 0, 3
FIRST_YEAR, JUNETEENTH = 2014, 2022  # before 2014 some half days were other ones


def new_york(first: int, last: int, closed: Iterable[str] = ()) -> Sessions:
    """Returns the sessions of NYSE and NASDAQ, 09:30 to 16:00, with holidays and half days.

    The rules do not include days of mourning: give such days, e.g. 2018-12-05 and 2025-01-09, as
    `closed`.

    Args:
      first, last: the years, both included.
      closed: further dates without trading, as "2025-01-09".

    Raises:
      ConfigError: years before 2014, or none.

    Example:
      >>> new_york(2024, 2024).half_days
      {'2024-07-03': '13:00', '2024-12-24': '13:00', '2024-11-29': '13:00'}
    """
    if not FIRST_YEAR <= first <= last:
        raise ConfigError(f"years {first} to {last}: the rules hold from {FIRST_YEAR} on.")
    years = range(first, last + 1)
    holidays = {str(day) for year in years for day in _holidays(year)} | set(closed)
    half = {str(day): "13:00" for year in years for day in _half_days(year)}
    return Sessions(
        zone="America/New_York",
        weekly=tuple((day, "09:30", day, "16:00") for day in range(5)),
        half_days={day: close for day, close in half.items() if day not in holidays},
        holidays=frozenset(holidays),
    )


def _nth(year: int, month: int, weekday: int, n: int) -> datetime.date:
    """Returns the n-th weekday of its kind in a month; the last one for n = -1."""
    if n < 0:
        end = datetime.date(year + month // 12, month % 12 + 1, 1) - datetime.timedelta(1)
        return end - datetime.timedelta((end.weekday() - weekday) % 7)
    start = datetime.date(year, month, 1)
    return start + datetime.timedelta((weekday - start.weekday()) % 7 + 7 * (n - 1))


def _observed(day: datetime.date) -> datetime.date:
    """Moves a Saturday's holiday to Friday and a Sunday's to Monday."""
    return day + datetime.timedelta({5: -1, 6: 1}.get(day.weekday(), 0))


def _good_friday(year: int) -> datetime.date:
    """Returns Good Friday by the Gregorian computus (Meeus, Jones, Butcher)."""
    a, (b, c) = year % 19, divmod(year, 100)
    d, e = divmod(b, 4)
    g = (8 * b + 13) // 25
    h = (19 * a + b - d - g + 15) % 30
    i, k = divmod(c, 4)
    m = (32 + 2 * e + 2 * i - h - k) % 7
    n = (a + 11 * h + 22 * m) // 451
    month, day = divmod(h + m - 7 * n + 114, 31)
    return datetime.date(year, month, day + 1) - datetime.timedelta(2)


def _holidays(year: int) -> list[datetime.date]:
    """Returns the days without trading."""
    new_year = datetime.date(year, 1, 1)
    days = [
        _nth(year, 1, MONDAY, 3),  # Martin Luther King Jr. Day
        _nth(year, 2, MONDAY, 3),  # Presidents' Day
        _good_friday(year),
        _nth(year, 5, MONDAY, -1),  # Memorial Day
        _observed(datetime.date(year, 7, 4)),
        _nth(year, 9, MONDAY, 1),  # Labor Day
        _nth(year, 11, THURSDAY, 4),  # Thanksgiving
        _observed(datetime.date(year, 12, 25)),
    ]
    if new_year.weekday() != 5:  # on a Saturday it is not observed: the Friday ends a year
        days.append(_observed(new_year))
    if year >= JUNETEENTH:
        days.append(_observed(datetime.date(year, 6, 19)))
    return days


def _half_days(year: int) -> list[datetime.date]:
    """Returns the days that close at 13:00."""
    days = [datetime.date(year, 7, 3), datetime.date(year, 12, 24)]
    days = [day for day in days if day.weekday() < 4]  # on a Friday the holiday itself is observed
    return [*days, _nth(year, 11, THURSDAY, 4) + datetime.timedelta(1)]
