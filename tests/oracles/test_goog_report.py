"""The luck of a grid of SMA pairs on GOOG equals a report that was computed elsewhere."""

import json

import numpy as np
import pandas as pd
import pytest

from nca_trader.evaluate import metrics
from nca_trader.evaluate.evidence import inference

GOOG = pytest.importorskip("backtesting.test", reason="see `make test-oracles`").GOOG


@pytest.fixture(scope="module")
def returns():
    """Daily returns of 50 pairs, long or short by the sign, a day late, at 0.2% of each change."""
    close = GOOG.Close
    moved, found = close.pct_change().fillna(0.0), {}
    for fast in range(5, 26, 5):
        for slow in range(10, 66, 5):
            if fast < slow:
                sign = np.sign(close.rolling(fast).mean() - close.rolling(slow).mean())
                held = sign.shift(1).fillna(0.0)
                cost = 0.002 * held.diff().abs().fillna(0.0)
                found[fast, slow] = (held * moved - cost).fillna(0.0)
    return pd.DataFrame(found), moved.to_numpy()


@pytest.fixture(scope="module")
def expected(shared):
    text = (shared / "expected" / "stats_and_published.json").read_text()
    return json.loads(text)["goog_sma_grid_overfit_report"]


def test_ratios_psr_and_dsr(returns, expected):
    table, _ = returns
    ratios = {pair: metrics.sharpe(table[pair], 252) for pair in table}
    best = max(ratios, key=ratios.get)
    assert len(ratios) == expected["n_strategies"]
    assert "_".join(map(str, best)) == expected["best"]
    assert ratios[best] == pytest.approx(expected["best_sharpe"], rel=1e-12)
    moments = inference.moments(table[best])
    assert inference.probabilistic_sharpe(moments) == pytest.approx(expected["psr_vs0"], rel=1e-6)
    variance = np.var(np.array(list(ratios.values())) / np.sqrt(252), ddof=1)
    level = inference.expected_max_sharpe(50, variance) * np.sqrt(252)
    assert level == pytest.approx(expected["dsr_sr0_annual"], rel=1e-6)
    deflated = inference.deflated_sharpe(moments, 50, variance)
    assert deflated == pytest.approx(expected["dsr"], rel=1e-6)


def test_pbo(returns, expected):
    found = inference.overfit_probability(returns[0].to_numpy())
    assert found.probability == pytest.approx(expected["pbo"], abs=1e-12)


def test_bootstrap_interval_of_the_best(returns, expected):
    table, _ = returns
    low, high = inference.sharpe_interval(table[5, 25], 252)[:2]
    # Other resamples of the same bootstrap: its noise over 2,000 is some hundredths.
    assert [low, high] == pytest.approx(expected["stationary_bootstrap_sharpe_ci95"], abs=0.1)
