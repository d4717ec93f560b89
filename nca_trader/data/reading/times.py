"""The times of a file in UTC.

The first rows show the form of all of them: typed times, epochs, or texts with the parts of a date
in some order, with or without a clock and a zone.
"""

from __future__ import annotations

import contextlib
import re
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from nca_trader.data.reading.faults import Fault, Kind
from nca_trader.errors import argument

# The unit of an epoch follows from its size.
EPOCHS = ((1e17, 1), (1e14, 10**3), (1e11, 10**6), (1e8, 10**9))  # smallest, nanoseconds per unit
MICROSECONDS = 1e14
# A time outside these counts as not readable.
EARLIEST, LATEST = np.datetime64("1800-01-01", "ns"), np.datetime64("2200-01-01", "ns")
EPOCH, UNIT_BEGINS = np.datetime64(0, "ns"), np.datetime64(10**17, "ns")  # the latter: all EPOCHS
NAT, HOUR = np.datetime64("NaT", "ns"), np.timedelta64(1, "h")
HEAD = 1 << 16  # rows that show the form of the times, and that are read at once
LONGEST = 64  # characters of a time at most
MOMENTS = "M"  # kind of a column of times
REAL = "iuf"  # kinds of a column of real numbers: not of truth values, not complex
MONTHS = tuple(map(str, "jan feb mar apr may jun jul aug sep oct nov dec".split()))
TEXT = (
    r"^(?:[A-Za-z]{3},? )?"
    r"(?P<date>\d{8}|\d{4}[./-]\d\d?[./-]\d\d?|\d\d?[./-]\d\d?[./-](?:\d{4}|\d\d)"
    r"|\d\d?[ -][A-Za-z]{3,9}[ -](?:\d{4}|\d\d)|[A-Za-z]{3,9}\.? \d\d?,? \d{4})"
    r"(?:(?:(?:T|,? +|[-:]|)(?P<clock>\d\d?:\d\d(?::\d\d(?:\.\d+)?)?|\d{6}(?:\d{3}|\d{6})?)"
    r"|[T ](?P<hour>\d\d(?:\d\d)?))"
    r" *(?P<half>[AaPp][Mm]\b)? *(?P<zone>[A-Za-z][A-Za-z0-9_+/:-]*|[+-]\d\d(?::?\d\d)?)?)?$"
)


def is_clock(column: pd.Series) -> bool:
    """Return whether most texts of a column are times of day alone, such as 9:30 PM or 093000."""
    clock = r"\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm])?|\d{1,6}"
    return bool(_texts(column).str.fullmatch(clock).mean() > 0.5)


def join_clock(date: pd.Series, clock: pd.Series) -> pd.Series:
    """Return the times of a date and a clock in two columns.

    A clock of digits is 930 or 0930, or 93000 or 093000, as the longest one shows.
    """
    text = _texts(clock)
    digits = text.str.fullmatch(r"\d{1,6}").to_numpy(bool, na_value=False)
    if digits.any():
        width = 4 if text[digits].str.len().max() in (3, 4) else 6
        text = text.mask(digits, text.str.zfill(width))
    return (_texts(date) + " " + text).str.strip()


class Times(NamedTuple):
    """The times of a file.

    Attributes:
      utc: `[rows]` datetime64[ns], NaT where a time cannot be known.
      faults: what is wrong with them.
      notes: sentences for the note of the bars.
    """

    utc: np.ndarray
    faults: list[Fault]
    notes: list[str]


class _Written(NamedTuple):
    """Times as they are written.

    Attributes:
      time: `[rows]` datetime64[ns], NaT where a time cannot be read.
      zone: `[rows]` place of its zone in `zones`, which begin with UTC; -1 without one.
      order: the fault of dates whose order cannot be known.
    """

    time: np.ndarray
    zone: np.ndarray
    zones: list[str]
    order: Fault | None = None
    notes: tuple[str, ...] = ()


def keep_cells(column: pd.Series) -> pd.Series:
    """Return what is kept of a chunk's times until all are known: texts without more than fits."""
    typed = column.dtype.kind in REAL + MOMENTS
    return column if typed else _texts(column).str.slice(0, LONGEST)


def whole(parts: list[pd.Series]) -> pd.Series:
    """Return the column of parts as `keep_cells`, as texts if some of them are."""
    if len({part.dtype.kind in REAL for part in parts}) > 1:
        parts = [_texts(part) for part in parts]
    return pd.concat(parts, ignore_index=True)


def read_times(column: pd.Series, timezone: str | None, dates: str | None) -> Times:
    """Read the times of a file in the one form that most of its first HEAD rows have.

    A later row in another form cannot be read.

    Args:
      column: the times as `keep_cells`.
      timezone: IANA zone of times without UTC offset, or an offset; None: UTC.
      dates: "dmy", "mdy", or None: as the file proves.
    """
    if column.dtype.kind == MOMENTS:
        aware = getattr(column.dtype, "tz", None) is not None
        time = _ns(column.dt.tz_convert(None) if aware else column)
        written = _Written(time, np.full(len(time), aware - 1), ["UTC"])
    else:
        written = _written(column, dates)
    if written.order is not None:
        return Times(np.full(len(column), NAT), [written.order], [])
    time = written.time
    faults, unread = [], np.isnat(time)
    if unread.any():
        say = f"time {_shown(column, unread)!r} can't be read"
        faults.append(Fault(Kind.D013, say, unread))
    skipped, clock = np.zeros(len(time), dtype=bool), timezone
    for place, zone in [*enumerate(written.zones[1:], 1), (-1, timezone)]:
        rows = ~unread & (written.zone == place)
        if zone is not None and rows.any():
            time[rows] = _utc(time[rows], zone)
            lost = rows & np.isnat(time)
            clock = zone if lost.any() and not skipped.any() else clock
            skipped |= lost
    if skipped.any():
        say = f"time {_shown(column, skipped)!r} is skipped or repeated by the clock of {clock}"
        faults.append(Fault(Kind.D016, say, skipped))
    naive = ~unread & (written.zone < 0)
    if timezone is None and naive.any():
        faults += _unplaced(time, naive, int((written.zone >= 0).sum()), _shown(column, naive))
    return Times(time, faults, [*written.notes])


def _ns(times: pd.Series) -> np.ndarray:
    """Return times as datetime64[ns], NaT for years that can be no bar's."""
    wild = times.isna() | (times < EARLIEST) | (times > LATEST)
    return (times.mask(wild) if wild.any() else times).to_numpy("datetime64[ns]", copy=True)


def _shown(column: pd.Series, mask: np.ndarray) -> str:
    """Return the first time of `mask` as it is written."""
    value = column.iloc[int(np.argmax(mask))]
    if isinstance(value, pd.Timestamp) and not 1 <= value.year <= 9999:
        value = value.to_datetime64()  # Python's dates, and so pandas, cannot print it
    return str(value)


def _unplaced(time: np.ndarray, naive: np.ndarray, aware: int, text: str) -> list[Fault]:
    """Return the fault of times whose zone is neither written nor given; dates need none."""
    local = time[naive]
    if not aware and not (local - local.astype("datetime64[D]")).any():
        return []
    # The example is a zone whose clock has each of these times once.
    zones = ("America/New_York", "UTC")
    zone = next(name for name in zones if not np.isnat(_utc(local, name)).any())
    remedy = f"{argument('timezone')}, e.g. {argument('timezone', zone)}"
    if aware:
        say = f"time {text!r} has no UTC offset but {aware:,} others do"
        return [Fault(Kind.D014, say, naive, f"Add an offset or pass {remedy}")]
    remedy = f"Add a UTC offset or pass {remedy}"
    return [Fault(Kind.D015, f"time {text!r} has no time zone", naive, remedy)]


def _written(column: pd.Series, dates: str | None) -> _Written:
    """Read texts and numbers in the form that the first rows show."""
    head = column[:HEAD]
    text = _texts(head)
    if text.notna().all() and _iso(text) is not None:
        return _dated(column, "ymd", dates)
    numbers = pd.to_numeric(head if head.dtype.kind in REAL else text, errors="coerce")
    size = float(numbers.abs().median())
    dated = _fields(text)["date"].dropna()
    whole = len(dated) <= len(text) / 2 and (numbers % 1 == 0).mean() > 0.5
    if whole and EPOCHS[-1][0] <= size < EPOCHS[0][0] * 100:
        return _epochs(pd.to_numeric(column, errors="coerce"), size)
    rows = dated.value_counts()
    orders = rows.groupby([_split_date(day)[0] for day in rows.index]).sum()
    if len(orders):
        return _dated(column, str(orders.idxmax()), dates)
    none = np.full(len(column), NAT)
    return _Written(none, np.zeros(len(none)), [])


def _epochs(column: pd.Series, size: float) -> _Written:
    """Read epochs of one unit, which are whole numbers of about this `size`.

    Epochs in a coarser unit, e.g. seconds after milliseconds, are not read: in the others' unit
    these are of 1970 or 1971, and nothing leads from there to the others. Milliseconds before
    microseconds are read, as an exchange changed from one to the other.
    """
    unit = next(unit for least, unit in EPOCHS if size >= least)
    later = (column.abs() >= MICROSECONDS).to_numpy() & (unit == 10**6)
    units = np.where(later, 10**3, unit)
    inside = column.where(column.abs() < 2.0**63 / units)  # else the product would wrap around
    time = _ns(pd.to_datetime(inside * units, unit="ns", errors="coerce"))
    mixed = bool((later & ~np.isnat(time)).any())
    early = (time >= EPOCH) & (time < UNIT_BEGINS)
    if early.any() and time[early].max() < UNIT_BEGINS - (UNIT_BEGINS - EPOCH) // 2:
        mixed = unit == 10**3
        time[early] = EPOCH + (time[early] - EPOCH) * 1000 if mixed else NAT
    notes = ("Times are in milliseconds and, of other rows, in microseconds.",) * mixed
    return _Written(time, np.zeros(len(time)), ["UTC"], notes=notes)


def _dated(column: pd.Series, order: str, dates: str | None) -> _Written:
    """Read dates whose parts are in this order, with or without a clock and a zone."""
    days, zones, size = {"": 0, "1970-01-01": 1}, ["UTC"], len(column)
    code, zone, since = np.ones(size, "i4"), np.zeros(size, "i2"), np.zeros(size, "m8[ns]")
    for begin in range(0, size, HEAD):
        part = slice(begin, begin + HEAD)
        text = _texts(column.iloc[part])
        if order == "ymd" and (iso := _iso(text)) is not None:
            since[part], zone[part] = iso
            continue
        fields = _fields(text)
        place, found = pd.factorize(fields["date"])  # few days for many rows
        code[part] = np.array([days.setdefault(str(d), len(days)) for d in found] + [0])[place]
        zone[part], shift = _zones_of(fields["zone"], zones)
        since[part] = _since_midnight(fields) - shift
    split, fault, months_first = [_split_date(day) for day in days], None, dates == "mdy"
    if order == "day" and dates is None:
        months_first, fault = _order(column, code, split)
    each = np.array([_date(*day, months_first) if day[0] == order else NAT for day in split])
    for begin in range(0, size, HEAD):  # all at once would take as much memory again
        part = slice(begin, begin + HEAD)
        since[part] += (each - EPOCH)[code[part]]
    return _Written(since.view("M8[ns]"), zone, zones, fault)


def _iso(text: pd.Series) -> tuple[np.ndarray, int] | None:
    """Return times since 1970 and the zone of texts that all are ISO 8601, else None.

    The zone is 0 for UTC offsets, and -1 without. `_fields` reads such texts ten times slower.
    """
    array = pa.array(text, pa.large_string(), from_pandas=True)
    for zone in (-1, 0):
        with contextlib.suppress(pa.ArrowInvalid):
            kind = pa.timestamp("ns", None if zone else "UTC")
            array[:1].cast(kind)  # a cast that fails takes a hundred times as long for each text
            time = array.cast(kind).to_numpy(zero_copy_only=False)
            return np.where((time < EARLIEST) | (time > LATEST), NAT, time) - EPOCH, zone
    return None


def _order(
    column: pd.Series, code: np.ndarray, split: list[tuple[str, str, str, str]]
) -> tuple[bool, Fault | None]:
    """Return whether months come first in dates of two numbers and a year.

    A fault is returned where no date shows it, or some show another order than others.

    Args:
      column: the times.
      code: `[rows]` the place of each date in `split`.
      split: the dates in parts.
    """
    # A year of two digits may also be the day.
    sure = [kind == "day" and len(year) == 4 for kind, year, *_ in split]
    above = [
        [known and int(day[i]) > 12 for known, day in zip(sure, split, strict=True)] for i in (2, 3)
    ]
    first, second = map(np.array, above)
    day_first, month_first = (first & ~second)[code], (second & ~first)[code]
    if day_first.any() and month_first.any():
        few, most = sorted((day_first, month_first), key=np.sum)
        say = f"time {_shown(column, few)!r} has day and month in another order than "
        return False, Fault(Kind.D017, f"{say}{_shown(column, most)!r}", few)
    if day_first.any() or month_first.any():
        return bool(month_first.any()), None
    rows = np.array([kind == "day" for kind, *_ in split])[code]
    say = f"time {_shown(column, rows)!r}: no date shows which is the day, which the month"
    ways = " or ".join(argument("dates", name) for name in ("dmy", "mdy"))
    return False, Fault(Kind.D017, say, rows, f"Pass {ways}")


def _split_date(text: str) -> tuple[str, str, str, str]:
    """Return the order of a date's parts, "ymd", "dMy", "Mdy" or "day", its year, month and day.

    Of "day", two numbers and a year, the numbers stay in their order.

    >>> _split_date("27-Feb-2023"), _split_date("27/02/2023")
    (('dMy', '2023', 'Feb', '27'), ('day', '2023', '27', '02'))
    """
    parts = [part for part in re.split(r"[./, -]+", text) if part]
    a, b, c = parts if len(parts) == 3 else (text[:4], text[4:6], text[6:])
    if a.isalpha():
        return "Mdy", c, a, b
    if b.isalpha():
        return "dMy", c, b, a
    return ("ymd", a, b, c) if len(a) in (0, 4) else ("day", c, a, b)


def _date(kind: str, year: str, month: str, day: str, months_first: bool) -> np.datetime64:
    """Return the date of parts as `_split_date` gives them, NaT where there is none."""
    if kind == "day" and not months_first:
        month, day = day, month
    if month.isalpha():
        month = f"{MONTHS.index(month[:3].lower()) + 1 if month[:3].lower() in MONTHS else 0}"
    if len(year) == 2:
        year = f"{'19' if year > '68' else '20'}{year}"
    try:
        found = np.datetime64(f"{year:0>4}-{month:0>2}-{day:0>2}", "D")
    except ValueError:
        return NAT
    return found.astype("datetime64[ns]") if EARLIEST < found < LATEST else NAT


def _zones_of(column: pd.Series, zones: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's place in `zones`, -1 without a zone, and the offset that is left.

    Adds zones that are new; the offset is NaT where there is no such zone.
    """
    code, names = pd.factorize(column)
    zone, shift = np.full(len(names) + 1, -1), np.zeros(len(names) + 1, "timedelta64[ns]")
    for i, name in enumerate(map(str, names)):
        name = re.sub(r"^(?:GMT|UTC)(?=[+-]\d\d:?\d\d$)", "", name)
        if name[0] in "+-":
            minutes = 60 * int(name[1:3]) + int(name[3:].strip(":") or 0)
            zone[i], shift[i] = 0, np.timedelta64(int(f"{name[0]}1") * minutes, "m")
        elif name.upper() in ("Z", "UTC", "GMT"):
            zone[i] = 0
        elif name in zoneinfo.available_timezones():
            zones += [name] * (name not in zones)
            zone[i] = zones.index(name)
        else:
            shift[i] = np.timedelta64("NaT", "ns")
    return zone[code], shift[code]


def _texts(column: pd.Series) -> pd.Series:
    """Return texts; whole numbers without the point that pandas adds where some are missing."""
    if column.dtype.kind in REAL:
        column = column.where(column % 1 == 0).astype("Int64")
    return column.astype("str").str.strip()


def _fields(text: pd.Series) -> pd.DataFrame:
    """Return the date, clock, half of the day and zone of texts, missing where there is none."""
    found: Any = pc.call_function(
        "extract_regex",
        [pa.array(text, pa.large_string(), from_pandas=True)],
        pc.ExtractRegexOptions(TEXT),
    )
    columns = dict(zip(found.type.names, found.flatten(), strict=True))
    frame = pd.DataFrame({name: part.to_pandas() for name, part in columns.items()}, dtype="str")
    return frame.mask(frame == "").set_axis(text.index)


def _since_midnight(fields: pd.DataFrame) -> np.ndarray:
    """Return the time of day, of a clock of 24 hours or of two halves; 0 where there is none."""
    clock = fields["clock"].fillna(fields["hour"]).fillna("00:00")
    for digits in (r"", r"(\d\d)", r"(\d\d)(\d+)"):
        colons = r"\1:\2" + r":\3" * (digits != "") + r".\4" * digits.endswith("+)")
        clock = clock.str.replace(rf"^(\d\d)(\d\d){digits}$", colons, regex=True)
    time = pd.to_datetime("1970-01-01 " + clock, format="ISO8601", errors="coerce", utc=True)
    since = time.dt.tz_convert(None).to_numpy("datetime64[ns]") - EPOCH
    half = fields["half"].str.lower()
    if half.notna().any():
        hour = since // HOUR
        since = since + 12 * HOUR * ((half == "pm").to_numpy(bool, na_value=False) & (hour < 12))
        since = since - 12 * HOUR * ((half == "am").to_numpy(bool, na_value=False) & (hour == 12))
        since[half.notna().to_numpy() & ((hour < 1) | (hour > 12))] = np.timedelta64("NaT", "ns")
    return since


def _utc(local: np.ndarray, zone: str) -> np.ndarray:
    """Return times by the clock of a zone in UTC; NaT where it skips or repeats one."""
    index = pd.DatetimeIndex(local).tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
    return index.tz_convert(None).to_numpy("datetime64[ns]")
