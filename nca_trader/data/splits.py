"""Bars parted by date into what is learnt from, selected on, and looked at once."""

from __future__ import annotations

import dataclasses

from nca_trader.errors import BarError
from nca_trader.types import Bars


@dataclasses.dataclass(frozen=True)
class Span:
    """Rows `first <= row < last` of some bars; the bars before it stay there for warm-up.

    `str(span)` tells its dates.
    """

    name: str
    first: int
    last: int
    dates: str

    def __len__(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return f"{self.name}: {self.dates} ({len(self)} bars)"

    @property
    def rows(self) -> slice:
        """The rows as a slice: `bars[span.rows]`, `result.equity.iloc[span.rows]`."""
        return slice(self.first, self.last)


@dataclasses.dataclass(frozen=True)
class Splits:
    """Three spans of one series of bars, in order of time, without a row in common."""

    train: Span
    select: Span
    test: Span


def split(bars: Bars, train_until: str, select_until: str, test_until: str | None = None) -> Splits:
    """Parts bars by date; each bound is the first moment after its span, UTC.

    E.g. `split(bars, "2011-01-01", "2013-01-01")` trains on the years to 2010, selects on
    2011-2012, and tests on what follows, up to `test_until` if it is given.

    Raises:
      BarError: a span would be empty, e.g. because the bounds are not in order.
    """
    bounds = [0, bars.row(train_until), bars.row(select_until)]
    bounds.append(len(bars) if test_until is None else bars.row(test_until))
    ends = (train_until, select_until, test_until or "the end")
    spans = {}
    for name, first, last, end in zip(
        ("train", "select", "test"), bounds[:-1], bounds[1:], ends, strict=True
    ):
        if first >= last:
            raise BarError(
                f"{bars.source or 'bars'}: the {name} span until {end} has no bars; {bars!r}: "
                "move the dates."
            )
        dates = f"{str(bars.time[first])[:10]} to {str(bars.time[last - 1])[:10]}"
        spans[name] = Span(name, first, last, dates)
    return Splits(**spans)
