"""The mean of several agents: what it orders, equals the mean of what each would order."""

import numpy as np
import pytest
from drawn import random_bars
from untrained import untrained_run

from nca_trader import Costs, EnvConfig, TradingEnv, backtest
from nca_trader.agents.policy import mean_policy, unstack
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.data.bars import write_bars
from nca_trader.evaluate.simulate import simulate_agent
from nca_trader.paper.session.parity import compare
from nca_trader.paper.session.trade import paper_trade
from nca_trader.runs.exported import Coding, compact, read_run, write_exported
from nca_trader.runs.manifest import Run, Selection

SEEDS = 3
START = "2020-05-01"
COSTS = Costs(commission=5e-4, slippage=2e-4)


def run_of(path, bars, ensemble="mean", **env):
    config = EnvConfig(features=("return_1", "rsi"), costs=COSTS, **env)
    shape = PolicyConfig(channels=8, hidden=8, steps=2, dilations=(1, 2))
    agent = AgentConfig(policy=shape, num_seeds=SEEDS, ensemble=ensemble)
    return untrained_run(path, bars, config, agent)


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(3), 220, 2, missing=0.03)


@pytest.fixture(scope="module", params=["targets", "weights", "agreement"])
def run(request, bars, tmp_path_factory):
    extra = {"actions": "weights"} if request.param == "weights" else {}
    ensemble = request.param if request.param == "agreement" else "mean"
    return run_of(tmp_path_factory.mktemp("runs") / request.param, bars, ensemble, **extra)


def orders_of(result, actions):
    """`[S, N, A]` what each agent would order, read from the logits in plain numpy."""
    spec = result.run.spec
    parts = np.split(np.asarray(result.logits, np.float64), SEEDS, axis=-1)
    if actions == "weights":
        low, high = spec.bounds
        return np.array([low + (high - low) * (1.0 + np.tanh(p[..., 0])) / 2.0 for p in parts])
    return np.array([np.array(spec.targets)[p.argmax(-1)] for p in parts])


@pytest.mark.few(1)
@pytest.mark.parametrize("actions", ["targets", "weights"])
def test_agents_that_disagree_order_less_by_the_formula_in_numpy(bars, tmp_path, actions):
    extra = {"actions": "weights"} if actions == "weights" else {}
    results = {
        ensemble: backtest(
            bars, run_of(tmp_path / ensemble, bars, ensemble, **extra), start=START, look=False
        )
        for ensemble in ("mean", "agreement")
    }
    assert "cut where they disagree" in results["agreement"].run.described
    run = results["mean"].run
    run.write_json("selection.json", Selection(sharpe=[None] + [0.59] * (SEEDS - 1)))
    assert "each: 0 (no trade), 1 (Sharpe ratio 0.59)" in Run(run.path).described
    for ensemble, result in results.items():
        each = orders_of(result, actions)
        mean, spread = each.mean(0), each.std(0)
        want = mean
        if ensemble == "agreement":
            with np.errstate(divide="ignore", invalid="ignore"):
                want = np.where(mean == 0.0, 0.0, mean / (1.0 + (spread / mean) ** 2))
            assert (np.abs(want) < 0.7 * np.abs(mean) - 1e-3).mean() > 0.1, "they all agree"
        np.testing.assert_allclose(result.targets, want, atol=2e-6)


@pytest.mark.heavy
@pytest.mark.few(1)
@pytest.mark.parametrize("ensemble", ["mean", "agreement"])
def test_paper_trades_the_mean_agent_as_the_backtest_does(bars, tmp_path, ensemble):
    run = run_of(tmp_path / "agent", bars, ensemble)
    result = backtest(bars, run, start=START)
    assert len(np.unique(np.round(result.targets.to_numpy(), 9))) > 3, "no mean was traded"
    result.save(run.path / "backtest.parquet")
    write_bars(bars, tmp_path / "bars.csv")
    said = paper_trade(
        run.path, f"replay:{tmp_path / 'bars.csv'}", tmp_path / "journal", start=START
    )
    assert said["seed"] is None and said["agent"].startswith("the mean of 3 agents")
    parity = compare(run.path, tmp_path / "journal")
    assert parity.ok, parity.sentence


@pytest.mark.few(1)
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


@pytest.mark.heavy
@pytest.mark.few(2)
def test_without_the_account_it_orders_the_mean_of_what_each_orders_alone(run, bars):
    """An agent that does not see the account orders the same, whatever the account holds."""
    params = run.params()
    head = params["head"]
    blind = {**params, "head": {**head, "account": np.zeros_like(head["account"])}}
    given = (run.account, 0, len(bars))
    mean, *_ = simulate_agent(bars, run, (blind,), *given)
    alone = []
    for seed, one in enumerate(unstack(blind, SEEDS)):
        trace, *_ = simulate_agent(bars, Run(run.path, seed=seed), (one,), *given)
        alone.append(trace.target)
    want = np.mean(alone, axis=0)
    if run.agent_config.ensemble == "agreement":
        want *= want**2 / np.maximum(np.square(alone).mean(axis=0), 1e-12)
    np.testing.assert_allclose(mean.target, want, atol=1e-6)
    orders = np.array(alone)[:, -100:]
    assert (orders.std(axis=0) > 0.05).mean() > 0.2, "the agents agree: this test shows nothing"


@pytest.mark.heavy
@pytest.mark.few(2)
def test_a_batch_a_stream_and_each_agent_alone_see_the_same_cells(run, bars):
    one, params = run.each, run.params()
    several = mean_policy(one, SEEDS)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 40, 2, one.spec.num_features)).astype(np.float32)
    present = rng.random((1, 40, 2)) < 0.9
    cells = several.encode(params, x, present)
    each = [one.encode(part, x, present) for part in unstack(params, SEEDS)]
    np.testing.assert_allclose(cells, np.concatenate(each, axis=-1), atol=2e-5)
    state = several.begin()
    for t in range(40):
        state, now = several.stream(params, state, x[0, t], present[0, t])
        np.testing.assert_allclose(now, cells[0, t], atol=2e-5)
    seen = rng.normal(size=(2, 3)).astype(np.float32)
    logits, _ = several.act(params, cells[0, -1], seen)
    parts = [
        one.act(part, of[0, -1], seen)[0]
        for part, of in zip(unstack(params, SEEDS), each, strict=True)
    ]
    np.testing.assert_allclose(logits, np.concatenate(parts, axis=-1), atol=2e-5)
