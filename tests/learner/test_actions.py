"""The learner on every kind of action, with what an episode draws: it trains, and is replayed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV

from nca_trader import backtest
from nca_trader.agents import heads
from nca_trader.envs.trading import TradingEnv, reset, step, window
from nca_trader.learner.train import train
from nca_trader.types import EnvSpec

KINDS = {
    "orders": dict(actions="orders", random_costs=(0.5, 2.0), reward="drawdown"),
    "weights": dict(actions="weights", feature_dropout=0.1, reward="differential_sharpe"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_an_agent_trains_and_its_backtest_is_the_environments_own_walk(kind, tmp_path):
    config = dataclasses.replace(ENV, random_start=False, **KINDS[kind])
    bars = random_bars(np.random.default_rng(0), 260, 2)
    run = train(TradingEnv(bars[:200], config), AGENT, tmp_path / kind, seed=1)
    last = run.metrics()[-1]
    assert last["skipped"] == 0 and np.isfinite(last["loss"])
    # One epoch of one minibatch: the ratios are of the very policy that collected.
    assert last["approx_kl"] == pytest.approx(0.0, abs=1e-6) and last["clip_fraction"] == 0.0
    # Greedy decisions walked through the environment, without drops, against the backtest.
    plain = dataclasses.replace(config, feature_dropout=0.0, random_costs=None)
    env, policy, params = TradingEnv(bars, plain), run.policy, run.params()
    # What the reward remembers is in units of the bars that were trained on.
    market = dataclasses.replace(env.market, dynamics=env.dynamics._replace(spec=run.spec))
    present = jnp.ones((policy.receptive_field, 2), bool)

    def walk(state, _):
        seen = window(market, state.observation, policy.receptive_field)
        cells = policy.encode(params, seen[None], present[None])[0, -1]
        account = state.observation.account
        seen = heads.account_features(policy.spec, account)
        logits, _ = policy.act(params, cells, seen)
        decide = policy.distribution
        action = decide.order(policy.spec, decide.mode(logits))
        state, timestep = step(market, state, action)
        return state, timestep.observation.account

    state, _ = reset(market, jax.random.key(0))
    first = policy.first_decision
    state = state._replace(index=jnp.asarray(first))
    length = len(bars) - 1 - first
    account = jax.jit(lambda s: jax.lax.scan(walk, s, None, length=length)[1])(state)
    result = backtest(bars, run, start=str(bars.time[first]))
    ordered = np.asarray(account.ordered)
    np.testing.assert_allclose(result.targets[:-1], ordered, atol=1e-4)
    np.testing.assert_allclose(result.log_equity[1:], account.log_equity, atol=1e-4)
    assert len(np.unique(np.round(ordered, 5))) > 1


SPEC = EnvSpec(symbols=("A", "B"), features=("x",), targets=(-0.5, 0.0, 0.5), warmup=0,
               actions="weights")  # fmt: skip


def test_the_squashed_gaussian_by_integration():
    """Its density sums to one, its entropy is minus the mean log-density, its draws match it."""
    gaussian = heads.distribution(SPEC)
    assert gaussian.outputs(SPEC) == 2 and SPEC.num_actions == 0
    logits = jnp.array([[0.3, -0.7], [-1.0, 0.2]])
    grid = np.linspace(-12, 12, 4001)
    for asset in range(2):
        u = np.zeros((len(grid), 1)) + grid[:, None]
        density = np.exp(np.asarray(gaussian.log_prob(logits[None, asset : asset + 1], u)))
        assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-5)
    joint = gaussian.log_prob(logits, jnp.array([0.1, -0.4]))
    each = [gaussian.log_prob(logits[i : i + 1], jnp.array([a])) for i, a in enumerate((0.1, -0.4))]
    assert float(joint) == pytest.approx(float(sum(each)), rel=1e-6)
    noise = gaussian.noise(jax.random.key(0), (40_000, 2, 2))
    draws = np.asarray(gaussian.sample(jnp.broadcast_to(logits, noise.shape), noise))
    np.testing.assert_allclose(draws.mean(0), [0.3, -1.0], atol=0.03)
    np.testing.assert_allclose(np.log(draws.std(0)), [-0.7, 0.2], atol=0.02)
    log_prob = gaussian.log_prob(jnp.broadcast_to(logits, noise.shape), jnp.asarray(draws))
    assert float(gaussian.entropy(logits)) == pytest.approx(-float(log_prob.mean()), abs=0.02)
    orders = np.asarray(gaussian.order(SPEC, jnp.asarray(draws)))
    assert (
        orders.min() >= -0.5 and orders.max() <= 0.5 and (np.diff(np.sort(orders[:, 0])) >= 0).all()
    )
    np.testing.assert_allclose(gaussian.order(SPEC, jnp.zeros(2)), 0.0, atol=1e-7)
    np.testing.assert_array_equal(gaussian.mode(logits), logits[:, 0])
