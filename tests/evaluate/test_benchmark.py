"""Alpha, beta and the information ratio against statsmodels, and a coverage experiment."""

import dataclasses
import math

import ledger
import numpy as np
import pytest
import statsmodels.api as sm
from drawn import EVERY_COST, random_bars, rich_bars

import nca_trader as nca
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


RULES = {"capital": 1e5, "delist_after": 5, "delist_haircut": 0.2}


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_the_benchmark_is_a_ledger_that_buys_each_asset_once(fill):
    bars = rich_bars(np.random.default_rng(0), 120, 3)
    result = nca.backtest(bars, nca.rules.always_flat(), EVERY_COST, fill, **RULES)
    listed = bars.present.cumsum(axis=0) * bars.present == 1
    once = np.where(listed, 1 / 3, np.nan)
    account = ledger.run(bars, once, dataclasses.asdict(EVERY_COST), {"fill": fill, **RULES})
    np.testing.assert_allclose(result.benchmark, account.equity, rtol=1e-10)
    assert all(
        account.went[name].any() for name in ("dividends", "funding", "interest", "delisting")
    )
    assert result.benchmark.index.equals(bars.index)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.few(3)
def test_a_holder_has_no_alpha_whatever_is_paid_and_earned(seed):
    rng = np.random.default_rng(seed)
    bars = rich_bars(rng, 150, 3)
    costs = nca.Costs(
        **{field.name: getattr(EVERY_COST, field.name) * rng.integers(0, 3)
           for field in dataclasses.fields(EVERY_COST) if getattr(EVERY_COST, field.name)}
    )  # fmt: skip
    fill = ("next_open", "close")[seed % 2]
    more = {**RULES, **({"start": str(bars.index[40])} if seed > 3 else {})}
    held = np.where(np.arange(150)[:, None] == [[0, 0, 0]], 1 / 3, np.nan)
    for holder in (nca.rules.buy_and_hold(), held):
        result = nca.backtest(bars, holder, costs, fill, **more)
        m = result.metrics
        assert m["alpha"] == pytest.approx(0.0, abs=1e-12) and m["beta"] == pytest.approx(1.0)
        assert np.isnan(m["information_ratio"])
        assert result.hold.account_metrics == pytest.approx(result.account_metrics, nan_ok=True)
    # The trader of the same bars has.
    assert (
        abs(nca.backtest(bars, nca.rules.momentum(5), costs, fill, **more).metrics["alpha"]) > 1e-3
    )


def test_interest_on_cash_is_no_alpha():
    bars = random_bars(np.random.default_rng(1), 300, 1)
    costs = nca.Costs(interest_lend=0.10)
    m = nca.backtest(bars, np.full(300, 0.5), costs, "close", "rebalance").metrics
    # Half of the benchmark and half cash at each close: r - i / E = r_b / 2 in each bar.
    assert m["beta"] == pytest.approx(0.5) and m["alpha"] == pytest.approx(0.0, abs=1e-12)
    assert m["interest"] > 0.03
    flat = nca.backtest(bars, nca.rules.always_flat(), costs).metrics
    assert flat["alpha"] == 0.0 and flat["total_return"] > 0.07
