"""What can be wrong with the rows of a table of bars: values, and order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from nca_trader.data.faults import Fault, refuse
from nca_trader.types import PRICES, Bars

SLACK = 1e-9  # relative: vendors' adjusted prices are off by rounding


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

    for name in ("close", "open", "high", "low", "volume"):  # the others may stand in for a close
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
    back = inside & (np.diff(time[rows[order]]) < np.timedelta64(0, "ns"))
    if back.any():
        mask = np.zeros(len(frame), dtype=bool)
        mask[rows[order][1:][back]] = True
        newest_first = back.sum() == inside.sum()
        say = "the time is before that of the row above"
        say = "times run backwards, newest first" if newest_first else say
        yield Fault("D020", say, "Sort the rows by time", mask, ("sort",))


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
