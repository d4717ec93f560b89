"""Rewards and actions, each against a loop in plain numpy, and what an episode draws."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger import random_bars

from nca_trader import Costs, EnvConfig, TradingEnv
from nca_trader.envs.actions import to_target
from nca_trader.envs.trading import kept
from nca_trader.errors import ConfigError
from nca_trader.numerics import hash_uniform
from nca_trader.types import EnvSpec

COSTS = Costs(commission=2e-3, slippage=1e-3, half_spread=5e-4)
LENGTH = 60


def make_env(num_assets=2, **changes):
    bars = random_bars(np.random.default_rng(0), LENGTH, num_assets, spread=0.03)
    fields = {"features": ("bollinger",), "costs": COSTS, "random_start": False}
    return TradingEnv(bars, EnvConfig(**fields | changes))


def drawn(env, seed=1):
    rng = np.random.default_rng(seed)
    shape = (len(env) - 1 - env.spec.warmup, env.spec.num_assets)
    if env.spec.actions == "weights":
        return rng.uniform(-2, 2, shape).astype(np.float32)
    return rng.integers(0, env.spec.num_actions, shape)


def live(env, actions, key=0):
    """Every step from the features' warm-up to the end."""
    state, _ = env.reset(jax.random.key(key))
    assert int(state.index) == env.spec.warmup
    return jax.jit(lambda s, a: jax.lax.scan(env.step, s, a))(state, jnp.asarray(actions))[1]


@pytest.fixture(scope="module")
def plain():
    """Log-returns of equity of the same actions, which the schemes are functions of."""
    env = make_env()
    return drawn(env), np.asarray(live(env, drawn(env)).reward, np.float64)


def test_the_default_reward_is_the_log_return_of_equity(plain):
    actions, log_returns = plain
    account = live(make_env(), actions).observation.account
    np.testing.assert_allclose(account.log_equity, np.cumsum(log_returns), atol=1e-6)


def test_differential_sharpe_adds_up_to_the_sharpe_ratio_to_first_order(plain):
    actions, returns = plain
    decay = 0.05
    reward = live(make_env(reward="differential_sharpe", sharpe_decay=decay), actions).reward
    mean = square = 0.0
    for got, r in zip(np.asarray(reward), returns, strict=True):
        variance = square - mean**2
        # The derivative, by the decay, of the moving Sharpe ratio A / sqrt(B - A^2): by a
        # difference quotient instead of the formula.
        if variance > 1e-9:
            step = 1e-6

            def ratio(eta, a=mean, b=square, r=r):
                a, b = a + eta * (r - a), b + eta * (r**2 - b)
                return a / math.sqrt(b - a**2)

            expected = (ratio(step) - ratio(-step)) / (2 * step)
            assert got == pytest.approx(expected, rel=2e-3, abs=2e-4)
        mean, square = mean + decay * (r - mean), square + decay * (r**2 - square)
    assert np.isfinite(reward).all() and reward[0] == 0.0


def test_drawdown_costs_its_penalty_for_every_bar_below_the_peak(plain):
    actions, returns = plain
    reward = live(make_env(reward="drawdown", drawdown_penalty=0.3), actions).reward
    equity = np.concatenate([[0.0], np.cumsum(returns)])
    below = np.maximum.accumulate(equity) - equity
    np.testing.assert_allclose(reward, returns - 0.3 * below[1:], atol=1e-6)
    assert below.max() > 0.05


def test_mean_variance_and_crra_of_simple_returns(plain):
    actions, returns = plain
    gross = np.exp(returns)
    reward = live(make_env(reward="mean_variance", risk_aversion=4.0), actions).reward
    np.testing.assert_allclose(reward, gross - 1 - 2.0 * (gross - 1) ** 2, atol=1e-6)
    reward = live(make_env(reward="crra", risk_aversion=3.0), actions).reward
    np.testing.assert_allclose(reward, (gross**-2 - 1) / -2, atol=1e-6)
    reward = live(make_env(reward="crra", risk_aversion=1.0), actions).reward
    np.testing.assert_allclose(reward, returns, atol=1e-7)


@pytest.mark.parametrize("returns", ["log", "simple"])
@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_pnl_pays_positions_of_constant_size_whatever_the_fill(returns, fill):
    env = make_env(
        reward="pnl", pnl_returns=returns, fill=fill, size=1.0, max_gross=None, borrow=True,
        quadratic_cost=0.01, risk_aversion=0.02,
    )  # fmt: skip
    actions = drawn(env)
    reward = live(env, actions).reward
    close, first = env.bars.close, env.spec.warmup
    r = close[1:] / close[:-1] - 1.0
    r = (np.log1p(r) if returns == "log" else r)[first:]
    a = np.vstack([np.zeros((1, 2)), actions - 1.0])
    da = np.diff(a, axis=0)
    rate = COSTS.commission + COSTS.slippage + COSTS.half_spread
    pay = a[1:] * r - rate * np.abs(da) - 0.005 * da**2 - 0.01 * a[1:] ** 2
    np.testing.assert_allclose(reward, pay.sum(1), atol=1e-6)


SPEC = EnvSpec(symbols=("A", "B", "C"), features=("x",), targets=(-0.5, 0.0, 0.5), warmup=0)


def test_a_direction_is_an_index_into_the_targets():
    target = to_target(SPEC, jnp.array([0, 1, 2]), jnp.zeros(3))
    np.testing.assert_array_equal(target, [-0.5, 0.0, 0.5])


def test_an_order_moves_the_last_target_one_step_and_no_further_than_the_bounds():
    spec = dataclasses.replace(SPEC, actions="orders")
    assert spec.num_actions == 3
    ordered = jnp.array([-0.5, 0.0, 0.5])
    for action, expected in ((0, [-0.5, -0.5, 0.0]), (1, ordered), (2, [0.0, 0.5, 0.5])):
        np.testing.assert_array_equal(to_target(spec, jnp.full(3, action), ordered), expected)
    long_only = dataclasses.replace(spec, targets=(0.0, 0.5))
    target = to_target(long_only, jnp.zeros(3, int), jnp.array([0.0, 0.5, 0.5]))
    np.testing.assert_array_equal(target, [0.0, 0.0, 0.0])


def test_orders_walk_through_an_episode():
    env = make_env(actions="orders", size=0.5)
    actions = drawn(env)
    ordered = live(env, actions).observation.account.ordered
    expected, held = [], np.zeros(2)
    for action in actions:
        held = np.clip(held + 0.5 * (action - 1), -0.5, 0.5)
        expected.append(held)
    np.testing.assert_array_equal(ordered, expected)


def test_weights_are_taken_as_they_are_within_the_bounds():
    env = make_env(actions="weights", size=0.4)
    assert env.spec.num_actions == 0
    actions = drawn(env)
    ordered = live(env, actions).observation.account.ordered
    np.testing.assert_array_equal(ordered, np.clip(actions, np.float32(-0.4), np.float32(0.4)))
    long_only = make_env(actions="weights", size=0.4, short=False)
    assert float(live(long_only, actions).observation.account.ordered.min()) == 0.0


def test_an_episodes_costs_are_drawn_once_evenly_in_their_log():
    env = make_env(random_costs=(0.25, 4.0))
    episodes = jax.jit(jax.vmap(env.begin))(jax.random.split(jax.random.key(0), 4000))
    scale = np.log(np.asarray(episodes.cost_scale)) / math.log(4.0)
    assert -1.0 <= scale.min() < -0.99 and 0.99 < scale.max() <= 1.0
    assert abs(scale.mean()) < 4 * math.sqrt(1 / 3 / 4000)
    # What is paid is what the scaled costs say, all through the episode.
    actions = drawn(env)
    state, _ = env.reset(jax.random.key(3))
    factor = float(state.episode.cost_scale)
    fixed = make_env(costs=COSTS.scaled(factor))
    np.testing.assert_allclose(
        live(env, actions, 3).reward, live(fixed, actions, 3).reward, atol=1e-6
    )


def test_dropped_bars_are_neither_seen_nor_filled_in():
    env = make_env(drop_bars=0.3, fill="next_open")
    actions = drawn(env)
    state, _ = env.reset(jax.random.key(5))
    rows = np.arange(env.spec.warmup, len(env))
    there = np.asarray(kept(0.3, state.drop, jnp.asarray(rows), 2))
    assert 0.5 < there.mean() < 0.9 and not (there[:, 0] == there[:, 1]).all()
    steps = live(env, actions, 5)
    weight = np.asarray(steps.observation.account.weight)
    # A position that was flat stays flat through a bar that is dropped.
    flat = np.vstack([np.zeros((1, 2)), weight[:-1]]) == 0.0
    assert (weight[flat & ~there[1:]] == 0.0).all() and (weight[flat & there[1:]] != 0.0).any()
    observation = jax.tree.map(lambda a: a[-1], steps.observation)
    window = np.asarray(env.window(observation, 8))
    assert (window[~there[-8:]] == 0.0).all() and (window[there[-8:]] != 0.0).all()
    # Another episode drops others; the same key the same.
    other, _ = env.reset(jax.random.key(6))
    again, _ = env.reset(jax.random.key(5))
    assert again.drop == state.drop != other.drop


def test_nothing_is_drawn_that_is_not_asked_for():
    state, _ = make_env().reset(jax.random.key(0))
    assert state.drop is None and state.episode.cost_scale is None and state.episode.memory == ()


def test_the_hash_is_even_and_its_words_are_independent():
    u = np.asarray(hash_uniform(jnp.arange(2000)[:, None], jnp.arange(50)[None, :]), np.float64)
    assert 0.0 <= u.min() and u.max() < 1.0
    counts = np.histogram(u, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 50  # chi-square, 19 degrees: 1 in 10,000
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(actions="directions"), "did you mean 'direction'"),
        (dict(reward="diff_sharpe"), "did you mean 'differential_sharpe'"),
        (dict(random_costs=(2.0, 1.0)), "random_costs=.* is not a range of factors"),
        (dict(drop_bars=1.0), "drop_bars=1.0 is outside its range"),
        (dict(market_bars=1), "market_bars=1 is below"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        EnvConfig(**wrong)


def test_a_reward_never_sees_the_future():
    """Perturbing bars after a step leaves its reward as it was, bit for bit."""
    for reward in ("pnl", "differential_sharpe", "drawdown"):
        env = make_env(reward=reward)
        actions, cut = drawn(env), 20
        close = env.bars.close.copy()
        close[env.spec.warmup + cut + 1 :] *= 1.5
        changed = dataclasses.replace(env.bars, close=close, high=close * 2, low=close / 2)
        other = TradingEnv(changed, env.config)
        ours, theirs = (np.asarray(live(e, actions).reward) for e in (env, other))
        np.testing.assert_array_equal(ours[:cut], theirs[:cut])
        assert (ours[cut:] != theirs[cut:]).any()
