"""Sharpe ratios, intervals and tests of many against the papers, closed forms and plain loops."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from arch.bootstrap import StationaryBootstrap, optimal_block_length
from scipy.stats import norm

from nca_trader.errors import ConfigError
from nca_trader.evaluate.evidence import inference
from nca_trader.evaluate.evidence.inference import ConfidenceInterval, Moments

GAUSSIAN = {"skewness": 0.0, "kurtosis": 3.0}


def test_psr_of_the_hedge_fund_in_the_paper():
    # Bailey and Lopez de Prado 2012: 0.982 if returns were normal, 0.913 as they are.
    normal = Moments(0.458, 24, **GAUSSIAN)
    assert inference.probabilistic_sharpe(normal) == pytest.approx(0.982, abs=5e-4)
    skewed = Moments(0.458, 24, -2.448, 10.164)
    assert inference.probabilistic_sharpe(skewed) == pytest.approx(0.913, abs=5e-4)
    exact = Moments(0.45755008833277844, 24, -2.448, 10.164)
    assert inference.probabilistic_sharpe(exact) == pytest.approx(0.9132343068848602, rel=1e-12)


def test_the_best_of_many_trials_without_skill_is_as_expected():
    draws = np.random.default_rng(0).standard_normal((20_000, 100)).max(axis=1)
    # The formula is asymptotic: 1% above the exact mean at N = 100.
    expected = inference.expected_max_sharpe(100, 1.0)
    assert expected == pytest.approx(2.5306028932016846, rel=1e-12)
    assert expected == pytest.approx(draws.mean(), rel=0.02)
    assert inference.expected_max_sharpe(100, 4.0) == pytest.approx(2 * expected)
    assert inference.expected_max_sharpe(1, 1.0) == 0.0


def test_dsr_of_the_paper():
    # Bailey and Lopez de Prado 2014: 0.9004 at N = 100, 0.9505 at N = 46.
    m = Moments(2.5 / math.sqrt(250), 1250, -3.0, 10.0)
    assert inference.expected_max_sharpe(100, 0.5 / 250) == pytest.approx(0.1132, abs=5e-5)
    dsr = inference.deflated_sharpe(m, 100, 0.5 / 250)
    assert dsr == pytest.approx(0.9003968344493903, rel=1e-12)
    assert inference.deflated_sharpe(m, 46, 0.5 / 250) == pytest.approx(0.9505, abs=5e-5)
    normal = m._replace(**GAUSSIAN)
    assert inference.deflated_sharpe(normal, 88, 0.5 / 250) == pytest.approx(0.9505, abs=5e-5)


def test_one_trial_needs_no_deflation_and_unknown_variance_is_that_of_no_skill():
    m = Moments(0.05, 1000, 0.2, 4.0)
    assert inference.deflated_sharpe(m, 1) == inference.probabilistic_sharpe(m)
    by_hand = inference.deflated_sharpe(m, 20, 1 / 999)
    assert inference.deflated_sharpe(m, 20) == by_hand < inference.deflated_sharpe(m, 2)


def test_every_value_in_the_reference_file_is_met(shared):
    text = (shared / "expected" / "stats_and_published.json").read_text()
    reference = json.loads(text)["sharpe_inference"]
    for name in ("PSR_hedge_fund_normal", "PSR_hedge_fund", "PSR_exact"):
        given = reference[name]["inputs"]
        m = Moments(given["sr"], given["T"], given["skew"], given["kurt"])
        ours = inference.probabilistic_sharpe(m, given.get("sr0", 0))
        assert ours == pytest.approx(reference[name]["computed"], rel=1e-12)


def test_moments_are_per_bar_and_leave_nan_out():
    r = np.random.default_rng(3).normal(0.001, 0.01, 400)
    m = inference.moments(np.append(r, np.nan))
    assert m.num_bars == 400
    assert m.sharpe == pytest.approx(r.mean() / r.std(ddof=1))
    assert m.kurtosis == pytest.approx(3.0, abs=0.6)  # not in excess


def test_an_account_without_volatility_has_no_probability():
    m = inference.moments(np.zeros(50))
    assert math.isnan(inference.probabilistic_sharpe(m))
    assert math.isnan(inference.deflated_sharpe(m, 3))


def test_no_trials_is_refused():
    with pytest.raises(ConfigError, match="num_trials = 0"):
        inference.expected_max_sharpe(0, 1.0)


def test_the_bootstrap_interval_of_a_mean_is_the_textbook_one_for_independent_returns():
    r = np.random.default_rng(5).normal(0.0, 0.01, 2000)
    interval = inference.mean_difference_interval(r, 0.0 * r, 1.0)
    half = norm.ppf(0.975) * r.std(ddof=1) / math.sqrt(len(r))
    assert interval.low == pytest.approx(r.mean() - half, abs=0.15 * half)
    assert interval.high == pytest.approx(r.mean() + half, abs=0.15 * half)


def test_returns_that_persist_widen_the_interval_as_their_long_run_variance_does():
    rng = np.random.default_rng(6)
    phi, r = 0.6, np.zeros(4000)
    for t, shock in enumerate(rng.normal(0, 0.01, 4000)):
        r[t] = phi * r[t - 1] + shock
    interval = inference.mean_difference_interval(r, 0.0 * r, 1.0)
    half = norm.ppf(0.975) * 0.01 / (1 - phi) / math.sqrt(len(r))  # AR(1): sd = shock / (1 - phi)
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.2)


def test_the_sharpe_interval_is_near_its_large_sample_form_and_repeats_with_its_seed():
    r = np.random.default_rng(8).normal(0.0005, 0.01, 2500)
    interval = inference.sharpe_interval(r, 252)
    # Lo 2002: standard error sqrt((1 + SR^2 / 2) / T), per bar.
    width = 2 * norm.ppf(0.975) * math.sqrt(252 / 2500)
    assert interval.high - interval.low == pytest.approx(width, rel=0.1)
    assert inference.sharpe_interval(r, 252) == interval
    assert inference.sharpe_interval(r, 252, seed=1) != interval


def test_differences_are_paired_so_a_constant_edge_is_certain():
    rng = np.random.default_rng(9)
    other = rng.normal(0, 0.01, 1000)
    better = other + 1e-4 + rng.normal(0, 1e-5, 1000)
    interval = inference.mean_difference_interval(better, other, 252)
    assert interval.low == pytest.approx(252e-4, rel=0.02)
    assert interval.high == pytest.approx(252e-4, rel=0.02)
    assert inference.sharpe_difference_interval(better, other, 252).low > 0
    assert inference.mean_difference_interval(other, other, 252) == ConfidenceInterval(
        0.0, 0.0, 0.95
    )


@pytest.mark.parametrize("r", [np.zeros(100), np.full(100, 0.01), np.array([0.01, -0.01] * 5)])
def test_an_interval_without_information_is_undefined_and_holds_nothing(r):
    interval = inference.sharpe_interval(r, 252)
    assert math.isnan(interval.low) and math.isnan(interval.high)


def test_returns_that_almost_never_move_have_no_sharpe_interval():
    r = np.zeros(200)
    r[100] = 0.01  # a third of resamples have no trade, and no Sharpe ratio
    assert math.isnan(inference.sharpe_interval(r, 252).low)


def noise(seed, edge=0.0, shape=(1600, 50)):
    r = np.random.default_rng(seed).standard_normal(shape)
    r[:, 7] += edge
    return r


@pytest.mark.parametrize(
    "name",
    ["noise_seed0", "noise_seed1", "one_true_SR0.10_per_period", "one_true_SR0.20_per_period"],
)
def test_pbo_equals_the_published_values(shared, name):
    expected = json.loads((shared / "expected/stats_and_published.json").read_text())
    expected = expected["pbo_cscv"][name]
    found = inference.overfit_probability(noise(expected["seed"], expected["edge"]), expected["S"])
    assert found.probability == expected["pbo"]
    assert found.logits.mean() == pytest.approx(expected["mean_logit"], abs=1e-12)
    assert len(found.logits) == expected["combinations"]


def test_pbo_equals_a_loop_over_splits():
    r = noise(3, 0.1, (130, 9))
    parts = np.array_split(r[:128], 8)
    logits = []
    for chosen in itertools.combinations(range(8), 4):
        inside = np.concatenate([parts[k] for k in chosen])
        outside = np.concatenate([parts[k] for k in range(8) if k not in chosen])
        best = (inside.mean(0) / inside.std(0, ddof=1)).argmax()
        w = pd.Series(outside.mean(0) / outside.std(0, ddof=1)).rank()[best] / 10
        logits.append(np.log(w / (1 - w)))
    found = inference.overfit_probability(r, 8)
    np.testing.assert_allclose(np.sort(found.logits), np.sort(logits), atol=1e-12)
    assert found.probability == np.mean(np.array(logits) <= 0)


def test_pbo_of_identical_strategies_is_chance():
    one = np.random.default_rng(0).standard_normal((160, 1))
    found = inference.overfit_probability(np.repeat(one, 5, axis=1), 8)
    np.testing.assert_allclose(found.logits, 0.0, atol=1e-12)


def drawn_rows(num_rows, repetitions, seed=0):
    """Rows `[R, L]` of circular blocks, as `superiority` draws them."""
    length = round(num_rows ** (1 / 3))
    begins = np.random.default_rng(seed).integers(num_rows, size=(repetitions, num_rows // length))
    return ((begins[:, :, None] + np.arange(length)) % num_rows), length


def long_run_error(y, length):
    """The standard error of mean(y): of the sums of all circular blocks of y."""
    around = np.concatenate([y, y[: length - 1]])
    sums = np.array([around[i : i + length].sum() for i in range(len(y))])
    return math.sqrt((sums**2).mean() / (length * len(y)))


def spa_by_hand(r, chosen, repetitions):
    """Hansen's consistent p-value with `sqrt(T) mean / std`, one resample at a time."""
    rows, length = drawn_rows(len(r), repetitions)
    sd, mean = r.std(0, ddof=1), r.mean(0)
    bound = math.sqrt(2 * math.log(math.log(len(r))))
    errors = [long_run_error(x - x.mean(), length) for x in r.T]
    centre = np.where(mean >= -bound * np.array(errors), mean, 0.0)
    count = 1
    for blocks in rows:
        again = r[blocks.ravel()]
        best = (math.sqrt(len(again)) * (again.mean(0) - centre) / sd).max()
        count += max(best, 0.0) >= max(0.0, math.sqrt(len(r)) * mean[chosen] / sd[chosen])
    return count / (repetitions + 1)


def difference_by_hand(r, benchmark, chosen, repetitions):
    """The difference of Sharpe ratios, studentised again in each resample."""
    rows, length = drawn_rows(len(r), repetitions)
    columns = np.column_stack([r, benchmark])
    z = (columns - columns.mean(0)) / columns.std(0, ddof=1)
    ratio = columns.mean(0) / columns.std(0, ddof=1)
    y = z - ratio / 2 * (z**2 - 1)
    y, found = (y - y[:, -1:])[:, :-1], (ratio - ratio[-1])[:-1]
    errors = np.array([long_run_error(x, length) for x in y.T])
    centre = np.where(found >= -math.sqrt(2 * math.log(math.log(len(r)))) * errors, found, 0.0)
    count = 1
    for blocks in rows:
        again = columns[blocks.ravel()]
        ratios = again.mean(0) / again.std(0) * math.sqrt((len(r) - 1) / len(r))
        of_blocks = y[blocks].sum(1)
        own = of_blocks.std(0) / math.sqrt(len(of_blocks)) / length
        best = (((ratios - ratios[-1])[:-1] - centre) / own).max()
        count += max(best, 0.0) >= max(0.0, (found / errors)[chosen])
    return count / (repetitions + 1)


@pytest.mark.few(3)
@pytest.mark.parametrize("edge", [0.0, 0.05, 0.15])
@pytest.mark.parametrize("chosen", [7, 3])
def test_superiority_equals_a_loop_over_resamples(edge, chosen):
    r = noise(4, edge, (301, 12)) * np.linspace(0.5, 3.0, 12) + np.linspace(-0.3, 0.02, 12)
    benchmark = 0.05 + np.random.default_rng(9).standard_normal(301)
    ours = inference.superiority(r, chosen, repetitions=300)
    assert ours == pytest.approx(spa_by_hand(r, chosen, 300), abs=1e-12)
    ours = inference.superiority(r, chosen, benchmark, repetitions=300)
    # The loop divides by T and the test by T - 1: one resample may fall on the other side.
    assert ours == pytest.approx(difference_by_hand(r, benchmark, chosen, 300), abs=0.007)


def test_a_calm_rule_with_a_large_t_is_found_among_volatile_ones():
    """Means alone find nothing: the best mean is that of a volatile rule."""
    rng = np.random.default_rng(0)
    r = 0.1 * rng.standard_normal((1000, 101))
    z = rng.standard_normal(1000)
    r[:, 0] = 0.001 * ((z - z.mean()) / z.std(ddof=1) + 5.9 / math.sqrt(1000))
    assert r.mean(0).argmax() != 0
    assert r[:, 0].mean() / r[:, 0].std(ddof=1) * math.sqrt(1000) == pytest.approx(5.9)
    assert inference.superiority(r, 0) < 0.01
    assert inference.superiority(r, int(r.mean(0).argmax())) > 0.05


def test_the_p_value_of_one_strategy_is_that_of_its_t():
    r = np.random.default_rng(1).normal(0.0007, 0.01, (1000, 1))
    t = r.mean() / r.std(ddof=1) * math.sqrt(1000)
    ours = inference.superiority(r, 0, repetitions=4000)
    assert ours == pytest.approx(norm.sf(t), abs=0.015)


def test_a_copy_of_the_benchmark_and_what_never_trades_are_not_better():
    hold = np.random.default_rng(2).normal(0.001, 0.01, 600)
    copies = np.column_stack([hold, hold.astype(np.float32), 0.5 * hold])
    assert all(inference.superiority(copies, k, hold) == 1.0 for k in range(3))
    assert inference.superiority(np.zeros((600, 2)), 0) == 1.0
    assert inference.superiority(-copies, 0) == 1.0
    assert math.isnan(inference.superiority(copies[:19], 0))


def test_superiority_in_pieces_is_the_same(monkeypatch):
    r, hold = noise(5, 0.05, (400, 30)), noise(6)[:400, 0]
    whole = [inference.superiority(r, 7, other, repetitions=200) for other in (None, hold)]
    monkeypatch.setattr(inference, "COLUMNS", 7)
    again = [inference.superiority(r, 7, other, repetitions=200) for other in (None, hold)]
    assert whole == again


def test_superiority_finds_an_edge_and_no_luck():
    hold = noise(1)[:, 0]
    assert inference.superiority(noise(0, 0.15), 7) < 0.01
    assert inference.superiority(noise(0, 0.15), 7, hold) < 0.01
    found = np.zeros(2)
    for k in range(16):
        r = noise(k, shape=(300, 20))
        best = int((r.mean(0) / r.std(0)).argmax())
        p = [inference.superiority(r, best, other, 200) for other in (None, hold[:300] + 0.0)]
        found += np.array(p) < 0.1
    # 1.6 of 16 are expected at this size; 7 or more have a probability of 0.1%.
    assert (found <= 6).all()


def test_pbo_is_not_decided_by_the_rounding_of_float32():
    """Rules that hold the same in half of the history: their ratios there differ by rounding."""
    rng = np.random.default_rng(8)
    r = 0.01 * rng.standard_normal((640, 12))
    r[320:] = r[320:, :1]
    rounded = (r * (1.0 + 1e-7 * rng.standard_normal(12))).astype(np.float32)
    exact = inference.overfit_probability(r, 8)
    np.testing.assert_allclose(inference.overfit_probability(rounded, 8).logits, exact.logits)


def test_too_few_rows_have_no_pbo():
    short = inference.overfit_probability(noise(0)[:31])
    assert math.isnan(short.probability) and short.logits.size == 0
    assert len(inference.overfit_probability(noise(0)[:32]).logits) == math.comb(8, 4)


@pytest.mark.parametrize(("rows", "strategies", "parts"), [
    (64, 9, 16), (63, 9, 14), (56, 9, 14), (55, 9, 12), (47, 9, 10), (40, 9, 10), (39, 9, 8),
    (64, 156, 14), (64, 2165, 10), (64, 30_000, 8),  # of 2,000,000 numbers at most, if it can be
])  # fmt: skip
def test_pbo_takes_as_many_parts_as_rows_and_memory_allow(rows, strategies, parts):
    found = inference.overfit_probability(noise(0, shape=(rows, strategies)))
    assert len(found.logits) == math.comb(parts, parts // 2)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.6, 0.98])
@pytest.mark.parametrize("num", [20, 51, 400])
def test_resamples_are_those_of_arch(rho, num):
    """The block length of Patton, Politis and White, and each row that is drawn."""
    x = np.random.default_rng(num).standard_normal(num)
    for t in range(1, num):
        x[t] += rho * x[t - 1]
    block = float(optimal_block_length(x)["stationary"].iloc[0])
    assert inference.best_block(x) == pytest.approx(block, rel=1e-9)
    block = max(block, 1.0)
    theirs = StationaryBootstrap(block, np.arange(num), seed=3).bootstrap(20)
    drawn = [x[rows[0]] for rows, _ in theirs]
    found = inference.resampled(x, repetitions=20, seed=3)
    np.testing.assert_allclose(found.mean[:, 0], np.mean(drawn, 1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.deviation[:, 0], np.std(drawn, 1, ddof=1), rtol=1e-9)


def test_blocks_keep_the_sum():
    r = noise(0, shape=(4999, 8))
    blocks = inference.block_returns(r)
    assert len(blocks) <= 2000 and blocks[0] == pytest.approx(r[:3].sum(0))
    np.testing.assert_allclose(blocks.sum(0), r.sum(0))


def test_refusals_are_one_line():
    for call in (
        lambda: inference.overfit_probability(noise(0), 7),
        lambda: inference.overfit_probability(noise(0)[:, :1]),
        lambda: inference.superiority(noise(0), 7, np.zeros(3)),
        lambda: inference.superiority(np.full((50, 2), np.nan), 0),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        assert "\n" not in str(raised.value)
