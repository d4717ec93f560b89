"""Faults that no row shows alone: reused tickers, jumps, columns that changed places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from nca_trader.data.columns import ADJUSTMENTS
from nca_trader.data.faults import Fault

REUSE = np.timedelta64(180, "D")  # without bars, at least
JUMP = np.log(1.8)  # at least, and
JUMP_MOVES = 25  # times the symbol's median move: what is wild already jumps higher
WINDOW = 100  # bars whose opens and closes are looked at together
CHANGES = 1e-3  # relative: adjusted closes are rounded


def series_faults(frame: pd.DataFrame) -> Iterator[Fault]:
    """Faults between bars of one symbol, in order of time; `frame` as `checks.order_faults`'."""
    rows, code, names, time = _in_order(frame)
    segment = np.cumsum(np.concatenate(([0], np.diff(code) != 0)))
    parted = _parts(time, code, frame["present"].to_numpy()[rows])

    def fault(name: str, at: np.ndarray, say: str, remedy: str, *repairs: str) -> Fault:
        mask = np.zeros(len(frame), dtype=bool)
        mask[rows[at]] = True
        return Fault(name, say, remedy, mask, repairs)

    def day(row: int) -> str:
        return str(time[row])[:10]

    if len(parted):
        row = int(parted[0])
        own = np.flatnonzero(code == code[row])
        until = next((int(r) for r in parted[1:] if code[r] == code[row]), int(own[-1]) + 1) - 1
        say = f"{names[code[row]]} has bars from {day(own[0])} to {day(row - 1)} and again from "
        say += f"{day(row)} to {day(until)}: a ticker used again, or a gap"
        yield fault("D025", parted, say, "Give each its own symbol", "part-reuse", "keep-gaps")
    checked = np.flatnonzero((frame["present"].to_numpy() & (frame["close"] > 0).to_numpy())[rows])
    rows, code, time, segment = (x[checked] for x in (rows, code, time, segment))
    inside = (np.diff(segment) == 0) & (np.diff(time) <= REUSE)
    with np.errstate(divide="ignore", invalid="ignore"):
        o, c = (np.log(frame[name].to_numpy()[rows]) for name in ("open", "close"))
    at = _jumps(o, c, inside, code)
    if len(at):
        row = int(at[0])
        before, after = np.exp(c[row - 1]), np.exp(o[row])
        say = f"{names[code[row]]} jumps from close {before:.6g} to open {after:.6g}, "
        say += f"{after / before:.4g} times"
        remedy = "Correct the prices, or adjust splits, e.g. --columns split=COLUMN"
        yield fault("D026", at, say, remedy, "keep-jumps")
    at = _open_close_swapped(o, c, inside)
    if len(at):
        say = f"open and close look swapped from about here, for {len(at):,} bars: the closes, "
        yield fault("D029", at, f"{say}not the opens, go on from the bar before", "Swap them there")


def _in_order(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, pd.Index, np.ndarray]:
    """The rows by symbol and time: their places, their symbols' codes, those symbols, times."""
    code, names = pd.factorize(frame["symbol"])
    time = frame["time"].to_numpy()
    rows = np.lexsort((time, code))
    return rows, code[rows], pd.Index(names), time[rows]


def _typical(value: np.ndarray, inside: np.ndarray, code: np.ndarray) -> np.ndarray:
    """`[n - 1]` the median of `value` `[n - 1]` within each row's symbol."""
    series = pd.Series(np.where(inside, value, np.nan))
    return series.groupby(code[1:]).transform("median").to_numpy()


def _parts(time: np.ndarray, code: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Places, in order of symbol and time, of the first bar after half a year without a row.

    Beside a row that says itself that the bar is missing there is none.
    """
    step = np.diff(time) / np.timedelta64(1, "D")
    inside = (np.diff(code) == 0) & present[1:] & present[:-1]
    long = inside & (step > REUSE / np.timedelta64(1, "D"))
    if not long.any():
        return np.zeros(0, dtype=int)
    # Bars of a quarter or a year are always as far apart as that.
    return np.flatnonzero(long & (step > 20 * _typical(step, inside, code))) + 1


def _jumps(o: np.ndarray, c: np.ndarray, inside: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Places whose open is far from the close before, both as logarithms."""
    jump = np.abs(o[1:] - c[:-1])
    high = inside & (jump > JUMP)
    if not high.any():
        return np.zeros(0, dtype=int)
    typical = _typical(np.abs(np.diff(c)), inside, code)
    return np.flatnonzero(high & (jump > JUMP_MOVES * typical)) + 1


def part_reused(frame: pd.DataFrame) -> pd.Series:
    """The symbols, those of every later span with the year of its first bar: FB, FB-2012."""
    rows, code, names, time = _in_order(frame)
    out = frame["symbol"].astype(object).to_numpy().copy()
    for place in _parts(time, code, frame["present"].to_numpy()[rows]):
        later = rows[place:][code[place:] == code[place]]
        out[later] = f"{names[code[place]]}-{str(time[place])[:4]}"
    return pd.Series(out, index=frame.index)


def _open_close_swapped(o: np.ndarray, c: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Rows, of logarithms in order of time, whose close goes on from the open before it.

    An open is nearer to the close before it than that bar's open is to this bar's close, over any
    window of bars; where columns are swapped it is the other way round.
    """
    width = min(WINDOW, len(inside))
    if width < 30:
        return np.zeros(0, dtype=int)
    near = np.where(inside, np.abs(o[1:] - c[:-1]), 0.0)
    far = np.where(inside, np.abs(c[1:] - o[:-1]), 0.0)
    excess = np.nan_to_num(near - 2.0 * far, nan=0.0)
    total = np.concatenate(([0.0], np.cumsum(excess)))
    if not (total[width:] - total[:-width] > 1e-9).any():
        return np.zeros(0, dtype=int)
    # The span in which swapped columns explain most: from the lowest to the highest of the sum.
    total = np.concatenate(([0.0], np.cumsum(np.nan_to_num(near - far, nan=0.0))))
    last = int(np.argmax(total - np.minimum.accumulate(total)))
    return np.arange(int(np.argmin(total[: last + 1])) + 1, last + 1)


def column_faults(
    frame: pd.DataFrame, others: pd.DataFrame, repairs: frozenset[str]
) -> Iterator[Fault]:
    """Adjustments that are not applied, and columns that changed places with volume.

    Where the repair swap-volume is asked for, the volume of `frame` is mended in place.
    """
    for at in range(others.shape[1]):
        column, name = others.iloc[:, at], str(others.columns[at]).strip()
        if not pd.api.types.is_numeric_dtype(column.dtype):
            continue
        value = column.to_numpy(np.float64, na_value=np.nan)
        if name.lower().replace(" ", "_") in ADJUSTMENTS and "split" not in frame:
            if "dividend" not in frame:
                yield from _unadjusted(frame, value, name)
            continue
        for fault in _volume_swapped(frame, value, name):
            if fault.mask is not None and fault.mended_by(repairs):
                frame["volume"] = np.where(fault.mask, value, frame["volume"])
            yield fault


def _unadjusted(frame: pd.DataFrame, value: np.ndarray, name: str) -> Iterator[Fault]:
    kind = name.lower().replace(" ", "_")
    ratio = kind in ("adj_close", "adjclose", "adjusted_close")
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = value / frame["close"].to_numpy() if ratio else value
        moved = np.abs(factor[1:] / factor[:-1] - 1.0) > CHANGES
    symbol = frame["symbol"].to_numpy()
    mask = np.concatenate(([False], moved & (symbol[1:] == symbol[:-1])))
    if mask.any():
        row = int(np.flatnonzero(mask)[0])
        say = f"{name} = {value[row]:.6g} adjusts the prices, which are taken as they stand"
        use = "split=1/ajexdi" if kind == "ajexdi" else f"dividend={name}{'/close' * ratio}"
        use = f"split={name}" if kind == "split_factor" else use
        yield Fault("D027", say, f"Pass --columns {use}", mask, ("unadjusted",))


def _volume_swapped(frame: pd.DataFrame, value: np.ndarray, name: str) -> Iterator[Fault]:
    """Rows whose volume is traded value and the other way round; else where two columns cross."""
    volume, close = frame["volume"].to_numpy(), frame["close"].to_numpy()
    known = (volume > 0) & (value > 0) & (close > 0) & frame["present"].to_numpy()
    if known.sum() < 2:
        return
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        more = np.where(known, np.log(value) - np.log(volume), 0.0)
        price = np.where(known, np.log(close), 0.0)
        edge = np.where(known, np.log(frame["high"] / frame["low"]), 0.0) + 0.02
    straight = known & (np.abs(more - price) <= edge)
    swapped = known & (np.abs(-more - price) <= edge)
    if (straight | swapped).sum() >= 0.8 * known.sum():
        # The column is traded value, volume times price: what of a row is nearer is what it is.
        mask = known & (np.abs(-more - price) + 0.5 < np.abs(more - price))
        if mask.any():
            row = int(np.flatnonzero(mask)[0])
            say = f"volume {volume[row]:.8g} and {name} {value[row]:.8g} are swapped: the second "
            say += "times the price is the first"
            yield Fault("D028", say, "Swap them there", mask, ("swap-volume",))
        return
    sign = np.sign(more[known]) * (np.abs(more[known]) > np.log(10.0))
    flips = np.flatnonzero(sign[1:] != sign[:-1])
    ups, downs = (sign > 0).mean(), (sign < 0).mean()
    if 0 < len(flips) <= 5 and min(ups, downs) > 0.02 and ups + downs == 1.0:
        size = np.abs(more[known])
        if abs(np.median(size[sign > 0]) - np.median(size[sign < 0])) < 1.0:
            mask = np.zeros(len(frame), dtype=bool)
            mask[np.flatnonzero(known)[flips + 1]] = True
            say = f"volume and {name} change places here"
            yield Fault("D028", say, "Swap them on one side of it", mask)
