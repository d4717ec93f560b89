"""Shifts of positions in time: what is planted is found, and chance has its own rate."""

import numpy as np
import pytest

from nca_trader import Costs, backtest, rules, sample_bars
from nca_trader.evaluate.stress import break_even_cost, shifted, timing_test

YEAR = 252.0


def test_the_p_value_is_the_rank_among_shifts_counted_one_by_one():
    rng = np.random.default_rng(0)
    held, moved = rng.normal(size=(60, 2)), rng.normal(size=(60, 2))
    true = sum(held[t] @ moved[t] for t in range(60))
    others = [sum(held[(t - k) % 60] @ moved[t] for t in range(60)) for k in range(1, 60)]
    found = shifted(held, moved, YEAR)
    assert found.earned == pytest.approx(true / 60 * YEAR)
    assert found.p_value == pytest.approx((1 + sum(x >= true for x in others)) / 60)
    assert found.shifted[0] == pytest.approx(np.mean(others) / 60 * YEAR)


def test_noise_passes_at_its_nominal_rate_and_a_forecast_always():
    low = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        held = np.cumsum(rng.normal(size=(120, 1)), axis=0)  # positions with a long memory
        low += shifted(held, rng.normal(0.01, 1.0, (120, 1)), YEAR).p_value <= 0.05
    assert 2 <= low <= 20, low
    rng = np.random.default_rng(1)
    moved = rng.normal(size=(500, 1))
    assert shifted(np.sign(moved), moved, YEAR).p_value == pytest.approx(1 / 500)


def test_a_hold_has_no_timing_and_long_spans_draw_their_shifts():
    bars = sample_bars("sp500")[-300:]
    held = timing_test(backtest(bars, rules.equal_weight()))
    assert held.p_value > 0.05 and "not distinguishable" in held.sentence
    rng = np.random.default_rng(2)
    long = rng.normal(size=(2, 6000, 1))
    ours, again, other = (shifted(*long, YEAR, seed=seed) for seed in (0, 0, 1))
    assert ours.shifts == 5000 and ours == again and ours != other


def test_at_the_break_even_cost_nothing_is_earned():
    bars = sample_bars("sp500")[-1500:]
    rule = rules.sma_cross(5, 20)
    even = break_even_cost(backtest(bars, rule, Costs(commission=1e-4)))
    assert even > 2e-4
    less, at = (backtest(bars, rule, Costs(commission=c)).excess_returns for c in (1e-4, even))
    # Costs move the weights that are held, hence not exactly.
    assert abs(at.mean()) < 0.03 * less.mean()
