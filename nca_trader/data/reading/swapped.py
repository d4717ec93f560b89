"""Columns that changed places for a while: open and close, or the columns of two assets.

Of the other pairs of open, high, low and close a single bar shows it: no open or close is above
the high or below the low. So it does of volume and a price, if it isn't of a price's size. A bar
whose open and close are swapped is a bar like others; what tells is that the next open goes on from
the open before and not from the close.
"""

from __future__ import annotations

import itertools

import numpy as np

from nca_trader.data.reading.records import Records

EVIDENCE = 20.0  # natural logarithms; clean files reach 15, see data/README.md
FINE = 0.05  # quantile of the bars' bodies, and part of the median one: smaller gaps tell no more
MIRRORED = 10.0  # times an asset's median move from close to close: a jump that another mirrors
NEAR = 0.25  # of that jump: how far from the other asset's price it ends, at most
FAR = 0.4  # as a logarithm, at least: of a high or a low from the open and the close of its bar
BLOCK = 1 << 16  # bars looked at together, so that what is computed of them is small


def open_close_swapped(
    records: Records, rows: slice | np.ndarray, inside: np.ndarray, code: np.ndarray
) -> np.ndarray:
    """Places, in order of symbol and time, of the bars that swapped columns explain best.

    Of each symbol one stretch of bars is found, that of the most evidence, if it reaches EVIDENCE.

    Args:
      records: the rows of a file. rows: those looked at, by symbol and time. inside: `[n - 1]`
        whether the next of them is of the same symbol and span. code: `[n]` the symbols.
    """
    found = [np.zeros(0, dtype=int)]
    for begin, end in itertools.pairwise(_ends(code)):
        evidence, first, last = _best_stretch(records, rows, inside, begin, end)
        if evidence > EVIDENCE:
            found.append(np.arange(first, last + 1))
    return np.concatenate(found)


def _best_stretch(
    records: Records, rows: slice | np.ndarray, inside: np.ndarray, begin: int, end: int
) -> tuple[float, int, int]:
    """The evidence for the stretch of most, of the bars from `begin` to `end`; its ends.

    From each bar to the next a price moves by d; the evidence is the sum of log(1 + d / typical)
    with columns as they stand, less that with the stretch's columns swapped back: a maximum of
    prefix sums over the pairs of its ends (Kadane), the moves into and out of it counted as well.
    """
    most = (0.0, begin, begin)
    into, since, total = -np.inf, begin, 0.0  # the best begin so far, and the sum up to this block
    for start in range(begin, end, BLOCK):
        stop = min(start + BLOCK, end)
        # Moves into this block's bars, and out of its last one.
        part = slice(max(start - 1, begin), min(stop + 1, end))
        as_is, swapped, enter, leave = _moves(records, rows, inside, part)
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


def _moves(
    records: Records, rows: slice | np.ndarray, inside: np.ndarray, part: slice
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`[m - 1]` log(1 + d / typical) of close to open, open to close, close to close, open to open.

    The typical move is of the smaller of the first two, which swapping changes nothing of.
    """
    own = part if isinstance(rows, slice) else rows[part]
    with np.errstate(divide="ignore", invalid="ignore"):
        o, c = np.log(records["open"][own]), np.log(records["close"][own])
    between = inside[part.start : part.stop - 1]
    pairs = (o[1:], c[:-1]), (c[1:], o[:-1]), (c[1:], c[:-1]), (o[1:], o[:-1])
    moves = [np.where(between, np.nan_to_num(np.abs(a - b)), 0.0) for a, b in pairs]
    body = np.abs(c - o)
    usual = np.median(np.minimum(moves[0], moves[1])) if len(between) else 0.0
    fine = 0.0
    if len(body := body[body > 0.0]):
        # In a quiet hour a price goes up and down by one tick, which may look like anything.
        fine = max(np.quantile(body, FINE), FINE * np.median(body))
    typical = max(float(usual), float(fine)) or 1.0
    first, second, third, fourth = (np.log1p(move / typical) for move in moves)
    return first, second, third, fourth


def assets_swapped(
    records: Records,
    rows: slice | np.ndarray,
    inside: np.ndarray,
    code: np.ndarray,
    time: np.ndarray,
) -> np.ndarray:
    """Places, in order of symbol and time, where two assets jump each to the other's price.

    Args:
      records, rows, inside, code: as in `open_close_swapped`. time: `[n]` the bars' times.
    """
    jumps = _jumps(records, rows, inside, code) if len(records.symbols) > 1 else []
    if len(jumps) < 2:
        return np.zeros(0, dtype=int)
    at = np.array(jumps)
    of_rows = (lambda place: place) if isinstance(rows, slice) else (lambda place: rows[place])
    before = np.log(records["close"][of_rows(at - 1)])
    after = np.log(records["open"][of_rows(at)])
    found = []
    for same in _groups(time[at]):
        order = same[np.argsort(before[same])]
        for i in same:
            # The asset whose price before is nearest to this one's after.
            place = int(np.searchsorted(before[order], after[i]))
            for j in order[max(place - 1, 0) : place + 1]:
                size = NEAR * min(abs(after[i] - before[i]), abs(after[j] - before[j]))
                if j != i and max(abs(after[i] - before[j]), abs(after[j] - before[i])) < size:
                    found.append(at[i])
    return np.unique(np.array(found, dtype=int))


def _jumps(
    records: Records, rows: slice | np.ndarray, inside: np.ndarray, code: np.ndarray
) -> list[int]:
    """Places whose open is MIRRORED times the symbol's median move from the close before."""
    out: list[int] = []
    for begin, end in itertools.pairwise(_ends(code)):
        for start in range(begin, end - 1, BLOCK):
            part = slice(start, min(start + BLOCK + 1, end))
            own = part if isinstance(rows, slice) else rows[part]
            with np.errstate(divide="ignore", invalid="ignore"):
                o, c = np.log(records["open"][own]), np.log(records["close"][own])
            gap = np.where(inside[part.start : part.stop - 1], np.abs(o[1:] - c[:-1]), 0.0)
            usual = np.nanmedian(np.abs(np.diff(c)))
            out += (np.flatnonzero(gap > MIRRORED * max(usual, 1e-12)) + start + 1).tolist()
    return out


def range_volume_swapped(
    records: Records, rows: slice | np.ndarray, code: np.ndarray
) -> tuple[str, np.ndarray]:
    """Which of high and low holds the volume, if one does; the places, in order, where.

    There it is far from open and close, and the volume ends near them on the right side.
    """
    for name, side in (("high", 1.0), ("low", -1.0)):
        found = [np.zeros(0, dtype=int)]
        for begin, end in itertools.pairwise(_ends(code)):
            for start in range(begin, end, BLOCK):
                part = slice(start, min(start + BLOCK, end))
                own = part if isinstance(rows, slice) else rows[part]
                with np.errstate(divide="ignore", invalid="ignore"):
                    o, c, v, edge = (
                        side * np.log(records[n][own]) for n in ("open", "close", "volume", name)
                    )
                top = np.maximum(o, c)  # of logarithms turned round, for the low
                out = edge - top
                far = out > np.maximum(FAR, MIRRORED * np.nanmedian(out))
                found.append(np.flatnonzero(far & (v >= top) & (v - top < NEAR * out)) + start)
        if len(places := np.concatenate(found)):
            return name, places
    return "", np.zeros(0, dtype=int)


def _ends(code: np.ndarray) -> list[int]:
    """Where each run of one symbol begins, and the end of all."""
    return [0, *(np.flatnonzero(code[1:] != code[:-1]) + 1).tolist(), len(code)]


def _groups(time: np.ndarray) -> list[np.ndarray]:
    """The places of equal values of `time`, of those that are there more than once."""
    order = np.argsort(time, kind="stable")
    cuts = np.flatnonzero(time[order][1:] != time[order][:-1]) + 1
    return [group for group in np.split(order, cuts) if len(group) > 1]
