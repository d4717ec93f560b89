"""The planted trend: the Sharpe ratio that is stated is the one that its best rule earns."""

import math

import numpy as np
import pytest

from nca_trader import ConfigError
from nca_trader.markets.closed_form import best_sharpe, trend_panel

HALF_LIFE = 20.0
PHI = 0.5 ** (1 / HALF_LIFE)


def test_the_best_rule_earns_the_stated_sharpe_ratio_and_no_other_filter_more():
    panel = trend_panel(20, 30_000, seed=3, sharpe=2.0, half_life=HALF_LIFE)
    close = panel.bars.close
    r = close[1:] / close[:-1] - 1.0
    sigma = np.geomspace(0.05, 0.40, 20) / math.sqrt(252)

    def earned(forecast):
        book = (forecast[:-1] / sigma * r).sum(1)
        return book.mean() / book.std() * math.sqrt(252)

    error = math.sqrt(252 / len(r))
    assert earned(panel.forecast) == pytest.approx(panel.sharpe, abs=3 * error)
    assert panel.sharpe == pytest.approx(2.0, rel=1e-9)
    # A Kalman filter written out with its variance as it converges, from the returns alone.
    x, p, seen, s = np.zeros(20), 1.0, np.zeros_like(r), panel.strength
    for t in range(len(r)):
        gain = s * p / (1 + s * s * p)
        x, p = PHI * (x + gain * (r[t] / sigma - s * x)), PHI**2 * p * (1 - gain * s) + 1 - PHI**2
        seen[t] = x
    np.testing.assert_allclose(seen[2000:], panel.forecast[2001:], atol=1e-6)
    # Rules that forget sooner or later earn less, and the drift itself more.
    for half_life in (3.0, 300.0):
        slow, a = np.zeros_like(r), np.zeros(20)
        for t in range(len(r)):
            a = a + (1 - 0.5 ** (1 / half_life)) * (r[t] / sigma - a)
            slow[t] = a
        assert earned(np.concatenate([np.zeros((1, 20)), slow])) < earned(panel.forecast)
    assert earned(panel.drift) > earned(panel.forecast) + 5 * error


def test_trends_decay_by_half_in_the_half_life():
    x = trend_panel(50, 4000, seed=1, half_life=HALF_LIFE).drift
    lag = int(HALF_LIFE)
    assert (x[lag:] * x[:-lag]).mean() / (x**2).mean() == pytest.approx(0.5, abs=0.03)


def test_more_assets_and_stronger_trends_earn_more():
    assert best_sharpe(0.05, PHI, 40) == pytest.approx(best_sharpe(0.05, PHI, 10) * 2.0, rel=1e-12)
    assert best_sharpe(0.1, PHI, 10) > best_sharpe(0.05, PHI, 10)


def test_what_is_out_of_range_is_one_line():
    with pytest.raises(ConfigError, match="num_assets"):
        trend_panel(0)
    with pytest.raises(ConfigError, match="half_life"):
        trend_panel(half_life=0.5)
