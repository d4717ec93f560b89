"""What `leakcheck` found, in words: a report, and the smallest change that proves a leak."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nca_trader.evaluate.leakcheck.cases import Case, equal

LENGTH = "length"  # named beside the columns: how many bars there are, or when the later ones are


class Found(NamedTuple):
    """How an output changed up to row t.

    rows: that changed, ascending. largest: finite change, NaN where all are to or from NaN.
    where: index into the output of the first change. before, after: the values there.
    """

    rows: np.ndarray
    largest: float
    where: tuple[int, ...]
    before: float
    after: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A change of the future that changed the past.

    Attributes:
      t: bars up to this row (with `decided="open"`: up to its open) were left as they were.
      change: what was done to later bars, in words.
      columns: what differs: columns of the bars, or "length". assets: symbols that differ.
      rows: first and last row that differ, None where bars were left out or added.
      row: the first row of the output that changed. where: the asset or column of the output.
      before, after: its value there.
      from_value, to_value: of the one cell of the bars that differs, None where there are more.
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
        before, after = told_apart(self.before, self.after)
        return f"{self.change}: row {self.row}{of} goes from {before} to {after}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `leakcheck` found; print it.

    Attributes:
      subject: name of what was checked. bars: how many, of which assets. cases: how many were run.
      decided, tolerance, seed: as given.
      leaks: cases in which a row up to t changed. raised: cases in which the subject gave no
        output at all, though it gives rows up to t when it sees the bars after t.
      reacted: cases in which a later row changed, as it should; 0 says that nothing was tested.
      columns: what leaks, as columns of the bars, or "length". first_row: the first row that
        changed in any case, None if none did. largest: the largest change, 0
        where all are to or from NaN.
      example: the smallest found. error: of the first case that raised, in words; or "".
      notes: what else must be known to read this.
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
        """No case changed the past, and none left the subject without an answer."""
        return not self.leaks and not self.raised

    @property
    def verdict(self) -> str:
        """One line: what was found."""
        if self.leaks:
            return (
                f"{self.subject} looks ahead through {listed(self.columns)} "
                f"({self.leaks} of {self.cases} cases). {self.example}."
            )
        if self.raised:
            return (
                f"{self.subject} needs later bars to answer for earlier ones "
                f"({self.raised} of {self.cases} cases). {self.error}."
            )
        if not self.reacted:
            return (
                f"{self.subject}: no row changed in {self.cases} cases, earlier or later; it is "
                "constant, decides once, or reads its data elsewhere, so this shows nothing."
            )
        return (
            f"{self.subject}: no look-ahead found in {self.cases} cases; later rows changed in "
            f"{self.reacted} of them, as they should."
        )

    def __str__(self) -> str:
        lines = [self.verdict]
        if self.leaks:
            lines.append(f"  columns    {listed(self.columns)}")
            lines.append(f"  first row  {self.first_row} is the earliest that changed")
            largest = f"change {self.largest:.3g}" if self.largest else "to or from NaN"
            lines.append(f"  largest    {largest}")
        if self.leaks and self.raised:
            lines.append(f"  raised     in {self.raised} cases. {self.error}")
        lines.append(f"  checked    {self.bars}; decided at the {self.decided}; seed {self.seed}")
        if self.tolerance:
            lines.append(f"  tolerance  {self.tolerance:g}")
        return "\n".join(lines + [f"  note       {note}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {"ok": self.ok, "verdict": self.verdict} | dataclasses.asdict(self)


def changed_cells(case: Case) -> dict[str, np.ndarray]:
    """`{column: [cells, 2] rows and assets}` in which the case's bars differ."""
    pairs = ((k, getattr(case.before, k), getattr(case.after, k)) for k in case.before.fields)
    cells = {name: np.argwhere(~equal(a, b)) for name, a, b in pairs}
    return {name: where for name, where in cells.items() if len(where)}


def size(case: Case) -> int:
    """Cells of the bars that differ; where bars were left out or added, all after t."""
    if not case.same_length:
        longest = max(len(case.after), len(case.before))
        return (longest - case.t) * len(case.before.fields) * case.before.num_assets
    return sum(len(where) for where in changed_cells(case).values())


def example(case: Case, found: Found) -> Example:
    """The case in words."""
    bars, symbols = case.before, case.before.symbols
    holes = ", on bars with holes added" if case.holed else ""
    effect: dict[str, Any] = {
        "t": case.t,
        "row": found.where[0],
        "where": _column(found.where[1:], symbols),
        "before": found.before,
        "after": found.after,
    }
    if not case.same_length:
        change = case.change + holes
        return Example(change=change, columns=(LENGTH,), assets=symbols, rows=None, **effect)
    cells = changed_cells(case)
    both = np.concatenate(list(cells.values()))
    rows = (int(both[:, 0].min()), int(both[:, 0].max()))
    assets = tuple(symbols[i] for i in np.unique(both[:, 1]))
    at = f"rows {rows[0]} to {rows[1]}"
    if rows[0] == rows[1]:
        at = f"row {rows[0]} ({_when(bars.time[rows[0]])})"
    change = f"Changing {listed(tuple(cells))} of {listed(assets)} in {at}"
    if len(both) == 1:
        (name,), cell = cells, tuple(both[0])
        old, new = (float(getattr(b, name)[cell]) for b in (bars, case.after))
        effect |= {"from_value": old, "to_value": new}
        change += " from {} to {}".format(*told_apart(old, new))
    change += " and nothing else" + holes
    return Example(change=change, columns=tuple(cells), assets=assets, rows=rows, **effect)


def _when(time: np.datetime64) -> str:
    """A time as people write it: a date alone where it is midnight."""
    stamp = pd.Timestamp(time)
    return str(stamp.date() if stamp == stamp.normalize() else stamp)


def _column(where: tuple[int, ...], symbols: tuple[str, ...]) -> str:
    """What a column of the output is called: its asset where there are several; "" of one."""
    if not where or (len(where) == 1 and len(symbols) == 1 and where[0] == 0):
        return ""
    asset, *rest = where
    first = symbols[asset] if asset < len(symbols) else f"column {asset}"
    return ", ".join([first, *(f"column {i}" for i in rest)])


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Two numbers with as many digits as show that they differ."""
    for digits in (6, 9, 12, 17):
        pair = f"{a:.{digits}g}", f"{b:.{digits}g}"
        if pair[0] != pair[1]:
            break
    return pair


def listed(names: tuple[str, ...]) -> str:
    """`"a, b and c"`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
