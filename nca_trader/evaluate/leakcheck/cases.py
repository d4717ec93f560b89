"""Which row, and which other future after it: the cases that `leakcheck` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nca_trader.types import PRICES, Bars

# What is known of a bar at its open: that it is there, its open, and what was paid over the gap.
KNOWN_AT_OPEN = ("open", "present", "dividend")
# A fraction of price: from what rounding moves to what no limit on daily moves would allow.
NOISE = (1e-3, 0.03, 0.3)
JUMPS = (1.0, 1.0, 1.3, 1 / 1.3, 3.0, 1 / 3.0, 30.0, 1 / 30.0)
MISSING = (0.1, 0.5, 1.0)

Arrays = dict[str, np.ndarray]


class Future(NamedTuple):
    """Where a perturbation may write: rows from `first` on, of the assets that are True in `[A]`.

    first: the first row after the past. at_open: row `first - 1` is known as at its open, so that
    the rest of it belongs to the future.
    """

    first: int
    assets: np.ndarray
    at_open: bool = False

    def rows(self, name: str) -> slice:
        """The rows of column `name` that are not known yet."""
        early = self.at_open and name not in KNOWN_AT_OPEN
        return slice(self.first - early, None)


def _factors(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Factors of price: one jump for all, so that levels move, and noise, so that returns do."""
    return rng.choice(JUMPS) * np.exp(rng.choice(NOISE) * rng.normal(size=shape))


def _move(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
    """Everything: each bar's prices times a factor of its own, other volumes, at times holes."""
    factor = _factors(rng, arrays["close"].shape)
    for name in PRICES:
        _write(arrays, name, future, arrays[name] * factor)
    for name in sorted(arrays.keys() - {*PRICES, "present"}):
        _other(name)(rng, arrays, future)
    _take_in(arrays, future)
    if rng.random() < 0.25:
        _presence(rng, arrays, future)


def _within(name: str) -> Callable[[np.random.Generator, Arrays, Future], None]:
    """Another open or close between the bar's own low and high, and nothing else."""

    def change(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
        low, high = arrays["low"], arrays["high"]
        _write(arrays, name, future, low + rng.random(low.shape) * (high - low))

    return change


def _beyond(name: str) -> Callable[[np.random.Generator, Arrays, Future], None]:
    """A higher high or a lower low."""

    def change(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
        wider = np.exp(rng.choice(NOISE) * np.abs(rng.normal(size=arrays[name].shape)))
        # Away from the other prices, also where they are negative.
        away = np.abs(arrays[name]) * (wider - 1.0)
        _write(arrays, name, future, arrays[name] + (away if name == "high" else -away))

    return change


def _other(name: str) -> Callable[[np.random.Generator, Arrays, Future], None]:
    """Another volume, spread, dividend or funding rate, zero now and then."""

    def change(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
        old = arrays[name]
        size = np.where(np.isfinite(old) & (old != 0), old, 1.0 if name == "volume" else 1e-3)
        new = size * np.exp(rng.normal(size=old.shape)) * (rng.random(old.shape) > 0.05)
        _write(arrays, name, future, new)

    return change


def _presence(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
    """Bars that go missing, now and then all of them: halts, gaps, a delisting."""
    present = arrays["present"]
    _write(arrays, "present", future, present & (rng.random(present.shape) >= rng.choice(MISSING)))


def _reorder(rng: np.random.Generator, arrays: Arrays, future: Future) -> None:
    """The same bars in another order: what a sum or a mean over all of them does not see."""
    count = len(arrays["close"]) - future.first
    order = future.first + rng.permutation(count)
    for name, values in arrays.items():
        new = values.copy()
        new[future.first :] = values[order]
        _write(arrays, name, future, new)


COLUMNS: dict[str, Callable[[np.random.Generator, Arrays, Future], None]] = {
    "open": _within("open"),
    "high": _beyond("high"),
    "low": _beyond("low"),
    "close": _within("close"),
    "volume": _other("volume"),
    "half_spread": _other("half_spread"),
    "dividend": _other("dividend"),
    "funding": _other("funding"),
    "present": _presence,
}


def changed(rng: np.random.Generator, bars: Bars, kind: str, future: Future) -> Bars:
    """`bars` with another future: kind is "all", "order", or a column's name, see `COLUMNS`."""
    arrays = arrays_of(bars)
    ways = {"all": _move, "order": _reorder, **COLUMNS}
    ways[kind](rng, arrays, future)
    _carry(arrays, future)
    return dataclasses.replace(bars, **arrays)


def arrays_of(bars: Bars) -> Arrays:
    """Copies of the arrays `[N, A]` of the bars, by name."""
    return {name: getattr(bars, name).copy() for name in bars.fields}


def without(bars: Bars, first: int, stop: int) -> Bars:
    """The bars but for the rows `first <= row < stop`."""
    kept = np.r_[0:first, stop : len(bars)]
    arrays = {name: getattr(bars, name)[kept] for name in bars.fields}
    return dataclasses.replace(bars, time=bars.time[kept], **arrays)


def longer(rng: np.random.Generator, bars: Bars, count: int) -> Bars:
    """The bars and `count` more, copies of earlier ones at prices that go on from the last."""
    step = np.median(np.diff(bars.time)) if len(bars) > 1 else np.timedelta64(1, "D")
    time = np.concatenate([bars.time, bars.time[-1] + step * np.arange(1, count + 1)])
    rows = np.concatenate([np.arange(len(bars)), rng.integers(0, len(bars), count)])
    arrays = {name: getattr(bars, name)[rows] for name in bars.fields}
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = bars.close[-1] / arrays["close"] * _factors(rng, (len(rows), bars.num_assets))
    scale = np.where(np.isfinite(scale), scale, 1.0)
    for name in PRICES:
        arrays[name][len(bars) :] *= scale[len(bars) :]
    _carry(arrays, Future(len(bars), np.ones(bars.num_assets, bool)))
    return dataclasses.replace(bars, time=time, **arrays)


def holed(rng: np.random.Generator, bars: Bars, rate: float = 0.05) -> Bars:
    """The bars with some more missing: what fills holes from behind shows itself only there."""
    arrays = arrays_of(bars)
    arrays["present"] &= rng.random(bars.present.shape) >= rate
    arrays["present"][0] = bars.present[0]
    _carry(arrays, Future(1, np.ones(bars.num_assets, bool)))
    return dataclasses.replace(bars, **arrays)


def _write(arrays: Arrays, name: str, future: Future, new: np.ndarray) -> None:
    rows = future.rows(name)
    arrays[name][rows, future.assets] = new[rows][:, future.assets]


def _take_in(arrays: Arrays, future: Future) -> None:
    """High and low take in open and close again, where an open had to stay as it was."""
    highest = np.maximum(arrays["high"], np.maximum(arrays["open"], arrays["close"]))
    lowest = np.minimum(arrays["low"], np.minimum(arrays["open"], arrays["close"]))
    _write(arrays, "high", future, highest)
    _write(arrays, "low", future, lowest)


def _carry(arrays: Arrays, future: Future) -> None:
    """Missing bars of the future take the last close before them as prices, and volume 0."""
    present = arrays["present"]
    row = np.arange(len(present))[:, None]
    last = np.maximum.accumulate(np.where(present, row, -1), axis=0)
    carried = np.take_along_axis(arrays["close"], np.maximum(last, 0), axis=0)
    carried = np.where(last >= 0, carried, np.nan)
    for name in (*PRICES, "volume"):
        fill = np.zeros_like(carried) if name == "volume" else carried
        _write(arrays, name, future, np.where(present, arrays[name], fill))


# Half the cases move everything at once: a leak through any column or asset shows itself there.
KINDS = ("all", "column", "all", "without", "all", "order", "all", "column", "cut", "longer")
MOST = 30  # bars that are added, or left out with later ones kept


class Case(NamedTuple):
    """Two sequences of bars that agree up to row t.

    holed: the first is not the user's bars but those with holes. change: what was done, in words,
    where bars were left out or added; else "".
    """

    t: int
    holed: bool
    before: Bars
    after: Bars
    change: str = ""

    @property
    def same_length(self) -> bool:
        """Whether values alone differ, so that the change can be taken apart."""
        return len(self.before) == len(self.after)


def equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays have the same value; NaN equals NaN."""
    return a == b if a.dtype == bool else (a == b) | (np.isnan(a) & np.isnan(b))


def differing(before: Bars, after: Bars) -> list[str]:
    """Columns in which two sequences of the same length differ."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in before.fields}
    return [name for name, (a, b) in pairs.items() if not equal(a, b).all()]


class Cases:
    """Draws cases from bars.

    Attributes:
      bases: the user's bars under False and, where the subject takes them, others with holes
        under True. rows: `{holed: rows}` at which much is decided. at_open: row t is known as at
        its open. lengths: numbers of bars to choose from where each costs a compilation, or None.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        bases: dict[bool, Bars],
        output: np.ndarray,
        at_open: bool,
        few_lengths: bool,
    ):
        """Finds where the output `[N, ...]` on the user's bars moves."""
        self.rng, self.bases, self.at_open = rng, bases, at_open
        size = len(bases[False])
        self.lengths = sorted(set(rng.integers(2, size, 2).tolist())) if few_lengths else None
        flat = output.reshape(size, -1)
        moves = np.flatnonzero((~equal(flat[1:], flat[:-1])).any(axis=1)) + 1
        self.rows = {holed: _holes(base) for holed, base in bases.items()}
        self.rows[False] = np.unique(np.concatenate([moves, moves - 1, self.rows[False]]))

    def draw(self, number: int) -> Case:
        """Case `number`: a row t, and another future after it."""
        kind = KINDS[number % len(KINDS)]
        # Every fourth on bars with holes; out of step with the kinds, so that each meets both.
        holed = True in self.bases and (number + number // len(KINDS)) % 4 == 3
        bars = self.bases[holed]
        last = len(bars) - 1
        if kind == "longer":
            count = 7 if self.lengths else int(self.rng.integers(1, MOST))
            change = f"Adding {count} bars after the last"
            return Case(last, holed, bars, longer(self.rng, bars, count), change)
        t = self._draw_row(last if self.at_open else last - 1, holed)
        if kind in ("cut", "without") and t < last:
            return self._shorter(t, holed, all_after=kind == "cut")
        if kind == "column":
            kind = str(self.rng.choice([name for name in bars.fields if name in COLUMNS]))
        elif kind != "order":
            kind = "all"
        future = Future(t + 1, self._draw_assets(bars.num_assets), self.at_open)
        after = changed(self.rng, bars, kind, future)
        if not differing(bars, after):  # e.g. another close, where high equals low
            after = changed(self.rng, bars, "all", future)
        return Case(t, holed, bars, after)

    def _shorter(self, t: int, holed: bool, all_after: bool) -> Case:
        """All bars after t left out, or some of them and the later ones kept."""
        bars = self.bases[holed]
        stop = len(bars)
        if self.lengths:
            length = int(self.rng.choice(self.lengths))
            t = length - 1 if all_after else int(self.rng.integers(0, length))
            stop = t + 1 + len(bars) - length
        elif not all_after:
            stop = int(min(stop, t + 1 + self.rng.integers(1, MOST)))
        rest = f"row {t + 1}" if stop == t + 2 else f"rows {t + 1} to {stop - 1}"
        change = f"Leaving out {rest}"
        if stop == len(bars):
            change = f"Leaving out all bars after row {t}"
        return Case(t, holed, bars, without(bars, t + 1, stop), change)

    def _draw_row(self, last: int, holed: bool) -> int:
        """A row in 0..last: anywhere, near either end, or where something happens.

        Warm-ups show themselves near the first row, windows that run out near the last, a rare
        signal only where it is given, and what fills holes only at them.
        """
        way, rows = self.rng.integers(4), self.rows[holed]
        if len(rows) and (way == 0 or (holed and way < 3)):
            return int(min(self.rng.choice(rows), last))
        near = int(np.exp(self.rng.uniform(0.0, np.log(last + 1)))) - 1
        if way == 1:
            return near
        return last - near if way == 2 else int(self.rng.integers(0, last + 1))

    def _draw_assets(self, num_assets: int) -> np.ndarray:
        """`[A]` all assets, or one of them."""
        if self.rng.random() < 0.5:
            return np.ones(num_assets, bool)
        return np.arange(num_assets) == self.rng.integers(num_assets)


def _holes(bars: Bars) -> np.ndarray:
    """Rows at which an asset is missing."""
    return np.flatnonzero(~bars.present.all(axis=1))
