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
from nca_trader.evaluate.evidence.deploy import deployable, mean_exposure
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


@pytest.mark.heavy
def test_the_gate_says_what_to_deploy(bars, alone):
    gate = alone[0].gate
    assert gate.baseline in alone[0].baselines
    assert gate.baseline not in ("best constant weight", "exposure-matched hold")
    assert gate.sentence in repr(alone[0])
    # Untrained in effect, on random bars: nothing better can be shown.
    assert not gate.passed and gate.deployed == gate.baseline


@pytest.mark.heavy
def test_a_walk_of_an_agent_that_tilts_a_base_asks_whether_it_does_that_harm(bars, tmp_path):
    env = dataclasses.replace(ENV, actions="weights")
    policy = dataclasses.replace(AGENT.policy, base="time_series_momentum(lookback=5)")
    still = dataclasses.replace(AGENT.optimizer, learning_rate=1e-30)
    agent = dataclasses.replace(AGENT, policy=policy, optimizer=still)
    done = nca.walk_forward(bars, agent, **SPANS, seeds=1, env=env)
    name = "time-series momentum 5"
    assert done.result.equity.equals(done.baselines[name].equity)
    assert done.gate.harm.base == name and done.gate.harm.bounds == (0.0, 0.0)
    assert done.gate.trades and done.gate.sentence in repr(done)
    assert "No harm shown, no gain shown" in done.folds.attrs["verdict"]
    run = untrained_run(tmp_path / "run", bars, env, agent)
    done.deploy(run)
    assert Run(run.path).replacement is None


@pytest.mark.heavy
def test_a_run_begins_with_the_parameters_that_it_is_given(bars, tmp_path):
    env = nca.TradingEnv(bars[:124], ENV)
    still = dataclasses.replace(
        AGENT, optimizer=dataclasses.replace(AGENT.optimizer, learning_rate=1e-30)
    )
    first = nca.train(env, AGENT, tmp_path / "a", seed=3).params()
    second = nca.train(env, still, tmp_path / "b", seed=4, params=first).params()
    for name, leaf in leaves_of(first).items():
        np.testing.assert_allclose(leaves_of(second)[name], leaf, rtol=1e-6, atol=1e-12)
    with pytest.raises(ConfigError, match="params: begins one agent, and this one has num_seeds"):
        several = dataclasses.replace(AGENT, num_seeds=2)
        nca.train(env, several, tmp_path / "c", params=first)


@pytest.mark.heavy
def test_a_run_that_a_walk_cannot_decide_on_is_refused_before_the_first_fold(bars, tmp_path):
    agent = dataclasses.replace(AGENT, num_seeds=2)
    trained = tmp_path / "folds"
    # Folds judge on rows 160 to 239; the second run's training ends with row 238.
    for name, rows, seeds, says in (
        ("one", 240, 2, None),
        ("early", 239, 2, "which could then be no test"),
        ("alone", 240, 1, "its num_seeds differs"),
    ):
        one = dataclasses.replace(agent, num_seeds=seeds)
        run = untrained_run(tmp_path / name, bars[:rows], ENV, one)
        given = {"train": 160, "test": 40, "env": ENV, "deploy": run}
        if says is None:
            with pytest.raises(RuntimeError, match="begun"):
                nca.walk_forward(bars, agent, folder=trained, done=_stop, **given)
            assert trained.exists()
            continue
        with pytest.raises(ConfigError, match=says):
            nca.walk_forward(bars, agent, folder=tmp_path / f"of {name}", **given)
        assert not (tmp_path / f"of {name}").exists()
    with pytest.raises(ConfigError, match="of a strategy"):
        nca.walk_forward(bars, nca.rules.buy_and_hold(), train=160, test=40, deploy=run)


def _stop(number, fitted):
    raise RuntimeError("begun")


@pytest.mark.heavy
@pytest.mark.parametrize("sizing", ["fixed", "volatility"])
def test_a_matched_hold_has_the_mean_exposure_and_no_timing(sizing):
    two = random_bars(np.random.default_rng(9), 300, 2, missing=0.02)
    rules = {"sizing": sizing, "volatility_span": 20, "size_cap": 4.0}
    rules = rules if sizing == "volatility" else {}
    asked = np.random.default_rng(1).uniform(-0.2, 0.4, (300, 2))
    done = nca.backtest(two, asked, start=str(two.index[50]), **rules)
    # Written out: what was asked for, before the account sized it.
    np.testing.assert_allclose(mean_exposure(done), asked[50:].mean(0), rtol=1e-9)
    held = deployable(done, two, str(two.index[50]))["exposure-matched hold"]
    direct = nca.backtest(
        two, np.tile(asked[50:].mean(0), (300, 1)), start=str(two.index[50]), **rules
    )
    np.testing.assert_allclose(held.equity, direct.equity, rtol=1e-9)
