"""A run decides in a backtest as its learner would, for every reward and kind of action."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV
from untrained import untrained_run

from nca_trader.agents.policy import make_policy
from nca_trader.config.env import REWARDS
from nca_trader.envs.trading import TradingEnv
from nca_trader.evaluate.backtest import backtest
from nca_trader.runs.exported import Coding, compact, read_run, write_exported

ACTIONS = ("direction", "orders", "weights")
QUICK = (
    ("pnl", "direction"),
    ("differential_sharpe", "direction"),
    ("drawdown", "weights"),
)
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(REWARDS, ACTIONS)
]


def ordered_before(targets):
    """`[N, A]` the last ordered target before each bar; flat before the first."""
    ordered = np.zeros_like(targets)
    for t in range(1, len(targets)):
        ordered[t] = np.where(np.isnan(targets[t - 1]), ordered[t - 1], targets[t - 1])
    return ordered


def greedy_target(env, logits, ordered):
    """The target weight of the most probable action, in numpy."""
    targets = np.asarray(env.spec.targets)
    if env.config.actions == "weights":
        return targets[0] + (targets[-1] - targets[0]) * (1 + np.tanh(logits[..., 0])) / 2
    action = logits.argmax(-1)
    if env.config.actions == "orders":
        there = np.abs(ordered[..., None] - targets).argmin(-1)
        action = np.clip(there + action - 1, 0, len(targets) - 1)
    return targets[action]


def kept_by_the_reward(env, growth, first):
    """`[N, M]` what the reward remembers at each bar, from log-returns `[N]`; begins at `first`."""
    full = env.bars.close[1:] / env.bars.close[:-1] - 1
    usual = max(map(abs, env.spec.targets)) ** 2 * full.var(axis=0).sum()
    if env.config.reward == "drawdown":
        equity = np.cumsum(growth)
        peak = np.maximum.accumulate(equity - 1e9 * (np.arange(len(growth)) < first))
        return np.log1p(np.maximum(peak - equity, 0) / np.sqrt(usual))[:, None]
    if env.config.reward != "differential_sharpe":
        return np.zeros((len(growth), 0))
    decay, mean, square = env.config.sharpe_decay, 0.0, usual
    rows = [(0.0, 0.0)] * (first + 1)
    for r in growth[first + 1 :]:
        mean, square = mean + decay * (r - mean), square + decay * (r**2 - square)
        variance = max(square - mean**2, 0.1 * usual)
        noise = np.sqrt(variance * decay / 2)
        rows.append((mean / noise, np.log(variance / usual) / 2))
    return np.array(rows)


def learnt_logits(env, params, weights, ordered, growth, first):
    """`[N, A, n]` what the learner's parameters say at each bar of an account's history.

    The account's features are written out here: those of `EnvConfig.reward`, not of a manifest.
    """
    policy = make_policy(AGENT, env.spec)
    cells = policy.encode(params, env.features[None], env.bars.present[None])[0]
    size = max(map(abs, env.spec.targets))
    held, cash = weights / size, np.broadcast_to(1 - weights.sum(1, keepdims=True), weights.shape)
    if env.config.reward == "pnl":
        held, cash = ordered / size, np.zeros_like(ordered)
    kept = kept_by_the_reward(env, growth, first)[:, None, :]
    kept = np.broadcast_to(kept, (*weights.shape, kept.shape[-1]))
    seen = np.stack([held, ordered / size, cash], -1)
    seen = np.concatenate([seen, kept], -1).astype(np.float32)
    return np.asarray(jax.vmap(policy.act, (None, 0, 0))(params, cells, seen)[0])


@pytest.mark.parametrize(("reward", "actions"), CASES)
@pytest.mark.few(1)
def test_a_backtest_decides_as_the_learner_does(tmp_path, reward, actions):
    config = dataclasses.replace(ENV, reward=reward, actions=actions)
    env = TradingEnv(random_bars(np.random.default_rng(3), 200, 2), config)
    run = untrained_run(tmp_path / "r", env.bars, config, AGENT)
    weights = compact(run, run.params(), Coding(bits=16), env.features, env.bars.present)
    write_exported(tmp_path / "agent.nca", run, weights)
    for served, params in (
        (run, run.params()),
        (read_run(tmp_path / "agent.nca"), weights.params(make_policy(AGENT, env.spec))),
    ):
        result = backtest(env.bars, served, start=str(env.bars.index[0]))
        targets, held = result.targets.to_numpy(), result.weights.to_numpy()
        decided = ~np.isnan(targets).all(1)
        ordered = ordered_before(targets)
        growth = np.diff(result.log_equity, prepend=result.log_equity[0])
        logits = learnt_logits(env, params, held, ordered, growth, decided.argmax())
        np.testing.assert_allclose(result.logits[decided], logits[decided], atol=2e-4)
        want = greedy_target(env, logits, ordered)
        if actions == "weights":
            np.testing.assert_allclose(targets[decided], want[decided], atol=1e-4)
        else:
            gap = np.diff(np.sort(logits, -1)[..., -2:], axis=-1)[..., 0]
            clear = decided[:, None] & (gap > 1e-3)
            assert clear[decided].mean() > 0.9
            np.testing.assert_allclose(targets[clear], want[clear])
        assert len(np.unique(targets[decided])) > 1, "an agent that never moves shows nothing"
