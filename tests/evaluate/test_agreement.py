"""Agreement of two sets of parameters, where it can be counted by hand."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars

from nca_trader import Costs, EnvConfig, TradingEnv, backtest, make_policy
from nca_trader.agents import quantise
from nca_trader.config import AgentConfig, PolicyConfig
from nca_trader.errors import BarError
from nca_trader.evaluate.simulate import agreement

CONFIG = EnvConfig(features=("return_1",), costs=Costs(commission=5e-4))
OFFSET = 0.06  # below half a step of 4 bits beside a weight of 1


def by_hand(bars, config=CONFIG):
    """An agent that is long where `x + OFFSET > 0` and else short, and its run."""
    env = TradingEnv(bars, config)
    shape = PolicyConfig(kind="mlp", channels=1, hidden=0, window=1, head_hidden=1)
    policy = make_policy(AgentConfig(policy=shape), env.spec)
    params = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(policy.init, jax.random.key(0))
    )
    params["mlp"]["window"] = jnp.array([[1.0], [OFFSET]])  # the feature, and that it is there
    params["head"]["cell"] = jnp.ones((1, 1))
    outputs = params["head"]["logits"].shape[1]
    params["head"]["logits"] = jnp.array([np.linspace(-1.0, 1.0, outputs)], jnp.float32)
    run = types.SimpleNamespace(
        policy=policy, env_config=config, account=config.account, spec=env.spec, name="by hand",
    )  # fmt: skip
    run.on = lambda bars: run
    return env, run, params


def in_few_bits(params, bits):
    leaves = quantise.leaves_of(params)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    widened = quantise.widened(quantise.quantised(leaves, bits), shapes, bits)
    return quantise.params_of(widened)


@pytest.fixture(scope="module")
def bars():
    return random_bars(np.random.default_rng(5), 300, 1)


@pytest.mark.heavy
def test_decisions_that_fall_between_two_thresholds_are_those_that_differ(bars):
    env, run, params = by_hand(bars)
    few = in_few_bits(params, 4)
    assert few["mlp"]["window"][1, 0] == 0.0  # the offset is gone
    found = agreement(bars, run, params, few)
    x = env.features[run.policy.first_decision :, 0, 0]
    assert found.decisions == len(x)
    apart = ((x + OFFSET > 0) != (x > 0)).sum()
    assert 3 < apart < len(x) / 2
    assert found.share == pytest.approx(1 - apart / len(x), abs=1e-12)
    assert agreement(bars, run, params, in_few_bits(params, 8)).share == 1.0


def test_continuous_orders_agree_where_they_are_near(bars):
    config = dataclasses.replace(CONFIG, actions="weights")
    _, run, params = by_hand(bars, config)
    params["head"]["logits"] = jnp.array([[1.0, 0.0]])
    nudged = jax.tree.map(lambda p: p, params)
    for shift, share in ((0.005, 1.0), (0.1, 0.0)):  # of the mean, before it is squashed
        nudged["head"]["logits"] = jnp.array([[1.0, 0.0]])
        nudged["head"]["bias"] = params["head"]["bias"] + shift
        found = agreement(bars, run, params, nudged)
        assert (found.share == 1.0) if share else (found.share < 0.5)


def test_bars_that_are_too_few_are_refused(bars):
    _, run, params = by_hand(bars)
    with pytest.raises(BarError, match=r"decides from bar .* on .*; give more"):
        agreement(bars[: run.policy.first_decision], run, params, params)


@pytest.mark.heavy
def test_equity_is_that_of_a_backtest_of_the_positions(bars):
    env, run, params = by_hand(bars)
    found = agreement(bars, run, params, in_few_bits(params, 4))
    x, ready = env.features[:, 0, 0], np.arange(len(bars)) >= run.policy.first_decision
    for offset, equity in zip((OFFSET, 0.0), found.equity, strict=True):
        targets = np.where(ready, np.where(x + offset > 0, 1.0, -1.0), np.nan)
        want = backtest(bars, targets, costs=CONFIG.costs, order="on_change", max_gross=1.0)
        assert equity == pytest.approx(want.equity.iloc[-1], rel=1e-9)
    assert found.difference == pytest.approx(found.equity[1] / found.equity[0] - 1)
    assert found.difference != 0.0
