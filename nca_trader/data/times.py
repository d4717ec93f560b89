"""The times of a file in UTC: ISO 8601, dates in either order, compact digits, epochs."""

from __future__ import annotations

import difflib
import zoneinfo

import numpy as np
import pandas as pd

from nca_trader.data.faults import Fault
from nca_trader.errors import BarError

DATES = {"dmy": "31.12.2018", "mdy": "12/31/2018"}
# A whole number as a time is a date such as 20181231, or an epoch whose unit its size tells.
EPOCHS = ((1e17, 1), (1e14, 10**3), (1e11, 10**6), (1e8, 10**9))  # smallest, nanoseconds a unit
STAMPS = (1.8e13, 2.2e13)  # 20181231143000; as milliseconds these would be centuries away
OFFSET = r"(?:[T ]\d.*[+-]\d\d(?::?\d\d)?|Z|UTC)$"
EARLIEST, LATEST = np.datetime64("1800-01-01"), np.datetime64("2200-01-01")
DAY_AND_MONTH = r"^(?P<a>\d{1,2})[./-](?P<b>\d{1,2})[./-](?P<year>\d{4})$"
DIGITS = r"\d{8}[ T]?\d{6}(?:\d{3}|\d{6})?"


def read_times(
    column: pd.Series, timezone: str | None, dates: str | None = None
) -> tuple[pd.Series, list[Fault]]:
    """Times in UTC as datetime64[ns] without zone, NaT where they are at fault, and the faults.

    Text is ISO 8601 (2018-12-31, 2018-12-31T14:30:00Z, ...), which no one reads as another day;
    or digits (20181231 143000); or a date in the order `dates`, of `DATES`. Without `dates` that
    order must be proved: a number above 12 is no month.
    """
    _known(timezone, dates)
    faults = []
    aware = np.full(len(column), getattr(column.dtype, "tz", None) is not None)
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        times = column
    elif pd.api.types.is_numeric_dtype(column.dtype):
        times, aware[:] = _of_numbers(column)
    else:
        times, aware, faults = _of_text(column.astype("str").str.strip(), dates)
    times = times.dt.tz_convert(None) if getattr(times.dtype, "tz", None) else times
    wild = (times.isna() | (times < EARLIEST) | (times > LATEST)).to_numpy()
    times = times.mask(wild).astype("datetime64[ns]")
    told = [fault.mask for fault in faults if fault.mask is not None]
    unread = wild & ~np.logical_or.reduce(told) if told else wild
    if unread.any():
        say = f"time {str(column[unread].iloc[0])!r} can't be read"
        remedy = "Write it as 2018-12-31 or 2018-12-31T14:30:00Z"
        faults.append(Fault("D013", say, remedy, unread, ("drop-bad",)))
    return times, faults + _localise(times, column, ~aware & ~wild, aware, timezone)


def _known(timezone: str | None, dates: str | None) -> None:
    if timezone is not None and timezone not in zoneinfo.available_timezones():
        near = difflib.get_close_matches(timezone, zoneinfo.available_timezones(), 1, 0.0)[0]
        raise BarError(f"unknown time zone {timezone!r}; did you mean {near!r}?")
    if dates is not None and dates not in DATES:
        known = " or ".join(f"{name} ({example})" for name, example in DATES.items())
        raise BarError(f"unknown order of dates {dates!r}; give {known}.")


def _localise(
    times: pd.Series,
    column: pd.Series,
    naive: np.ndarray,
    aware: np.ndarray,
    timezone: str | None,
) -> list[Fault]:
    """Takes the `naive` of `times` from `timezone` to UTC, in place; what is wrong with that."""
    if not naive.any():
        return []
    if timezone is not None:
        local = times[naive].dt.tz_localize(timezone, ambiguous="NaT", nonexistent="NaT")
        times[naive] = local.dt.tz_convert(None)
        skipped = naive & times.isna().to_numpy()
        if not skipped.any():
            return []
        say = f"time {str(column[skipped].iloc[0])!r} is skipped or repeated by the clock of"
        remedy = "Add a UTC offset to the time"
        return [Fault("D016", f"{say} {timezone}", remedy, skipped, ("drop-bad",))]
    if aware.any():
        say = f"time {str(column[naive].iloc[0])!r} has no UTC offset but {aware.sum():,} others do"
        remedy = "Add an offset or pass --timezone, e.g. America/New_York"
        return [Fault("D014", say, remedy, naive)]
    if (times[naive] != times[naive].dt.normalize()).any():
        say = f"time {str(column[naive].iloc[0])!r} has no time zone"
        remedy = "Add a UTC offset or pass --timezone, e.g. UTC or America/New_York"
        return [Fault("D015", say, remedy, naive)]
    return []


def _of_numbers(column: pd.Series) -> tuple[pd.Series, bool]:
    """Times of whole numbers, and whether they are moments (epochs) and not dates."""
    size = column.abs().median()
    unit = next((unit for least, unit in EPOCHS if size >= least), None)
    stamps = STAMPS[0] <= size < STAMPS[1]
    if unit is None or stamps:
        whole = column.where(column % 1 == 0).astype("Int64").astype("str")
        form = "%Y%m%d%H%M%S" if stamps else "%Y%m%d"
        return pd.to_datetime(whole, format=form, errors="coerce"), False
    inside = column.where(column.abs() < 2**63 // unit)  # else the product would wrap around
    return pd.to_datetime(inside * unit, unit="ns", errors="coerce"), True


def _of_text(text: pd.Series, dates: str | None) -> tuple[pd.Series, np.ndarray, list[Fault]]:
    """Times of texts, all in the one form that most of them have; which have an offset; faults."""
    aware = text.str.contains(OFFSET, regex=True).to_numpy(dtype=bool, na_value=False)
    times = pd.to_datetime(text, format="ISO8601", errors="coerce", utc=True)
    times = times.mask((text.str.len() < len("2018-1-2")).to_numpy())  # "2018" is not a day
    if times.notna().mean() > 0.5:
        return times, aware, []
    numbers = pd.to_numeric(text, errors="coerce")
    if numbers.notna().mean() > 0.5 and numbers.abs().median() < EPOCHS[0][0] * 100:
        times, moments = _of_numbers(numbers)
        if times.notna().mean() > 0.5:
            return times, np.full(len(text), moments), []
    if text.str.fullmatch(DIGITS).mean() > 0.5:
        digits = text.str.replace("[ T]", "", regex=True)
        cuts = (4, "-"), (6, "-"), (8, " "), (10, ":"), (12, ":"), (14, ".")
        iso, begin = digits.str.slice(0, 0), 0
        for end, sign in cuts:
            iso, begin = iso + digits.str.slice(begin, end) + sign, end
        iso = iso + digits.str.slice(14).replace("", "0")
        times = pd.to_datetime(iso, format="ISO8601", errors="coerce", utc=True)
        return times, np.zeros(len(text), dtype=bool), []
    # Few texts for many rows: the days.
    code, days = pd.factorize(text.str.replace("[ T].*$", "", regex=True))
    parts = pd.Series(days, dtype="str").str.extract(DAY_AND_MONTH)
    known = parts["a"].notna().to_numpy()
    if known[code].mean() <= times.notna().mean():
        return times, aware, []
    mask, iso, faults = _in_order(text, code, parts, dates)
    if faults:
        return pd.Series(pd.NaT, text.index, dtype="datetime64[ns, UTC]"), aware, faults
    clock = text.str.replace("^[^ T]*[ T]*", "", regex=True).where(mask, "").replace("", "00:00")
    full = pd.Series(iso.take(code).to_numpy(), text.index, dtype="str") + " " + clock
    return pd.to_datetime(full, format="ISO8601", errors="coerce", utc=True), aware, []


def _in_order(
    text: pd.Series, code: np.ndarray, parts: pd.DataFrame, dates: str | None
) -> tuple[np.ndarray, pd.Series, list[Fault]]:
    """Which rows have a date of `parts`, its ISO texts, and the fault if no order is proved."""
    a, b = (pd.to_numeric(parts[name]).to_numpy(np.float64, na_value=0) for name in "ab")
    mask, day_first, month_first = parts["a"].notna().to_numpy()[code], a > 12, b > 12
    faults = []
    if dates is None and day_first.any() and month_first.any():
        few, most = sorted((day_first[code], month_first[code]), key=np.count_nonzero)
        say = f"time {text[few].iloc[0]!r} has day and month in another order than "
        faults.append(Fault("D017", say + repr(text[most].iloc[0]), "Write them alike", few))
    elif dates is None and not day_first.any() and not month_first.any():
        say = f"time {text[mask].iloc[0]!r}: no date shows which is the day, which the month"
        ways = " or ".join(f"--dates {name}" for name in DATES)
        faults.append(Fault("D017", say, f"Pass {ways}", mask))
    order = "ba" if dates == "dmy" or (dates is None and day_first.any()) else "ab"
    month, day = (parts[name].str.zfill(2) for name in order)
    return mask, parts["year"] + "-" + month + "-" + day, faults
