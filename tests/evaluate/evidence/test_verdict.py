"""The verdict's rules, and which baseline an agent is nearest to."""

import dataclasses
import math
import types

import numpy as np
import pandas as pd
import pytest
from made_up import made_up_result

from nca_trader.errors import ConfigError
from nca_trader.evaluate.evidence.inference import (
    ConfidenceInterval,
    Moments,
    deflated_sharpe,
    overfit_probability,
)
from nca_trader.evaluate.evidence.verdict import (
    CHOSEN,
    CHOSEN_OF_TWO,
    Difference,
    Evidence,
    nearest_baseline,
    verdict,
    weigh,
)
from nca_trader.types import Costs

TIME = pd.date_range("2013-01-02", periods=400, freq="B", tz="UTC")


def frame(*columns):
    return pd.DataFrame(np.column_stack(columns))


def scored(total_return, sharpe, in_sample=None):
    metrics = {"total_return": total_return, "sharpe": sharpe}
    equity = pd.Series(1.0, TIME)
    return types.SimpleNamespace(metrics=metrics, equity=equity, in_sample=in_sample)


def evidence(low, high, share=0.5, sharpe=0.6, daily_sharpe=0.04, in_sample=0):
    """Evidence whose interval of the difference of Sharpe ratios is [low, high]."""
    difference = Difference(
        mean_return=-0.1,
        mean_return_interval=ConfidenceInterval(-1.0, 1.0, 0.95),
        sharpe=(low + high) / 2,
        sharpe_interval=ConfidenceInterval(low, high, 0.95),
    )
    return Evidence(
        agent=scored(0.2, sharpe, in_sample),
        baselines={"buy and hold": scored(0.3, 0.7), "always flat": scored(0.0, math.nan)},
        intervals={},
        differences={"buy and hold": difference, "always flat": difference},
        best="buy and hold",
        nearest="buy and hold",
        nearest_share=share,
        moments=Moments(daily_sharpe, 1500, 0.0, 3.0),
    )


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (-0.05, 0.02, "is not distinguishable from buy and hold"),
        (0.0, 0.0, "is not distinguishable from buy and hold"),
        (-0.05, 0.0, "is not distinguishable from buy and hold"),
        (0.01, 0.05, "earned more than buy and hold for its risk"),
        (-0.05, -0.01, "earned less than buy and hold for its risk"),
        (math.nan, math.nan, "is not distinguishable from buy and hold"),
    ],
)
def test_only_an_interval_that_excludes_zero_makes_a_difference(low, high, found):
    said = verdict(evidence(low, high), num_trials=3)
    assert found in said
    phrases = ("not distinguishable", "earned more", "earned less")
    assert sum(phrase in said for phrase in phrases) == 1
    if not math.isnan(low):
        assert ("excludes 0" in said) == (low > 0 or high < 0)
        assert f"{low:.2f} to {high:.2f}" in said


@pytest.mark.parametrize(("share", "named"), [(0.95, True), (0.987, True), (0.949, False)])
def test_a_copy_is_named_from_95_percent_of_the_bars(share, named):
    said = verdict(evidence(-0.05, 0.02, share=share), num_trials=3)
    sentence = f"This agent copies buy and hold: {share:.1%} of its bars hold the same weights."
    assert (sentence in said) == named
    assert ("copies" in said) == named


def test_the_limits_are_always_said():
    for low, high in ((-0.05, 0.02), (0.01, 0.05), (-0.05, -0.01)):
        said = verdict(evidence(low, high), num_trials=7, note="Indexes are not tradable")
        assert "one market, one period and the one selected of 7 trials." in said
        assert said.endswith("Indexes are not tradable.")
    assert "one trial." in verdict(evidence(-0.05, 0.02), num_trials=1)


def test_success_is_weighed_against_the_number_of_trials():
    lucky = verdict(evidence(0.01, 0.05, daily_sharpe=0.05), num_trials=100)
    assert "luck in the search is not ruled out" in lucky
    earned = verdict(evidence(0.01, 0.05, daily_sharpe=0.2), num_trials=100)
    assert "deflated Sharpe ratio is 1.00." in earned and "luck" not in earned
    assert "deflated" not in verdict(evidence(-0.05, 0.02), num_trials=100)


def test_bars_that_the_agent_saw_are_said_first_and_never_called_out_of_sample():
    for low, high in ((-0.05, 0.02), (0.01, 0.05), (-0.05, -0.01)):
        said = verdict(evidence(low, high, in_sample=1), num_trials=3)
        assert said.startswith("IN SAMPLE: 1 of these 1,500 bars")
        assert "out of sample" not in said.lower() and "deflated" not in said
        assert "From 2013-01-02 to 2014-07-15, the agent" in said


def test_a_strategy_is_no_agent_and_its_tries_were_not_counted():
    for low, high in ((-0.05, 0.02), (0.01, 0.05), (-0.05, -0.01)):
        said = verdict(evidence(low, high, share=0.99, in_sample=None), num_trials=None)
        assert "From 2013-01-02 to 2014-07-15, the strategy" in said
        assert "This strategy copies buy and hold" in said
        assert "no trial log counts how many were tried before" in said
        assert not any(word in said.lower() for word in ("sample", "agent", "selected", "deflated"))


def test_a_strategy_whose_trials_are_counted_is_weighed_against_them():
    one = evidence(0.01, 0.05, daily_sharpe=0.05, in_sample=None)
    said = verdict(one, num_trials=1200)
    assert "one of 1,200 trials that the trial log counts on this market" in said
    assert "no trial log" not in said and "luck in the search is not ruled out" in said
    deflated = deflated_sharpe(one.moments, 1200)
    assert f"the deflated Sharpe ratio is {deflated:.2f}, below 0.95" in said
    assert deflated < 0.95 < deflated_sharpe(one.moments, 1)
    assert "selected" not in said and "sample" not in said.lower()
    assert "one period and one trial." in verdict(one, num_trials=1)


def test_an_agent_that_nothing_selected_is_one_of_its_trials():
    said = verdict(evidence(-0.05, 0.02), num_trials=7, selected=False)
    assert "one of 7 trials." in said and "selected" not in said


def test_an_agent_that_never_moved_has_no_sharpe_ratio_in_words():
    said = verdict(evidence(-0.05, 0.02, sharpe=math.nan), num_trials=1)
    assert "never had a return other than 0" in said
    assert "nan" not in said and "n/a against 0.70" in said


def test_the_nearest_baseline_is_counted_by_targets_in_force():
    nan = np.nan
    agent = frame([0.5, 0.5, nan, 0.0], [0.5, 0.5, nan, 0.0])
    hold = frame([0.5, nan, nan, nan], [0.5, nan, nan, nan])
    flat = frame([0.0] * 4, [0.0] * 4)
    assert nearest_baseline(agent, {"flat": flat, "hold": hold}) == ("hold", 0.75)
    # One asset of two is not the same weights.
    half = frame([0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.5])
    assert nearest_baseline(half, {"hold": hold, "flat": flat}) == ("hold", 0.25)
    # No order yet is flat.
    assert nearest_baseline(frame([nan, nan], [nan, nan]), {"flat": flat[:2]}) == ("flat", 1.0)


def test_a_float32_target_is_its_float64_twin_and_another_size_is_not():
    third = frame(np.full(5, 1 / 3))
    assert nearest_baseline(third.astype(np.float32), {"hold": third}) == ("hold", 1.0)
    assert nearest_baseline(frame(np.full(5, 0.5)), {"hold": frame(np.full(5, 0.51))})[1] == 0.0


def fake(returns, target, **rules):
    """An account that holds `target` throughout and earns `returns`, costs aside."""
    market = np.full((len(TIME), 1), float(target))
    result = made_up_result("x", market, market * 0.0, **rules)
    equity = pd.Series(np.cumprod(1 + returns), TIME)
    cost = pd.Series(0.0, TIME)
    cost.iloc[0] = abs(target) * 1e-3
    weights = pd.DataFrame(market, TIME)
    return dataclasses.replace(
        result,
        equity=equity,
        weights=weights,
        turnover=cost * 1e3,
        cost=cost,
        flows=result.flows.assign(commission=-cost),
    )


def test_weighing_real_curves_gives_differences_a_second_derivation_confirms():
    market = np.random.default_rng(0).normal(5e-4, 0.01, len(TIME))
    hold, flat = fake(market, 1.0), fake(np.zeros(len(TIME)), 0.0)
    agent = fake(market + 1e-3 + np.random.default_rng(1).normal(0, 1e-4, len(TIME)), 0.5)
    weighed = weigh(agent, {"always flat": flat, "buy and hold": hold}, 252.0)
    assert (
        weighed.best == "buy and hold"
    )  # although its Sharpe ratio may be negative: flat has none
    gap = weighed.differences["buy and hold"]
    ours = agent.equity.pct_change().fillna(agent.equity.iloc[0] - 1)
    theirs = hold.equity.pct_change().fillna(hold.equity.iloc[0] - 1)
    assert gap.mean_return == pytest.approx((ours - theirs).mean() * 252)
    ratios = [r.mean() / r.std() * math.sqrt(252) for r in (ours, theirs)]
    assert gap.sharpe == pytest.approx(ratios[0] - ratios[1])
    assert gap.mean_return_interval.low > 0.24 and gap.sharpe_interval.low > 0
    assert math.isnan(weighed.differences["always flat"].sharpe)
    assert weighed.agent.costs_paid == pytest.approx(0.5e-3)
    assert weighed.agent is agent and [*weighed.intervals] == ["always flat", "buy and hold", None]
    assert (weighed.nearest_share, weighed.copies) == (0.0, False)
    assert "earned more than buy and hold" in verdict(weighed, num_trials=1)


def test_more_return_at_the_same_sharpe_ratio_is_no_better():
    """Twice the position earns twice the mean return, which is apart from 0; the ratio is equal."""
    market = np.random.default_rng(2).normal(0.002, 0.01, (600, 1))
    once, twice = (
        made_up_result(name, np.full((600, 1), w), market, rate=0.0)
        for name, w in (("hold", 1.0), ("twice", 2.0))
    )
    weighed = weigh(twice, {"hold": once}, 252.0)
    assert weighed.differences["hold"].mean_return_interval.low > 0
    assert "is not distinguishable from hold" in verdict(weighed, num_trials=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "below", "power"), [(2, CHOSEN_OF_TWO, 70), (3, CHOSEN, 70), (5, CHOSEN, 70)]
)
def test_a_choice_is_false_in_at_most_five_of_a_hundred(count, below, power):
    """Of combinations alike in 100 series, and of one that is better by .15% a bar in the same."""
    false = found = 0
    for seed in range(100):
        alike = 0.01 * np.random.default_rng([seed, count]).standard_normal((1000, count))
        false += overfit_probability(alike).probability < below
        alike[:, 0] += 0.0015
        found += overfit_probability(alike).probability < below
    assert false <= 5 and found >= power


def test_a_control_that_knows_the_span_is_not_the_baseline_to_beat():
    market = np.random.default_rng(3).normal(0.001, 0.01, (120, 1))
    names = {"buy and hold": -0.2, "exposure-matched hold": 0.5}
    rules = {n: made_up_result(n, np.full((120, 1), w), market) for n, w in names.items()}
    assert weigh(rules["buy and hold"], rules, 252.0).best == "buy and hold"
    alone = {"exposure-matched hold": rules["exposure-matched hold"]}
    assert weigh(rules["buy and hold"], alone, 252.0).best == "exposure-matched hold"


def test_the_same_account_as_a_baseline_is_a_copy_and_not_distinguishable():
    hold = fake(np.random.default_rng(0).normal(5e-4, 0.01, len(TIME)), 1.0)
    weighed = weigh(hold, {"buy and hold": hold}, 252.0)
    said = verdict(weighed, num_trials=1)
    assert "not distinguishable from buy and hold" in said
    assert "copies buy and hold: 100.0%" in said


def test_baselines_under_easier_rules_are_refused():
    market = np.random.default_rng(0).normal(5e-4, 0.01, len(TIME))
    agent = fake(market, 1.0)
    for rules in ({"costs": Costs()}, {"fill": "close"}):
        with pytest.raises(ConfigError, match="backtest both alike"):
            weigh(agent, {"hold": fake(market, 1.0, **rules)}, 252.0)


def test_intervals_of_returns_summed_over_bars_are_those_of_the_bars(monkeypatch):
    rng = np.random.default_rng(0)
    market = rng.normal(4e-4, 0.01, (401, 1))
    held = np.repeat(rng.choice([0.0, 1.0], 41), 10)[:401, None]
    agent = made_up_result("agent", held, market)
    baselines = {"buy and hold": made_up_result("buy and hold", np.ones((401, 1)), market)}
    exact = weigh(agent, baselines, 252.0)
    monkeypatch.setattr("nca_trader.evaluate.evidence.verdict.LONG", 400)
    monkeypatch.setattr("nca_trader.evaluate.evidence.verdict.RESAMPLED", 100)
    summed = weigh(agent, baselines, 252.0)
    there, here = (x.differences["buy and hold"] for x in (exact, summed))
    assert here.mean_return == there.mean_return and summed.moments == exact.moments
    for name in ("mean_return_interval", "sharpe_interval"):
        one, other = getattr(there, name), getattr(here, name)
        width = one.high - one.low
        np.testing.assert_allclose(other[:2], one[:2], atol=0.15 * width)
        assert other != one
