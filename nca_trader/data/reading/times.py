"""The times of a file in UTC.

The first rows show the form of all of them: typed times, ISO 8601, numbers (dates or epochs), or a
date in another order of its parts, with or without a clock and a zone.
"""

from __future__ import annotations

import re
import zoneinfo
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nca_trader.config.reading import refuse_times
from nca_trader.data.reading.faults import Code, Fault
from nca_trader.errors import argument

# A whole number is a date such as 20181231, or an epoch whose unit follows from its size.
EPOCHS = ((1e17, 1), (1e14, 10**3), (1e11, 10**6), (1e8, 10**9))  # smallest, nanoseconds per unit
MICROSECONDS = 1e14
STAMPS = (1.8e13, 2.2e13)  # 20181231143000; as milliseconds these would be centuries away
SERIALS = (2e4, 8e4)  # days since 1900 or 1904, as spreadsheets count; which, no number shows
OFFSET = r"(?:[T ]\d.*[+-]\d\d(?::?\d\d)?|Z|UTC)$"
# A time outside these counts as not readable.
EARLIEST, LATEST = np.datetime64("1800-01-01", "ns"), np.datetime64("2200-01-01", "ns")
EPOCH, UNIT_BEGINS = np.datetime64(0, "ns"), np.datetime64(10**17, "ns")  # the latter: all EPOCHS
NAT, HOUR = np.datetime64("NaT", "ns"), np.timedelta64(1, "h")
HEAD = 1 << 16  # rows that show the form of the times; epochs of 1970 alone would show no unit
CAPACITY = 1 << 16  # rows of an array to begin with
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
TEXT = (
    r"^(?:[A-Za-z]{3},? )?"
    r"(?P<date>\d{8}|\d{4}[./-]\d\d?[./-]\d\d?|\d\d?[./-]\d\d?[./-](?:\d{4}|\d\d)"
    r"|\d\d?[ -][A-Za-z]{3,9}[ -](?:\d{4}|\d\d)|[A-Za-z]{3,9}\.? \d\d?,? \d{4})"
    r"(?:(?:T|,? +|[-:]|)(?P<clock>\d\d?:\d\d(?::\d\d(?:\.\d+)?)?|\d{6}(?:\d{3}|\d{6})?)"
    r" *(?P<half>[AaPp][Mm]\b)? *(?P<zone>[A-Za-z][A-Za-z0-9_+/:-]*|[+-]\d\d(?::?\d\d)?)?)?$"
)
# What is known of a time; the rows of each are counted, and the first one's text is shown.
UNREAD, NAIVE, AWARE, EITHER, DAY_FIRST, MONTH_FIRST = (1 << i for i in range(6))


def holds_numbers(column: pd.Series) -> bool:
    """Return whether a column's type is real numbers; booleans and complex numbers are not."""
    kinds = pd.api.types
    other = kinds.is_bool_dtype(column.dtype) or kinds.is_complex_dtype(column.dtype)
    return kinds.is_numeric_dtype(column.dtype) and not other


def is_clock(column: pd.Series) -> bool:
    """Return whether most texts of a column are times of day alone, such as 9:30 PM or 093000."""
    clock = r"\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm])?|\d{1,6}"
    return bool(_texts(column).str.fullmatch(clock).mean() > 0.5)


def joined(date: pd.Series, clock: pd.Series, seen: dict[str, int]) -> pd.Series:
    """Return the times of a date and a clock in two columns.

    A clock of digits is 930 or 0930, or 93000 or 093000, as the longest of the first chunk shows;
    `seen` keeps its length. A longer one is not read.
    """
    text = _texts(clock)
    digits = text.str.fullmatch(r"\d{1,6}").to_numpy(bool, na_value=False)
    if digits.any():
        longest = seen.setdefault("digits", int(text[digits].str.len().max()))
        form, width = (r"^(\d\d)(\d\d)$", 4) if longest in (3, 4) else (r"^(\d\d)(\d\d)(\d\d)$", 6)
        with_colons = text.str.zfill(width).str.replace(
            form, r"\1:\2" + r":\3" * (width == 6), regex=True
        )
        text = text.mask(digits, with_colons)
    return date.astype("str").str.strip() + " " + text


class Growing:
    """An array that chunks are added to.

    It doubles as it grows, and no page of it takes memory before it is written to. A list of the
    chunks, joined at the end, would take twice the memory: the freed chunks leave fragments.
    """

    def __init__(self, dtype: np.dtype | type | str):
        self._array, self._size = np.empty(CAPACITY, dtype), 0

    def add(self, values: np.ndarray) -> None:
        """Append `values` `[n]`."""
        size = self._size + len(values)
        if size > len(self._array):
            grown = np.empty(max(2 * len(self._array), size), self._array.dtype)
            grown[: self._size] = self.whole
            self._array = grown
        self._array[self._size : size] = values
        self._size = size

    @property
    def whole(self) -> np.ndarray:
        """`[size]` all that was added, not a copy."""
        return self._array[: self._size]


class TimeReader:
    """Reads the times of a file chunk by chunk, in the one form that most of its first rows have.

    The first HEAD rows show the form, however the file is cut into chunks; a later row in another
    form cannot be read. Times stay as written until all are known, as a late date may show which
    number of 01/02/2018 is the day.

    Args:
      timezone: IANA zone of times without UTC offset, or an offset; None: UTC.
      dates: "dmy", "mdy", or None: as the file proves.

    Raises:
      BarError: there is no such zone, or no such order of dates.
    """

    def __init__(self, timezone: str | None, dates: str | None = None):
        refuse_times(timezone, dates)
        self._timezone, self._dates = timezone, dates
        self._form, self._size, self._mixed = "", float("nan"), False
        self._head: list[pd.Series] = []  # the first rows, until there are HEAD
        self._time, self._mark = Growing("datetime64[ns]"), Growing(np.uint8)
        # The zone that is written in each row; times of the first, UTC, are moments already.
        self._zone, self._zones = Growing(np.int16), {"": 0}
        self._texts: dict[int, str] = {}  # the first row's, by what is known of it
        self._days: dict[str, tuple[str, np.datetime64, int]] = {}

    def add(self, column: pd.Series) -> None:
        """Take the next rows of the file."""
        moments = pd.api.types.is_datetime64_any_dtype(column.dtype)
        if not self._form and not moments:
            self._head.append(column)
            if sum(map(len, self._head)) >= HEAD:
                self._flush()
            return
        self._flush()
        # Of a file that begins with typed times, texts are read as ISO 8601.
        self._form = self._form or "iso"
        if moments and self._form in ("iso", "number"):
            aware = getattr(column.dtype, "tz", None) is not None
            times = column.dt.tz_convert(None) if aware else column
            self._append(times, np.full(len(column), AWARE if aware else NAIVE), column)
        else:
            self._take(column)

    def _flush(self) -> None:
        """Find the form of the first rows, "iso", "number" or the order of a date, and take these.

        A form that only some rows have is chosen where no other has more.
        """
        head, self._head = self._head, []
        if not head:
            return
        text = pd.concat([_texts(column) for column in head])[:HEAD]
        self._form, iso = "iso", _iso(text).notna().mean()
        if iso <= 0.5:
            numbers = pd.to_numeric(text, errors="coerce")
            given = [column if holds_numbers(column) else _texts(column) for column in head]
            given = pd.to_numeric(pd.concat(given)[:HEAD], errors="coerce")
            self._size = float(given.abs().median())
            known = numbers.notna().mean() > 0.5 and self._size < EPOCHS[0][0] * 100
            parts = _parts(text)
            dated = parts["date"].dropna()
            if known and _of_numbers(numbers, self._size)[0].notna().mean() > 0.5:
                self._form = "number"
            elif len(dated) > iso * len(text):
                order = [self._day(date)[0] for date in dated.unique()]
                self._form = pd.Series(order).mode()[0]
        for column in head:
            self._take(column)

    def _take(self, column: pd.Series) -> None:
        """Take rows in the form found."""
        if self._form == "number":
            numbers = column if holds_numbers(column) else _texts(column)
            numbers = pd.to_numeric(numbers, errors="coerce")
            times, moments = _of_numbers(numbers, self._size)
            if _unit(self._size) == 10**6 and (times.notna() & (numbers >= MICROSECONDS)).any():
                self._mixed = True
            return self._append(times, np.full(len(times), AWARE if moments else NAIVE), column)
        text = _texts(column)
        if self._form == "iso":
            aware = text.str.contains(OFFSET, regex=True).to_numpy(dtype=bool, na_value=False)
            return self._append(_iso(text), np.where(aware, AWARE, NAIVE), column)
        parts = _parts(text)
        code, dates = pd.factorize(parts["date"])  # few days for many rows
        days = [self._day(str(date)) for date in dates]
        fits = [order == self._form for order, _, _ in days]
        # The last is that of rows without a date.
        day = np.array([d if f else NAT for (_, d, _), f in zip(days, fits, strict=True)] + [NAT])
        mark = np.array([m if f else 0 for (*_, m), f in zip(days, fits, strict=True)] + [0])
        zone, shift = self._zones_of(parts["zone"])
        mark = mark[code] | np.where(zone == 0, AWARE, NAIVE)
        times = pd.Series(day[code] + _since_midnight(parts) - shift)
        self._append(times, mark, text, np.maximum(zone, 0))

    def _day(self, text: str) -> tuple[str, np.datetime64, int]:
        """Return the order of a date's parts, the date, and what its numbers show of the order.

        Without an order given, a date of two numbers and a year is read as days first, and as
        months first where the days cannot come first. `finish` exchanges them if months do.
        """
        if text in self._days:
            return self._days[text]
        parts = [part for part in re.split(r"[./, -]+", text) if part]
        mark, order = 0, "ymd"
        if len(parts) == 1:
            parts = [text[:4], text[4:6], text[6:]]
        elif len(parts[0]) < 4 or parts[0].isalpha():
            named = parts[0].isalpha()
            order = "Mdy" if named else "dMy" if parts[1].isalpha() else "day"
            a, b, year = parts
            if order == "day":
                first, second = (
                    (len(year) == 4 and int(number) > 12 >= int(other))
                    for number, other in ((a, b), (b, a))
                )
                mark = EITHER | DAY_FIRST * first | MONTH_FIRST * second
                named = self._dates == "mdy" or (self._dates is None and second)
            day, month = (b, a) if named else (a, b)
            if len(year) == 2:
                year = str((1900 if int(year) > 68 else 2000) + int(year))
            parts = [year, month, day]
        year, month, day = parts
        if month.isalpha():
            near = [i for i, name in enumerate(MONTHS, 1) if month[:3].lower() == name]
            month = str(near[0]) if near else "0"
        try:
            found = np.datetime64(f"{int(year):04}-{int(month):02}-{int(day):02}", "ns")
        except ValueError:
            found = NAT
        self._days[text] = order, found, 0 if np.isnat(found) else mark
        return self._days[text]

    def _zones_of(self, column: pd.Series) -> tuple[np.ndarray, np.ndarray]:
        """Return the zone of each row, 0 of UTC and -1 of none, and the offset that is left."""
        code, names = pd.factorize(column)
        zone, shift = np.full(len(names) + 1, -1), np.zeros(len(names) + 1, "timedelta64[ns]")
        for i, name in enumerate(map(str, names)):
            name = re.sub(r"^(?:GMT|UTC)(?=[+-]\d\d:?\d\d$)", "", name)
            sign = name[0]
            if name.upper() in ("Z", "UTC", "GMT"):
                zone[i] = 0
            elif sign in "+-":
                hours, minutes = int(name[1:3]), int(name[3:].strip(":") or 0)
                zone[i], shift[i] = 0, np.timedelta64(int(f"{sign}1") * (60 * hours + minutes), "m")
            elif name in zoneinfo.available_timezones():
                zone[i] = self._zones.setdefault(name, len(self._zones))
            else:
                shift[i] = np.timedelta64("NaT")
        return zone[code], shift[code]

    def _append(
        self, times: pd.Series, mark: np.ndarray, column: pd.Series, zone: np.ndarray | int = 0
    ) -> None:
        """Append times `[n]` as they are written; `column` is their text."""
        wild = (times.isna() | (times < EARLIEST) | (times > LATEST)).to_numpy()
        mark = np.where(wild, UNREAD, mark).astype(np.uint8)
        for bit in (UNREAD, NAIVE, EITHER, DAY_FIRST, MONTH_FIRST):
            if bit not in self._texts and (mark & bit).any():
                value = column.iloc[int(np.argmax(mark & bit))]
                if isinstance(value, pd.Timestamp) and not 1 <= value.year <= 9999:
                    value = value.to_datetime64()  # Python's dates, and so pandas, cannot print it
                self._texts[bit] = str(value)
        self._time.add(times.mask(wild).to_numpy("datetime64[ns]"))
        self._mark.add(mark)
        self._zone.add(np.broadcast_to(zone, len(mark)))

    @property
    def notes(self) -> list[str]:
        """Sentences for the note of the bars, after `finish`."""
        return ["Times are in milliseconds and, of other rows, in microseconds."] * self._mixed

    def finish(self) -> tuple[np.ndarray, list[Fault]]:
        """Return all times in UTC `[rows]`, NaT where they cannot be known, and their faults."""
        self._flush()
        time, mark = self._time.whole, self._mark.whole
        if self._form == "number":
            self._settle_units(time, mark)
        if self._form == "day" and self._dates is None and (mark & EITHER).any():
            fault = self._settle_order(time, mark)
            if fault is not None:
                return np.full(len(time), NAT), [fault]
        faults, unread = [], (mark & UNREAD) > 0
        if unread.any():
            say, remedy = f"time {self._texts[UNREAD]!r} can't be read", ""
            if SERIALS[0] < self._size < SERIALS[1]:
                say += ": a spreadsheet's count of days"
                remedy = "Give the column the format of a date and save the file again"
            faults.append(Fault(Code.D013, say, unread, remedy))
        naive = (mark & NAIVE) > 0
        skipped = np.zeros(len(time), dtype=bool)
        for name, place in self._zones.items():
            rows, zone = naive & (self._zone.whole == place), name or self._timezone
            if zone is None or not rows.any():
                continue
            local = time[rows]
            time[rows] = _utc(local, zone)
            lost = rows & np.isnat(time)
            if lost.any() and not skipped.any():
                first = pd.Timestamp(local[np.argmax(lost[rows])])
                say = f"time '{first}' is skipped or repeated by the clock of {zone}"
            skipped |= lost
        if skipped.any():
            faults.append(Fault(Code.D016, say, skipped))
        return time, faults + self._unplaced(time, naive & (self._zone.whole == 0))

    def _unplaced(self, time: np.ndarray, naive: np.ndarray) -> list[Fault]:
        """Return the fault of times whose zone is neither written nor given."""
        if not naive.any() or self._timezone is not None:
            return []
        aware = int(((self._mark.whole & AWARE) > 0).sum())
        local = time[naive]
        if not aware and not (local - local.astype("datetime64[D]")).any():
            return []  # dates
        # The example is a zone whose clock has each of these times once.
        zones = ("America/New_York", "UTC")
        zone = next(name for name in zones if not np.isnat(_utc(local, name)).any())
        remedy = f"{argument('timezone')}, e.g. {argument('timezone', zone)}"
        say = f"time {self._texts[NAIVE]!r} has no"
        if aware:
            say = f"{say} UTC offset but {aware:,} others do"
            return [Fault(Code.D014, say, naive, f"Add an offset or pass {remedy}")]
        return [Fault(Code.D015, f"{say} time zone", naive, f"Add a UTC offset or pass {remedy}")]

    def _settle_units(self, time: np.ndarray, mark: np.ndarray) -> None:
        """Mark epochs in a coarser unit than the others, e.g. seconds after milliseconds.

        In the others' unit these are of 1970 or 1971, and nothing leads from there to the others.
        Milliseconds before microseconds are read, as an exchange changed from one to the other.
        """
        unit = _unit(self._size)
        early = (time >= EPOCH) & (time < UNIT_BEGINS)
        if unit is None or not early.any():
            return
        if time[early].max() >= UNIT_BEGINS - (UNIT_BEGINS - EPOCH) // 2:
            return
        if unit == 10**3:
            time[early] = EPOCH + (time[early] - EPOCH) * 1000
            self._mixed = True
            return
        if not (mark[: int(np.argmax(early))] & UNREAD).any():
            self._texts[UNREAD] = str(int(time[early][0].astype(np.int64)) // unit)
        mark[early], time[early] = UNREAD, NAT

    def _settle_order(self, time: np.ndarray, mark: np.ndarray) -> Fault | None:
        """Exchange day and month where the file proves that months come first.

        Returns:
          The fault where no date shows the order, or some show another than others.
        """
        known, day_first, month_first = ((mark & b) > 0 for b in (EITHER, DAY_FIRST, MONTH_FIRST))
        other = time.copy()
        open_ = known & ~day_first & ~month_first
        other[open_] = exchanged(time[open_])
        if day_first.any() and month_first.any():
            few, most = sorted((DAY_FIRST, MONTH_FIRST), key=lambda bit: ((mark & bit) > 0).sum())
            say = f"time {self._texts[few]!r} has day and month in another order than "
            return Fault(Code.D017, f"{say}{self._texts[most]!r}", (mark & few) > 0)
        if month_first.any():
            time[:] = other
            return None
        if day_first.any():
            return None
        say = f"time {self._texts[EITHER]!r}: no date shows which is the day, which the month"
        ways = [argument("dates", name) for name in ("dmy", "mdy")]
        ordered = [runs_one_way(each[known]) for each in (time, other)]
        if ordered[0] != ordered[1]:
            best = ordered.index(True)
            ways = [f"{ways[best]}, by which the times are in order,", ways[1 - best]]
        return Fault(Code.D017, say, known, f"Pass {' or '.join(ways)}")


def _texts(column: pd.Series) -> pd.Series:
    """Return texts; whole numbers without the point that pandas adds where some are missing."""
    if holds_numbers(column):
        column = column.where(column % 1 == 0).astype("Int64")
    return column.astype("str").str.strip()


def _iso(text: pd.Series) -> pd.Series:
    """Return times of ISO 8601, NaT for other texts."""
    times = pd.to_datetime(text, format="ISO8601", errors="coerce", utc=True)
    size = text.str.len()
    # "2018" is not a day, and an epoch such as 1801010100 is not an hour of the year 1801.
    none = (size < len("2018-1-2")) | ((size > len("20180102")) & text.str.isdigit())
    times = times.mask(none.to_numpy(dtype=bool, na_value=True))
    return times.dt.tz_convert(None)


def _parts(text: pd.Series) -> pd.DataFrame:
    """Return the date, clock, half of the day and zone of texts, missing where there is none."""
    found: Any = pc.call_function(
        "extract_regex",
        [pa.array(text, pa.large_string(), from_pandas=True)],
        pc.ExtractRegexOptions(TEXT),
    )
    columns = dict(zip(found.type.names, found.flatten(), strict=True))
    frame = pd.DataFrame({name: part.to_pandas() for name, part in columns.items()}, dtype="str")
    return frame.mask(frame == "").set_axis(text.index)


def _since_midnight(parts: pd.DataFrame) -> np.ndarray:
    """Return the time of day, of a clock of 24 hours or of two halves; 0 where there is none."""
    clock = parts["clock"].fillna("00:00")
    for digits, colons in (("", r"\1:\2:\3"), (r"(\d+)", r"\1:\2:\3.\4")):
        clock = clock.str.replace(rf"^(\d\d)(\d\d)(\d\d){digits}$", colons, regex=True)
    time = pd.to_datetime("1970-01-01 " + clock, format="ISO8601", errors="coerce", utc=True)
    since = time.dt.tz_convert(None).to_numpy("datetime64[ns]") - EPOCH
    half = parts["half"].str.lower()
    if half.notna().any():
        hour = since // HOUR
        since = since + 12 * HOUR * ((half == "pm").to_numpy(bool, na_value=False) & (hour < 12))
        since = since - 12 * HOUR * ((half == "am").to_numpy(bool, na_value=False) & (hour == 12))
        since[half.notna().to_numpy() & ((hour < 1) | (hour > 12))] = np.timedelta64("NaT")
    return since


def _unit(size: float) -> int | None:
    """Return the nanoseconds per unit of epochs of that size; None for dates and stamps."""
    if STAMPS[0] <= size < STAMPS[1]:
        return None
    return next((unit for least, unit in EPOCHS if size >= least), None)


def _of_numbers(column: pd.Series, size: float) -> tuple[pd.Series, bool]:
    """Return times of whole numbers of about this `size`; whether they are epochs, not dates."""
    unit = _unit(size)
    if unit is None:
        stamps = STAMPS[0] <= size < STAMPS[1]
        whole = column.where(column % 1 == 0).astype("Int64").astype("str")
        form = "%Y%m%d%H%M%S" if stamps else "%Y%m%d"
        return pd.to_datetime(whole, format=form, errors="coerce"), False
    units: Any = unit
    if unit == 10**6:  # later rows may be in microseconds, which as milliseconds are far away
        units = np.where(column.abs() >= MICROSECONDS, 10**3, unit)
    inside = column.where(column.abs() < 2.0**63 / units)  # else the product would wrap around
    return pd.to_datetime(inside * units, unit="ns", errors="coerce"), True


def _utc(local: np.ndarray, zone: str) -> np.ndarray:
    """Return times by the clock of a zone in UTC; NaT where it skips or repeats one."""
    index = pd.DatetimeIndex(local).tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
    return index.tz_convert(None).to_numpy("datetime64[ns]")


def exchanged(time: np.ndarray) -> np.ndarray:
    """Return times with day and month exchanged, both at most 12."""
    month, day = time.astype("datetime64[M]"), time.astype("datetime64[D]")
    january = time.astype("datetime64[Y]").astype("datetime64[M]")
    new = (january + (day - month).astype(int)).astype("datetime64[D]")
    return new + (month - january).astype(int).astype("timedelta64[D]") + (time - day)


def runs_one_way(time: np.ndarray, inside: np.ndarray | bool = True) -> bool:
    """Return whether times never decrease or never increase, in the steps that are `inside`."""
    steps = np.diff(time).astype(np.int64) * inside
    return bool((steps >= 0).all() or (steps <= 0).all())
