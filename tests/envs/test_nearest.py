"""The ranking of neighbours against numpy's own correlations, and who stores it."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest
from drawn import random_bars

from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.envs.market import correlations, nearest_assets
from nca_trader.envs.trading import TradingEnv
from nca_trader.optimum.optima import synthetic
from nca_trader.runs.manifest import Run
from nca_trader.runs.opening import open_run


def linked_bars(num_bars=300, missing=0.1, seed=3):
    """Bars of five assets whose returns share a common part in various degrees."""
    rng = np.random.default_rng(seed)
    bars = random_bars(rng, num_bars, 5, missing=missing)
    common = rng.normal(0, 0.01, (num_bars, 1))
    own = rng.normal(0, 0.01, (num_bars, 5))
    mixed = np.array([1.0, 0.9, -0.8, 0.3, 0.0])
    close = 100.0 * np.exp(np.cumsum(mixed * common + (1 - np.abs(mixed)) * own, axis=0))
    for row in range(1, num_bars):
        close[row] = np.where(bars.present[row], close[row], close[row - 1])
    return dataclasses.replace(bars, open=close, high=close, low=close, close=close)


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_correlations_equal_numpys_with_means_in_the_place_of_missing_returns(missing, lead):
    bars = linked_bars(missing=missing)
    returns = pd.DataFrame(np.log(bars.close)).diff()[1:]
    there = bars.present[1:] & bars.present[:-1]
    centred = returns.where(there) - returns.where(there).mean()
    found = correlations(bars, lead)
    for a, b in itertools.product(range(5), range(5)):
        both = pd.concat([centred[a], centred[b].shift(lead)], axis=1).iloc[lead:].fillna(0.0)
        x, y = both.to_numpy().T
        expected = np.mean(x * y) / np.sqrt(np.mean(x**2) * np.mean(y**2))
        np.testing.assert_allclose(found[a, b], expected, rtol=1e-9, atol=1e-12)
    if not missing and not lead:
        np.testing.assert_allclose(found, np.corrcoef(returns.to_numpy().T), atol=1e-12)


def test_two_assets_that_share_few_bars_are_no_neighbours():
    bars = linked_bars(missing=0.0)
    present = bars.present.copy()
    present[:-3, 3] = False  # two returns, whose correlation with any others is 1 or -1
    nearest = nearest_assets(dataclasses.replace(bars, present=present))
    assert [row[-1] for row in nearest[:3]] == [3] * 3


def test_an_asset_with_a_single_return_correlates_with_nothing():
    bars = linked_bars(missing=0.0)
    present = bars.present.copy()
    present[:, 3] = np.isin(np.arange(len(present)), [7, 8])
    found = correlations(dataclasses.replace(bars, present=present))
    np.testing.assert_array_equal(found[3], 0.0)
    np.testing.assert_array_equal(found[:, 3], 0.0)


def test_the_most_correlated_comes_first_whatever_the_sign():
    nearest = nearest_assets(linked_bars())
    assert nearest[0][0] == 1 and nearest[1][0] == 0
    assert nearest[0][1] == nearest[1][1] == 2  # which moves against them
    assert nearest[0][-1] == 4  # whose returns are its own
    assert all(sorted((*row, a)) == list(range(5)) for a, row in enumerate(nearest))


@pytest.mark.parametrize(("delay", "beta"), [(1, 0.3), (5, -0.3)])
def test_an_asset_that_leads_another_comes_first(delay, beta):
    task = synthetic.make("lead_lag", num_bars=4000, assets=6, delay=delay, beta=beta)
    nearest = nearest_assets(task.bars)
    assert [row[0] for row in nearest] == list(task.details["leader"])


def test_who_never_moved_or_was_never_there_comes_last_in_order():
    bars = linked_bars()
    close = bars.close.copy()
    close[:, 1] = 50.0 * 1.001 ** np.arange(len(close))  # its returns differ by rounding
    present = bars.present.copy()
    present[:, 3] = False
    bars = dataclasses.replace(
        bars, open=close, high=close, low=close, close=close, present=present
    )
    nearest = nearest_assets(bars)
    assert nearest[0][-2:] == (1, 3) and nearest[1] == (0, 2, 3, 4)


def test_one_asset_has_no_neighbours_and_many_are_cut():
    assert nearest_assets(linked_bars().select("S0")) == ()
    many = nearest_assets(random_bars(np.random.default_rng(0), 50, 20))
    assert len(many) == 20 and {len(row) for row in many} == {16}


def test_an_environment_ranks_its_own_bars_and_its_run_keeps_the_ranking(tmp_path):
    bars = linked_bars()
    config = EnvConfig(features=("return_1",))
    env = TradingEnv(bars, config)
    assert env.spec.nearest == nearest_assets(bars)
    run = open_run(env, AgentConfig(), tmp_path / "run", seed=0)
    assert Run(run.path).spec == env.spec
