"""Train and test spans of a walk-forward, in rows of the bars."""

from __future__ import annotations

import dataclasses

import numpy as np

from nca_trader.config.spans import Spans, check_spans
from nca_trader.errors import BarError, ConfigError, argument
from nca_trader.types import Bars

Span = tuple[int, int]  # the first row, and the row after the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """One fold: what is fitted where, and where it then acts.

    Attributes:
      number: from 0, in order of time.
      train: spans that are fitted on, one unless the folds are combinatorial.
      test: spans that the fitted strategy acts on, none of whose rows is in `train`.
      paths: for each test span, the path of stitched test spans that it belongs to.
    """

    number: int
    train: tuple[Span, ...]
    test: tuple[Span, ...]
    paths: tuple[int, ...] = (0,)

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
      ConfigError: see `check_spans`; or skfolio is missing.
      BarError: there is room for fewer than two folds.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-1000:]
      >>> folds = make_folds(bars, Spans(train=500, test=250, purge=5))
      >>> [(fold.train, fold.test) for fold in folds]
      [(((0, 495),), ((500, 750),)), (((250, 745),), ((750, 1000),))]
    """
    check_spans(spans)
    if spans.scheme == "combinatorial":
        return _combinatorial(bars, spans)
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
        folds.append(
            Fold(number=number, train=((begin, first - gap),), test=((first, first + test),))
        )
    return folds


def _combinatorial(bars: Bars, spans: Spans) -> list[Fold]:
    """Cut the bars as skfolio's `CombinatorialPurgedCV` does."""
    try:
        from skfolio.model_selection import (  # type: ignore[import-not-found]
            CombinatorialPurgedCV,
        )
    except ImportError:
        raise ConfigError(
            "combinatorial folds need skfolio, which is not installed; pip install skfolio."
        ) from None
    part = len(bars) // spans.num_folds
    # A part that is tested may lose both ends, and must keep some rows.
    if 2 * spans.purge + spans.embargo >= part:
        raise BarError(
            f"{bars.source or 'bars'}: {len(bars)} bars in {spans.num_folds} parts of {part} are "
            f"too few for {argument('purge')} {spans.purge} and {argument('embargo')} "
            f"{spans.embargo}; give more bars, or fewer parts."
        )
    splitter = CombinatorialPurgedCV(
        n_folds=spans.num_folds,
        n_test_folds=spans.num_test,
        purged_size=spans.purge,
        embargo_size=spans.embargo,
    )
    # skfolio cuts by the number of rows alone, so it gets no data of ours.
    rows = np.zeros((len(bars), 1))
    ids = splitter.get_path_ids()
    folds = []
    for number, (train, tests) in enumerate(splitter.split(rows)):
        folds.append(
            Fold(
                number=number,
                # Its rows come as one array with holes; a fit needs spans that have no hole.
                train=_runs(np.asarray(train)),
                test=tuple(span for test in tests for span in _runs(np.asarray(test))),
                paths=tuple(int(path) for path in ids[number]),
            )
        )
    return folds


def _runs(rows: np.ndarray) -> tuple[Span, ...]:
    """Return the spans of consecutive rows."""
    edges = np.flatnonzero(np.diff(rows) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(rows, edges) if len(run))
