"""The search of `leakcheck`: the cases that leak, and the smallest of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.errors import ConfigError, user_line
from nca_trader.evaluate.perturb import Case, Cases, arrays_of, equal, holed
from nca_trader.types import Bars

# Stands among the columns: the number of bars, or the times of the later ones, changed the past.
LENGTH = "length"
SHRUNK = 3  # leaking cases whose change is made smaller
NEAR = (0, 1, 2, 3, 4, 9, 19)  # rows after the first that are tried alone for a small example


class Subject(NamedTuple):
    """A strategy or a feature as a function of bars.

    Attributes:
      name: for the report.
      run: from bars to output.
      compiled: whether each number of bars costs a compilation.
    """

    name: str
    run: Callable[[Bars], Any]
    compiled: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A change of the future that changed the past.

    Attributes:
      t: bars up to this row (with `decided="open"`: up to its open) are unchanged.
      change: the change of later bars, in words.
      columns: columns of the bars that differ, or "length".
      assets: symbols that differ.
      rows: first and last row that differ; None where bars were removed or added.
      row: the first row of the output that changed.
      where: the asset or column of the output; "" where there is one.
      before: the output there on the bars as they are.
      after: the output there on the changed bars.
      from_value: the one cell of the bars that differs, before; None where several differ.
      to_value: the same cell after the change.
    """

    t: int
    change: str
    columns: tuple[str, ...]
    assets: tuple[str, ...]
    rows: tuple[int, int] | None
    row: int
    where: str
    before: float
    after: float
    from_value: float | None = None
    to_value: float | None = None

    def __str__(self) -> str:
        of = f" of {self.where}" if self.where else ""
        before, after = distinct(self.before, self.after)
        return f"{self.change}: row {self.row}{of} goes from {before} to {after}"


class Found(NamedTuple):
    """A change of the output up to row t.

    Attributes:
      rows: that changed, ascending.
      largest: the largest finite change; NaN where every change is to or from NaN.
      where: index into the output of the first change.
      before: the value there on the bars as they are.
      after: the value there on the changed bars.
    """

    rows: np.ndarray
    largest: float
    where: tuple[int, ...]
    before: float
    after: float


class _NotRows(Exception):
    """The output is not one row per bar."""


class Search:
    """Runs one subject on cases, and collects what its outputs show.

    Attributes:
      leaking: cases in which the past changed, and how.
      through: columns that leaked.
      early: cases in which the subject refused a history in which it had not decided anything.
    """

    def __init__(self, subject: Subject, tolerance: float, at_open: bool):
        self.subject, self.tolerance, self.at_open = subject, tolerance, at_open
        self.outputs: dict[bool, np.ndarray] = {}
        self.leaking: list[tuple[Case, Found]] = []
        self.through: set[str] = set()
        self.raised, self.reacted, self.early, self.error = 0, 0, 0, ""
        self.notes: list[str] = []

    def begin(self, rng: np.random.Generator, bars: Bars) -> Cases:
        """Run the bars as they are, and bars with holes added; return the cases."""
        try:
            output, again = (self.values(bars) for _ in range(2))
        except Exception as error:
            raise ConfigError(
                f"{self.subject.name}: {described(error)}; it must return one row per bar on the "
                "bars as they are, so repair that first."
            ) from None
        # One that draws random numbers differs from itself, and every case would look like a leak.
        bases, self.outputs[False] = {False: bars}, output
        self.refuse_other(again, "gives other values on the same bars the second time")
        # Code that fills holes backwards leaks only where there are holes. Some code refuses them.
        try:
            bases[True] = holed(rng, bars)
            self.outputs[True] = self.values(bases[True])
        except Exception as error:
            # It was set before the subject refused it.
            del bases[True]
            self.notes.append(f"not tried on bars with holes added: {described(error)}")
        return Cases(rng, bases, output, self.at_open, self.subject.compiled)

    def refuse_other(self, again: np.ndarray, what: str) -> None:
        """Refuse a subject whose output on the same bars is not the first one."""
        output = self.outputs[False]
        if output.shape != again.shape or not equal(output, again).all():
            raise ConfigError(
                f"{self.subject.name}: {what}, so nothing can be said of its past; give it a "
                "fixed seed, and let it keep nothing between calls."
            )

    def values(self, bars: Bars) -> np.ndarray:
        """Return the subject's output as float64 `[N, ...]`; raise what the subject raises."""
        output = self.subject.run(dataclasses.replace(bars))  # a copy: ours must not be written to
        # Rows of other times would be compared with the wrong bars.
        index = getattr(output, "index", None)
        if isinstance(index, pd.DatetimeIndex) and len(index) == len(bars):
            # An index without a zone is taken as UTC, as that of bars is.
            there = index.tz_localize("UTC") if index.tz is None else index.tz_convert("UTC")
            if (there != bars.index).any():
                raise _NotRows("its rows are not at the times of the bars; reindex by bars.index")
        try:
            values = np.asarray(output, np.float64)
        except (TypeError, ValueError):
            kind = type(output).__name__
            raise _NotRows(f"it gives {kind}, not numbers, one row per bar") from None
        if not values.ndim or len(values) != len(bars):
            count = f"not one row for each of {len(bars)} bars"
            raise _NotRows(f"it gives shape {values.shape}, {count}")
        return values

    def run(self, case: Case) -> None:
        """Run the subject on the case's other future, and record what that shows."""
        before = self.outputs[case.holed]
        try:
            after = self.values(case.after)
            if after.shape[1:] != before.shape[1:]:
                raise _NotRows(f"it gives shape {after.shape} there and {before.shape} before")
        except Exception as error:
            past = before[: case.t + 1]
            if equal(past, past[:1]).all():
                self.early += 1  # it had decided nothing by then, so it may refuse
                return
            self.raised += 1
            what = case.change or f"Changing bars after row {case.t}"
            self.error = self.error or f"{what}: {described(error)}"
            return
        found = compare(before, after, case.t, self.tolerance)
        if found is not None:
            self.leaking.append((case, found))
        # An output that never reacts was not tested: it may read its data elsewhere.
        later = slice(case.t + 1 - self.at_open, min(len(before), len(after)))
        self.reacted += bool((~equal(before[later], after[later])).any())

    def smallest(self) -> Example | None:
        """Return the smallest change that was found to leak: few columns, one asset, one row."""
        values = [leak for leak in self.leaking if leak[0].same_length]
        others = [leak for leak in self.leaking if not leak[0].same_length]
        shrunk = [self._shrink(*leak) for leak in values[:SHRUNK]]
        # A leak through values shows in removed bars as well, so "length" is named only alone.
        if others and not shrunk:
            self.through.add(LENGTH)
        best = min(shrunk + others[:1], key=lambda leak: size(leak[0]), default=None)
        return None if best is None else example(*best)

    def _shrink(self, case: Case, found: Found) -> tuple[Case, Found]:
        """Remove from the change what the leak does not need; note the columns that leak."""
        best = (case, found)
        names = case.cells
        # Each column alone: a leak may need one of several that changed together.
        alone = {name: self._leak(case, mixed(case, columns=(name,))) for name in names}
        leaking = {name: leak for name, leak in alone.items() if leak is not None}
        self.through |= set(leaking or names)
        if leaking:
            # The close if it leaks: an example with it is the easiest to follow.
            best = leaking.get("close") or next(iter(leaking.values()))
        assets = range(case.before.num_assets)
        smaller = (self._leak(best[0], mixed(best[0], asset=asset)) for asset in assets)
        best = next((leak for leak in smaller if leak is not None), best)
        # The same leak from one of the first rows, or else from ever shorter halves.
        case, first, stop = best[0], case.t + 1 - self.at_open, len(case.before)
        for row in [first + ahead for ahead in NEAR if first + ahead < stop]:
            one = self._leak(case, mixed(case, rows=slice(row, row + 1)))
            if one is not None:
                return one
        while stop - first > 1:
            middle = (first + stop) // 2
            for half in (slice(first, middle), slice(middle, stop)):
                one = self._leak(case, mixed(case, rows=half))
                if one is not None:
                    best, first, stop = one, half.start, half.stop
                    break
            else:
                break
        return best

    def _leak(self, case: Case, after: Bars) -> tuple[Case, Found] | None:
        """Return the case with a smaller change, if that leaks as well."""
        try:
            output = self.values(after)
            found = compare(self.outputs[case.holed], output, case.t, self.tolerance)
        except Exception:  # a subject may refuse invalid bars; these show nothing then
            return None
        return None if found is None else (case._replace(after=after), found)


def compare(before: np.ndarray, after: np.ndarray, t: int, tolerance: float) -> Found | None:
    """Compare the rows up to t of two outputs `[N, ...]`; None where they are equal."""
    before, after = before[: t + 1], after[: t + 1]
    with np.errstate(invalid="ignore"):
        change = np.abs(after - before)
        # False for NaN: from a number to NaN is a change, whatever the tolerance.
        rounding = change <= tolerance * np.maximum(1.0, np.abs(before))
    differs = ~(equal(before, after) | rounding)
    if not differs.any():
        return None
    # `argwhere` goes row by row, so this is in the earliest row that changed.
    where = tuple(int(i) for i in np.argwhere(differs)[0])
    largest = float(np.fmax.reduce(change[differs]))
    rows = np.unique(np.nonzero(differs)[0])
    return Found(rows, largest, where, float(before[where]), float(after[where]))


def mixed(
    case: Case,
    columns: tuple[str, ...] | None = None,
    asset: int | None = None,
    rows: slice = slice(None),
) -> Bars:
    """Return the bars before, with those after in these columns, asset and rows; None: all."""
    arrays = arrays_of(case.before)
    assets = slice(None) if asset is None else slice(asset, asset + 1)
    for name in case.before.fields if columns is None else columns:
        arrays[name][rows, assets] = getattr(case.after, name)[rows, assets]
    return dataclasses.replace(case.before, **arrays)


def described(error: Exception) -> str:
    """Describe an exception of the subject in one line, with the line of code it came from."""
    if isinstance(error, _NotRows):
        return str(error)
    # Arrays of bars are read-only, so that code which changes them fails at its own line.
    if isinstance(error, ValueError) and "read-only" in str(error):
        return f"it writes into the bars at {user_line(error)}; let it copy them first"
    said = " ".join(str(error).split()) or "no message"
    if isinstance(error, ConfigError) and not user_line(error):
        return said.rstrip(".")  # of this package, which says what and where
    return f"it raises {type(error).__name__} at {user_line(error)}: {said[:200].rstrip('.')}"


def size(case: Case) -> int:
    """Count the cells of the bars that differ; all after t where bars were removed or added."""
    if not case.same_length:
        longest = max(len(case.after), len(case.before))
        return (longest - case.t) * len(case.before.fields) * case.before.num_assets
    return sum(len(where) for where in case.cells.values())


def example(case: Case, found: Found) -> Example:
    """Describe the case in words."""
    bars, symbols = case.before, case.before.symbols
    holes = ", on bars with holes added" if case.holed else ""
    row, *place = found.where
    # The output may have other columns than an asset each, e.g. features.
    names = [f"column {i}" for i in place]
    if place and place[0] < len(symbols):
        names[0] = symbols[place[0]]
    effect: dict[str, Any] = {
        "t": case.t,
        "row": row,
        "where": "" if place == [0] and len(symbols) == 1 else ", ".join(names),
        "before": found.before,
        "after": found.after,
    }
    if not case.same_length:
        change = case.change + holes
        return Example(change=change, columns=(LENGTH,), assets=symbols, rows=None, **effect)
    cells = case.cells
    both = np.concatenate(list(cells.values()))
    rows = (int(both[:, 0].min()), int(both[:, 0].max()))
    assets = tuple(symbols[i] for i in np.unique(both[:, 1]))
    at = f"rows {rows[0]} to {rows[1]}"
    if rows[0] == rows[1]:
        when = pd.Timestamp(bars.time[rows[0]])
        at = f"row {rows[0]} ({when.date() if when == when.normalize() else when})"
    change = f"Changing {listed(tuple(cells))} of {listed(assets)} in {at}"
    if len(both) == 1:
        (name,), cell = cells, tuple(both[0])
        old, new = (float(getattr(b, name)[cell]) for b in (bars, case.after))
        effect |= {"from_value": old, "to_value": new}
        change += " from {} to {}".format(*distinct(old, new))
    change += " and nothing else" + holes
    return Example(change=change, columns=tuple(cells), assets=assets, rows=rows, **effect)


def distinct(a: float, b: float) -> tuple[str, str]:
    """Write two numbers with as many digits as they need to differ."""
    for digits in (6, 9, 12, 17):
        pair = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if pair[0] != pair[1]:
            break
    return pair


def listed(names: tuple[str, ...]) -> str:
    """Join names as `"a, b and c"`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
