"""Train and test spans of a walk-forward, in rows of the bars."""

from __future__ import annotations

import dataclasses
import itertools
from numbers import Integral
from typing import Any, cast

from nca_trader.config.spans import Spans, check_spans
from nca_trader.errors import BarError, argument
from nca_trader.types import Bars

Span = tuple[int, int]  # the first row, and the row after the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """One fold: what is fitted where, and where it then acts.

    Attributes:
      number: from 0, in order of time.
      train: the span that is fitted on.
      test: the span after it, on which the fitted strategy acts.
    """

    number: int
    train: Span
    test: Span

    @property
    def name(self) -> str:
        """The name of the fold in messages."""
        return f"fold {self.number}"


def make_folds(bars: Bars, spans: Spans) -> list[Fold]:
    """Cut the bars into folds, the oldest first.

    The last test span ends at the last bar, so the bars that are left over are the oldest ones; the
    test spans of a walk-forward follow each other without a gap.

    Args:
      bars: N bars.
      spans: see `Spans`.

    Raises:
      ConfigError: see `check_spans`.
      BarError: there is room for fewer than two folds, or for no bar in one of the spans.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-1000:]
      >>> folds = make_folds(bars, Spans(train=500, test=250, purge=5))
      >>> [(fold.train, fold.test) for fold in folds]
      [((0, 495), (500, 750)), ((250, 745), (750, 1000))]
      >>> folds = make_folds(bars, Spans(train="2015", test=("2017", "2018"), scheme="expanding"))
      >>> [bars.time[fold.test[0]].astype("datetime64[D]").item().isoformat() for fold in folds]
      ['2017-01-03', '2018-01-02']
    """
    check_spans(spans)
    begin, starts = _dated(bars, spans) if spans.dated else _counted(bars, spans)
    # Before a test span both do the same: the train span ends earlier.
    gap, length = spans.purge + spans.embargo, starts[0] - begin
    folds = []
    for number, (first, last) in enumerate(itertools.pairwise([*starts, len(bars)])):
        since = begin if spans.scheme == "expanding" else first - length
        folds.append(Fold(number=number, train=(since, first - gap), test=(first, last)))
    return folds


def _counted(bars: Bars, spans: Spans) -> tuple[int, list[int]]:
    """Return the first row of the first train span, and of each test span, of so many bars each."""
    train, test = int(cast(Any, spans.train)), int(cast(Any, spans.test))
    count = (len(bars) - train) // test
    if count < 2:
        raise BarError(
            f"{bars.source or 'bars'}: {len(bars)} bars are room for {max(count, 0)} folds of "
            f"{argument('train')} {train} and {argument('test')} {test}, and a walk-forward needs "
            f"2; give at least {train + 2 * test} bars, or shorter spans."
        )
    # Bars that are not a whole test span are left out at the beginning: newer ones count more.
    left = len(bars) - train - count * test
    return left, [left + train + number * test for number in range(count)]


def _dated(bars: Bars, spans: Spans) -> tuple[int, list[int]]:
    """Return what `_counted` does, of test spans that begin at dates."""
    train, dates = cast(Any, spans.train), cast(Any, spans.test)
    starts = [bars.row(date, "test") for date in dates]
    where = f"{bars.source or 'bars'}, {bars.index[0].date()} to {bars.index[-1].date()}"
    if not starts or any(a >= b for a, b in itertools.pairwise([*starts, len(bars)])):
        raise BarError(
            f"{where}: {argument('test')} needs dates that each have bars before the next; give "
            "other dates."
        )
    by_number = isinstance(train, Integral)
    begin = starts[0] - int(train) if by_number else bars.row(train, "train")
    if begin < 0 or begin + spans.purge + spans.embargo >= starts[0]:
        raise BarError(
            f"{where}: {argument('train', train)} leaves no train span before the first "
            "test span; give a later test date, or another train span."
        )
    return begin, starts
