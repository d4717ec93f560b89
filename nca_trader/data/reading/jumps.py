"""Jumps of a price between two bars: splits that are not adjusted, digits that are lost."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nca_trader.data.reading.records import Records

JUMP = np.log(1.8)  # at least, and
JUMP_MOVES = 25  # times the symbol's median move: what is wild already jumps higher
RATIOS = (  # shares after and before, of the splits that are common
    (5, 4), (4, 3), (3, 2), (5, 3), (2, 1), (5, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1),
    (8, 1), (10, 1), (15, 1), (20, 1), (25, 1), (30, 1), (50, 1), (100, 1),
)  # fmt: skip
NEAR = 0.025  # of a ratio, as logarithms: what the price itself moved over night
SPLIT_MOVES = 8  # times the moves of the bars around, at least
AROUND = 50  # bars before and after, at most
QUIET = 12.0  # or this part of the jump: what opens a third lower on news moves on by more
CALM = 3.0  # times the range of the bars around, at most: news moves a price within the bar too
BUSY = 2.5  # times the volume of the bars before, at most
BLOCK = 1 << 16


def split_ratio(times: float) -> str:
    """Which split a price that is `times` the one before looks like, or ""."""
    names = {before / after: f"{after} for {before}" for after, before in RATIOS}
    names |= {after / before: f"{before} for {after}" for after, before in RATIOS}
    ratio = min(names, key=lambda ratio: abs(np.log(times / ratio)))
    near = abs(np.log(times / ratio)) <= NEAR
    return f", as a split of {names[ratio]} that is not adjusted" if near else ""


def is_jump(
    records: Records, rows: slice | np.ndarray, inside: np.ndarray, code: np.ndarray
) -> np.ndarray:
    """Places, in order of symbol and time, whose open is far from the close before.

    Args:
      records: the rows of a file. rows: those looked at, by symbol and time. inside: `[n - 1]`
        whether the next of them is of the same symbol and span. code: `[n]` the symbols.
    """
    gaps = _gaps(records, rows, inside)
    places = np.flatnonzero(np.abs(gaps) > np.log(RATIOS[0][0] / RATIOS[0][1]) - NEAR)
    if not len(places):
        return places
    high = places[np.abs(gaps[places]) > JUMP]
    found = set((high[_far(records, rows, inside, code, high, gaps)] + 1).tolist())
    logs = np.log([after / before for after, before in RATIOS])
    for place in places:
        near = np.abs(np.abs(gaps[place]) - logs).min() <= NEAR
        row = int(place) + 1
        if near and row not in found and _is_split(records, rows, code, row, gaps):
            found.add(row)
    return np.array(sorted(found), dtype=int)


def _part(rows: slice | np.ndarray, begin: int, end: int) -> slice | np.ndarray:
    return slice(begin, end) if isinstance(rows, slice) else rows[begin:end]


def _gaps(records: Records, rows: slice | np.ndarray, inside: np.ndarray) -> np.ndarray:
    """`[n - 1]` float32 logarithms of open over the close before, 0 between symbols."""
    out = np.zeros(len(inside), dtype=np.float32)
    for begin in range(0, len(inside), BLOCK):
        end = min(begin + BLOCK, len(inside))
        part = _part(rows, begin, end + 1)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            gap = np.log(records["open"][part][1:] / records["close"][part][:-1])
        out[begin:end] = np.where(inside[begin:end] & np.isfinite(gap), gap, 0.0)
    return out


def _far(
    records: Records,
    rows: slice | np.ndarray,
    inside: np.ndarray,
    code: np.ndarray,
    places: np.ndarray,
    gaps: np.ndarray,
) -> np.ndarray:
    """`[places]` whether the gap is far beyond the symbol's median move from close to close."""
    if not len(places):
        return np.zeros(0, dtype=bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        move = np.abs(np.diff(np.log(records["close"][rows])))
    series = pd.Series(np.where(inside, move, np.nan))
    typical = series.groupby(code[1:]).transform("median").to_numpy()
    return np.abs(gaps[places]) > JUMP_MOVES * typical[places]


def _is_split(
    records: Records, rows: slice | np.ndarray, code: np.ndarray, row: int, gaps: np.ndarray
) -> bool:
    """Whether nothing but the level changes at `row`: moves, range and volume stay as around it.

    News that moves a price as far also widens the bar's range and multiplies its volume; a split
    of k for 1 makes the volume k times what it was.
    """
    first, last = max(row - AROUND, 0), min(row + AROUND + 1, len(code))
    own = code[first:last] == code[row]
    part = _part(rows, first, last)
    o, h, low, c, v = (records[n][part] for n in ("open", "high", "low", "close", "volume"))
    at, gap = row - first, abs(float(gaps[row - 1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        spread, body = np.log(h / low), np.abs(np.log(c / o))
    others = own.copy()
    others[at] = False
    if others.sum() < 5:
        return False
    between = own[1:] & own[:-1]
    between[at - 1] = False
    moves = np.abs(gaps[first : last - 1])[between]
    usual = max(float(np.nanmedian(spread[others])), float(np.nanmedian(body[others])))
    if not gap > SPLIT_MOVES * max(usual, float(np.nanpercentile(moves, 75)), 1e-9):
        return False
    if not spread[at] <= max(CALM * usual, gap / QUIET):
        return False
    known = v[:at][own[:at]]
    if not len(known) or not np.median(known) > 0.0:
        return True
    more = max(1.0, float(np.exp(-gaps[row - 1])))  # what the volume becomes in the new unit
    return bool(v[at] <= more * max(BUSY * np.median(known), 1.5 * np.percentile(known, 95)))
