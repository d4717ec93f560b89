"""Faults that no row shows alone: reused tickers, jumps, columns that changed places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from nca_trader.data.reading.columns import ADJUSTMENTS
from nca_trader.data.reading.faults import Fault
from nca_trader.data.reading.jumps import is_jump, split_ratio
from nca_trader.data.reading.records import Records
from nca_trader.data.reading.swapped import assets_swapped, open_close_swapped, range_volume_swapped
from nca_trader.errors import argument

REUSE = np.timedelta64(180, "D")  # without bars, at least
CHANGES = 1e-3  # relative: adjusted closes are rounded
BLOCK = 1 << 16  # rows looked at together, so that what is computed of them is small


def series_faults(records: Records) -> Iterator[Fault]:
    """Faults between bars of one symbol, in order of time."""
    rows, code, time = _in_order(records)
    present = records["present"][rows]
    parted = _parts(time, code, present)

    def fault(name: str, at: np.ndarray, say: str, remedy: str, *repairs: str) -> Fault:
        mask = np.zeros(len(records), dtype=bool)
        mask[at if isinstance(rows, slice) else rows[at]] = True
        return Fault(name, say, remedy, mask, repairs)

    def day(row: int) -> str:
        return str(time[row])[:10]

    if len(parted):
        row = int(parted[0])
        own = np.flatnonzero(code == code[row])
        until = next((int(r) for r in parted[1:] if code[r] == code[row]), int(own[-1]) + 1) - 1
        name = records.symbols[code[row]]
        say = f"{name} has bars from {day(own[0])} to {day(row - 1)} and again from "
        say += f"{day(row)} to {day(until)}: a ticker used again, or a gap"
        yield fault("D025", parted, say, "Give each its own symbol", "part-reuse", "keep-gaps")
    checked = present & (records["close"][rows] > 0)
    if not checked.all():  # others stand between no two bars
        rows = np.flatnonzero(checked) if isinstance(rows, slice) else rows[checked]
        code, time = code[checked], time[checked]
    inside = (code[1:] == code[:-1]) & (np.diff(time) <= REUSE)
    at = is_jump(records, rows, inside, code)
    if len(at):
        row = int(at[0])
        place = rows[row - 1 : row + 1] if isinstance(rows, np.ndarray) else [row - 1, row]
        before, after = records["close"][place[0]], records["open"][place[1]]
        say = f"{records.symbols[code[row]]} jumps from close {before:.6g} to open {after:.6g}, "
        say += f"{after / before:.4g} times{split_ratio(after / before)}"
        remedy = f"Correct the prices, or adjust splits, e.g. {argument('columns', 'split=COLUMN')}"
        yield fault("D026", at, say, remedy, "keep-jumps")
    name, at = range_volume_swapped(records, rows, code)
    if name:
        say = f"{name} and volume look swapped: the volume is of the size of the price, and the "
        yield fault("D028", at, f"{say}{name} isn't", "Swap them there", "keep-jumps")
    at = open_close_swapped(records, rows, inside, code)
    if len(at):
        say = f"open and close look swapped from about here, for {len(at):,} bars: the closes, "
        say += "not the opens, go on from the bar before"
        yield fault("D029", at, say, "Swap them there", "keep-jumps")
    at = assets_swapped(records, rows, inside, code, time)
    if len(at):
        say = f"{records.symbols[code[at[0]]]} goes on from the price of another asset, and that "
        say += "one from its: their columns look swapped from here, or up to here"
        yield fault("D029", at, say, "Swap them there", "keep-jumps")


def _in_order(records: Records) -> tuple[slice | np.ndarray, np.ndarray, np.ndarray]:
    """The rows by symbol and time: their places, their symbols' codes, their times."""
    code, time = records["symbol"], records["time"]
    step = code[1:].astype(np.int64) - code[:-1] if len(records.symbols) > 1 else 0
    if ((step > 0) | ((step == 0) & (time[1:] >= time[:-1]))).all():
        return slice(None), code, time
    rows = np.lexsort((time, code))
    return rows, code[rows], time[rows]


def typical(value: np.ndarray, inside: np.ndarray, code: np.ndarray) -> np.ndarray:
    """`[n - 1]` the median of `value` `[n - 1]` within each row's symbol."""
    series = pd.Series(np.where(inside, value, np.nan))
    return series.groupby(code[1:]).transform("median").to_numpy()


def _parts(time: np.ndarray, code: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Places, in order of symbol and time, of the first bar after half a year without a row.

    Beside a row that says itself that the bar is missing there is none.
    """
    long = (np.diff(time) > REUSE) & (code[1:] == code[:-1]) & present[1:] & present[:-1]
    if not long.any():
        return np.zeros(0, dtype=int)
    inside = (code[1:] == code[:-1]) & present[1:] & present[:-1]
    step = np.diff(time) / np.timedelta64(1, "D")
    # Bars of a quarter or a year are always as far apart as that.
    return np.flatnonzero(long & (step > 20 * typical(step, inside, code))) + 1


def part_reused(records: Records) -> None:
    """Gives every later span of a symbol the year of its first bar: FB, FB-2012; in place."""
    rows, code, time = _in_order(records)
    names, out = list(records.symbols), records["symbol"].copy()
    places = np.arange(len(records)) if isinstance(rows, slice) else rows
    for place in _parts(time, code, records["present"][rows]):
        later = places[place:][code[place:] == code[place]]
        names.append(f"{records.symbols[code[place]]}-{str(time[place])[:4]}")
        out[later] = len(names) - 1
    # The assets in the order of their first rows.
    new, order = pd.factorize(out)
    records["symbol"], records.symbols = new.astype(np.int32), [names[i] for i in order]


def column_faults(
    records: Records, others: list[tuple[str, np.ndarray]], repairs: frozenset[str]
) -> Iterator[Fault]:
    """Adjustments that are not applied, and columns that changed places with volume.

    Where the repair swap-volume is asked for, the volume of `records` is mended in place.
    """
    for name, value in others:
        if name.lower().replace(" ", "_") in ADJUSTMENTS and "split" not in records:
            if "dividend" not in records:
                yield from _unadjusted(records, value, name)
            continue
        for fault in _volume_swapped(records, value, name):
            if fault.mask is not None and fault.mended_by(repairs):
                records["volume"] = np.where(fault.mask, value, records["volume"])
            yield fault


def _unadjusted(records: Records, value: np.ndarray, name: str) -> Iterator[Fault]:
    kind = name.lower().replace(" ", "_")
    ratio = kind in ("adj_close", "adjclose", "adjusted_close")
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = value / records["close"] if ratio else value
        moved = np.abs(factor[1:] / factor[:-1] - 1.0) > CHANGES
    symbol = records["symbol"]
    mask = np.concatenate(([False], moved & (symbol[1:] == symbol[:-1])))
    if mask.any():
        row = int(np.argmax(mask))
        say = f"{name} = {value[row]:.6g} adjusts the prices, which are taken as they stand"
        use = "split=1/ajexdi" if kind == "ajexdi" else f"dividend={name}{'/close' * ratio}"
        use = f"split={name}" if kind == "split_factor" else use
        yield Fault("D027", say, f"Pass {argument('columns', use)}", mask, ("unadjusted",))


def _volume_swapped(records: Records, value: np.ndarray, name: str) -> Iterator[Fault]:
    """Rows whose volume is traded value and the other way round; else where two columns cross."""
    volume = records["volume"]
    known = (volume > 0) & (value > 0) & (records["close"] > 0) & records["present"]
    if known.sum() < 2:
        return
    rows = np.flatnonzero(known) if not known.all() else slice(None)
    more = np.empty(int(known.sum()))
    told, mask = 0, np.zeros(len(known), dtype=bool)
    for begin in range(0, len(more), BLOCK):
        part = slice(begin, min(begin + BLOCK, len(more)))
        at = part if isinstance(rows, slice) else rows[part]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            more[part] = np.log(value[at]) - np.log(volume[at])
            price = np.log(records["close"][at])
            edge = np.log(records["high"][at] / records["low"][at]) + 0.02
        straight, swapped = np.abs(more[part] - price), np.abs(-more[part] - price)
        told += int(((straight <= edge) | (swapped <= edge)).sum())
        mask[at] = swapped + 0.5 < straight
    if told >= 0.8 * len(more):
        # The column is traded value, volume times price: what of a row is nearer is what it is.
        if mask.any():
            row = int(np.argmax(mask))
            say = f"volume {volume[row]:.8g} and {name} {value[row]:.8g} are swapped: the second "
            say += "times the price is the first"
            yield Fault("D028", say, "Swap them there", mask, ("swap-volume",))
        return
    sign = np.sign(more).astype(np.int8) * (np.abs(more) > np.log(10.0))
    flips = np.flatnonzero(sign[1:] != sign[:-1])
    ups, downs = (sign > 0).mean(), (sign < 0).mean()
    if 0 < len(flips) <= 5 and min(ups, downs) > 0.02 and ups + downs == 1.0:
        size = np.abs(more)
        if abs(np.median(size[sign > 0]) - np.median(size[sign < 0])) < 1.0:
            mask = np.zeros(len(known), dtype=bool)
            mask[np.flatnonzero(known)[flips + 1]] = True
            say = f"volume and {name} change places here"
            yield Fault("D028", say, "Swap them on one side of it", mask)
