"""The gate passes what is better and stops what is lucky; its numbers have closed forms."""

import math

import numpy as np
import pytest
from arch.bootstrap import optimal_block_length

from nca_trader.errors import ConfigError
from nca_trader.evaluate.gate import gate

YEAR = 252


def drawn(seed, years, sharpe, correlation=0.0):
    """Daily returns `[T, len(sharpe)]` of these true Sharpe ratios, equally correlated."""
    rng = np.random.default_rng(seed)
    n = len(sharpe)
    common, own = rng.standard_normal((years * YEAR, 1)), rng.standard_normal((years * YEAR, n))
    noise = math.sqrt(correlation) * common + math.sqrt(1.0 - correlation) * own
    return 0.01 * (noise + np.array(sharpe) / math.sqrt(YEAR))


def test_the_bound_and_what_is_detectable_are_those_of_the_normal_law():
    """Two independent series: the error of their difference is sqrt(2 / years) (Lo 2002)."""
    r = drawn(0, 20, (1.5, 0.2))
    found = gate({"a": r[:, 0]}, {"b": r[:, 1]}, YEAR)
    error = math.sqrt(2.0 / 20)
    own = r.mean(0) / r.std(0, ddof=1) * math.sqrt(YEAR)
    assert found.difference == pytest.approx(own[0] - own[1], rel=1e-12)
    assert found.sharpe == pytest.approx(tuple(own), rel=1e-12)
    assert found.bound == pytest.approx(found.difference - 1.645 * error, abs=0.08)
    assert found.detectable == pytest.approx(2.485 * error, rel=0.1)
    assert found.passed and found.deployed == "a" and found.years == 20.0


@pytest.mark.parametrize(
    ("gain", "least", "most"),
    [(0.0, 0, 6), pytest.param(1.0, 33, 40, marks=pytest.mark.slow)],
)
def test_it_stops_what_is_equal_and_passes_what_is_better(gain, least, most):
    """40 panels of 15 years, correlated 0.7: the error of a difference is 0.2."""
    passed = 0
    for seed in range(40):
        r = drawn(100 + seed, 15, (0.5 + gain, 0.5, -0.5, 0.0), correlation=0.7)
        others = {f"b{k}": r[:, k] for k in (1, 2, 3)}
        passed += gate({"a": r[:, 0]}, others, YEAR, repetitions=400).passed
    assert least <= passed <= most


def test_a_choice_among_many_agents_pays_for_its_luck():
    """20 agents without an edge: the best looks better, and seldom passes."""
    passed = lucky = 0
    for seed in range(20):
        r = drawn(500 + seed, 8, (0.0,) * 21)
        agents = {f"a{k}": r[:, k] for k in range(20)}
        found = gate(agents, {"hold": r[:, 20]}, YEAR, repetitions=300)
        passed += found.passed
        alone = gate({found.agent: agents[found.agent]}, {"hold": r[:, 20]}, YEAR, 300)
        lucky += alone.passed
    assert passed <= 3 < lucky


def by_hand(r, split, block, agents_again=True, baselines_again=True):
    """The bound of agents `r[:, :split]`, resampled in plain numpy: blocks of geometric length."""
    rng, bars = np.random.default_rng(1), np.arange(len(r))

    def sharpes(rows):
        return rows.mean(0) / rows.std(0, ddof=1) * math.sqrt(YEAR)

    def resampled():
        starts = rng.random(len(r)) < 1.0 / block
        starts[0] = True
        last = np.maximum.accumulate(np.where(starts, bars, 0))  # the block that a bar is in
        return r[(rng.integers(0, len(r), len(r))[last] + bars - last) % len(r)]

    found = sharpes(r)
    best, other = found[:split].argmax(), split + found[split:].argmax()
    errors = []
    for _ in range(1500):
        again = sharpes(resampled())
        luck = again - found
        agent = luck[:split].max() if agents_again else luck[best]
        baseline = again[split:].max() - found[other] if baselines_again else luck[other]
        errors.append(agent - baseline)
    return found[best] - found[other] - np.quantile(errors, 0.95)


def test_the_bound_chooses_checkpoint_and_baseline_again_as_a_bootstrap_by_hand_does():
    r = drawn(11, 5, (0.9, 0.8, 0.9, 0.7, 0.8, 0.6, 0.6, 0.6, 0.5, 0.5), correlation=0.1)
    for t in range(1, len(r)):
        r[t] += 0.2 * r[t - 1]  # so that blocks matter
    agents, others = ({f"{k}": r[:, k] for k in part} for part in (range(5), range(5, 10)))
    found = gate(agents, others, YEAR)
    block = float(optimal_block_length(r)["stationary"].max())
    assert found.bound == pytest.approx(by_hand(r, 5, block), abs=0.08)
    # A gate that kept either choice would be elsewhere.
    assert by_hand(r, 5, block, agents_again=False) > found.bound + 0.15
    assert by_hand(r, 5, block, baselines_again=False) < found.bound - 0.15


def test_a_flat_baseline_has_a_sharpe_ratio_of_zero():
    r = drawn(3, 10, (-0.8,))[:, 0]
    found = gate({"agent": r}, {"always flat": 0.0 * r}, YEAR)
    assert found.deployed == "always flat" and found.sharpe[1] == 0.0 and not found.passed
    assert found.sentence.startswith("No agent was shown to be better; deployed: always flat.")
    assert found.finding.startswith(
        "agent was not shown to be better than always flat. Sharpe ratio"
    )


def test_a_copy_of_the_baseline_does_not_pass():
    r = drawn(4, 5, (1.0,))[:, 0]
    found = gate({"agent": r}, {"hold": r}, YEAR)
    assert (found.difference, found.bound, found.passed) == (0.0, 0.0, False)


def test_too_few_bars_decide_nothing():
    r = drawn(5, 1, (3.0, 0.0))[:15]
    found = gate({"agent": r[:, 0]}, {"hold": r[:, 1]}, YEAR)
    assert math.isnan(found.bound) and not found.passed and "undefined" in found.sentence


@pytest.mark.parametrize(
    ("agents", "baselines"),
    [({}, {"b": [0.1]}), ({"a": [0.1]}, {}), ({"a": [0.1]}, {"b": [0.1, 0.2]})],
)
def test_series_that_do_not_fit_are_refused(agents, baselines):
    with pytest.raises(ConfigError, match="gate: "):
        gate(agents, baselines, YEAR)
