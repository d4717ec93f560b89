"""Combinatorial purged cross-validation through skfolio: what it leaves out, and its paths."""

import dataclasses
import itertools

import numpy as np
import pytest

import nca_trader as nca
from nca_trader.errors import BarError, ConfigError
from nca_trader.evaluate.walkforward.folds import Spans, make_folds

pytest.importorskip("skfolio")
SPANS = Spans(scheme="combinatorial", num_folds=6, num_test=2, purge=3, embargo=4)


def test_no_fold_trains_near_its_test():
    bars = nca.sample_bars("sp500")[-303:]
    folds = make_folds(bars, SPANS)
    assert len(folds) == len(list(itertools.combinations(range(6), 2)))
    for fold in folds:
        near = np.zeros(len(bars), bool)
        for first, last in fold.test:
            near[max(first - 3, 0) : last + 3 + 4] = True
        train = np.zeros(len(bars), bool)
        for first, last in fold.train:
            train[first:last] = True
        assert not (train & near).any()
        # At most the bars after the test span may be left out in addition.
        assert (~train & ~near).sum() <= 4 * len(fold.test)


def test_every_path_acts_on_every_bar_once():
    bars = nca.sample_bars("sp500").select("SP500")[-400:]

    def hold(bars, weight=1.0):
        return np.full(len(bars), weight)

    walk = nca.walk_forward(
        bars, hold, nca.Costs(commission=1e-3), scheme="combinatorial", num_folds=4, num_test=2,
        purge=3, embargo=4, grid={"weight": (0.25, 0.5)}, metric="total_return", fill="close",
    )  # fmt: skip
    assert len(walk.paths) == 3 and len(walk.folds) == 6
    for path in walk.paths:
        assert len(path.equity) == 400 and not path.targets.isna().any().any()
    # Each path holds, part by part, what the split that tested it had chosen.
    folds = make_folds(bars, dataclasses.replace(SPANS, num_folds=4))
    for fold, weight in zip(folds, walk.folds["weight"], strict=True):
        for (first, last), path in zip(fold.test, fold.paths, strict=True):
            assert (walk.paths[path].targets.iloc[first:last] == weight).all().all()
    sharpes = sorted(path.metrics["sharpe"] for path in walk.paths)
    assert walk.metrics["sharpe"] == sharpes[1] and "median of 3 paths" in walk.verdict


def test_what_does_not_fit_is_refused():
    bars = nca.sample_bars("sp500").select("SP500")[-100:]
    with pytest.raises(BarError, match="100 bars in 10 parts of 10 are too few for purge 5"):
        make_folds(bars, Spans(scheme="combinatorial", purge=5))
    with pytest.raises(ConfigError, match="a function that fits takes one"):
        nca.walk_forward(bars, lambda bars: lambda b: np.ones(len(b)), scheme="combinatorial")
    with pytest.raises(ConfigError, match="an agent trains on one span"):
        nca.walk_forward(bars, "nano", env="index_daily", scheme="combinatorial")
