"""Finds faults that no row shows alone: jumps, and columns that are swapped for some bars.

Swapping any two of open, high, low and close breaks a single bar, as no open or close is above the
high or below the low. The exception is open and close: such a bar looks like any other. Only the
next open shows it, because it continues from the open before and not from the close.

Every function takes the bars of all symbols in order of symbol and time, and returns places in
that order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

REUSE = np.timedelta64(180, "D")  # without bars, at least
CHANGES = 1e-3  # relative: adjusted closes are rounded
BLOCK = 1 << 16  # rows examined together: temporary arrays stay small, and medians local
JUMP = np.log(1.8)  # at least, and
JUMP_MOVES = 25  # times the symbol's median move: wild symbols jump higher
RATIOS = (  # shares after and before, of the splits that are common
    (5, 4), (4, 3), (3, 2), (5, 3), (2, 1), (5, 2), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1),
    (8, 1), (10, 1), (15, 1), (20, 1), (25, 1), (30, 1), (50, 1), (100, 1),
)  # fmt: skip
NEAR_RATIO = 0.025  # as logarithms: the price's own move overnight
SPLIT_MOVES = 8  # times the moves of the bars around, at least
AROUND = 50  # bars before and after, at most
QUIET = 12.0  # or this part of the jump: a price that opens a third lower on news moves on by more
CALM = 3.0  # times the range of the bars around, at most: news moves a price within the bar too
BUSY = 2.5  # times the volume of the bars before, at most
EVIDENCE = 20.0  # natural logarithms; clean files reach 15, see docs/lab-notes/bar-files.md
FINE = 0.05  # quantile of the bars' bodies, and part of the median one: smaller gaps show no more
MIRRORED = 10.0  # times an asset's median move from close to close: a jump that another mirrors
NEAR = 0.25  # of that jump: how far from the other asset's price it ends, at most
FAR = 0.4  # as a logarithm, at least: of a high or a low from the open and the close of its bar
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


def symbol_ends(code: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield where each symbol's bars begin and end."""
    cuts = (np.flatnonzero(code[1:] != code[:-1]) + 1).tolist()
    return itertools.pairwise([0, *cuts, len(code)])


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ends of pieces of at most BLOCK bars."""
    return ((start, min(start + BLOCK, end)) for start in range(begin, end, BLOCK))


def logs(*prices: np.ndarray) -> list[np.ndarray]:
    """Return natural logarithms; NaN or infinite, without a warning, where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return [np.log(price) for price in prices]


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
        move = np.abs(np.diff(logs(bars.close)[0]))
        far = is_far(gaps[high], _typical(move, inside, bars.code)[high])
        found.update((high[far] + 1).tolist())
    ratios = np.log([after / before for after, before in RATIOS])
    for place in places:
        near = np.abs(np.abs(gaps[place]) - ratios).min() <= NEAR_RATIO
        row = int(place) + 1
        if near and row not in found and _is_split(bars, row, gaps):
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


def open_close_swapped(bars: Series) -> np.ndarray:
    """Return places of bars that swapped opens and close explain best.

    For each symbol it finds at most one stretch of bars: the one with the most evidence, if that
    reaches EVIDENCE.
    """
    found = [np.zeros(0, dtype=int)]
    inside = bars.inside
    for begin, end in symbol_ends(bars.code):
        evidence, first, last = best_stretch(bars, inside, begin, end)
        if evidence > EVIDENCE:
            found.append(np.arange(first, last + 1))
    return np.concatenate(found)


def best_stretch(bars: Series, inside: np.ndarray, begin: int, end: int) -> tuple[float, int, int]:
    """Return the most evidence for a stretch of the bars from `begin` to `end`, and its ends.

    From each bar to the next a price moves by d; the evidence is the sum of log(1 + d / typical)
    with columns as they stand, less that with the stretch's columns swapped back: a maximum of
    prefix sums over the pairs of its ends (Kadane), the moves into and out of it counted as well.
    """
    most = (0.0, begin, begin)
    into, since, total = -np.inf, begin, 0.0  # the best begin so far, and the sum up to this block
    for start, stop in blocks(begin, end):
        # Moves into this block's bars, and out of its last one.
        part = slice(max(start - 1, begin), min(stop + 1, end))
        as_is, swapped, enter, leave = _moves(bars, inside, part)
        front, back = int(start == begin), int(stop == end)
        gained = np.pad(as_is - swapped, (front, 0))[: stop - start]
        entering = np.pad(as_is - enter, (front, 0))[: stop - start]
        leaving = np.pad(as_is - leave, (0, back))[1 - front :][: stop - start]
        sums = total + np.cumsum(gained)
        entered = entering - sums
        best = np.maximum(np.maximum.accumulate(entered), into)
        whole = best + sums + leaving
        last = int(np.argmax(whole))
        at = int(np.argmax(entered[: last + 1]))
        if whole[last] > most[0]:
            most = float(whole[last]), start + at if entered[at] >= into else since, start + last
        if entered.max() > into:
            into, since = float(entered.max()), start + int(np.argmax(entered))
        total = float(sums[-1])
    return most


def _moves(bars: Series, inside: np.ndarray, part: slice) -> list[np.ndarray]:
    """Return `[m - 1]` log(1 + d / typical) of the moves between bars in four ways.

    These are close to open, open to close, close to close and open to open. The typical move is
    of the smaller of the first two, which swapping does not change.
    """
    o, c = logs(bars.open[part], bars.close[part])
    between = inside[part.start : part.stop - 1]
    pairs = (o[1:], c[:-1]), (c[1:], o[:-1]), (c[1:], c[:-1]), (o[1:], o[:-1])
    moves = [np.where(between, np.nan_to_num(np.abs(a - b)), 0.0) for a, b in pairs]
    usual = np.median(np.minimum(moves[0], moves[1])) if len(between) else 0.0
    body = np.abs(c - o)
    fine = 0.0
    if len(body := body[body > 0.0]):
        # In a quiet hour a price moves up and down by one tick, which is not evidence.
        fine = max(np.quantile(body, FINE), FINE * np.median(body))
    typical = max(float(usual), float(fine)) or 1.0
    return [np.log1p(move / typical) for move in moves]


def assets_swapped(bars: Series) -> np.ndarray:
    """Return places where two assets jump to each other's price at the same time."""
    jumped = []
    inside = bars.inside
    for begin, end in symbol_ends(bars.code):
        for start, stop in blocks(begin, end - 1):
            o, c = logs(bars.open[start : stop + 1], bars.close[start : stop + 1])
            gap = np.where(inside[start:stop], np.abs(o[1:] - c[:-1]), 0.0)
            usual = np.nanmedian(np.abs(np.diff(c)))
            jumped.append(np.flatnonzero(gap > MIRRORED * max(usual, 1e-12)) + start + 1)
    at = np.concatenate([np.zeros(0, dtype=int), *jumped])
    before, after = logs(bars.close[at - 1], bars.open[at])
    found = []
    for same in pd.Series(at).groupby(bars.time[at]).indices.values():
        same = np.asarray(same)
        order = same[np.argsort(before[same])]
        for i in same:
            # The asset whose price before is nearest to this one's after.
            place = int(np.searchsorted(before[order], after[i]))
            for j in order[max(place - 1, 0) : place + 1]:
                size = NEAR * min(abs(after[i] - before[i]), abs(after[j] - before[j]))
                if j != i and max(abs(after[i] - before[j]), abs(after[j] - before[i])) < size:
                    found.append(at[i])
    return np.unique(np.array(found, dtype=int))


def range_volume_swapped(bars: Series, name: str) -> np.ndarray:
    """Return places where the column `name`, high or low, hold the volume.

    There it is far from open and close, and the volume ends near them on the right side.
    """
    side = 1.0 if name == "high" else -1.0  # for the low the logarithms are negated
    found = [np.zeros(0, dtype=int)]
    for begin, end in symbol_ends(bars.code):
        for start, stop in blocks(begin, end):
            part = slice(start, stop)
            columns = (bars.open, bars.close, bars.volume, getattr(bars, name))
            o, c, v, edge = (side * log for log in logs(*(column[part] for column in columns)))
            top = np.maximum(o, c)
            out = edge - top
            far = out > np.maximum(FAR, MIRRORED * np.nanmedian(out))
            found.append(np.flatnonzero(far & (v >= top) & (v - top < NEAR * out)) + start)
    return np.concatenate(found)


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


class Crossing(NamedTuple):
    """Rows `mask` at which the volume and another column are swapped, or change places.

    `each_row` is True where `mask` holds every swapped row, False where it holds the places of
    the change alone.
    """

    mask: np.ndarray
    say: str
    each_row: bool


def volume_swapped(
    name: str, value: np.ndarray, volume: np.ndarray, bars: dict[str, np.ndarray]
) -> Crossing | None:
    """Find rows whose volume is in another column `[rows]`, or where two columns cross.

    A column of traded value, volume times price, shows it row by row. For any other column only the
    place is known at which two columns of different sizes are swapped.
    """
    close = bars["close"]
    rows = np.flatnonzero((volume > 0) & (value > 0) & (close > 0) & bars["present"])
    if len(rows) < 2:
        return None
    mask = np.zeros(len(value), dtype=bool)
    more, price = logs(value[rows], close[rows])
    more -= np.log(volume[rows])
    with np.errstate(all="ignore"):
        edge = np.log(bars["high"][rows] / bars["low"][rows]) + 0.02
    straight, swapped = np.abs(more - price), np.abs(-more - price)
    if ((straight <= edge) | (swapped <= edge)).mean() >= 0.8:
        mask[rows] = swapped + 0.5 < straight
        if not mask.any():
            return None
        row = int(np.argmax(mask))
        say = f"volume {volume[row]:.8g} and {name} {value[row]:.8g} are swapped: the second "
        say += "times the price is the first"
        return Crossing(mask, say, True)
    sign = np.sign(more).astype(np.int8) * (np.abs(more) > np.log(10.0))
    flips = np.flatnonzero(sign[1:] != sign[:-1])
    ups, downs = (sign > 0).mean(), (sign < 0).mean()
    if 0 < len(flips) <= 5 and min(ups, downs) > 0.02 and ups + downs == 1.0:
        size = np.abs(more)
        if abs(np.median(size[sign > 0]) - np.median(size[sign < 0])) < 1.0:
            mask[rows[flips + 1]] = True
            return Crossing(mask, f"volume and {name} change places here", False)
    return None
