"""Metrics against published values, hand arithmetic and a second derivation."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics

# Vectors and values of empyrical's own tests (252 days a year).
MIXED = np.array([np.nan, 1, 10, -4, 2, 3, 2, 1, -10]) / 100
POSITIVE = np.array([1, 2, 1, 1, 1, 1, 1, 1, 1]) / 100
NEGATIVE = np.array([0, -6, -7, -1, -9, -2, -6, -8, -5]) / 100
BENCHMARK = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0]) / 100


@pytest.mark.parametrize(
    ("value", "published"),
    [
        (metrics.total_return(MIXED), 0.03893),
        (metrics.max_drawdown(MIXED), -0.1),
        (metrics.max_drawdown(NEGATIVE), -0.3659073),
        (metrics.cagr(MIXED, 252), 1.9135925373194231),
        (metrics.annual_volatility(MIXED, 252), 0.9136465399704637),
        (metrics.calmar(MIXED, 252), 19.135925373194233),
        (metrics.sharpe(MIXED, 252), 1.7238613961706866),
        (metrics.sharpe(POSITIVE, 252), 52.915026221291804),
        (metrics.sharpe(NEGATIVE, 252), -24.406808633910085),
        (metrics.downside_deviation(MIXED, 252), 0.6044832503882965),
        (metrics.sortino(MIXED, 252), 2.605531251673693),
        # Its threshold is 1,000% a year.
        (metrics.omega(MIXED, 11 ** (1 / 252) - 1), 0.8335426349755793),
        (metrics.stability(MIXED), 0.1529973665111273),
        # The published value takes the first return for 0; with the NaN left out it is the next.
        (metrics.tail_ratio(np.nan_to_num(MIXED)), 0.9473684210526313),
        (metrics.tail_ratio(MIXED), 0.9556962025316452),
        (metrics.sharpe(MIXED - BENCHMARK, 252), 0.34111411441060574),
    ],
)
def test_metrics_equal_the_published_ones(value, published):
    assert value == pytest.approx(published, rel=4e-5 if abs(published) == 0.03893 else 1e-8)


def test_the_sp500_of_1999_to_2018_has_its_known_figures(shared):
    from arch.data import sp500

    text = (shared / "expected" / "stats_and_published.json").read_text()
    expected = json.loads(text)["sp500_index_price_1999_2018"]
    price = sp500.load()["Adj Close"]
    # A price begins at its first bar, and an account before it.
    ours = metrics.summary(price[1:] / price.iloc[0], bars_per_year=252.0)
    names = {"n": "bars", "ann_vol": "annual_volatility", "skew": "skewness", "kurt": "kurtosis"}
    for name, value in expected.items():
        # The reference's moments carry pandas' small-sample corrections or none: 1e-3 is theirs.
        assert ours[names.get(name, name)] == pytest.approx(value, rel=1e-6), name


def test_sharpe_takes_a_risk_free_rate_off():
    r = np.array([0.01, -0.02, 0.03, 0.005])
    mean = (0.01 - 0.02 + 0.03 + 0.005) / 4
    variance = sum((x - mean) ** 2 for x in r) / 3
    by_hand = (mean * 252 - 0.015) / math.sqrt(variance * 252)
    assert metrics.sharpe(r, 252, risk_free=0.015) == pytest.approx(by_hand, rel=1e-12)


def test_equity_and_returns_go_both_ways_and_capital_before_the_first_bar_counts():
    r = np.random.default_rng(0).normal(0, 0.02, 50)
    equity = np.cumprod(1 + r)
    np.testing.assert_allclose(metrics.simple_returns(equity), r, atol=1e-14)
    assert metrics.total_return(metrics.simple_returns([0.9, 0.9])) == pytest.approx(-0.1)
    assert metrics.max_drawdown(metrics.simple_returns([0.9, 0.9])) == pytest.approx(-0.1)


def test_drawdown_is_the_fall_from_the_highest_equity_before():
    r = np.random.default_rng(1).normal(0, 0.03, 200)
    equity = [1.0]
    for value in r:
        equity.append(equity[-1] * (1 + value))
    double_loop = [equity[t] / max(equity[: t + 1]) - 1 for t in range(1, 201)]
    np.testing.assert_allclose(metrics.drawdown_series(r), double_loop, atol=1e-14)
    assert metrics.max_drawdown(r) == pytest.approx(min(double_loop))


@pytest.mark.parametrize("seed", range(5))
def test_the_duration_of_a_drawdown_is_the_longest_wait_for_a_high(seed):
    r = np.random.default_rng(seed).normal(0, 0.03, 60)
    equity, longest = [1.0, *np.cumprod(1 + r)], 0
    for first in range(61):
        for last in range(first + 1, 61):
            if equity[last] < equity[first]:
                # The recovery, where there is one, is the bar after.
                longest = max(longest, min(last + 1, 60) - first)
            else:
                break
    assert metrics.max_drawdown_duration(r) == longest


def test_durations_of_short_histories():
    assert metrics.max_drawdown_duration([0.1, 0.1]) == 0.0
    assert metrics.max_drawdown_duration([0.1, -0.1]) == 1.0  # open at the end
    assert metrics.max_drawdown_duration([-0.1, 0.2]) == 2.0
    assert math.isnan(metrics.max_drawdown_duration([np.nan]))


def test_tails_by_sorting():
    r = np.random.default_rng(3).normal(0, 0.01, 201)
    ordered = np.sort(r)
    # 200 steps between 201 values: the 5% quantile is the value after ten of them.
    assert metrics.value_at_risk(r) == pytest.approx(ordered[10])
    assert metrics.expected_shortfall(r) == pytest.approx(ordered[:11].mean())
    assert metrics.tail_ratio(r) == pytest.approx(ordered[190] / -ordered[10])
    ulcer = math.sqrt(np.mean(metrics.drawdown_series(r) ** 2))
    assert metrics.ulcer_index(r) == pytest.approx(ulcer)


def test_interest_on_cash_is_left_out_of_ratios_and_what_was_paid_is_not():
    index = pd.date_range("2020-01-01", periods=3, tz="UTC")
    equity = pd.Series([1.02, 1.0302, 1.0096], index)
    interest = pd.Series([0.01, 0.0051, -0.003], index)
    excess = [0.02 - 0.01, 0.01 - 0.005, 1.0096 / 1.0302 - 1.0]
    np.testing.assert_allclose(metrics.excess_returns(equity, interest), excess, atol=1e-15)
    np.testing.assert_allclose(metrics.excess_returns(equity, None), metrics.simple_returns(equity))
    found = metrics.summary(equity, turnover=equity, bars_per_year=252, interest=interest)
    assert found["sharpe"] == pytest.approx(metrics.sharpe(excess, 252))
    assert found["interest"] == pytest.approx(0.0151)
    assert found["total_return"] == pytest.approx(0.0096)


def test_a_nan_return_is_left_out_and_keeps_its_place_in_a_drawdown():
    r = np.array([0.1, np.nan, -0.2, 0.05])
    without = r[~np.isnan(r)]
    for metric in (metrics.total_return, metrics.max_drawdown, metrics.hit_rate, metrics.skewness):
        assert metric(r) == metric(without)
    assert metrics.sharpe(r, 252) == metrics.sharpe(without, 252)
    np.testing.assert_allclose(metrics.drawdown_series(r), [0, 0, -0.2, -0.16], atol=1e-15)


def test_what_is_undefined_is_nan_and_nothing_is_infinite():
    for r in (np.zeros(10), np.full(10, 0.01), np.array([]), np.full(3, np.nan)):
        assert math.isnan(metrics.sharpe(r, 252))
        assert math.isnan(metrics.skewness(r))
        assert math.isnan(metrics.omega(r))
    assert math.isnan(metrics.sortino([0.01, 0.02], 252))
    assert math.isnan(metrics.calmar([0.01, 0.02], 252))
    assert math.isnan(metrics.hit_rate(np.zeros(4)))
    assert math.isnan(metrics.total_return([]))
    assert math.isnan(metrics.annual_volatility([0.1], 252))


def test_a_flat_account_has_zeros_where_they_mean_something_and_no_sharpe_ratio():
    index = pd.date_range("2020-01-01", periods=5, tz="UTC")
    zeros = pd.Series(0.0, index)
    flat = metrics.summary(zeros + 1.0, pd.DataFrame({"a": zeros}), zeros, 252)
    for name in ("total_return", "cagr", "annual_volatility", "max_drawdown", "exposure"):
        assert flat[name] == 0.0
    assert flat["turnover"] == 0.0 and math.isnan(flat["sharpe"])


def test_exposure_turnover_and_hit_rate_by_hand():
    weights = [[0.0, 0.0], [0.5, 0.0], [0.5, -0.5], [np.nan, 0.0]]
    assert metrics.exposure(weights) == 0.5
    assert metrics.annual_turnover([0.0, 0.5, np.nan, 0.5], 252) == 1.0 * 252 / 4
    assert metrics.hit_rate([0.1, -0.1, 0.0, 0.2]) == pytest.approx(2 / 3)


def test_the_dust_of_a_closed_position_is_not_a_position():
    dust = [[1e-17], [-3e-12], [1e-3], [-1e-3]]
    assert metrics.positions(dust).ravel().tolist() == [0, 0, 1, -1]
    assert metrics.exposure(dust) == 0.5


def test_moments_of_a_coin_and_of_a_skewed_sample():
    assert metrics.kurtosis([1.0, -1.0] * 5) == pytest.approx(1.0)
    assert metrics.skewness([1.0, -1.0] * 5) == pytest.approx(0.0)
    p = 0.2  # Bernoulli: skewness (1 - 2p) / sqrt(p q), kurtosis 3 + (1 - 6 p q) / (p q)
    sample = [1.0] * 20 + [0.0] * 80
    assert metrics.skewness(sample) == pytest.approx((1 - 2 * p) / math.sqrt(p * 0.8))
    assert metrics.kurtosis(sample) == pytest.approx(3 + (1 - 6 * p * 0.8) / (p * 0.8))


def test_ruin_is_a_growth_rate_and_worse_than_ruin_is_not():
    assert metrics.cagr([-1.0, 0.0], 252) == -1.0
    assert math.isnan(metrics.cagr([-2.0, 0.0, 0.0], 252))


@pytest.mark.parametrize("equity", [[1.0, 0.0], [1.0, -1.0], [[1.0, 1.0]]])
def test_equity_that_is_not_one_positive_column_is_refused(equity):
    with pytest.raises(ConfigError, match="one column of positive numbers"):
        metrics.simple_returns(equity)


def test_returns_of_several_accounts_at_once_are_refused():
    with pytest.raises(ConfigError, match=r"shape \(2, 3\)"):
        metrics.sharpe(np.zeros((2, 3)), 252)


def test_a_calmar_ratio_and_a_tail_ratio_are_those_of_the_figures_next_to_them():
    index = pd.date_range("2020-01-01", periods=400, tz="UTC")
    equity = pd.Series(np.cumprod(1 + np.random.default_rng(1).normal(1e-3, 0.01, 400)), index)
    found = metrics.summary(equity, turnover=equity, bars_per_year=252, interest=equity * 2e-4)
    assert found["calmar"] == pytest.approx(found["cagr"] / -found["max_drawdown"], rel=1e-12)
    high = np.quantile(metrics.simple_returns(equity), 0.95)
    assert found["tail_ratio"] == pytest.approx(high / -found["value_at_risk"], rel=1e-12)


def test_sums_of_several_accounts_have_the_metrics_of_each():
    rows = np.random.default_rng(2).normal(0, 0.01, (3, 200))
    rows[2] = 0.0
    each = [metrics.sums(r) for r in rows]
    sums = metrics.Sums(*(np.array(field) for field in zip(*each, strict=True)))
    together = metrics.of_sums(sums, sums, sums, 252)
    for k, r in enumerate(each):
        for name, value in metrics.of_sums(r, r, r, 252).items():
            np.testing.assert_allclose(together[name][k], value, rtol=1e-12, err_msg=name)
