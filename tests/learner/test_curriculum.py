"""What is easier at a run's start, by closed form: rewards by hand from prices and orders."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from tiny import AGENT, ENV, MLP

from nca_trader import ConfigError, TradingEnv, make_learner, make_policy
from nca_trader.config import CurriculumConfig
from nca_trader.envs.account.state import legs_of
from nca_trader.learner import rollout, sampled, update
from nca_trader.learner.exact import enumerate_segments
from nca_trader.learner.ppo import setup_of

pytestmark = pytest.mark.usefixtures("quick_compile")

COMMISSION, QUADRATIC = 0.002, 0.05
PNL = dataclasses.replace(
    ENV,
    reward="pnl",
    quadratic_cost=QUADRATIC,
    costs=dataclasses.replace(ENV.costs, commission=COMMISSION, slippage=0.0),
)
LEARNER = dataclasses.replace(
    AGENT.learner, num_segments=2, segment_length=4, envs_per_segment=2, logical_shards=1
)


def test_factors_go_in_a_straight_line_to_one_and_stay():
    config = CurriculumConfig(costs_from=0.2, volatility_from=4.0, volatility_share=0.25)
    updates = jnp.array([0, 1, 2, 4, 8, 15])
    ways = (
        (update.cost_scale, config.costs_share),
        (update.volatility_scale, config.volatility_share),
    )
    cost, moves = (
        jax.vmap(lambda u, of=of, share=share: of(config, u, update.whole_after(share, 16)))(
            updates
        )
        for of, share in ways
    )
    np.testing.assert_allclose(cost, [0.2, 0.3, 0.4, 0.6, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(moves, [4.0, 3.25, 2.5, 1.0, 1.0, 1.0], rtol=1e-6)
    assert update.volatility_scale(CurriculumConfig(costs_from=0.0), updates[0], 16) is None
    with pytest.raises(ConfigError, match="volatility_from"):
        CurriculumConfig(volatility_from=0.0)


@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_moves_of_a_scaled_market_are_those_of_its_prices_to_that_power(scale):
    bars = random_bars(np.random.default_rng(0), 60, 2, missing=0.2)
    powers = {name: getattr(bars, name) ** scale for name in ("open", "high", "low", "close")}
    expected = legs_of(dataclasses.replace(bars, **powers))
    with jax.enable_x64(True):
        got = rollout.scale_returns(legs_of(bars), jnp.asarray(scale))
    np.testing.assert_allclose(got.overnight, expected.overnight, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(got.intraday, expected.intraday, rtol=1e-12, atol=1e-15)
    move = np.log1p(np.asarray(expected.overnight)) + np.log1p(np.asarray(expected.intraday))
    usual = np.log1p(legs_of(bars).overnight) + np.log1p(legs_of(bars).intraday)
    assert move.std() == pytest.approx(scale * usual.std(), rel=1e-12)


@pytest.fixture(scope="module")
def part():
    """`(cost_scale, volatility_scale) -> rollout`, of one program; and what it was made of."""
    env = TradingEnv(random_bars(np.random.default_rng(1), 90, 2), PNL)
    policy = make_policy(AGENT, env.spec)
    setup = setup_of(policy, dataclasses.replace(AGENT, learner=LEARNER))
    params = jax.jit(policy.init)(jax.random.key(0))
    none = jnp.array([70, 81], jnp.int32)
    keys = jax.random.split(jax.random.key(1), (2, 2))
    segments = rollout.Segments(none, none, None, jax.jit(jax.vmap(jax.vmap(env.begin)))(keys))

    @jax.jit
    def live(cost, moves):
        draw = rollout.Draw(jax.random.split(jax.random.key(2), 2), segments.episode, cost, moves)
        span = rollout.Span(none, None)
        collected = rollout.roll_out(setup, params, env.market, segments, draw)[1]
        return collected, enumerate_segments(env.market, span, 4, draw)[1]

    def again(old, cost, moves):
        """The rollout `old` as replay learns from it under these factors."""
        kept = sampled.store_rollout(old, rollout.Begun(segments.episode, segments.episode))
        args = (setup, params, params, env.market, kept, (cost, moves))
        return sampled.revalued(*args)[0]

    return env, none, live, jax.jit(again)


def pay(before, after, r, cost, moves):
    """By hand: `moves (b overnight + a intraday) - cost (c |da| + q/2 da^2)`, each asset's."""
    step, (overnight, intraday) = np.abs(after - before), r
    return moves * (before * overnight + after * intraday) - cost * (
        COMMISSION * step + 0.5 * QUADRATIC * step**2
    )


@pytest.mark.heavy
@pytest.mark.parametrize(("cost", "moves"), [(1.0, 1.0), (0.25, 1.0), (1.0, 3.0), (0.0, 0.5)])
def test_rewards_are_by_hand_those_of_scaled_prices_less_scaled_costs(part, cost, moves):
    env, index, live, again = part
    old, _ = live(jnp.float32(0.5), jnp.float32(2.0))
    scales = jnp.float32(cost), jnp.float32(moves)
    got, each = jax.device_get(live(*scales))
    targets = np.asarray(env.spec.targets)
    rows = np.asarray(index)[:, None] + np.arange(4)
    filled_at = env.bars.open[rows + 1]
    r = np.log([filled_at / env.bars.close[rows], env.bars.close[rows + 1] / filled_at])
    # Fresh, and out of the replay ring, collected when costs and moves were others.
    for found in (got, jax.device_get(again(old, *scales))):
        before = found.seen[..., 1] * env.spec.size  # [S, L, E, A] ordered weights
        after = targets[found.action]
        expected = pay(before, after, r[:, :, :, None], cost, moves).sum(-1)
        np.testing.assert_allclose(found.reward, expected, rtol=1e-4, atol=1e-6)
        assert (before != after).any() and np.abs(expected).max() > 1e-3
    # And what the exact estimator enumerates, at each position and action.
    p, a = targets[:, None], targets[None]
    expected = pay(p, a, r[..., None, None], cost, moves)
    np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["costs", "volatility"])
def test_an_update_lives_through_what_its_curriculum_says(name, monkeypatch):
    env = TradingEnv(random_bars(np.random.default_rng(1), 120, 2), ENV)
    curriculum = CurriculumConfig(**{f"{name}_from": 0.5})
    agent = dataclasses.replace(AGENT, policy=MLP, curriculum=curriculum)
    learner = make_learner(env, make_policy(agent, env.spec), agent)
    draws = []
    real = sampled.roll_out
    monkeypatch.setattr(sampled, "roll_out", lambda *args: draws.append(args[-1]) or real(*args))
    jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))
    (draw,) = draws
    assert (draw.cost_scale is not None) == (name == "costs")
    assert (draw.volatility_scale is not None) == (name == "volatility")
