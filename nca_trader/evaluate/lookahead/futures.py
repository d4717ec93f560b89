"""Other futures for the look-ahead checker: bars that agree with the given ones up to a row."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from nca_trader.types import PRICES, Bars, split_columns

# Known of a bar at its open: that it exists, its open, and the dividend paid overnight.
KNOWN_AT_OPEN = ("open", "present", "dividend")
# Fractions of a price: from rounding to more than any limit on daily moves allows.
NOISE = (1e-3, 0.03, 0.3)
# 1.0 stands here twice, so that a quarter of the draws has noise without a jump.
JUMPS = (1.0, 1.0, 1.3, 1 / 1.3, 3.0, 1 / 3.0, 30.0, 1 / 30.0)
# Shares of bars to remove; 1.0 is an asset that is delisted after the row.
MISSING = (0.1, 0.5, 1.0)
# Half of the cases change all columns and assets at once, which shows a leak through any of them.
KINDS = ("all", "column", "all", "without", "all", "order", "all", "column", "cut", "longer")
MOST = 30  # bars that are added, or removed with later ones kept

Arrays = dict[str, np.ndarray]


class Future(NamedTuple):
    """The cells `[N, A]` bool of the bars that a perturbation may write.

    Attributes:
      early: of the columns in `KNOWN_AT_OPEN`.
      late: of the others: as of its open a bar has no range, close or volume yet.
    """

    early: np.ndarray
    late: np.ndarray

    @classmethod
    def after(
        cls, shape: tuple[int, ...], t: int, asset: int | None = None, at_open: bool = False
    ) -> Future:
        """Return what follows row `t`, of one asset or all; `at_open`: the open of row t."""
        rows, assets = np.arange(shape[0])[:, None], np.arange(shape[1])
        free = np.full(len(assets), True) if asset is None else assets == asset
        return cls((rows > t) & free, (rows > t - at_open) & free)

    def write(self, arrays: Arrays, name: str, new: np.ndarray) -> None:
        """Copy `new` `[N, A]` into column `name` of `arrays`, but only in the future."""
        cells = self.early if name in KNOWN_AT_OPEN else self.late
        arrays[name][cells] = new[cells]

    def carry(self, arrays: Arrays) -> None:
        """Give missing bars of the future the last close as prices and a volume of 0."""
        present = arrays["present"]
        # What the reader does with a missing bar: no value may show that a bar was perturbed.
        row = np.arange(len(present))[:, None]
        last = np.maximum.accumulate(np.where(present, row, -1), axis=0)
        carried = np.take_along_axis(arrays["close"], np.maximum(last, 0), axis=0)
        carried = np.where(last >= 0, carried, np.nan)
        for name in (*PRICES, "volume"):
            fill = np.zeros_like(carried) if name == "volume" else carried
            self.write(arrays, name, np.where(present, arrays[name], fill))


def price_factors(
    rng: np.random.Generator, shape: tuple[int, ...], jump: float | None = None
) -> np.ndarray:
    """Draw factors of a price: one jump for all, which moves levels, and noise for returns."""
    return (jump or rng.choice(JUMPS)) * np.exp(rng.choice(NOISE) * rng.normal(size=shape))


def other_values(rng: np.random.Generator, arrays: Arrays, name: str) -> np.ndarray:
    """Draw other values `[N, A]` of one column that are valid next to the other columns."""
    old = arrays[name]
    if name == "present":  # halts, gaps, a delisting
        return old & (rng.random(old.shape) >= rng.choice(MISSING))
    if name in ("open", "close"):
        low, high = arrays["low"], arrays["high"]
        return low + rng.random(low.shape) * (high - low)
    if name in ("high", "low"):
        wider = np.exp(rng.choice(NOISE) * np.abs(rng.normal(size=old.shape)))
        # The absolute value moves a negative price away from the others as well.
        away = np.abs(old) * (wider - 1.0)
        return old + (away if name == "high" else -away)
    size = np.where(np.isfinite(old) & (old != 0), old, 1.0 if name == "volume" else 1e-3)
    return size * np.exp(rng.normal(size=old.shape)) * (rng.random(old.shape) > 0.05)


def changed(
    rng: np.random.Generator, bars: Bars, kind: str, future: Future, jump: float | None = None
) -> Bars:
    """Return `bars` with another future.

    Args:
      rng: draws the future.
      bars: `[N, A]`.
      kind: "all" changes every column, "values" all but what is present, "order" shuffles the
        rows, a name of `bars.fields` changes that column alone.
      future: where to write.
      jump: of "all" and "values", the factor that moves prices; None draws it.
    """
    arrays = arrays_of(bars)
    if kind == "order":  # a sum or a mean over all bars does not change
        order, rows = np.arange(len(bars)), np.flatnonzero(future.early.any(axis=1))
        order[rows] = rng.permutation(rows)
        for name in arrays:
            future.write(arrays, name, arrays[name][order])
    elif kind in ("all", "values"):
        factor = price_factors(rng, arrays["close"].shape, jump)
        for name in PRICES:
            future.write(arrays, name, arrays[name] * factor)
        for name in sorted(arrays.keys() - {*PRICES, "present"}):
            future.write(arrays, name, other_values(rng, arrays, name))
        # An open that is known already keeps its value, so the range has to include it again.
        prices = np.stack([arrays[name] for name in PRICES])
        future.write(arrays, "high", prices[[0, 1, 3]].max(axis=0))
        future.write(arrays, "low", prices[[0, 2, 3]].min(axis=0))
        if kind == "all" and rng.random() < 0.25:
            future.write(arrays, "present", other_values(rng, arrays, "present"))
    else:
        future.write(arrays, kind, other_values(rng, arrays, kind))
    future.carry(arrays)
    return dataclasses.replace(bars, **split_columns(arrays))


def arrays_of(bars: Bars) -> Arrays:
    """Copy the arrays `[N, A]` of the bars, by name."""
    return {name: getattr(bars, name).copy() for name in bars.fields}


def without(bars: Bars, first: int, stop: int) -> Bars:
    """Return the bars without the rows `first <= row < stop`."""
    kept = np.r_[0:first, stop : len(bars)]
    arrays = {name: getattr(bars, name)[kept] for name in bars.fields}
    return dataclasses.replace(bars, time=bars.time[kept], **split_columns(arrays))


def longer(rng: np.random.Generator, bars: Bars, count: int) -> Bars:
    """Append `count` bars: copies of earlier ones, at prices that follow the last close."""
    step = np.median(np.diff(bars.time)) if len(bars) > 1 else np.timedelta64(1, "D")
    time = np.concatenate([bars.time, bars.time[-1] + step * np.arange(1, count + 1)])
    # The copies have the same kind of ranges, volumes and missing bars as the original.
    rows = np.concatenate([np.arange(len(bars)), rng.integers(0, len(bars), count)])
    arrays = {name: getattr(bars, name)[rows] for name in bars.fields}
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = bars.close[-1] / arrays["close"] * price_factors(rng, (len(rows), bars.num_assets))
    # An asset that is not listed at the end has no close to follow: its copies keep their prices.
    scale = np.where(np.isfinite(scale), scale, 1.0)
    for name in PRICES:
        arrays[name][len(bars) :] *= scale[len(bars) :]
    Future.after(scale.shape, len(bars) - 1).carry(arrays)
    return dataclasses.replace(bars, time=time, **split_columns(arrays))


def holed(rng: np.random.Generator, bars: Bars, rate: float = 0.05) -> Bars:
    """Return the bars with a share `rate` of them missing in addition.

    Code that fills holes backwards leaks only there.
    """
    arrays = arrays_of(bars)
    arrays["present"] &= rng.random(bars.present.shape) >= rate
    arrays["present"][0] = bars.present[0]  # nothing before it could be carried
    Future.after(bars.present.shape, 0).carry(arrays)
    return dataclasses.replace(bars, **split_columns(arrays))


class Case(NamedTuple):
    """Two sequences of bars that agree up to row t.

    Attributes:
      t: the last row that is the same in both.
      holed: whether `before` is the user's bars with holes added.
      before: the bars of the first run.
      after: the bars of the second.
      change: what was removed or added, in words; "" where only values differ.
    """

    t: int
    holed: bool
    before: Bars
    after: Bars
    change: str = ""

    @property
    def same_length(self) -> bool:
        """Whether only values differ, so that the change can be taken apart."""
        return len(self.before) == len(self.after)

    @property
    def cells(self) -> dict[str, np.ndarray]:
        """`{column: [cells, 2]}` rows and assets in which bars of the same length differ."""
        pairs = ((k, getattr(self.before, k), getattr(self.after, k)) for k in self.before.fields)
        where = {name: np.argwhere(~equal(a, b)) for name, a, b in pairs}
        return {name: cells for name, cells in where.items() if len(cells)}


def equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compare two arrays by element; NaN equals NaN."""
    return a == b if a.dtype == bool else (a == b) | (np.isnan(a) & np.isnan(b))


class Cases:
    """Draws cases from bars.

    Args:
      rng: draws the rows and the futures.
      bases: the user's bars under False and, if the subject accepts them, bars with holes added
        under True.
      output: `[N, ...]` of the subject on the user's bars.
      at_open: whether row t is known only as of its open.
      few_lengths: whether each number of bars costs a compilation, so that few are tried.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        bases: dict[bool, Bars],
        output: np.ndarray,
        at_open: bool,
        few_lengths: bool,
    ):
        self.rng, self.bases, self.at_open = rng, bases, at_open
        size = len(bases[False])
        self.lengths = sorted(set(rng.integers(2, size, 2).tolist())) if few_lengths else None
        # A row where the output moves is where a rare signal is given.
        flat = output.reshape(size, -1)
        moves = np.flatnonzero((~equal(flat[1:], flat[:-1])).any(axis=1)) + 1
        # Rows at which much is decided: missing bars, and where the output moves.
        holes = {key: np.flatnonzero(~b.present.all(axis=1)) for key, b in bases.items()}
        self.rows = holes | {False: np.unique(np.concatenate([moves, moves - 1, holes[False]]))}

    def draw(self, number: int) -> Case:
        """Draw case `number`: a row t, and another future after it."""
        rng, kind = self.rng, KINDS[number % len(KINDS)]
        # Every fourth case is on bars with holes, out of step with the kinds, so that each kind
        # is tried on both.
        holed = True in self.bases and (number + number // len(KINDS)) % 4 == 3
        bars = self.bases[holed]
        last = len(bars) - 1
        if kind == "longer":
            count = 7 if self.lengths else int(rng.integers(1, MOST))
            change = f"Adding {count} bars after the last"
            return Case(last, holed, bars, longer(rng, bars, count), change)
        t = self._draw_row(last if self.at_open else last - 1, holed)
        if kind in ("cut", "without") and t < last:
            stop = len(bars)
            if self.lengths:  # t follows from a length that is compiled already
                length = int(rng.choice(self.lengths))
                t = length - 1 if kind == "cut" else int(rng.integers(0, length))
                stop = t + 1 + len(bars) - length
            elif kind == "without":
                stop = int(min(stop, t + 1 + rng.integers(1, MOST)))
            change = f"Removing rows {t + 1} to {stop - 1}"
            if stop == len(bars):
                change = f"Removing all bars after row {t}"
            elif stop == t + 2:
                change = f"Removing row {t + 1}"
            return Case(t, holed, bars, without(bars, t + 1, stop), change)
        if kind == "column":
            kind = str(rng.choice(bars.fields))
        elif kind != "order":
            kind = "all"
        asset = None if rng.random() < 0.5 else int(rng.integers(bars.num_assets))
        future = Future.after(bars.present.shape, t, asset, self.at_open)
        case = Case(t, holed, bars, changed(rng, bars, kind, future))
        if not case.cells:  # e.g. another close, where high equals low
            case = case._replace(after=changed(rng, bars, "all", future))
        return case

    def _draw_row(self, last: int, holed: bool) -> int:
        """Draw a row in 0..last: anywhere, near either end, or where something happens.

        A warm-up leaks near the first row, a window that ends early near the last, a rare signal
        only where it is given, and filled holes only at holes.
        """
        way, rows = self.rng.integers(4), self.rows[holed]
        if len(rows) and (way == 0 or (holed and way < 3)):
            return int(min(self.rng.choice(rows), last))
        # Uniform in the logarithm, so that the first rows are drawn often.
        near = int(np.exp(self.rng.uniform(0.0, np.log(last + 1)))) - 1
        if way == 1:
            return near
        return last - near if way == 2 else int(self.rng.integers(0, last + 1))
