"""Finds faults that no row shows alone: jumps, long gaps, and adjustments that are not applied.

Every function takes the bars of all symbols in order of symbol and time, and returns places in
that order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

REUSE = np.timedelta64(180, "D")  # without bars, at least
CHANGES = 1e-3  # relative: adjusted closes are rounded
JUMP = np.log(1.8)  # at least, and
JUMP_MOVES = 25  # times the symbol's median move: wild symbols jump higher
RATIOS = (  # shares after and before, of the splits that are common
    (5, 4), (4, 3), (3, 2), (5, 3), (2, 1), (5, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1),
    (8, 1), (10, 1), (15, 1), (20, 1), (25, 1), (30, 1), (50, 1), (100, 1),
)  # fmt: skip
NEAR_RATIO = 0.025  # as logarithms: the price's own move overnight
SUSPECTS = 10_000  # moves by the ratio of a split that are looked at
SPLIT_MOVES = 8  # times the moves of the bars around, at least
AROUND = 50  # bars before and after, at most
QUIET = 12.0  # or this part of the jump: a price that opens a third lower on news moves on by more
CALM = 3.0  # times the range of the bars around, at most: news moves a price within the bar too
BUSY = 2.5  # times the volume of the bars before, at most
# Columns of vendors that hold adjusted prices or factors for them.
ADJUSTMENTS = {
    "split_factor", "price_factor", "adj_close", "adjclose", "adjusted_close", "ajexdi",
    "factor", "adj_factor", "adjustment_factor",
}  # fmt: skip


class Series(NamedTuple):
    """Present bars in order of symbol and time.

    Attributes:
      code: `[n]` the symbol, a place among the names.
      time: `[n]` datetime64[ns].
      open, high, low, close, volume: `[n]` float64.
    """

    code: np.ndarray
    time: np.ndarray
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray

    @property
    def inside(self) -> np.ndarray:
        """`[n - 1]` bool, whether the next bar is of the same symbol and span."""
        return (self.code[1:] == self.code[:-1]) & (np.diff(self.time) <= REUSE)


def jump_fault(bars: Series, names: list[str]) -> tuple[np.ndarray, str]:
    """Return the places of jumps (see `jumps`), and the message about the first."""
    at = jumps(bars)
    if not len(at):
        return at, ""
    before, after = float(bars.close[at[0] - 1]), float(bars.open[at[0]])
    say = f"{names[bars.code[at[0]]]} jumps from close {before:.6g} to open {after:.6g}, "
    return at, f"{say}{after / before:.4g} times{split_ratio(after / before)}"


def split_ratio(times: float) -> str:
    """Name the split that a price `times` the one before looks like, or return "".

    >>> split_ratio(0.5)
    ', as a split of 2 for 1 that is not adjusted'
    """
    names = {before / after: f"{after} for {before}" for after, before in RATIOS}
    names |= {after / before: f"{before} for {after}" for after, before in RATIOS}
    ratio = min(names, key=lambda ratio: abs(np.log(times / ratio)))
    near = abs(np.log(times / ratio)) <= NEAR_RATIO
    return f", as a split of {names[ratio]} that is not adjusted" if near else ""


def jumps(bars: Series) -> np.ndarray:
    """Return places whose open is far from the close before, or by a split's ratio."""
    inside = bars.inside
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gaps = np.log(bars.open[1:] / bars.close[:-1]).astype(np.float32)
    # Between symbols, or without a price, there is no move.
    gaps[~(inside & np.isfinite(gaps))] = 0.0
    places = np.flatnonzero(np.abs(gaps) > np.log(RATIOS[0][0] / RATIOS[0][1]) - NEAR_RATIO)
    found: set[int] = set()
    high = places[is_far(gaps[places], 0.0)]
    if len(high):
        with np.errstate(divide="ignore", invalid="ignore"):
            move = np.abs(np.diff(np.log(bars.close)))
        far = is_far(gaps[high], _typical(move, inside, bars.code)[high])
        found.update((high[far] + 1).tolist())
    size, near = np.abs(gaps[places]), np.zeros(len(places), dtype=bool)
    for after, before in RATIOS:
        near |= np.abs(size - np.log(after / before)) <= NEAR_RATIO
    # In a file with more moves of such sizes they are not splits, and looking takes minutes.
    for row in (places[near] + 1).tolist()[:SUSPECTS]:
        if row not in found and _is_split(bars, row, gaps):
            found.add(row)
    return np.array(sorted(found), dtype=int)


def is_far(move: np.ndarray, typical: np.ndarray | float) -> np.ndarray:
    """Return whether moves, as logarithms, are jumps for symbols whose median move is `typical`."""
    size = np.abs(move)
    return (size > JUMP) & (size > JUMP_MOVES * typical)


def _typical(value: np.ndarray, inside: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Return `[n - 1]` the median of `value` `[n - 1]` within each row's symbol."""
    series = pd.Series(np.where(inside, value, np.nan))
    return series.groupby(code[1:]).transform("median").to_numpy()


def _is_split(bars: Series, row: int, gaps: np.ndarray) -> bool:
    """Return whether only the level of the price changes at `row`.

    News that moves a price as far also widens the bar's range and multiplies its volume. A split of
    k for 1 multiplies the volume by k.
    """
    first, last = max(row - AROUND, 0), min(row + AROUND + 1, len(bars.code))
    part = slice(first, last)
    own = bars.code[part] == bars.code[row]
    at, gap = row - first, abs(float(gaps[row - 1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.log(bars.high[part] / bars.low[part])
        body = np.abs(np.log(bars.close[part] / bars.open[part]))
    others = own.copy()
    others[at] = False
    if others.sum() < 5:
        return False
    between = own[1:] & own[:-1]
    # The jump itself must not count as a usual move.
    between[at - 1] = False
    moves = np.abs(gaps[first : last - 1])[between]
    usual = max(float(np.nanmedian(spread[others])), float(np.nanmedian(body[others])))
    if not gap > SPLIT_MOVES * max(usual, float(np.nanpercentile(moves, 75)), 1e-9):
        return False
    if not spread[at] <= max(CALM * usual, gap / QUIET):
        return False
    volume = bars.volume[part]
    known = volume[:at][own[:at]]
    if not len(known) or not np.median(known) > 0.0:
        return True
    more = max(1.0, float(np.exp(-gaps[row - 1])))  # the factor of the volume in the new unit
    return bool(volume[at] <= more * max(BUSY * np.median(known), 1.5 * np.percentile(known, 95)))


def gaps_of_half_a_year(time: np.ndarray, code: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return places of the first bar after half a year without a row.

    A row whose `present` is False does not count as such a gap.

    Args:
      time: `[n]` times of the rows, which are in order of symbol and time.
      code: `[n]` the number of each row's symbol.
      present: `[n]` whether the row is a bar.
    """
    inside = (code[1:] == code[:-1]) & present[1:] & present[:-1]
    long = inside & (np.diff(time) > REUSE)
    if not long.any():
        return np.zeros(0, dtype=int)
    step = np.diff(time) / np.timedelta64(1, "D")
    # Bars of a quarter or a year are always as far apart as that.
    return np.flatnonzero(long & (step > 20 * _typical(step, inside, code))) + 1


def unadjusted(
    name: str, value: np.ndarray, close: np.ndarray, symbol: np.ndarray
) -> tuple[np.ndarray, str]:
    """Return `[rows]` bool, where a vendor's adjustment changes, and `columns` that apply it."""
    kind = name.lower().replace(" ", "_")
    ratio = kind in ("adj_close", "adjclose", "adjusted_close")
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = value / close if ratio else value
        moved = np.abs(factor[1:] / factor[:-1] - 1.0) > CHANGES
    mask = np.concatenate(([False], moved & (symbol[1:] == symbol[:-1])))
    use = "split=1/ajexdi" if kind == "ajexdi" else f"dividend={name}{'/close' * ratio}"
    return mask, f"split={name}" if kind == "split_factor" else use
