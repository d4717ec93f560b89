"""The times of a file in UTC: ISO 8601, dates in either order, compact digits, epochs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from nca_trader.config.reading import refuse_times

# A whole number is a date such as 20181231, or an epoch whose unit follows from its size.
EPOCHS = ((1e17, 1), (1e14, 10**3), (1e11, 10**6), (1e8, 10**9))  # smallest, nanoseconds per unit
STAMPS = (1.8e13, 2.2e13)  # 20181231143000; as milliseconds these would be centuries away
OFFSET = r"(?:[T ]\d.*[+-]\d\d(?::?\d\d)?|Z|UTC)$"
# A time outside these counts as not readable.
EARLIEST, LATEST = np.datetime64("1800-01-01"), np.datetime64("2200-01-01")
DAY_AND_MONTH = r"^(?P<a>\d{1,2})[./-](?P<b>\d{1,2})[./-](?P<year>\d{4})$"
ORDERS = {"dmy": ("b", "a"), "mdy": ("a", "b")}  # month and day among the parts above
DIGITS = r"\d{8}[ T]?\d{6}(?:\d{3}|\d{6})?"
EPOCH, UNIT_BEGINS = np.datetime64(0, "ns"), np.datetime64(10**17, "ns")  # the latter: all EPOCHS
HEAD = 1 << 16  # rows that show the form of the times; epochs of 1970 alone would show no unit
CAPACITY = 1 << 16  # rows of an array to begin with


def holds_numbers(column: pd.Series) -> bool:
    """Return whether a column's type is real numbers; booleans and complex numbers are not."""
    kinds = pd.api.types
    other = kinds.is_bool_dtype(column.dtype) or kinds.is_complex_dtype(column.dtype)
    return kinds.is_numeric_dtype(column.dtype) and not other


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


class Marks:
    """Named masks of rows, each with the text of its first row."""

    def __init__(self, *names: str):
        self.masks = {name: Growing(bool) for name in names}
        self.texts: dict[str, str] = {}

    def add(self, text: Callable[[int], str], **masks: np.ndarray) -> None:
        """Append a chunk's masks; `text(row)` is called for the first row of a mask."""
        for name, mask in masks.items():
            self.masks[name].add(mask)
            if name not in self.texts and mask.any():
                self.texts[name] = text(int(np.argmax(mask)))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.masks[name].whole


class Times:
    """The times of a file as one way of reading them gives them, chunk after chunk.

    Attributes:
      utc: `[rows]` datetime64[ns], NaT where a time cannot be read.
      marks: rows that are `unread`, `naive` (without UTC offset) or `skipped` by the zone's clock.
      num_aware: rows with a UTC offset.
      clocked: whether some naive time is not midnight.
      order: the evidence on day and month where it does not settle their order: rows that are
        `known` dates, and those with `day_first` or `month_first`; None where it does.
    """

    def __init__(self, timezone: str | None):
        self.timezone = timezone
        self.utc = Growing("datetime64[ns]")
        self.marks = Marks("unread", "naive", "skipped")
        self.num_aware, self.clocked = 0, False
        self.order: Marks | None = None

    def add(self, times: pd.Series, aware: np.ndarray | bool, column: pd.Series) -> None:
        """Append times `[n]`, those without offset by the zone's clock; `column` is their text."""
        aware = np.broadcast_to(aware, len(column))
        times = times.dt.tz_convert(None) if getattr(times.dtype, "tz", None) else times
        wild = (times.isna() | (times < EARLIEST) | (times > LATEST)).to_numpy()
        utc = times.mask(wild).to_numpy("datetime64[ns]").copy()
        naive, skipped = ~aware & ~wild, np.zeros(len(utc), dtype=bool)
        if naive.any():
            days = utc[naive].astype("datetime64[D]").astype("datetime64[ns]")
            self.clocked = self.clocked or bool((utc[naive] != days).any())
            if self.timezone is not None:
                local = pd.DatetimeIndex(utc[naive])
                # A time that the clock repeats or skips is not one moment, so it becomes NaT.
                local = local.tz_localize(self.timezone, ambiguous="NaT", nonexistent="NaT")
                utc[naive] = local.tz_convert(None).to_numpy("datetime64[ns]")
                skipped = naive & np.isnat(utc)

        def text(row: int) -> str:
            value = column.iloc[row]
            if isinstance(value, pd.Timestamp) and not 1 <= value.year <= 9999:
                value = value.to_datetime64()  # Python's dates, and so pandas, cannot print it
            return str(value)

        self.num_aware += int(aware.sum())
        self.marks.add(text, unread=wild, naive=naive, skipped=skipped)
        self.utc.add(utc)


class TimeReader:
    """Reads the times of a file chunk by chunk, in the one form that most of its first rows have.

    The first HEAD rows show the form, however the file is cut into chunks; a later row in another
    form cannot be read.

    Text is ISO 8601 (2018-12-31, 2018-12-31T14:30:00Z, ...), digits (20181231 143000), or a date in
    one of two orders. Where the order is not given, dates are read in both, until a number above 12
    proves one.

    Args:
      timezone: IANA zone of times without UTC offset; None: UTC.
      dates: "dmy", "mdy", or None: as the file proves.

    Raises:
      BarError: there is no such zone, or no such order of dates.
    """

    def __init__(self, timezone: str | None, dates: str | None = None):
        refuse_times(timezone, dates)
        self._timezone, self._dates = timezone, dates
        self._form, self._size = "", float("nan")
        self._head: list[pd.Series] = []  # the first rows, until there are HEAD
        # In each order of day and month that the file may have; other forms are read in one way.
        self._readings: dict[str, Times] = {}
        self._order = Marks("known", "day_first", "month_first")

    def add(self, column: pd.Series) -> None:
        """Take the next rows of the file."""
        moments = pd.api.types.is_datetime64_any_dtype(column.dtype)
        if not self._form and not moments:
            self._head.append(column)
            if sum(map(len, self._head)) >= HEAD:
                self._flush()
            return
        self._flush()
        if not self._form:
            # Of a file that begins with typed times, texts are read as ISO 8601.
            self._form, self._readings = "moment", {"": Times(self._timezone)}
        if moments and self._form != "day":
            aware = getattr(column.dtype, "tz", None) is not None
            self._readings[""].add(column, aware, column)
        else:
            self._take(column)

    def finish(self) -> Times:
        """Return the times of all rows.

        Epochs in a coarser unit than the others, e.g. seconds after milliseconds, are not read. In
        the others' unit these are of 1970 or 1971, and nothing leads from there to the others.
        """
        self._flush()
        if len(self._readings) > 1 or not self._readings:
            # Both orders of day and month are possible, or neither is.
            read = Times(None)
            read.order = self._order
            read.utc.add(np.full(len(self._order["known"]), np.datetime64("NaT", "ns")))
            return read
        read = next(iter(self._readings.values()))
        unit = _unit(self._size) if self._form == "number" else None
        if unit is not None:
            times, unread = read.utc.whole, read.marks["unread"]
            early = (times >= EPOCH) & (times < UNIT_BEGINS)
            if early.any() and times[early].max() < UNIT_BEGINS - (UNIT_BEGINS - EPOCH) // 2:
                if not unread[: int(np.argmax(early))].any():
                    first = int(times[early][0].astype(np.int64)) // unit
                    read.marks.texts["unread"] = str(first)
                unread |= early
                times[early] = np.datetime64("NaT", "ns")
        return read

    def _flush(self) -> None:
        """Find the form of the first rows, "iso", "number", "digits" or "day", and take these."""
        head, self._head = self._head, []
        if not head:
            return
        text = pd.concat([_texts(column) for column in head])[:HEAD]
        self._form, iso = "iso", _iso(text).notna().mean()
        if iso <= 0.5:
            days = text.str.replace("[ T].*$", "", regex=True).str.match(DAY_AND_MONTH).mean()
            numbers = pd.to_numeric(text, errors="coerce")
            size = float(numbers.abs().median())
            known = numbers.notna().mean() > 0.5 and size < EPOCHS[0][0] * 100
            if known and _of_numbers(numbers, size)[0].notna().mean() > 0.5:
                self._form, self._size = "number", size
            elif text.str.fullmatch(DIGITS).mean() > 0.5:
                self._form = "digits"
            elif days > iso:
                self._form = "day"
        orders = [self._dates] if self._dates else ORDERS
        names = orders if self._form == "day" else ("",)
        self._readings = {name: Times(self._timezone) for name in names}
        for column in head:
            self._take(column)

    def _take(self, column: pd.Series) -> None:
        """Take rows in the form found."""
        if self._form == "number":
            numbers = column if holds_numbers(column) else _texts(column)
            times, moments = _of_numbers(pd.to_numeric(numbers, errors="coerce"), self._size)
            return self._readings[""].add(times, moments, column)
        text = _texts(column)
        if self._form == "digits":  # 20181231 143000, with or without the blank, and fractions
            digits = text.where(text.str.fullmatch(DIGITS)).str.replace("[ T]", "", regex=True)
            pattern = r"^(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)(\d*)$"
            iso = digits.str.replace(pattern, r"\1-\2-\3 \4:\5:\6.\7", regex=True) + "0"
            times = pd.to_datetime(iso, format="ISO8601", errors="coerce", utc=True)
            return self._readings[""].add(times, False, column)
        aware = text.str.contains(OFFSET, regex=True).to_numpy(dtype=bool, na_value=False)
        if self._form == "day":
            return self._take_days(text, aware)
        return self._readings[""].add(_iso(text), aware, column)

    def _take_days(self, text: pd.Series, aware: np.ndarray) -> None:
        """Take dates such as 31.12.2018 14:30, in each order that is still possible."""
        # A file has few days for many rows, so only distinct ones are parsed.
        code, days = pd.factorize(text.str.replace("[ T].*$", "", regex=True))
        parts = pd.Series(days, dtype="str").str.extract(DAY_AND_MONTH)
        if self._dates is None:
            a, b = (pd.to_numeric(parts[name]).to_numpy(np.float64, na_value=0) for name in "ab")
            masks = {
                "known": parts["a"].notna().to_numpy(),
                "day_first": a > 12,
                "month_first": b > 12,
            }
            marks = {name: np.append(mask, False)[code] for name, mask in masks.items()}
            self._order.add(lambda row: str(text.iloc[row]), **marks)
            for name, other in (("day_first", "mdy"), ("month_first", "dmy")):
                if masks[name].any():  # no month is above 12, so the other order is impossible
                    self._readings.pop(other, None)
        clock = text.str.replace("^[^ T]*[ T]*", "", regex=True).replace("", "00:00")
        time = pd.to_datetime("1970-01-01 " + clock, format="ISO8601", errors="coerce", utc=True)
        since = time.dt.tz_convert(None).to_numpy("datetime64[ns]") - EPOCH
        for order, reading in self._readings.items():
            month, day = (parts[name].str.zfill(2) for name in ORDERS[order])
            iso = parts["year"] + "-" + month + "-" + day
            dates = pd.to_datetime(iso, format="ISO8601", errors="coerce")
            # The last is that of rows without a date.
            dates = np.append(dates.to_numpy("datetime64[ns]"), np.datetime64("NaT", "ns"))
            reading.add(pd.Series(dates[code] + since), aware, text)


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
    return times.mask(none.to_numpy(dtype=bool, na_value=True))


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
    inside = column.where(column.abs() < 2**63 // unit)  # else the product would wrap around
    return pd.to_datetime(inside * unit, unit="ns", errors="coerce"), True
