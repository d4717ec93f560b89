"""The study of the gate's second question: its markets, its rates in small, and its results."""

import json

import numpy as np
import pytest

from benchmarks import harm


@pytest.fixture(scope="module")
def market():
    """A long draw: 800 years."""
    return harm.Market(3, 200_000, 1, harm.size_of(0.96))


def test_the_volatilities_that_are_computed_are_those_of_a_long_draw(market):
    assert market.base.std() == pytest.approx(harm.BASE_DEVIATION, rel=0.03)
    assert market.tilts[0].std() == pytest.approx(harm.TILT_DEVIATION, rel=0.03)


def test_a_market_has_fat_tails_clustered_volatility_and_the_correlation_asked_for(market):
    agent = market.base + harm.size_of(0.96) * market.tilts[0]
    assert np.corrcoef(agent, market.base)[0, 1] == pytest.approx(0.96, abs=0.01)
    z = market.base / market.base.std()
    assert (z**4).mean() > 6.0
    squares = z**2 - 1.0
    later = [float((squares[k:] * squares[:-k]).mean()) for k in (1, 20)]
    assert later[0] > later[1] > 0.2
    # The agent trades more than its base.
    assert market.traded[1].mean() > 1.5 * market.traded[0].mean()


@pytest.mark.parametrize(
    ("case", "years", "correlation", "least", "most"),
    [
        ("harm 0.3", 1, 0.96, 0, 5),
        ("harm 0.3 at doubled costs alone", 2, 0.9, 0, 5),
        ("harm 0.3, the best of 10", 1, 0.96, 0, 5),
        ("harm 0.15", 5, 0.99, 0, 7),
        ("harmless", 8, 0.99, 32, 40),
    ],
)
@pytest.mark.heavy
def test_few_draws_have_the_rates_of_the_study(case, years, correlation, least, most):
    """Of 40 draws 5% are 2; 6 or more of harm have a probability of 1.4%."""
    passed = sum(harm.judged(k, years, correlation, case).passed for k in range(40))
    assert least <= passed <= most


def test_the_rates_of_the_results_are_within_their_bounds(root):
    lines = (root / "benchmarks" / "results" / "harm.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    cells = {(row["case"], row["years"], row["correlation"]) for row in rows}
    assert len(cells) == len(rows)
    assert cells == {(c, y, r) for c in harm.CASES for y in harm.YEARS for r in harm.CORRELATIONS}
    for row in rows:
        share, (low, high) = (
            row["passed"] / row["draws"],
            harm.interval(row["passed"], row["draws"]),
        )
        if row["case"].startswith("harm 0.3"):
            assert share <= 0.05 and high <= 0.1
        elif row["case"] == "harm 0.15":
            assert low <= 0.05 and high <= 0.13
        # The normal law says which spans pass what is harmless; fat tails hardly change it.
        elif row["years"] >= 2:
            assert share == pytest.approx(row["expected"], abs=0.08)
