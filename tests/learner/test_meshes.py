"""One run is the same run on every mesh: one device, data, fsdp, model, and all three at once."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from ledger import random_bars
from recording import recording_optimizer

from nca_trader import AgentConfig, Costs, EnvConfig, TradingEnv, make_mesh, make_policy
from nca_trader.learner import update
from nca_trader.presets import LearnerConfig, MeshConfig, OptimizerConfig, PolicyConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

AGENT = AgentConfig(
    policy=PolicyConfig(channels=4, hidden=8, steps=2, dilations=(1, 2), head_hidden=4, window=3),
    learner=LearnerConfig(
        num_segments=8,
        segment_length=4,
        envs_per_segment=2,
        num_epochs=2,
        num_minibatches=1,
    ),
    # A clip that bites, and rates that go by what a layer sums over.
    optimizer=OptimizerConfig(
        learning_rate=1e-2, warmup_updates=2, max_grad_norm=0.05, base_width=2, ema_decay=0.9
    ),
)
ONE = (1, 1, 1)
MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2)]


@functools.cache
def environment(reward):
    bars = random_bars(np.random.default_rng(0), 60, 2, missing=0.05)
    costs = Costs(commission=5e-4, slippage=2e-4)
    config = EnvConfig(features=("bollinger", "rsi"), costs=costs, reward=reward)
    return TradingEnv(bars, config)


def learner_on(axes, kind="nca", estimator="gae", **mesh):
    """A learner whose optimiser also sums the gradients, which plain SGD would follow."""
    learn = dataclasses.replace(AGENT.learner, advantages=estimator)
    policy = dataclasses.replace(AGENT.policy, kind=kind)
    agent = dataclasses.replace(AGENT, learner=learn, policy=policy, mesh=MeshConfig(**mesh))
    env = environment("pnl" if estimator == "exact" else "log_return")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "make_optimizer", recording_optimizer)
        return update.make_learner(env, make_policy(agent, env.spec), agent, make_mesh(*axes))


def on_host(state):
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


def stepped(learner, updates):
    """The state after so many updates, where it is, and each update's metrics."""
    state, rows = learner.init(jax.random.key(0)), []
    for _ in range(updates):
        state, metrics = learner.step(state)
        rows.append({name: np.asarray(value) for name, value in metrics.items()})
    return state, rows


def wide(learner):
    """The learner's market in float64, as its parameters are."""
    return jax.tree.map(lambda a: a.astype("f8") if a.dtype == "f4" else a, learner.market)


@functools.cache
def run(axes, kind="nca", estimator="gae"):
    """Two updates in float64."""
    with jax.enable_x64(True):
        state, rows = stepped(learner_on(axes, kind, estimator), 2)
        return on_host(state), rows


def furthest(got, want):
    """The largest difference of any two entries, relative to the largest entry of its leaf."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    apart = [np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs]
    return max(apart)


def test_x():
    for axes in (ONE, (2, 2, 2)):
        import time

        t = time.process_time()
        got, rows = run(axes)
        print(axes, time.process_time() - t)
    want, other = run(ONE)
    for name, a in jax.tree_util.tree_flatten_with_path(want)[0]:
        print(jax.tree_util.keystr(name), a.dtype, a.shape)
    print("grad", furthest(got.opt_state.inner.gradients, want.opt_state.inner.gradients))
    print("params", furthest(got.params, want.params))
    for i in range(2):
        for k in rows[i]:
            print(i, k, rows[i][k], rows[i][k] - other[i][k], rows[i][k].dtype)
    assert 0
