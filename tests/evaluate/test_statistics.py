"""PSR, DSR, MinTRL and bootstrap intervals against the papers and against closed forms."""

import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from nca_trader.errors import ConfigError
from nca_trader.evaluate import statistics
from nca_trader.evaluate.statistics import Interval, Moments

GAUSSIAN = {"skewness": 0.0, "kurtosis": 3.0}


def test_psr_of_the_hedge_fund_in_the_paper():
    # Bailey and Lopez de Prado 2012: 0.982 if returns were normal, 0.913 as they are.
    normal = Moments(0.458, 24, **GAUSSIAN)
    assert statistics.probabilistic_sharpe(normal) == pytest.approx(0.982, abs=5e-4)
    skewed = Moments(0.458, 24, -2.448, 10.164)
    assert statistics.probabilistic_sharpe(skewed) == pytest.approx(0.913, abs=5e-4)
    exact = Moments(0.45755008833277844, 24, -2.448, 10.164)
    assert statistics.probabilistic_sharpe(exact) == pytest.approx(0.9132343068848602, rel=1e-12)


def test_minimum_track_records_of_the_paper_and_that_psr_reaches_its_confidence_there():
    for sharpe, skew, kurt, years in (
        (0.7079, -0.225, 2.957, 0.7152),
        (0.8183, -1.4455, 7.0497, 1.1593),
    ):
        bars = statistics.min_track_record(Moments(sharpe, 134, skew, kurt))
        assert bars / 12 == pytest.approx(years, abs=5e-5)
    sharpe = 2 / math.sqrt(250)
    needed = statistics.min_track_record(Moments(sharpe, 2, **GAUSSIAN), 1 / math.sqrt(250))
    assert needed / 250 == pytest.approx(2.731187801728176, rel=1e-9)
    m = Moments(0.1, 0, -0.5, 5.0)
    there = m._replace(num_bars=statistics.min_track_record(m, 0.02))
    assert statistics.probabilistic_sharpe(there, 0.02) == pytest.approx(0.95, abs=1e-12)
    assert statistics.min_track_record(m, 0.1) == math.inf


def test_the_best_of_many_trials_without_skill_is_as_expected():
    draws = np.random.default_rng(0).standard_normal((20_000, 100)).max(axis=1)
    # The formula is asymptotic: 1% above the exact mean at N = 100.
    expected = statistics.expected_max_sharpe(100, 1.0)
    assert expected == pytest.approx(2.5306028932016846, rel=1e-12)
    assert expected == pytest.approx(draws.mean(), rel=0.02)
    assert statistics.expected_max_sharpe(100, 4.0) == pytest.approx(2 * expected)
    assert statistics.expected_max_sharpe(1, 1.0) == 0.0


def test_dsr_of_the_paper():
    # Bailey and Lopez de Prado 2014: 0.9004 at N = 100, 0.9505 at N = 46.
    m = Moments(2.5 / math.sqrt(250), 1250, -3.0, 10.0)
    assert statistics.expected_max_sharpe(100, 0.5 / 250) == pytest.approx(0.1132, abs=5e-5)
    dsr = statistics.deflated_sharpe(m, 100, 0.5 / 250)
    assert dsr == pytest.approx(0.9003968344493903, rel=1e-12)
    assert statistics.deflated_sharpe(m, 46, 0.5 / 250) == pytest.approx(0.9505, abs=5e-5)
    normal = m._replace(**GAUSSIAN)
    assert statistics.deflated_sharpe(normal, 88, 0.5 / 250) == pytest.approx(0.9505, abs=5e-5)


def test_one_trial_needs_no_deflation_and_unknown_variance_is_that_of_no_skill():
    m = Moments(0.05, 1000, 0.2, 4.0)
    assert statistics.deflated_sharpe(m, 1) == statistics.probabilistic_sharpe(m)
    by_hand = statistics.deflated_sharpe(m, 20, 1 / 999)
    assert statistics.deflated_sharpe(m, 20) == by_hand < statistics.deflated_sharpe(m, 2)


def test_every_value_in_the_reference_file_is_met(shared):
    text = (shared / "expected" / "stats_and_published.json").read_text()
    reference = json.loads(text)["sharpe_inference"]
    for name in ("PSR_hedge_fund_normal", "PSR_hedge_fund", "PSR_exact"):
        given = reference[name]["inputs"]
        m = Moments(given["sr"], given["T"], given["skew"], given["kurt"])
        ours = statistics.probabilistic_sharpe(m, given.get("sr0", 0))
        assert ours == pytest.approx(reference[name]["computed"], rel=1e-12)
    monthly = reference["MinTRL_SR3_vs_2.5_nonnormal_monthly"]
    given = monthly["inputs"]
    root = math.sqrt(given["periods"])
    m = Moments(given["sr_annual"] / root, 2, given["skew"], given["kurt"])
    years = statistics.min_track_record(m, given["sr0_annual"] / root) / given["periods"]
    assert years == pytest.approx(monthly["published_years"], rel=1e-9)


def test_moments_are_per_bar_and_leave_nan_out():
    r = np.random.default_rng(3).normal(0.001, 0.01, 400)
    m = statistics.moments(np.append(r, np.nan))
    assert m.num_bars == 400
    assert m.sharpe == pytest.approx(r.mean() / r.std(ddof=1))
    assert m.kurtosis == pytest.approx(3.0, abs=0.6)  # not in excess


def test_an_account_without_volatility_has_no_probability():
    m = statistics.moments(np.zeros(50))
    for value in (
        statistics.probabilistic_sharpe(m),
        statistics.deflated_sharpe(m, 3),
        statistics.min_track_record(m),
    ):
        assert math.isnan(value)


def test_no_trials_is_refused():
    with pytest.raises(ConfigError, match="num_trials = 0"):
        statistics.expected_max_sharpe(0, 1.0)


def test_the_bootstrap_interval_of_a_mean_is_the_textbook_one_for_independent_returns():
    r = np.random.default_rng(5).normal(0.0, 0.01, 2000)
    interval = statistics.bootstrap_interval(lambda x: float(x.mean()), r, repetitions=4000)
    half = norm.ppf(0.975) * r.std(ddof=1) / math.sqrt(len(r))
    assert interval.low == pytest.approx(r.mean() - half, abs=0.15 * half)
    assert interval.high == pytest.approx(r.mean() + half, abs=0.15 * half)


def test_returns_that_persist_widen_the_interval_as_their_long_run_variance_does():
    rng = np.random.default_rng(6)
    phi, r = 0.6, np.zeros(4000)
    for t, shock in enumerate(rng.normal(0, 0.01, 4000)):
        r[t] = phi * r[t - 1] + shock
    interval = statistics.bootstrap_interval(lambda x: float(x.mean()), r)
    half = norm.ppf(0.975) * 0.01 / (1 - phi) / math.sqrt(len(r))  # AR(1): sd = shock / (1 - phi)
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.2)


def test_the_sharpe_interval_is_near_its_large_sample_form_and_repeats_with_its_seed():
    r = np.random.default_rng(8).normal(0.0005, 0.01, 2500)
    interval = statistics.sharpe_interval(r, 252)
    # Lo 2002: standard error sqrt((1 + SR^2 / 2) / T), per bar.
    width = 2 * norm.ppf(0.975) * math.sqrt(252 / 2500)
    assert interval.high - interval.low == pytest.approx(width, rel=0.1)
    assert statistics.sharpe_interval(r, 252) == interval
    assert statistics.sharpe_interval(r, 252, seed=1) != interval


def test_differences_are_paired_so_a_constant_edge_is_certain():
    rng = np.random.default_rng(9)
    other = rng.normal(0, 0.01, 1000)
    better = other + 1e-4 + rng.normal(0, 1e-5, 1000)
    interval = statistics.mean_difference_interval(better, other, 252)
    assert interval.low == pytest.approx(252e-4, rel=0.02)
    assert interval.high == pytest.approx(252e-4, rel=0.02)
    assert statistics.sharpe_difference_interval(better, other, 252).low > 0
    assert statistics.mean_difference_interval(other, other, 252) == Interval(0.0, 0.0, 0.95)


@pytest.mark.parametrize("r", [np.zeros(100), np.full(100, 0.01), np.array([0.01, -0.01] * 5)])
def test_an_interval_without_information_is_undefined_and_holds_nothing(r):
    interval = statistics.sharpe_interval(r, 252)
    assert math.isnan(interval.low) and math.isnan(interval.high)


def test_returns_that_almost_never_move_have_no_sharpe_interval():
    r = np.zeros(200)
    r[100] = 0.01  # a third of resamples have no trade, and no Sharpe ratio
    assert math.isnan(statistics.sharpe_interval(r, 252).low)
