"""What can be wrong with bars: each fault has a stable code, its rows, a remedy and its repairs.

D001 unreadable, D002 no rows, D003 no close, D004 no time, D005 other column missing or ambiguous,
D006 value missing, D007 infinite, D008 price not positive, D009 not a number, D010 high below low,
D011 open or close outside low to high, D012 negative volume, D013 time unreadable, D014 times with
and without UTC offset, D015 no time zone, D016 time that the zone's clock skips or repeats,
D020 not increasing, D021 duplicate, D022 more fields than names, D024 symbol missing or unknown.
"""

from __future__ import annotations

import difflib
import zoneinfo
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from nca_trader.errors import BarError
from nca_trader.types import PRICES, Bars

REPAIRS = {
    "sort": "put rows in order of time",
    "keep-first": "of rows with the same time and symbol, keep the first",
    "keep-last": "of rows with the same time and symbol, keep the last",
    "drop-nan": "drop rows in which a value is missing",
    "drop-bad": "drop rows whose time or values are impossible",
    "widen": "widen high and low until they take in open and close",
    "close-only": "take a missing open, high or low column from the close",
    "no-volume": "take missing volume as 0",
}
SLACK = 1e-9  # relative: vendors' adjusted prices are off by rounding
# A whole number as a time is a date such as 20181231, or an epoch whose unit its size tells.
EPOCHS = ((1e17, 1), (1e14, 10**3), (1e11, 10**6), (1e8, 10**9))  # smallest, nanoseconds a unit
OFFSET = r"(?:[T ]\d.*[+-]\d\d(?::?\d\d)?|Z|UTC)$"
EARLIEST, LATEST = np.datetime64("1800-01-01"), np.datetime64("2200-01-01")


class Fault(NamedTuple):
    """One kind of fault: `say` tells it of the first faulty row.

    `mask` `[rows]` says where, None means the table as a whole; `repairs` are the options of
    `REPAIRS` that mend it, of which the first that was asked for is applied.
    """

    code: str
    say: str
    remedy: str
    mask: np.ndarray | None = None
    repairs: tuple[str, ...] = ()

    def mended_by(self, repairs: frozenset[str]) -> str | None:
        """Which of the repairs asked for mends it, if any."""
        return next((repair for repair in self.repairs if repair in repairs), None)


def parse_repair(repair: str | Iterable[str] | None) -> frozenset[str]:
    """The repairs asked for, from "sort,drop-nan" or a sequence; refuses what is not known."""
    given = repair.split(",") if isinstance(repair, str) else repair or ()
    names = frozenset(name.strip() for name in given) - {""}
    for name in sorted(names - REPAIRS.keys()):
        near = difflib.get_close_matches(name, REPAIRS, n=1, cutoff=0.0)[0]
        raise BarError(f"unknown repair {name!r}; did you mean {near!r}?")
    if names >= {"keep-first", "keep-last"}:
        raise BarError("repairs keep-first and keep-last exclude each other; give one.")
    return names


def refuse(source: str, faults: Iterable[Fault], where: Callable[[int], str] = str) -> None:
    """Raises one `BarError` that lists every fault; silent where there is none.

    `where(row)` names a row as its reader knows it, e.g. "line 12".
    """
    lines = []
    for fault in faults:
        place, remedy = "", fault.remedy
        if fault.mask is not None:
            rows = np.flatnonzero(fault.mask)
            more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
            place = f"{where(int(rows[0]))}{more}: "
        if fault.repairs:
            remedy += ", or pass " + " or ".join(f"--repair={name}" for name in fault.repairs)
        lines.append((f"{fault.code} {place}{fault.say}.", f"{remedy}."))
    if len(lines) == 1:
        raise BarError(f"{source}: {' '.join(lines[0])}")
    if lines:
        body = "".join(f"\n  {first}\n       {second}" for first, second in lines)
        raise BarError(f"{source}: {len(lines)} problems{body}")


def value_faults(frame: pd.DataFrame, raw: pd.DataFrame | None = None) -> Iterator[Fault]:
    """Faults of open, high, low, close and volume, row by row.

    `frame` holds them as float64; `raw`, where it is given, as they were read, so that a text in
    place of a number is told from a missing value. Rows whose `present` is False are not looked
    at, and a row counts in the first check that it fails.
    """
    unchecked = frame["present"].to_numpy().copy()
    remedy = "Correct or remove the row"

    def fault(code: str, mask: np.ndarray, say: Callable[[int], str], *repairs: str):
        mask = mask & unchecked
        if mask.any():
            if repairs[0] != "no-volume":  # such a row stays, so the other checks are due
                unchecked[mask] = False
            yield Fault(code, say(int(np.flatnonzero(mask)[0])), remedy, mask, repairs)

    for name in (*PRICES, "volume"):
        value = frame[name].to_numpy()
        shown = frame[name] if raw is None else raw[name]
        missing, volume = np.isnan(value), name == "volume"

        def say(row: int, name: str = name, shown: pd.Series = shown) -> str:
            return f"{name} = {shown.iloc[row]}"

        def text(row: int, say: Callable[[int], str] = say) -> str:
            return f"{say(row)} is not a number"

        if raw is not None and missing.any():
            yield from fault("D009", missing & raw[name].notna().to_numpy(), text, "drop-bad")
        options = ("no-volume", "drop-nan") if volume else ("drop-nan",)
        yield from fault("D006", missing, say, *options)
        yield from fault("D007", np.isinf(value), say, "drop-bad")
        if volume:
            yield from fault("D012", value < 0, say, "drop-bad")
        else:
            yield from fault("D008", value <= 0, say, "drop-bad")
    o, h, low, c = (frame[name].to_numpy() for name in PRICES)

    def bar(row: int) -> str:
        return f"open {o[row]}, high {h[row]}, low {low[row]}, close {c[row]}"

    slack = SLACK * np.abs(c)
    yield from fault("D010", h < low - slack, lambda r: f"high below low: {bar(r)}", "drop-bad")
    outside = (np.maximum(o, c) > h + slack) | (np.minimum(o, c) < low - slack)
    yield from fault(
        "D011", outside, lambda r: f"open or close outside low to high: {bar(r)}", "widen"
    )


def order_faults(frame: pd.DataFrame) -> Iterator[Fault]:
    """Rows that repeat a time of their `symbol`, or whose time is before that of the row above."""
    time, symbol, close = (frame[name].to_numpy() for name in ("time", "symbol", "close"))
    again = frame.duplicated(["symbol", "time"]).to_numpy()
    if again.any():
        row = int(np.flatnonzero(again)[0])
        first = int(np.flatnonzero((time == time[row]) & (symbol == symbol[row]))[0])
        same = "the same close" if close[first] == close[row] else "different close"
        stamp = np.datetime_as_string(time[row], unit="s")
        say = f"duplicate time {stamp}Z with {same} ({close[first]} and {close[row]})"
        yield Fault("D021", say, "Remove one", again, ("keep-first", "keep-last"))
    rows = np.flatnonzero(~again)
    code = pd.factorize(symbol[rows])[0]
    order = np.argsort(code, kind="stable")
    inside = np.diff(code[order]) == 0
    back = inside & (np.diff(time[rows[order]]) < np.timedelta64(0))
    if back.any():
        mask = np.zeros(len(frame), dtype=bool)
        mask[rows[order][1:][back]] = True
        newest_first = back.sum() == inside.sum()
        say = "the time is before that of the row above"
        say = "times run backwards, newest first" if newest_first else say
        yield Fault("D020", say, "Sort the rows by time", mask, ("sort",))


def read_times(column: pd.Series, timezone: str | None) -> tuple[pd.Series, list[Fault]]:
    """Times in UTC as datetime64[ns] without zone, NaT where they are at fault, and the faults.

    Text is ISO 8601 (2018-12-31, 2018-12-31T14:30:00Z, ...), which no one reads as another day.
    """
    if timezone is not None and timezone not in zoneinfo.available_timezones():
        near = difflib.get_close_matches(timezone, zoneinfo.available_timezones(), 1, 0.0)[0]
        raise BarError(f"unknown time zone {timezone!r}; did you mean {near!r}?")
    aware = np.full(len(column), getattr(column.dtype, "tz", None) is not None)
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        times = column
    elif pd.api.types.is_numeric_dtype(column.dtype):
        size = column.abs().median()
        unit = next((unit for least, unit in EPOCHS if size >= least), None)
        aware[:] = unit is not None
        if unit is None:
            days = column.astype("Int64").astype("str")
            times = pd.to_datetime(days, format="%Y%m%d", errors="coerce")
        else:
            times = pd.to_datetime(column * unit, unit="ns", errors="coerce")
    else:
        text = column.astype("str").str.strip()
        aware = text.str.contains(OFFSET, regex=True).to_numpy(dtype=bool, na_value=False)
        times = pd.to_datetime(text, format="ISO8601", errors="coerce", utc=True)
    times = times.dt.tz_convert(None) if getattr(times.dtype, "tz", None) else times
    wild = times.isna() | (times < EARLIEST) | (times > LATEST)
    times = times.mask(wild).astype("datetime64[ns]")
    faults = []
    if wild.any():
        say = f"time {str(column[wild].iloc[0])!r} can't be read"
        remedy = "Write it as 2018-12-31 or 2018-12-31T14:30:00Z"
        faults.append(Fault("D013", say, remedy, wild.to_numpy(), ("drop-bad",)))
    naive = ~aware & ~wild.to_numpy()
    if not naive.any():
        return times, faults
    if timezone is not None:
        local = times[naive].dt.tz_localize(timezone, ambiguous="NaT", nonexistent="NaT")
        times[naive] = local.dt.tz_convert(None)
        skipped = naive & times.isna().to_numpy()
        if skipped.any():
            say = f"time {str(column[skipped].iloc[0])!r} is skipped or repeated by the clock of"
            remedy = "Add a UTC offset to the time"
            faults.append(Fault("D016", f"{say} {timezone}", remedy, skipped, ("drop-bad",)))
    elif aware.any():
        say = f"time {str(column[naive].iloc[0])!r} has no UTC offset but {aware.sum():,} others do"
        remedy = "Add an offset or pass --timezone, e.g. America/New_York"
        faults.append(Fault("D014", say, remedy, naive))
    elif (times[naive] != times[naive].dt.normalize()).any():
        say = f"time {str(column[naive].iloc[0])!r} has no time zone"
        remedy = "Add a UTC offset or pass --timezone, e.g. UTC or America/New_York"
        faults.append(Fault("D015", say, remedy, naive))
    return times, faults


def validate(bars: Bars) -> None:
    """Checks bars that were built by hand as `read_bars` checks a file's.

    Raises:
      BarError: every problem at once, with code, row, symbol and remedy.
    """
    fields = (*PRICES, "volume", "present")
    frame = pd.DataFrame({name: getattr(bars, name).ravel() for name in fields})
    # Arrays in memory have no --repair; their owner mends them.
    faults = [fault._replace(repairs=()) for fault in value_faults(frame)]
    width, names = bars.num_assets, bars.symbols
    refuse(bars.source or "bars", faults, lambda i: f"row {i // width}, {names[i % width]}")
