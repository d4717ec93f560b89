"""Train and test spans of a walk-forward, in rows of the bars."""

from __future__ import annotations

import dataclasses

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
      BarError: there is room for fewer than two folds.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-1000:]
      >>> folds = make_folds(bars, Spans(train=500, test=250, purge=5))
      >>> [(fold.train, fold.test) for fold in folds]
      [((0, 495), (500, 750)), ((250, 745), (750, 1000))]
    """
    check_spans(spans)
    train, test = int(spans.train or 0), int(spans.test or 0)
    # Before a test span both do the same: the train span ends earlier.
    gap, count = spans.purge + spans.embargo, (len(bars) - train) // test
    if count < 2:
        raise BarError(
            f"{bars.source or 'bars'}: {len(bars)} bars are room for {max(count, 0)} folds of "
            f"{argument('train')} {train} and {argument('test')} {test}, and a walk-forward needs "
            f"2; give at least {train + 2 * test} bars, or shorter spans."
        )
    # Bars that are not a whole test span are left out at the beginning: newer ones count more.
    left = len(bars) - train - count * test
    folds = []
    for number in range(count):
        first = left + train + number * test
        begin = left if spans.scheme == "expanding" else first - train
        folds.append(Fold(number=number, train=(begin, first - gap), test=(first, first + test)))
    return folds
