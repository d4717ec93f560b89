"""Alpha, beta and the information ratio against statsmodels, and a coverage experiment."""

import math

import ledger
import numpy as np
import pytest
import statsmodels.api as sm

from nca_trader.errors import ConfigError
from nca_trader.evaluate import benchmark, metrics


def drawn(seed, length=600):
    rng = np.random.default_rng(seed)
    market = rng.normal(3e-4, 0.01, length)
    noise = rng.normal(0, 0.004, length)
    noise[1:] += 0.4 * noise[:-1]  # autocorrelated
    return 2e-4 + 0.6 * market + noise * (1 + 20 * np.abs(market)), market


@pytest.mark.parametrize("seed", range(3))
def test_alpha_and_beta_are_those_of_statsmodels(seed):
    r, market = drawn(seed)
    found = benchmark.relative(r, market, 252.0)
    lags = benchmark.lags_of(r.size)
    fit = sm.OLS(r, sm.add_constant(market)).fit(
        cov_type="HAC", cov_kwds={"maxlags": lags, "use_correction": False}
    )
    assert found.alpha == pytest.approx(fit.params[0] * 252, rel=1e-9)
    assert found.beta == pytest.approx(fit.params[1], rel=1e-9)
    assert found.alpha_error == pytest.approx(fit.bse[0] * 252, rel=1e-9)
    assert found.beta_error == pytest.approx(fit.bse[1], rel=1e-9)
    assert found.information_ratio == pytest.approx(metrics.sharpe(r - market, 252.0), rel=1e-12)


def test_the_error_of_the_information_ratio_is_its_spread_over_samples():
    ratios, errors = [], []
    rng = np.random.default_rng(0)
    for _ in range(400):
        # Skewed differences, whose ratio is less certain than that of a Gaussian.
        difference = 0.15 - np.expm1(rng.normal(0, 0.8, 500))
        found = benchmark.relative(difference, np.zeros(500), 1.0)
        ratios.append(found.information_ratio)
        errors.append(found.information_ratio_error)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    gaussian = math.sqrt((1 + 0.5 * np.mean(ratios) ** 2) / 500)
    assert not np.std(ratios) == pytest.approx(gaussian, rel=0.05)


def test_a_bar_without_a_return_is_left_out_and_constants_have_no_beta():
    r, market = drawn(5)
    gaps = r.copy()
    gaps[[3, 70]] = np.nan
    kept = ~np.isnan(gaps)
    assert benchmark.relative(gaps, market, 252.0) == benchmark.relative(
        r[kept], market[kept], 252.0
    )
    assert math.isnan(benchmark.relative(r, np.zeros_like(r), 252.0).beta)
    same = benchmark.relative(market, market, 252.0)
    assert same.beta == pytest.approx(1.0) and math.isnan(same.information_ratio)
    with pytest.raises(ConfigError, match=r"\(600,\) and the benchmark \(10,\)"):
        benchmark.relative(r, market[:10], 252.0)


def test_buying_and_holding_is_the_mean_of_the_assets_growth():
    bars = ledger.random_bars(np.random.default_rng(0), 50, 3)
    held = benchmark.buy_and_hold(bars)
    by_hand = sum(bars.close[:, i] / bars.close[0, i] for i in range(3)) / 3
    np.testing.assert_allclose(held, by_hand)
    assert held.index.equals(bars.index)
