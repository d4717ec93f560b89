"""Walk-forward with agents: seeds, selection, warm starts, and the same bits from processes."""

import dataclasses

import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV
from untrained import untrained_run

import nca_trader as nca
from nca_trader.agents.quantise import leaves_of
from nca_trader.errors import ConfigError
from nca_trader.evaluate.walkforward import refit
from nca_trader.runs.manifest import Run

SPANS = {"train": 160, "test": 40, "purge": 5}


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(4), 240, 1)


def walked(bars, **more):
    return nca.walk_forward(bars, AGENT, **(SPANS | {"seeds": 2, "env": ENV} | more))


@pytest.fixture(scope="module")
def alone(bars, tmp_path_factory):
    folder, kept = tmp_path_factory.mktemp("walk") / "runs" / "w", []
    done = walked(bars, folder=folder, done=lambda number, fitted: kept.append(fitted))
    return done, kept, folder


@pytest.mark.heavy
def test_each_fold_is_what_training_and_a_backtest_by_hand_give(bars, alone, tmp_path):
    """Fold 1 trains on rows 40 to 194 and acts on rows 200 to 239, as the mean of its seeds."""
    done, kept, _ = alone
    targets = []
    for seed in (0, 1):
        run = nca.train(nca.TradingEnv(bars[40:195], ENV), AGENT, tmp_path / str(seed), seed=seed)
        common = {"costs": ENV.costs, "look": False}
        acted = nca.backtest(bars[40:240], run, start=str(bars.index[200]), **common)
        targets.append(acted.targets.to_numpy())
        for name, leaf in leaves_of(run.params()).items():
            np.testing.assert_array_equal(kept[1].leaves[seed][name], leaf)
    assert (targets[0] != targets[1]).any()
    np.testing.assert_array_equal(kept[1].targets, (targets[0] + targets[1]) / 2)
    np.testing.assert_array_equal(done.result.targets.to_numpy()[40:], kept[1].targets)
    assert set(done.folds["tried"]) == {2}


@pytest.mark.slow
def test_sizes_that_follow_volatility_are_applied_once(bars):
    env = dataclasses.replace(
        ENV, sizing="volatility", volatility_span=20, size_cap=2.0, max_gross=None, borrow=True
    )
    done = walked(bars, env=env, seeds=1)
    np.testing.assert_allclose(
        done.result.weights.to_numpy()[1:], done.result.targets.to_numpy()[:-1], atol=0.1
    )
    assert abs(done.result.targets.to_numpy()).max() > 0.0


@pytest.mark.heavy
def test_folds_that_are_there_are_not_trained_again(bars, alone, monkeypatch):
    monkeypatch.setattr(refit, "train", None)
    again = walked(bars, folder=alone[2])
    np.testing.assert_array_equal(again.result.equity, alone[0].result.equity)


@pytest.mark.slow
def test_a_warm_start_begins_with_the_fold_before(bars, monkeypatch):
    begun = []
    real = refit.train

    def spied(*args, params=None, **more):
        begun.append(params)
        run = real(*args, params=params, **more)
        begun.append(run.params())
        return run

    monkeypatch.setattr(refit, "train", spied)
    walked(bars, warm_start=True)
    # Two entries for each seed: what it began with, and what it came to.
    first, trained, second, after = *begun[:2], *begun[4:6]
    assert first is None
    for name, leaf in leaves_of(trained).items():
        np.testing.assert_array_equal(leaves_of(second)[name], leaf)
    assert any((leaves_of(after)[n] != leaf).any() for n, leaf in leaves_of(second).items())


@pytest.mark.heavy
def test_a_walk_records_what_trades_in_the_place_of_the_run(bars, alone, tmp_path):
    done, _, _ = alone
    agent = dataclasses.replace(AGENT, num_seeds=2)
    run = untrained_run(tmp_path / "run", bars, ENV, agent)
    done.deploy(run)
    found = Run(run.path).deployment
    assert found.sentence == done.gate.sentence and found.year == done.year
    assert found.baseline == ("" if done.gate.passed else done.gate.baseline)
    assert (found.data.first[:10], found.data.rows) == (str(bars.index[160].date()), 80)
    other = untrained_run(tmp_path / "wide", bars, ENV, AGENT)
    with pytest.raises(ConfigError, match="its num_seeds differs"):
        done.deploy(other)
    dear = dataclasses.replace(ENV, costs=nca.Costs(commission=0.01))
    with pytest.raises(ConfigError, match="its env differs"):
        done.deploy(untrained_run(tmp_path / "dear", bars, dear, agent))
    with pytest.raises(ConfigError, match="which could then be no test"):
        done.deploy(untrained_run(tmp_path / "early", bars[:200], ENV, agent))
    rule = nca.walk_forward(bars, nca.rules.buy_and_hold(), train=160, test=40)
    with pytest.raises(ConfigError, match="of a strategy"):
        rule.deploy(run)
