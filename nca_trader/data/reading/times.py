"""The times of a file in UTC: ISO 8601, dates in either order, compact digits, epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config.reading import DATES, refuse_times
from nca_trader.data.reading.faults import Fault
from nca_trader.data.reading.records import Growing
from nca_trader.data.reading.tables import holds_numbers
from nca_trader.errors import argument

# A whole number as a time is a date such as 20181231, or an epoch whose unit its size tells.
EPOCHS = ((1e17, 1), (1e14, 10**3), (1e11, 10**6), (1e8, 10**9))  # smallest, nanoseconds a unit
STAMPS = (1.8e13, 2.2e13)  # 20181231143000; as milliseconds these would be centuries away
OFFSET = r"(?:[T ]\d.*[+-]\d\d(?::?\d\d)?|Z|UTC)$"
EARLIEST, LATEST = np.datetime64("1800-01-01"), np.datetime64("2200-01-01")
DAY_AND_MONTH = r"^(?P<a>\d{1,2})[./-](?P<b>\d{1,2})[./-](?P<year>\d{4})$"
DIGITS = r"\d{8}[ T]?\d{6}(?:\d{3}|\d{6})?"
DAY = np.timedelta64(1, "D")
EPOCH, UNIT_BEGINS = np.datetime64(0, "ns"), np.datetime64(10**17, "ns")  # the latter: all EPOCHS
HEAD = 1 << 16  # rows that tell the form of the times; epochs of 1970 alone would tell no unit


class Days(NamedTuple):
    """Dates whose day and month are not told apart yet, with the clock of each row.

    clock: `[n]` datetime64[ns] of 1970-01-01, NaT where there is none. code: `[n]` which day of
    the file's, -1 where there is none. aware: `[n]` whether the clock has a UTC offset.
    """

    clock: np.ndarray
    code: np.ndarray
    aware: np.ndarray


class TimeReader:
    """Reads the times of a file chunk by chunk, in the one form that most of its first rows have.

    These are the first HEAD, however the file is cut into chunks; a later row in another form can't
    be read.

    Text is ISO 8601 (2018-12-31, 2018-12-31T14:30:00Z, ...), which no one reads as another day;
    or digits (20181231 143000); or a date in the order `dates`, of `DATES`. Without `dates` that
    order must be proved by the file: a number above 12 is no month.

    Raises:
      BarError: there is no such zone, or no such order of dates.
    """

    def __init__(self, timezone: str | None, dates: str | None = None):
        refuse_times(timezone, dates)
        self._timezone, self._dates = timezone, dates
        self._form, self._size = "", float("nan")
        self._head: list[pd.Series] = []  # the first rows, until there are HEAD
        self._days: dict[str, int] = {}
        self._examples: list[str] = []  # of each day, the text of the first row of it
        self._clocks: list[Any] = []  # and its clock
        self._parts: list[Days] = []
        self._times = Growing(np.dtype("datetime64[ns]"))
        self._masks = {name: Growing(np.dtype(bool)) for name in ("unread", "naive", "skipped")}
        self._texts: dict[str, str] = {}  # of the first row of each of these masks
        self._num_aware, self._clocked = 0, False

    def add(self, column: pd.Series) -> None:
        """Takes the next rows of the file."""
        if pd.api.types.is_datetime64_any_dtype(column.dtype):
            self._flush()
            zone = getattr(column.dtype, "tz", None)
            times = column if zone is None else column.dt.tz_convert(None)
            self._take(column, times, np.full(len(column), zone is not None))
        elif self._form:
            self._take_form(column)
        else:
            self._head.append(column)
            if sum(map(len, self._head)) >= HEAD:
                self._flush()

    def _flush(self) -> None:
        """Finds the form of the first rows, and takes these."""
        head, self._head = self._head, []
        if not head:
            return
        first = pd.concat([_texts(column) for column in head])[:HEAD]
        self._form = self._form_of(first)
        if self._form == "number":
            self._size = float(pd.to_numeric(first, errors="coerce").abs().median())
        for column in head:
            self._take_form(column)

    def _take_form(self, column: pd.Series) -> None:
        """Takes rows in the form found, numbers as they are and others as texts."""
        number = self._form == "number" and holds_numbers(column)
        text = column if number else _texts(column)
        if self._form == "day":
            self._parts.append(self._day_parts(text))
        else:
            self._take(column, *self._read(text))

    def _take(self, column: pd.Series, times: pd.Series, aware: np.ndarray) -> None:
        times = times.dt.tz_convert(None) if getattr(times.dtype, "tz", None) else times
        wild = (times.isna() | (times < EARLIEST) | (times > LATEST)).to_numpy()
        utc = times.mask(wild).to_numpy("datetime64[ns]").copy()

        def text(row: int) -> str:
            value = column.iloc[row]
            if isinstance(value, pd.Timestamp) and not 1 <= value.year <= 9999:
                value = value.to_datetime64()  # Python's dates, and so pandas, cannot print it
            return str(value)

        self._settle(utc, aware, text)

    def finish(self) -> tuple[np.ndarray, list[Fault]]:
        """`[rows]` datetime64[ns] in UTC, NaT where they are at fault, and the faults."""
        self._flush()
        faults = self._resolve_days() if self._days else []
        times = self._times.whole
        self._coarser_are_unread(times)
        masks = {name: each.whole for name, each in self._masks.items()}
        unread, naive, skipped = masks["unread"], masks["naive"], masks["skipped"]
        if unread.any() and not faults:
            say = f"time {self._texts['unread']!r} can't be read"
            remedy = "Write it as 2018-12-31 or 2018-12-31T14:30:00Z"
            faults.append(Fault("D013", say, remedy, unread, ("drop-bad",)))
        if skipped.any():
            say = f"time {self._texts['skipped']!r} is skipped or repeated by the clock of"
            remedy = "Add a UTC offset to the time"
            faults.append(Fault("D016", f"{say} {self._timezone}", remedy, skipped, ("drop-bad",)))
        if naive.any() and self._timezone is None:
            first = f"time {self._texts['naive']!r} has no"
            zone = f"{argument('timezone')}, e.g. {argument('timezone', 'America/New_York')}"
            if self._num_aware:
                say = f"{first} UTC offset but {self._num_aware:,} others do"
                remedy = f"Add an offset or pass {zone}"
                faults.append(Fault("D014", say, remedy, naive))
            elif self._clocked:
                remedy = f"Add a UTC offset or pass {zone}"
                faults.append(Fault("D015", f"{first} time zone", remedy, naive))
        return times, faults

    def _settle(self, utc: np.ndarray, aware: np.ndarray, text: Callable[[int], str]) -> None:
        """Takes naive times of `utc` from the zone to UTC, in place; counts what is wrong."""
        unread = np.isnat(utc)
        naive, skipped = ~aware & ~unread, np.zeros(len(utc), dtype=bool)
        if naive.any():
            days = utc[naive].astype("datetime64[D]").astype("datetime64[ns]")
            self._clocked = self._clocked or bool((utc[naive] != days).any())
        if self._timezone is not None and naive.any():
            local = pd.DatetimeIndex(utc[naive])
            local = local.tz_localize(self._timezone, ambiguous="NaT", nonexistent="NaT")
            utc[naive] = local.tz_convert(None).to_numpy("datetime64[ns]")
            skipped = naive & np.isnat(utc)
        self._num_aware += int(aware.sum())
        for name, mask in (("unread", unread), ("naive", naive), ("skipped", skipped)):
            self._masks[name].add(mask)
            if name not in self._texts and mask.any():
                self._texts[name] = text(int(np.argmax(mask)))
        self._times.add(utc)

    def _numbers(self, column: pd.Series) -> tuple[pd.Series, np.ndarray]:
        """Times of whole numbers, and whether they are moments (epochs) and not dates."""
        times, moments = _of_numbers(column, self._size)
        return times, np.full(len(column), moments)

    def _coarser_are_unread(self, times: np.ndarray) -> None:
        """Puts NaT where an epoch is in a coarser unit than the others, e.g. seconds after ms.

        Read in the others' unit it is of 1970 or 1971, and nothing leads from there to the others.
        """
        unit = _unit(self._size) if self._form == "number" else None
        if unit is None:
            return
        early = (times >= np.datetime64(0, "s")) & (times < UNIT_BEGINS)
        if early.any() and times[early].max() < UNIT_BEGINS - (UNIT_BEGINS - EPOCH) // 2:
            first = int(times[early][0].astype(np.int64)) // unit
            unread = self._masks["unread"].whole
            if not unread[: int(np.argmax(early))].any():
                self._texts["unread"] = str(first)
            unread |= early
            times[early] = np.datetime64("NaT", "ns")

    def _form_of(self, text: pd.Series) -> str:
        iso = _iso(text).notna().mean()
        if iso > 0.5:
            return "iso"
        numbers = pd.to_numeric(text, errors="coerce")
        if numbers.notna().mean() > 0.5 and numbers.abs().median() < EPOCHS[0][0] * 100:
            size = float(numbers.abs().median())
            if _of_numbers(numbers, size)[0].notna().mean() > 0.5:
                return "number"
        if text.str.fullmatch(DIGITS).mean() > 0.5:
            return "digits"
        known = text.str.replace("[ T].*$", "", regex=True).str.match(DAY_AND_MONTH)
        return "day" if known.mean() > iso else "iso"

    def _read(self, text: pd.Series) -> tuple[pd.Series, np.ndarray]:
        """Times and which have an offset, of texts in the form found."""
        if self._form == "number":
            return self._numbers(pd.to_numeric(text, errors="coerce"))
        if self._form == "digits":
            return _of_digits(text), np.zeros(len(text), dtype=bool)
        aware = text.str.contains(OFFSET, regex=True).to_numpy(dtype=bool, na_value=False)
        return _iso(text), aware

    def _day_parts(self, text: pd.Series) -> Days:
        """The rows' days by code, so that few texts are looked at for many rows."""
        aware = text.str.contains(OFFSET, regex=True).to_numpy(dtype=bool, na_value=False)
        code, days = pd.factorize(text.str.replace("[ T].*$", "", regex=True))
        clock = text.str.replace("^[^ T]*[ T]*", "", regex=True).replace("", "00:00")
        times = pd.to_datetime("1970-01-01 " + clock, format="ISO8601", errors="coerce", utc=True)
        utc = times.dt.tz_convert(None).to_numpy("datetime64[ns]")
        first = np.full(len(days), -1)
        first[code[::-1]] = np.arange(len(code))[::-1]  # the last assignment stays: the first row
        known = np.full(len(days) + 1, -1, dtype=np.int32)  # the last is that of no text
        for i, day in enumerate(days):
            if day not in self._days:
                self._days[day] = len(self._days)
                self._examples.append(str(text.iloc[first[i]]))
                self._clocks.append(utc[first[i]])
            known[i] = self._days[day]
        return Days(utc, known[code], aware)

    def _resolve_days(self) -> list[Fault]:
        """Puts times in the place of `Days`; the fault, if the order of day and month is none."""
        names = pd.Series(list(self._days), dtype="str")
        parts = names.str.extract(DAY_AND_MONTH)
        a, b = (pd.to_numeric(parts[name]).to_numpy(np.float64, na_value=0) for name in "ab")
        known, day_first, month_first = parts["a"].notna().to_numpy(), a > 12, b > 12
        faults = self._order_fault(known, day_first, month_first)
        order = "ba" if self._dates == "dmy" or (self._dates is None and day_first.any()) else "ab"
        month, day = (parts[name].str.zfill(2) for name in order)
        iso = pd.to_datetime(
            parts["year"] + "-" + month + "-" + day, format="ISO8601", errors="coerce"
        )
        iso = iso.where((iso >= EARLIEST) & (iso <= LATEST))
        none = np.array(["NaT"], "datetime64[ns]")
        dates = np.concatenate((iso.to_numpy("datetime64[ns]"), none))
        if faults:
            dates[:] = np.datetime64("NaT", "ns")
        for part in self._parts:
            utc = dates[part.code] + (part.clock - np.datetime64(0, "ns"))
            self._settle(utc, part.aware, lambda row, part=part: self._text(part, row))
        return faults

    def _order_fault(
        self, known: np.ndarray, day_first: np.ndarray, month_first: np.ndarray
    ) -> list[Fault]:
        if self._dates is not None or (day_first.any() != month_first.any()):
            return []

        def rows(days: np.ndarray) -> np.ndarray:
            days = np.append(days, False)  # of rows that have none
            return np.concatenate([days[part.code] for part in self._parts])

        def example(mask: np.ndarray) -> str:
            return repr(self._examples[int(np.argmax(mask))])

        if day_first.any():
            few, most = sorted((day_first, month_first), key=lambda d: np.count_nonzero(rows(d)))
            say = f"time {example(few)} has day and month in another order than {example(most)}"
            return [Fault("D017", say, "Write them alike", rows(few))]
        say = f"time {example(known)}: no date shows which is the day, which the month"
        ways = " or ".join(argument("dates", name) for name in DATES)
        return [Fault("D017", say, f"Pass {ways}", rows(known))]

    def _text(self, part: Days, row: int) -> str:
        """As nearly as it is kept: the text itself where it is the first of its day."""
        if part.code[row] < 0:
            return "nan"
        clock, example = part.clock[row], self._examples[part.code[row]]
        day, _, written = example.partition(" ")
        if np.isnat(clock) or not written or clock == self._clocks[part.code[row]]:
            return example
        return f"{day} {str(clock)[11:19]}"


def _texts(column: pd.Series) -> pd.Series:
    """As texts; whole numbers without the point that pandas gives them beside missing ones."""
    if holds_numbers(column):
        column = column.where(column % 1 == 0).astype("Int64")
    return column.astype("str").str.strip()


def _iso(text: pd.Series) -> pd.Series:
    times = pd.to_datetime(text, format="ISO8601", errors="coerce", utc=True)
    size = text.str.len()
    # "2018" is not a day, and an epoch such as 1801010100 no hour of the year 1801.
    none = (size < len("2018-1-2")) | ((size > len("20180102")) & text.str.isdigit())
    return times.mask(none.to_numpy(dtype=bool, na_value=True))


def _of_digits(text: pd.Series) -> pd.Series:
    """Times of 20181231 143000, with or without the blank, and further digits."""
    digits = text.where(text.str.fullmatch(DIGITS)).str.replace("[ T]", "", regex=True)
    cuts = (4, "-"), (6, "-"), (8, " "), (10, ":"), (12, ":"), (14, ".")
    iso, begin = digits.str.slice(0, 0), 0
    for end, sign in cuts:
        iso, begin = iso + digits.str.slice(begin, end) + sign, end
    iso = iso + digits.str.slice(14).replace("", "0")
    return pd.to_datetime(iso, format="ISO8601", errors="coerce", utc=True)


def _unit(size: float) -> int | None:
    """Nanoseconds of the unit of epochs of that size; None where they are dates or stamps."""
    if STAMPS[0] <= size < STAMPS[1]:
        return None
    return next((unit for least, unit in EPOCHS if size >= least), None)


def _of_numbers(column: pd.Series, size: float) -> tuple[pd.Series, bool]:
    """Times of whole numbers of about this `size`; whether they are moments and not dates."""
    unit = _unit(size)
    if unit is None:
        stamps = STAMPS[0] <= size < STAMPS[1]
        whole = column.where(column % 1 == 0).astype("Int64").astype("str")
        form = "%Y%m%d%H%M%S" if stamps else "%Y%m%d"
        return pd.to_datetime(whole, format=form, errors="coerce"), False
    inside = column.where(column.abs() < 2**63 // unit)  # else the product would wrap around
    return pd.to_datetime(inside * unit, unit="ns", errors="coerce"), True
