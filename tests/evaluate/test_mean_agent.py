"""The mean of several agents: what it orders, equals the mean of what each would order."""

import numpy as np
import pytest
from ledger import random_bars
from untrained import untrained_run

from nca_trader import Costs, EnvConfig, TradingEnv, backtest
from nca_trader.agents.policy import mean_policy, unstacked
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.data.bars import write_bars
from nca_trader.envs.account.state import rules_of
from nca_trader.evaluate.simulate import simulate_agent
from nca_trader.paper.parity import compare
from nca_trader.paper.session import paper_trade
from nca_trader.runs.exported import Coding, compact, read_run, write_exported
from nca_trader.runs.manifest import Run

SEEDS = 3
START = "2020-05-01"
COSTS = Costs(commission=5e-4, slippage=2e-4)


def run_of(path, bars, **env):
    config = EnvConfig(features=("return_1", "rsi"), costs=COSTS, **env)
    shape = PolicyConfig(channels=8, hidden=8, steps=2, dilations=(1, 2))
    agent = AgentConfig(policy=shape, num_seeds=SEEDS)
    return untrained_run(path, bars, config, agent)


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(3), 220, 2, missing=0.03)


@pytest.fixture(scope="module", params=["targets", "weights"])
def run(request, bars, tmp_path_factory):
    extra = {"actions": "weights"} if request.param == "weights" else {}
    return run_of(tmp_path_factory.mktemp("runs") / request.param, bars, **extra)


def test_without_the_account_it_orders_the_mean_of_what_each_orders_alone(run, bars):
    """An agent that does not see the account orders the same, whatever the account holds."""
    params = run.params()
    head = params["head"]
    blind = {**params, "head": {**head, "account": np.zeros_like(head["account"])}}
    given = (run.env_config.costs, rules_of(run.env_config), 0, len(bars))
    mean, _ = simulate_agent(bars, run, (blind,), *given)
    alone = []
    for seed, one in enumerate(unstacked(blind, SEEDS)):
        trace, _ = simulate_agent(bars, Run(run.path, seed=seed), (one,), *given)
        alone.append(trace.target)
    np.testing.assert_allclose(mean.target, np.mean(alone, axis=0), atol=1e-6)
    orders = np.array(alone)[:, -100:]
    assert (orders.std(axis=0) > 0.05).mean() > 0.2, "the agents agree: this test shows nothing"


def test_a_batch_a_stream_and_each_agent_alone_see_the_same_cells(run, bars):
    one, params = run.each, run.params()
    several = mean_policy(one, SEEDS)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 40, 2, one.spec.num_features)).astype(np.float32)
    present = rng.random((1, 40, 2)) < 0.9
    cells = several.encode(params, x, present)
    each = [one.encode(part, x, present) for part in unstacked(params, SEEDS)]
    np.testing.assert_allclose(cells, np.concatenate(each, axis=-1), atol=2e-5)
    state = several.begin()
    for t in range(40):
        state, now = several.stream(params, state, x[0, t], present[0, t])
        np.testing.assert_allclose(now, cells[0, t], atol=2e-5)
    seen = rng.normal(size=(2, 3)).astype(np.float32)
    logits, _ = several.act(params, cells[0, -1], seen)
    parts = [
        one.act(part, of[0, -1], seen)[0]
        for part, of in zip(unstacked(params, SEEDS), each, strict=True)
    ]
    np.testing.assert_allclose(logits, np.concatenate(parts, axis=-1), atol=2e-5)


def test_paper_trades_the_mean_agent_as_the_backtest_does(bars, tmp_path):
    run = run_of(tmp_path / "agent", bars)
    result = backtest(bars, run, start=START)
    assert len(np.unique(np.round(result.targets.to_numpy(), 9))) > 3, "no mean was traded"
    result.save(run.path / "backtest.parquet")
    write_bars(bars, tmp_path / "bars.csv")
    said = paper_trade(
        run.path, f"replay:{tmp_path / 'bars.csv'}", tmp_path / "journal", start=START
    )
    assert said["seed"] is None and said["agent"] == "the mean of 3 agents"
    parity = compare(run.path, tmp_path / "journal")
    assert parity.ok, parity.sentence


def test_an_exported_mean_agent_comes_back_and_trades_alike(run, bars, tmp_path):
    env = TradingEnv(bars, run.env_config)
    weights = compact(run, run.params(), Coding(bits=16), env.features, bars.present)
    write_exported(tmp_path / "agent.nca", run, weights)
    held = read_run(tmp_path / "agent.nca")
    assert held.selected is None and held.num_acting == SEEDS
    ours, theirs = (backtest(bars, r, start=START, look=False) for r in (held, run))
    np.testing.assert_allclose(ours.equity, theirs.equity, rtol=1e-2)
    assert (abs(ours.targets - theirs.targets) < 1e-3).to_numpy().mean() > 0.99
    # Which agent a tensor is of, is in its name: swapped names are another agent's weights.
    names = list(weights.tensors)
    assert {name.partition(".")[0] for name in names} == {"0", "1", "2"}
