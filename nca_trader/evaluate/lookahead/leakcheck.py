"""Checks whether targets or features look ahead, by running what decides them on other futures.

A decision at row t may depend only on bars up to t. So the subject runs on the bars as they
are and on bars that differ only after t, and every row up to t must be equal. A difference proves
a leak. No difference in many cases proves nothing.

`leakcheck` searches, and shows the smallest leak that it found. `outputs` compares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.config import AccountConfig
from nca_trader.config.account import complete_account
from nca_trader.config.ranges import expect
from nca_trader.data.feature_sets import FeatureSet, feature_set
from nca_trader.data.features import Feature
from nca_trader.data.indicators import Windows
from nca_trader.data.time_frames import seconds_of_bars
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.lookahead.futures import Case, Cases, arrays_of, equal, holed
from nca_trader.evaluate.lookahead.outputs import (
    Found,
    compare,
    described,
    foresights,
    own_features,
    refuse_chance,
    rows_of,
)
from nca_trader.evaluate.simulate import simulate_strategy
from nca_trader.evaluate.wording import listed
from nca_trader.progress import track
from nca_trader.strategies.strategy import Strategy
from nca_trader.strategies.targets import needs_account, strategy_targets
from nca_trader.types import Bars, split_columns

LEAST_BARS = 20
# Listed like a column where the number of bars, or the times of later bars, changed the past.
LENGTH = "length"
SHRUNK = 3  # leaking cases whose change is made smaller


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeakReport:
    """The findings of `leakcheck`. Print it.

    Attributes:
      subject: name of what was checked.
      bars: number of bars, and the names of the assets.
      cases: number of cases that were run.
      decided: as given.
      tolerance: as given.
      seed: as given.
      leaks: cases in which a row up to t changed.
      raised: cases without an output, although the subject decides rows up to t when it sees the
        bars after t.
      reacted: cases in which a later row changed, as it should. 0 means that nothing was tested.
      columns: columns of the bars that leak, or "length".
      first_row: the first row that changed in any case; None if none did.
      largest: the largest change; 0 where every change is to or from NaN.
      example: the smallest leak that was found.
      error: the error of the first case that raised, in words; or "".
      notes: further remarks.
    """

    subject: str
    bars: str
    cases: int
    decided: str
    tolerance: float
    seed: int
    leaks: int
    raised: int
    reacted: int
    columns: tuple[str, ...]
    first_row: int | None
    largest: float
    example: Example | None
    error: str
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no case changed the past or left the subject without an answer."""
        return not self.leaks and not self.raised

    @property
    def verdict(self) -> str:
        """The finding in one line."""
        name, cases = self.subject, self.cases
        if self.leaks:
            through = f"{name} looks ahead through {listed(self.columns)}"
            return f"{through} ({self.leaks} of {cases} cases). {self.example}."
        if self.raised:
            return (
                f"{name} needs later bars to answer for earlier ones "
                f"({self.raised} of {cases} cases). {self.error}."
            )
        if not self.reacted:
            return (
                f"{name}: no row changed in {cases} cases, earlier or later; it is "
                "constant, decides once, or reads its data elsewhere, so this shows nothing."
            )
        return (
            f"{name}: no look-ahead found in {cases} cases; later rows changed in "
            f"{self.reacted} of them, as they should."
        )

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.leaks:
            largest = f"change {self.largest:.3g}" if self.largest else "to or from NaN"
            lines += [
                f"  columns    {listed(self.columns)}",
                f"  first row  {self.first_row} is the earliest that changed",
                f"  largest    {largest}",
            ]
            if self.raised:
                lines.append(f"  raised     in {self.raised} cases. {self.error}")
        lines.append(f"  checked    {self.bars}; decided at the {self.decided}; seed {self.seed}")
        if self.tolerance:
            lines.append(f"  tolerance  {self.tolerance:g}")
        return "\n".join(lines + [f"  note       {note}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"ok": self.ok, "verdict": self.verdict} | dataclasses.asdict(self)


def leakcheck(
    subject: Any,
    bars: Bars,
    *,
    cases: int = 200,
    seed: int = 0,
    decided: str = "close",
    tolerance: float = 0.0,
    name: str | None = None,
) -> LeakReport:
    """Search a strategy or a feature for look-ahead by running it on other futures.

    Args:
      subject: a function `bars -> targets` (or features) of shape `[N]` or `[N, ...]`, one row
        per bar; or a `Strategy`; or a `Feature`, or its name in `FEATURES`.
      bars: at least 20 bars that the subject is meant for, with their holes and history.
      cases: number of other futures to try.
      seed: of the cases; the same seed tries the same ones.
      decided: when row t is decided. "close": bars up to t are known and the order fills later.
        "open": of bar t only its open is known, and that the bar exists.
      tolerance: the largest change that counts as rounding, relative to the value where that is
        above 1. 0 compares bit for bit (NaN equals NaN, 0.0 equals -0.0).
      name: of the subject, for the report.

    Returns:
      A `LeakReport`; `ok` is False where the past changed.

    Raises:
      ConfigError: an unknown feature or option; or a subject that cannot be checked, because on
        the bars as they are it raises, does not return one row per bar, or differs between runs.
      BarError: fewer than 20 bars.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[:200]
      >>> found = nca.leakcheck(lambda bars: bars.close - bars.close.mean(), bars, cases=10)
      >>> found.ok, found.columns
      (False, ('close',))
    """
    expect("cases", cases, Integral, "a whole number")
    if cases < 1:
        raise ConfigError(f"cases = {cases}: try at least one; 200 is usual.")
    if decided not in ("close", "open"):
        raise ConfigError(f"decided = {decided!r} is unknown; there are 'close' and 'open'.")
    if not 0.0 <= tolerance < np.inf:
        raise ConfigError(f"tolerance = {tolerance} is not a tolerance; give 0, or e.g. 1e-9.")
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", subject=subject)
    if len(bars) < LEAST_BARS:
        raise BarError(
            f"{bars.source or 'bars'}: {len(bars)} bars are too few to tell a past from a future; "
            f"give at least {LEAST_BARS}."
        )
    known = as_subject(subject, seconds_of_bars(bars))
    search = Search(known._replace(name=name or known.name), tolerance, decided == "open")
    whole = bars
    if known.windows is not None and len(bars) > (few := known.windows.few):
        # Python is called for each bar of each case, and what is called sees its own window alone.
        search.notes.append(f"cases are of the last {few} bars: an indicator sees its lookback")
        bars = bars[-few:]
    drawn = search.begin(np.random.default_rng(seed), bars)
    for number in track(range(cases), "leakcheck", "cases"):
        search.run(drawn.draw(number))
    # Once more on the bars as they are: this shows what a subject keeps from call to call.
    refuse_chance(search.subject.name, search.outputs[False], search.values(bars))
    if known.windows is not None and (longer := known.windows.longer(whole)):
        search.notes.append(longer)
    if search.early:
        search.notes.append(f"refused too short a history in {search.early} cases")
    # A built-in feature sees bars alone; what else is given may return what it read elsewhere.
    tried = not isinstance(subject, str) or own_features((subject,))
    output = {f"the output of {search.subject.name}": search.outputs[False]} if tried else {}
    search.notes += foresights(bars, output)
    # This comes after all cases, because finding the smallest leak takes further runs.
    example = search.smallest()
    return LeakReport(
        subject=search.subject.name,
        bars=f"{len(bars)} bars of {', '.join(bars.symbols)}",
        cases=cases,
        decided=decided,
        tolerance=tolerance,
        seed=seed,
        leaks=len(search.leaking),
        raised=search.raised,
        reacted=search.reacted,
        columns=tuple(field for field in (*bars.fields, LENGTH) if field in search.through),
        first_row=min((int(found.rows[0]) for _, found in search.leaking), default=None),
        # `fmax` passes over NaN: a change to or from NaN has no size.
        largest=float(np.fmax.reduce([found.largest for _, found in search.leaking], initial=0.0)),
        example=example,
        error=search.error,
        notes=tuple(search.notes),
    )


def as_subject(subject: Any, bar_seconds: int = 0) -> BarFunction:
    """Turn a function, a `Strategy`, a `Feature` or a feature's name into a function of bars.

    Args:
      subject: what `leakcheck` takes.
      bar_seconds: length of the bars, for a feature of a slower time frame.
    """
    if isinstance(subject, str):
        return of_feature(f"feature {subject}", feature_set((subject,), bar_seconds))
    if isinstance(subject, Feature):
        return of_feature("feature", FeatureSet(("feature",), {"feature": subject}))
    if isinstance(subject, Strategy):

        def decisions(bars: Bars) -> np.ndarray:
            if not needs_account(bars, subject):
                return strategy_targets(bars, subject)
            # Weights held show what stops close as well.
            rules = complete_account(AccountConfig(), subject)
            return np.asarray(simulate_strategy(bars, subject, rules, 0, len(bars)).weight)

        return BarFunction(subject.name, decisions, True)
    if callable(subject):
        name = getattr(subject, "__name__", type(subject).__name__)
        return BarFunction(name, subject, False)
    raise ConfigError(
        f"{subject!r} can't be checked; give a function of bars, a Strategy, or a feature or its "
        "name."
    )


def of_feature(name: str, features: FeatureSet) -> BarFunction:
    """Return a set of one feature as a function of bars."""
    (part,) = features.parts.values()
    windows = part.column if isinstance(part, Feature) else None
    known = windows if isinstance(windows, Windows) else None
    return BarFunction(name, features.batch, True, known)


class BarFunction(NamedTuple):
    """A strategy or a feature as a function of bars.

    Attributes:
      name: for the report.
      run: from bars to output.
      compiled: whether each number of bars costs a compilation.
      windows: of an `nca_trader.indicator`, else None.
    """

    name: str
    run: Callable[[Bars], Any]
    compiled: bool
    windows: Windows | None = None


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


class Search:
    """Runs one subject on cases, and collects what its outputs show.

    Attributes:
      leaking: cases in which the past changed, and how.
      through: columns that leaked.
      early: cases in which the subject refused a history in which it had not decided anything.
    """

    def __init__(self, subject: BarFunction, tolerance: float, at_open: bool):
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
        # A subject that draws random numbers is refused: two runs of it differ, so every case would
        # look like a leak.
        bases, self.outputs[False] = {False: bars}, output
        refuse_chance(self.subject.name, output, again)
        # Code that fills holes backwards leaks only where there are holes. Some code refuses them.
        try:
            bases[True] = holed(rng, bars)
            self.outputs[True] = self.values(bases[True])
        except Exception as error:
            # It was set before the subject refused it.
            del bases[True]
            self.notes.append(f"not tried on bars with holes added: {described(error)}")
        return Cases(rng, bases, output, self.at_open, self.subject.compiled)

    def values(self, bars: Bars, before: np.ndarray | None = None) -> np.ndarray:
        """Return the subject's output as float64 `[N, ...]`; raise what the subject raises."""
        return rows_of(self.subject.run(dataclasses.replace(bars)), bars, before)

    def run(self, case: Case) -> None:
        """Run the subject on the bars that the case changed, and record what that shows."""
        before = self.outputs[case.holed]
        try:
            after = self.values(case.after, before)
        except Exception as error:
            past = before[: case.t + 1]
            if equal(past, past[:1]).all():
                self.early += 1  # it had decided nothing up to row t, so it may refuse
                return
            self.raised += 1
            what = case.change or f"Changing bars after row {case.t}"
            self.error = self.error or f"{what}: {described(error)}"
            return
        found = compare(before, after, case.t, self.tolerance)
        if found is not None:
            self.leaking.append((case, found))
        # An output that no change of bars moves was not tested: it may read its data elsewhere.
        later = slice(case.t + 1 - self.at_open, min(len(before), len(after)))
        self.reacted += bool((~equal(before[later], after[later])).any())

    def smallest(self) -> Example | None:
        """Return the smallest change that was found to leak: few columns, one asset, one row."""
        values = [leak for leak in self.leaking if leak[0].same_length]
        shrunk = [self._shrink(*leak) for leak in values[:SHRUNK]]
        if shrunk:
            return example(*min(shrunk, key=lambda leak: sum(map(len, leak[0].cells.values()))))
        # Removed bars also show a leak through values, so "length" is named only where no column
        # leaks.
        if not self.leaking:
            return None
        self.through.add(LENGTH)
        return example(*self.leaking[0])

    def _shrink(self, case: Case, found: Found) -> tuple[Case, Found]:
        """Make the change as small as the leak allows; note the columns that leak."""
        # Each column is tried alone: of several that changed together, one may be enough for the
        # leak.
        alone = {name: self._leak(case, mixed(case, name)) for name in case.cells}
        leaking = {name: leak for name, leak in alone.items() if leak is not None}
        self.through |= set(leaking or alone)
        # The close if it leaks: an example with it is the easiest to follow.
        best = leaking.get("close") or next(iter(leaking.values()), (case, found))
        # Then one asset, and ever shorter halves of the rows, the earlier one first.
        while True:
            smaller = (self._leak(best[0], part) for part in parts(best[0]))
            leak = next((leak for leak in smaller if leak is not None), None)
            if leak is None:
                return best
            best = leak

    def _leak(self, case: Case, after: Bars) -> tuple[Case, Found] | None:
        """Return the case with a smaller change, if that leaks as well."""
        try:
            output = self.values(after)
            found = compare(self.outputs[case.holed], output, case.t, self.tolerance)
        except Exception:  # a subject may refuse invalid bars; these show nothing then
            return None
        return None if found is None else (case._replace(after=after), found)


def mixed(
    case: Case, column: str | None = None, asset: int | None = None, rows: slice = slice(None)
) -> Bars:
    """Return the bars before, with those after in this column, asset and rows; None: all."""
    arrays = arrays_of(case.before)
    assets = slice(None) if asset is None else slice(asset, asset + 1)
    for name in case.before.fields if column is None else (column,):
        arrays[name][rows, assets] = getattr(case.after, name)[rows, assets]
    return dataclasses.replace(case.before, **split_columns(arrays))


def parts(case: Case) -> Iterator[Bars]:
    """Yield the bars with smaller changes than the case: of one asset, then of half of the rows."""
    both = np.concatenate([*case.cells.values()])  # rows and assets that differ, `[cells, 2]`
    assets = np.unique(both[:, 1])
    yield from (mixed(case, asset=int(asset)) for asset in assets if len(assets) > 1)
    first, stop = int(both[:, 0].min()), int(both[:, 0].max()) + 1
    middle = (first + stop) // 2
    if first < middle:
        yield from (mixed(case, rows=half) for half in (slice(middle), slice(middle, None)))


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
