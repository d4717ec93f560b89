"""Does a strategy or a feature look ahead? Run on other futures, it must say the same of the past.

The law: what is decided at row t may depend on bars up to t alone. So the subject is run on the
bars as they are, and on bars that differ after t only (moved, reordered, missing, left out,
added), and every row up to t must be equal. A difference proves a leak, and the smallest one
found is shown; no difference in many cases proves nothing, but says much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from nca_trader.agents.rules import Strategy
from nca_trader.config.ranges import expect
from nca_trader.data.features import Feature, feature_set
from nca_trader.errors import BarError, ConfigError, user_line
from nca_trader.evaluate.leakcheck.cases import Case, Cases, arrays_of, differing, equal, holed
from nca_trader.evaluate.leakcheck.report import LENGTH, Example, Found, Report, example, size
from nca_trader.numerics import float64_on_cpu
from nca_trader.types import Bar, Bars

__all__ = ["Example", "Report", "leakcheck"]

LEAST_BARS = 20
SHRUNK = 3  # leaking cases that are taken apart for their columns
NEAR = (0, 1, 2, 3, 4, 9, 19)  # rows after the first that are tried alone for a small example


def leakcheck(
    subject: Any,
    bars: Bars,
    *,
    cases: int = 200,
    seed: int = 0,
    decided: str = "close",
    tolerance: float = 0.0,
    name: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """Looks for look-ahead in a strategy or a feature by running it on other futures.

    Args:
      subject: a function `bars -> targets` (or features) of shape `[N]` or `[N, ...]`, one row a
        bar; or a `Strategy`; or a `Feature` or its name in `FEATURES`.
      bars: at least 20; those that the subject is meant for, with its holes and its history.
      cases: other futures to try.
      seed: of the cases.
      decided: when row t is decided: "close" (bars up to t are known, the order fills later) or
        "open" (of bar t the open alone is known, and that it is there; bars before it fully).
      tolerance: largest change that is taken for rounding, relative to the value where that is
        above 1; 0 compares bit for bit (NaN equals NaN, 0.0 equals -0.0).
      name: of the subject, for the report.
      report: called with cases done and cases in all.

    Raises:
      ConfigError: no such feature or option, or a subject that can't be checked: it raises or
        gives no row a bar on the bars as they are, or differs between two runs on the same bars.
      BarError: fewer than 20 bars.
    """
    _refuse_options(cases, decided, tolerance)
    expect("bars", bars, Bars, "Bars, e.g. of nca.read_bars", subject=subject)
    if len(bars) < LEAST_BARS:
        raise BarError(
            f"{bars.source or 'bars'}: {len(bars)} bars are too few to tell a past from a future; "
            f"give at least {LEAST_BARS}."
        )
    known = _subject(subject)
    check = _Check(known._replace(name=name or known.name), tolerance)
    drawn = check.begin(np.random.default_rng(seed), bars, decided == "open")
    for number in range(cases):
        check.run(drawn.draw(number), decided == "open")
        if report is not None:
            report(number + 1, cases)
    check.run_again(bars)
    smallest = check.smallest(decided == "open")
    return Report(
        subject=check.subject.name,
        bars=f"{len(bars)} bars of {', '.join(bars.symbols)}",
        cases=cases,
        decided=decided,
        tolerance=tolerance,
        seed=seed,
        leaks=len(check.leaking),
        raised=check.raised,
        reacted=check.reacted,
        columns=tuple(field for field in (*bars.fields, LENGTH) if field in check.through),
        first_row=min((int(found.rows[0]) for _, found in check.leaking), default=None),
        largest=float(np.fmax.reduce([found.largest for _, found in check.leaking], initial=0.0)),
        example=smallest,
        error=check.error,
        notes=tuple(check.notes),
    )


class _Subject(NamedTuple):
    """name: for reports. run: bars to output. compiled: each number of bars costs a compilation."""

    name: str
    run: Callable[[Bars], Any]
    compiled: bool


class _Shape(Exception):
    """An output that is not one row a bar."""


class _Check:
    """Runs one subject, and gathers what its outputs show.

    Attributes:
      leaking: cases in which the past changed, and how. through: columns that leaked.
      raised, reacted, error, notes: as in `Report`.
    """

    def __init__(self, subject: _Subject, tolerance: float):
        self.subject, self.tolerance = subject, tolerance
        self.outputs: dict[bool, np.ndarray] = {}
        self.leaking: list[tuple[Case, Found]] = []
        self.through: set[str] = set()
        self.raised, self.reacted, self.early, self.error = 0, 0, 0, ""
        self.notes: list[str] = []

    def begin(self, rng: np.random.Generator, bars: Bars, at_open: bool) -> Cases:
        """The outputs on the bars as they are and on bars with holes; gives the cases."""
        try:
            output, again = (self._values(bars) for _ in range(2))
        except Exception as error:
            raise ConfigError(
                f"{self.subject.name}: {_told(error)}; it must give one row a bar on the bars as "
                "they are, so mend that first."
            ) from None
        self._refuse_other(output, again, "gives other values on the same bars the second time")
        bases, self.outputs[False] = {False: bars}, output
        try:
            bases[True] = holed(rng, bars)
            self.outputs[True] = self._values(bases[True])
        except Exception as error:
            del bases[True]
            self.notes.append(f"not tried on bars with holes added: {_told(error)}")
        return Cases(rng, bases, output, at_open, self.subject.compiled)

    def run_again(self, bars: Bars) -> None:
        """Once more on the bars as they are: what is kept from call to call shows itself."""
        self._refuse_other(self.outputs[False], self._values(bars), "changes from call to call")
        if self.early:
            self.notes.append(f"refused too short a history in {self.early} cases")

    def _refuse_other(self, output: np.ndarray, again: np.ndarray, what: str) -> None:
        if output.shape != again.shape or not equal(output, again).all():
            raise ConfigError(
                f"{self.subject.name}: {what}, so nothing can be said of its past; give it a "
                "fixed seed, and let it keep nothing between calls."
            )

    def _values(self, bars: Bars) -> np.ndarray:
        """The subject's output as float64 `[N, ...]`; raises whatever the subject raises."""
        output = self.subject.run(dataclasses.replace(bars))  # a copy: nobody writes into ours
        index = getattr(output, "index", None)
        if isinstance(index, pd.DatetimeIndex) and len(index) == len(bars):
            there = index.tz_localize("UTC") if index.tz is None else index.tz_convert("UTC")
            if (there != bars.index).any():
                raise _Shape("its rows are not at the times of the bars; reindex by bars.index")
        try:
            values = np.asarray(output, np.float64)
        except (TypeError, ValueError):
            raise _Shape(f"it gives {type(output).__name__}, not numbers, one row a bar") from None
        if not values.ndim or len(values) != len(bars):
            raise _Shape(f"it gives shape {values.shape}, not one row for each of {len(bars)} bars")
        return values

    def run(self, case: Case, at_open: bool) -> None:
        """Runs the subject on the case's other future, and keeps what that shows."""
        before = self.outputs[case.holed]
        try:
            after = self._values(case.after)
            if after.shape[1:] != before.shape[1:]:
                raise _Shape(f"it gives shape {after.shape} there and {before.shape} before")
        except Exception as error:
            self._note_error(case, error)
            return
        found = compare(before, after, case.t, self.tolerance)
        if found is not None:
            self.leaking.append((case, found))
        later = slice(case.t + 1 - at_open, min(len(before), len(after)))
        self.reacted += bool((~equal(before[later], after[later])).any())

    def _note_error(self, case: Case, error: Exception) -> None:
        past = self.outputs[case.holed][: case.t + 1]
        if equal(past, past[:1]).all():
            self.early += 1  # it had decided nothing by then, and owes no answer
            return
        self.raised += 1
        what = case.change or f"Changing bars after row {case.t}"
        self.error = self.error or f"{what}: {_told(error)}"

    def smallest(self, at_open: bool) -> Example | None:
        """The smallest change that was found to leak: few columns, one asset, one row."""
        values = [leak for leak in self.leaking if leak[0].same_length]
        others = [leak for leak in self.leaking if not leak[0].same_length]
        shrunk = [self._shrunk(*leak, at_open) for leak in values[:SHRUNK]]
        if others and not shrunk:
            self.through.add(LENGTH)
        best = min(shrunk + others[:1], key=lambda leak: size(leak[0]), default=None)
        return None if best is None else example(*best)

    def _shrunk(self, case: Case, found: Found, at_open: bool) -> tuple[Case, Found]:
        """Takes from the change what the leak does not need; keeps the columns that leak alone."""
        best = (case, found)
        names = differing(case.before, case.after)
        alone = {name: self._leak(case, mixed(case, columns=(name,))) for name in names}
        leaking = {name: leak for name, leak in alone.items() if leak is not None}
        self.through |= set(leaking or names)
        if leaking:
            best = leaking.get("close") or next(iter(leaking.values()))
        assets = range(case.before.num_assets)
        smaller = (self._leak(best[0], mixed(best[0], asset=asset)) for asset in assets)
        best = next((leak for leak in smaller if leak is not None), best)
        return self._in_few_rows(best, case.t + 1 - at_open, len(case.before))

    def _in_few_rows(self, best: tuple[Case, Found], first: int, stop: int) -> tuple[Case, Found]:
        """The same leak from one of the first rows, or else from ever shorter halves."""
        case = best[0]
        for row in [first + ahead for ahead in NEAR if first + ahead < stop]:
            smaller = self._leak(case, mixed(case, rows=slice(row, row + 1)))
            if smaller is not None:
                return smaller
        while stop - first > 1:
            middle = (first + stop) // 2
            for half in (slice(first, middle), slice(middle, stop)):
                smaller = self._leak(case, mixed(case, rows=half))
                if smaller is not None:
                    best, first, stop = smaller, half.start, half.stop
                    break
            else:
                break
        return best

    def _leak(self, case: Case, after: Bars) -> tuple[Case, Found] | None:
        """The case with a smaller change, if that leaks as well."""
        try:
            output = self._values(after)
            found = compare(self.outputs[case.holed], output, case.t, self.tolerance)
        except Exception:  # a subject may refuse what is no full bar; then it is no example
            return None
        return None if found is None else (case._replace(after=after), found)


def compare(before: np.ndarray, after: np.ndarray, t: int, tolerance: float) -> Found | None:
    """What differs in the rows up to t of two outputs `[N, ...]`, or None."""
    before, after = before[: t + 1], after[: t + 1]
    with np.errstate(invalid="ignore"):
        change = np.abs(after - before)
        # False for NaN: from a number to NaN is a change, whatever the tolerance.
        rounding = change <= tolerance * np.maximum(1.0, np.abs(before))
    differs = ~(equal(before, after) | rounding)
    if not differs.any():
        return None
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
    """The bars before, with what those after have in these columns, asset and rows; None: all."""
    arrays = arrays_of(case.before)
    assets = slice(None) if asset is None else slice(asset, asset + 1)
    for name in case.before.fields if columns is None else columns:
        arrays[name][rows, assets] = getattr(case.after, name)[rows, assets]
    return dataclasses.replace(case.before, **arrays)


def _subject(subject: Any) -> _Subject:
    """Whatever may be checked, as a function of bars."""
    if isinstance(subject, str):
        return _Subject(f"feature {subject}", feature_set((subject,)).batch, True)
    if isinstance(subject, Strategy):
        return _Subject(subject.name, _online(subject.init, subject.update), True)
    if isinstance(subject, Feature):
        update = jax.vmap(subject.update)

        def init(num_assets: int) -> Any:
            state = subject.init()
            return jax.tree.map(lambda x: np.broadcast_to(x, (num_assets, *np.shape(x))), state)

        return _Subject("feature", _online(init, update), True)
    if not callable(subject):
        raise ConfigError(
            f"{subject!r} can't be checked; give a function of bars, a Strategy, or a feature or "
            "its name."
        )
    return _Subject(getattr(subject, "__name__", type(subject).__name__), subject, False)


def _online(init: Callable[[int], Any], update: Callable[..., Any]) -> Callable[[Bars], np.ndarray]:
    """The scan of an online update over bars, in float64, compiled once for each length."""

    def over(state: Any, bar: Bar) -> Any:
        return jax.lax.scan(update, state, bar)[1]

    scan = jax.jit(over)

    def run(bars: Bars) -> np.ndarray:
        with float64_on_cpu():
            return np.asarray(scan(init(bars.num_assets), bars.as_bar()))

    return run


def _refuse_options(cases: int, decided: str, tolerance: float) -> None:
    expect("cases", cases, Integral, "a whole number")
    if cases < 1:
        raise ConfigError(f"cases = {cases}: try at least one; 200 is usual.")
    if decided not in ("close", "open"):
        raise ConfigError(f"decided = {decided!r} is unknown; there are 'close' and 'open'.")
    if not 0.0 <= tolerance < np.inf:
        raise ConfigError(f"tolerance = {tolerance} is no tolerance; give 0, or e.g. 1e-9.")


def _told(error: Exception) -> str:
    """An exception of the subject in one line, with the line of code it came from."""
    if isinstance(error, _Shape):
        return str(error)
    if isinstance(error, ValueError) and "read-only" in str(error):
        return f"it writes into the bars at {user_line(error)}; let it copy them first"
    said = " ".join(str(error).split()) or "no message"
    return f"it raises {type(error).__name__} at {user_line(error)}: {said[:200].rstrip('.')}"
