"""What can be wrong with the rows of a table of bars: values, and order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from nca_trader.data.reading.extras import add_extras
from nca_trader.data.reading.faults import Fault, refuse
from nca_trader.data.reading.records import Records
from nca_trader.errors import argument
from nca_trader.types import PRICES, Bars

SLACK = 1e-9  # relative: vendors' adjusted prices are off by rounding
NOT_POSITIVE = (
    "Correct or remove the row; a back-adjusted future is to be adjusted by ratios in place of "
    "differences, or an offset added to all its prices, whose returns are then of that sum"
)


def value_faults(frame: pd.DataFrame, raw: pd.DataFrame | None = None) -> Iterator[Fault]:
    """Faults of open, high, low, close and volume, row by row.

    `frame` holds them as float64; `raw`, where it is given, as they were read, so that a text in
    place of a number is told from a missing value. Rows whose `present` is False are not looked
    at, and a row counts in the first check that it fails.
    """
    unchecked = frame["present"].to_numpy().copy()
    about = ""

    def fault(code: str, mask: np.ndarray, say: Callable[[int], str], *repairs: str):
        mask = mask & unchecked
        remedy = NOT_POSITIVE if code == "D008" else "Correct or remove the row"
        if mask.any():
            if repairs[0] != "no-volume":  # such a row stays, so the other checks are due
                unchecked[mask] = False
            yield Fault(code, say(int(np.argmax(mask))), remedy, mask, repairs, about)

    for name in ("close", "open", "high", "low", "volume"):  # the others may stand in for a close
        value, about = frame[name].to_numpy(), name
        missing, volume = np.isnan(value), name == "volume"

        def say(row: int, name: str = name, value: np.ndarray = value) -> str:
            return f"{name} = {value[row]}"

        def text(row: int, name: str = name) -> str:
            return f"{name} = {'' if raw is None else raw[name].iloc[row]} is not a number"

        if raw is not None and missing.any():
            yield from fault("D009", missing & raw[name].notna().to_numpy(), text, "drop-bad")
        options = ("no-volume", "drop-nan") if volume else ("drop-nan",)
        yield from fault("D006", missing, say, *options)
        yield from fault("D007", np.isinf(value), say, "drop-bad")
        if volume:
            yield from fault("D012", value < 0, say, "drop-bad")
        else:
            yield from fault("D008", value <= 0, say, "drop-bad")
    about = ""
    o, h, low, c = (frame[name].to_numpy() for name in PRICES)

    def bar(row: int) -> str:
        return f"open {o[row]}, high {h[row]}, low {low[row]}, close {c[row]}"

    slack = SLACK * np.abs(c)
    yield from fault("D010", h < low - slack, lambda r: f"high below low: {bar(r)}", "drop-bad")
    outside = (np.maximum(o, c) > h + slack) | (np.minimum(o, c) < low - slack)
    yield from fault(
        "D011", outside, lambda r: f"open or close outside low to high: {bar(r)}", "widen"
    )


def order_faults(records: Records, timezone: str | None, dates: str | None) -> Iterator[Fault]:
    """Rows that repeat a time of their `symbol`, or whose time is before that of the row above.

    Where dates with day and month exchanged explain these, that is the only fault: sorted or
    dropped, such rows would still have wrong dates. `timezone` and `dates` are those of
    `read_bars`.
    """
    time, symbol, close = (records[name] for name in ("time", "symbol", "close"))
    order, inside, forward = _steps(time, symbol)
    if (forward | ~inside).all():
        return
    local = time
    if timezone is not None:
        local = pd.DatetimeIndex(time, tz="UTC").tz_convert(timezone).tz_localize(None).to_numpy()
    other = _exchanged(local)
    if _explains(other[order], local[order], inside):
        row = int(np.argmax(other != local))
        wrong, right = (str(t[row])[:10] for t in (local, other))
        say = f"day and month are exchanged in dates: {wrong} is {right}, and so in order"
        remedy = "Write the dates again from the source"
        if dates is not None and (_day(local) < 12).all():  # no date proves the order
            remedy += f", or pass {argument('dates', 'mdy' if dates == 'dmy' else 'dmy')}"
        yield Fault("D019", say, remedy, other != local)
        return
    again = pd.DataFrame({"time": time, "symbol": symbol}, copy=False).duplicated().to_numpy()
    if again.any():
        row = int(np.argmax(again))
        first = int(np.argmax((time == time[row]) & (symbol == symbol[row])))
        same = "the same close" if close[first] == close[row] else "different close"
        stamp = np.datetime_as_string(time[row], unit="s")
        say = f"duplicate time {stamp}Z with {same} ({close[first]} and {close[row]})"
        yield Fault("D021", say, "Remove one", again, ("keep-first", "keep-last"))
        rows = np.flatnonzero(~again)
        order, inside, forward = _steps(time[rows], symbol[rows])
        order = rows[order]
    back = inside & ~forward
    if back.any():
        mask = np.zeros(len(time), dtype=bool)
        mask[(np.arange(len(time)) if isinstance(order, slice) else order)[1:][back]] = True
        newest_first = back.sum() == inside.sum()
        say = "the time is before that of the row above"
        say = "times run backwards, newest first" if newest_first else say
        yield Fault("D020", say, "Sort the rows by time", mask, ("sort",))


def _exchanged(time: np.ndarray) -> np.ndarray:
    """`time` with day and month exchanged, where the day can be a month."""
    day, month = _day(time), time.astype("datetime64[M]").astype(int) % 12  # both from 0
    moved = (time.astype("datetime64[Y]").astype("datetime64[M]") + day).astype("datetime64[D]")
    return np.where(day < 12, moved + month + (time - time.astype("datetime64[D]")), time)


def _day(time: np.ndarray) -> np.ndarray:
    return (time.astype("datetime64[D]") - time.astype("datetime64[M]")).astype(int)


def _explains(other: np.ndarray, time: np.ndarray, inside: np.ndarray) -> bool:
    """Whether `other` runs in one direction by far shorter steps than `time`."""

    def path(each: np.ndarray) -> tuple[float, int]:
        step = np.diff(each)[inside].astype(np.int64).astype(np.float64)
        back = min((step < 0).sum(), (step > 0).sum()) + (step == 0).sum()
        return float(np.abs(step).sum()), int(back)

    (short, few), (long, many) = path(other), path(time)
    return 2 * short < long and 2 * few <= many


def _steps(
    time: np.ndarray, symbol: np.ndarray
) -> tuple[slice | np.ndarray, np.ndarray, np.ndarray]:
    """The rows by symbol, as they stand; from each to the next: the same symbol, a later time."""
    order = slice(None)
    if (symbol[1:] < symbol[:-1]).any():
        order = np.argsort(symbol, kind="stable")
        time, symbol = time[order], symbol[order]
    return order, symbol[1:] == symbol[:-1], time[1:] > time[:-1]


def validate(bars: Bars) -> None:
    """Checks bars that were built by hand as `read_bars` checks a file's.

    Raises:
      BarError: every problem at once, with code, row, symbol and remedy.
    """
    frame = pd.DataFrame({name: getattr(bars, name).ravel() for name in bars.fields})
    found = [*value_faults(frame)]
    frame = frame.rename(columns={"dividend": "cash_dividend"})
    found += add_extras(frame, frame, empty_is_none=False)
    # Arrays in memory have no option that repairs them; their owner does.
    faults = [fault._replace(repairs=()) for fault in found]
    width, names = bars.num_assets, bars.symbols
    refuse(bars.source or "bars", faults, lambda i: f"row {i // width}, {names[i % width]}")
