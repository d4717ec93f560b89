"""Which row, and which other future after it: the cases that `leakcheck` runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nca_trader.evaluate.leakcheck.perturbations import COLUMNS, Future, changed, longer, without
from nca_trader.types import Bars

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
