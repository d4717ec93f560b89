"""The gate's second question: whether an agent that tilts a base rule does that no harm."""

import dataclasses
import math

import numpy as np
import pytest
from arch.bootstrap import CircularBlockBootstrap

from nca_trader.errors import ConfigError
from nca_trader.evaluate.evidence.gate import TOLERATED, gate, harm

YEAR = 252


def pair(seed, years, ours, theirs, correlation):
    """Daily normal returns of an agent and its base, of these true annual Sharpe ratios."""
    rng = np.random.default_rng(seed)
    base, own = rng.standard_normal((2, round(years * YEAR)))
    agent = correlation * base + math.sqrt(1.0 - correlation**2) * own
    return tuple(0.01 * (z + s / math.sqrt(YEAR)) for z, s in ((agent, ours), (base, theirs)))


def judged(agent, base, twice=None, repetitions=500):
    doubled = (agent, base) if twice is None else twice
    return harm({"tilt": agent}, ("the base", base), doubled, YEAR, repetitions)


def ratio(returns):
    return returns.mean(0) / returns.std(0, ddof=1) * math.sqrt(YEAR)


@pytest.mark.parametrize("correlation", [0.9, 0.99])
def test_the_bound_is_that_of_the_normal_law(correlation):
    """Jobson and Korkie (1981) with Memmel's correction (2003), for independent normal returns."""
    agent, base = pair(1, 20, 1.0, 0.8, correlation)
    ours, theirs = ratio(agent), ratio(base)
    c = np.corrcoef(agent, base)[0, 1]
    variance = 2 * (1 - c) + (ours**2 + theirs**2 - 2 * ours * theirs * c**2) / (2 * YEAR)
    error = math.sqrt(variance / 20)
    found = judged(agent, base, repetitions=2000)
    assert found.differences == pytest.approx((ours - theirs,) * 2, rel=1e-9)
    assert found.bounds == pytest.approx((ours - theirs - 1.645 * error,) * 2, abs=0.1 * error)
    assert found.needed == pytest.approx(2.487 * error, rel=0.08)


def test_the_bound_is_that_of_another_bootstrap():
    """Blocks of equal length in a circle, with arch's own interval, of a market with memory."""
    rng = np.random.default_rng(3)
    volatility = np.exp(0.4 * np.sin(np.arange(10 * YEAR) / 60.0))
    base, own = 0.01 * volatility * rng.standard_t(5, (2, 10 * YEAR))
    base, own = (r + 0.1 * np.roll(r, 1) for r in (base, own))
    agent = base + 0.25 * own
    found = judged(agent, base, repetitions=2000)
    others = CircularBlockBootstrap(20, np.column_stack([agent, base]), seed=5)
    (by_arch,), _ = others.conf_int(
        lambda rows: -np.diff(ratio(rows)), 2000, method="basic", size=0.95, tail="lower"
    )
    error = (found.differences[0] - by_arch) / 1.645
    assert found.bounds[0] == pytest.approx(by_arch, abs=0.15 * error)


def test_an_agent_that_is_its_base_passes_and_gains_nothing():
    _, base = pair(0, 2, 0.0, 0.5, 0.9)
    found = judged(base, base.copy())
    assert (found.differences, found.bounds) == ((0.0, 0.0), (0.0, 0.0))
    assert found.passed and not found.gained
    assert found.finding.startswith("No harm shown, no gain shown: the Sharpe ratio of tilt was")


def test_both_costs_have_to_pass():
    agent, base = pair(2, 20, 1.0, 1.0, 0.995)
    dear = agent - 0.01 * 0.4 / math.sqrt(YEAR)
    assert judged(agent, base).passed
    assert not judged(agent, base, (dear, base)).passed
    assert not judged(dear, base, (agent, base)).passed
    # What the base pays more is in favour of the agent, at doubled costs alone.
    cheap = base - 0.01 * 0.4 / math.sqrt(YEAR)
    assert not judged(dear, base, (dear, cheap)).passed
    richer, poorer = (agent + 0.01 * x / math.sqrt(YEAR) for x in (0.4, -0.1))
    assert judged(richer, base).gained and not judged(richer, base, (poorer, base)).gained
    # Each has its own luck, and what is needed is needed at both.
    noisy = agent + 0.004 * np.random.default_rng(0).standard_normal(len(agent))
    one, other = judged(agent, base, (noisy, base)), judged(noisy, base, (agent, base))
    assert one.bounds == pytest.approx(other.bounds[::-1], rel=1e-9)
    assert one.needed == other.needed > 1.5 * judged(agent, base).needed


def test_harm_and_a_gain_of_nothing_are_called_what_they_are():
    _, base = pair(0, 20, 0.5, 0.5, 0.9)
    worse, better = (base + 0.01 * x / math.sqrt(YEAR) for x in (-0.1, 1e-4))
    found = judged(worse, base)
    assert found.passed and max(found.most) < 0.0
    assert found.finding.startswith("Harm shown, of less than 0.15: the Sharpe ratio of tilt was")
    # The first question passes an agent that is better by next to nothing, and does not decide.
    other = gate({"tilt": better}, {"the base": base}, YEAR)
    other = dataclasses.replace(other, harm=judged(better, base))
    assert other.passed and other.sentence.startswith("No harm shown, no gain shown")
    dear = dataclasses.replace(other, harm=judged(better, base, (worse - 0.001, base)))
    assert other.trades and dear.passed and not dear.trades and dear.deployed == "the base"


def test_the_bound_at_true_costs_is_that_of_the_gate_against_the_base():
    agent, base = pair(4, 8, 0.6, 0.5, 0.95)
    assert judged(agent, base).bounds[0] == pytest.approx(
        gate({"tilt": agent}, {"the base": base}, YEAR, 500).bound, rel=1e-9
    )


@pytest.mark.heavy
def test_a_choice_among_many_tilts_pays_for_its_luck():
    """The best of 15 tilts, each worse by .15, looks harmless and is seldom passed."""
    passed = lucky = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        base, *own = rng.standard_normal((16, 5 * YEAR))
        tilts = {f"t{k}": base + 0.3 * z - 0.15 / math.sqrt(YEAR) for k, z in enumerate(own)}
        best = max(tilts.values(), key=ratio)
        found = harm(tilts, ("base", base), (best, base), YEAR, 300)
        passed += found.passed
        lucky += judged(best, base, repetitions=300).passed
        assert tilts[found.agent] is best
    # 5% are expected at most; 5 or more of 30 have a probability of 1.6%.
    assert passed <= 4 < lucky


def test_without_a_bound_the_base_trades():
    agent, base = pair(5, 15 / YEAR, 3.0, 0.0, 0.9)
    found = judged(agent, base)
    assert math.isnan(found.bounds[0]) and math.isnan(found.needed)
    assert not found.passed and not found.gained and "undefined" in found.numbers
    flat = judged(0.0 * agent, 0.0 * base)
    assert not flat.passed


def test_the_years_that_would_pass_an_equal_are_those_of_the_normal_law():
    """The standard error of the difference is about `sqrt(2 (1 - c) / years)`."""
    agent, base = pair(6, 4, 0.2, 0.5, 0.9)
    found = judged(agent, base)
    years = 0.2 * (2.487 / TOLERATED) ** 2
    said = int(found.numbers.split(" years, and ")[1].split()[0])
    assert not found.passed and said == pytest.approx(years, rel=0.25)


def test_series_of_other_lengths_are_refused():
    with pytest.raises(ConfigError, match="harm: 1 agents"):
        harm({"a": [0.1]}, ("b", [0.1, 0.2]), ([0.1], [0.1]), YEAR)
