"""Rewards and actions, each against a loop in plain numpy, and what an episode draws."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars

from nca_trader import Costs, EnvConfig, TradingEnv
from nca_trader.config.toml import preset_names
from nca_trader.envs import load_env, rewards
from nca_trader.envs.account.state import BarReturns, open_account
from nca_trader.envs.actions import to_target
from nca_trader.envs.market import spec_of
from nca_trader.envs.trading import keep_mask
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
    state, _ = jax.jit(env.reset)(jax.random.key(key))
    assert int(state.index) == env.spec.warmup
    return jax.jit(lambda s, a: jax.lax.scan(env.step, s, a))(state, jnp.asarray(actions))[1]


@pytest.fixture(scope="module")
def plain():
    """Log-returns of equity of the same actions, which the schemes are functions of."""
    env = make_env()
    return drawn(env), np.asarray(live(env, drawn(env)).reward, np.float64)


def test_differential_sharpe_adds_up_to_the_sharpe_ratio_to_first_order(plain):
    actions, returns = plain
    decay, env = 0.05, make_env(reward="differential_sharpe", sharpe_decay=0.05)
    reward = live(env, actions).reward
    # Full positions in both assets, were they independent.
    start = sum(0.25 * np.var(c[1:] / c[:-1] - 1.0) for c in env.bars.close.T)
    mean, square, floored = 0.0, start, 0
    for got, r in zip(np.asarray(reward), returns, strict=True):
        variance = max(square - mean**2, 0.1 * start)
        floored += variance == 0.1 * start
        # The derivative, by the decay, of the moving Sharpe ratio A / sqrt(B - A^2): by a
        # difference quotient instead of the formula.
        step = 1e-6

        def ratio(eta, a=mean, b=variance + mean**2, r=r):
            a, b = a + eta * (r - a), b + eta * (r**2 - b)
            return a / math.sqrt(b - a**2)

        expected = (ratio(step) - ratio(-step)) / (2 * step)
        assert got == pytest.approx(expected, rel=2e-3, abs=2e-4)
        mean, square = mean + decay * (r - mean), square + decay * (r**2 - square)
    assert np.isfinite(reward).all() and floored < len(returns) / 2


def test_differential_sharpe_after_almost_nothing_pays_what_a_return_is_worth():
    """Returns of 0.002% and then 1% paid -1,263,911 from moments of 0."""
    config = EnvConfig(reward="differential_sharpe")
    spec = dataclasses.replace(spec_of(config, ("A",)), variance=1e-4)
    account = rewards.begin_account(spec, open_account(jnp.zeros(1)))
    legs = BarReturns(jnp.zeros(1), jnp.zeros(1), jnp.ones(1, bool))
    for r in (2e-5, 1e-2):
        kept = account.memory.kept
        none = legs.overnight
        step = rewards.Step(jnp.float32(r), none, none, legs, Costs(), 1.0, kept)
        reward = rewards.reward_of(config, spec, step)
        account = account._replace(log_equity=account.log_equity + r)
        account = rewards.remember(spec, account)
        assert float(reward) == pytest.approx(r / 0.01, rel=0.02)  # in deviations of 1%


def share_of_the_largest(reward, share=1e-3):
    """Of the sum of squares, what the largest `share` of steps holds."""
    squares = np.sort(np.asarray(reward, np.float64).ravel() ** 2)
    return squares[-math.ceil(share * len(squares)) :].sum() / squares.sum()


def of_a_random_agent(env, steps=1500, episodes=16):
    def live(key):
        key, act = jax.random.split(key)
        state, _ = env.reset(key)
        low, high = env.spec.bounds
        shape = (steps, env.spec.num_assets)
        if env.spec.actions == "weights":
            actions = jax.random.uniform(act, shape, minval=low, maxval=high)
        else:
            actions = jax.random.randint(act, shape, 0, env.spec.num_actions)
        return jax.lax.scan(env.step, state, actions)[1].reward

    return jax.jit(jax.vmap(live))(jax.random.split(jax.random.key(1), episodes))


@pytest.mark.heavy
@pytest.mark.parametrize("name", preset_names("envs"))
@pytest.mark.few(2)
def test_no_few_steps_of_a_preset_hold_the_rewards_of_a_random_agent(name):
    """Normal rewards have 1.6% of their sum of squares in the largest 0.1%."""
    config = dataclasses.replace(load_env(name), episode_bars=1500)
    if config.market:
        env = TradingEnv(None, dataclasses.replace(config, market_bars=4000))
    else:
        env = TradingEnv(random_bars(np.random.default_rng(3), 4000, 4, spread=0.01), config)
    reward = of_a_random_agent(env)
    assert np.isfinite(reward).all() and share_of_the_largest(reward) < 0.1


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


@pytest.mark.parametrize(
    "changes",
    [
        dict(fill="next_open", max_gross=None),
        dict(fill="close", pnl_returns="simple", max_gross=None),
        dict(fill="close", max_gross=1.0),
        dict(fill="next_open", max_gross=1.5, max_net=0.5),
    ],
)
def test_pnl_pays_what_positions_earn_from_their_fill_on_scaled_to_the_limits(changes):
    env = make_env(
        reward="pnl", size=1.0, borrow=True, quadratic_cost=0.01, risk_aversion=0.02, **changes
    )
    actions = drawn(env)
    reward = live(env, actions).reward
    bars, rate = env.bars, COSTS.commission + COSTS.slippage + COSTS.half_spread
    most, net = changes["max_gross"] or math.inf, changes.get("max_net", math.inf)
    held, ledger = [0.0, 0.0], []
    for t, action in enumerate(actions, start=env.spec.warmup):
        wanted = [float(a) - 1.0 for a in action]
        over = max(sum(map(abs, wanted)) / most, abs(sum(wanted)) / net, 1.0)
        paid = 0.0
        for i in range(2):
            # What the asset does before and after the moment at which an order fills.
            at = bars.open[t + 1, i] if changes["fill"] == "next_open" else bars.close[t, i]
            moves = at / bars.close[t, i], bars.close[t + 1, i] / at
            simple = "pnl_returns" in changes
            before, after = (m - 1.0 if simple else math.log(m) for m in moves)
            new = wanted[i] / over
            paid += held[i] * before + new * after - rate * abs(new - held[i])
            paid -= 0.005 * (new - held[i]) ** 2 + 0.01 * new**2
            held[i] = new
        ledger.append(paid)
    np.testing.assert_allclose(reward, ledger, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(costs=Costs(funding=0.5)), "does not pay for costs.funding;"),
        (dict(costs=Costs(borrow_fee=0.1, interest_lend=0.1)), "costs.borrow_fee, costs.interest"),
        (dict(costs=Costs(fixed_fee=1.0, impact=0.1), capital=1e5), "costs.impact, costs.fixed"),
        (dict(lot=1.0, tick=0.1, capital=1e5), "does not pay for lot, tick;"),
        (dict(max_participation=0.1, capital=1e5), "does not pay for max_participation;"),
        (dict(maintenance_margin=0.2), "does not pay for maintenance_margin;"),
        (dict(delist_after=3), "does not pay for delist_after;"),
        (dict(size=1.0, max_gross=None), "positions up to 2 in all are cut by cash"),
    ],
)
def test_pnl_refuses_what_it_does_not_pay(changes, says):
    with pytest.raises(ConfigError, match=says) as error:
        make_env(reward="pnl", **changes)
    assert "\n" not in str(error.value) and "reward='log_return'" in str(error.value)
    make_env(**changes)


@pytest.mark.parametrize("name", ["half_spread", "dividend", "funding", "present"])
def test_pnl_refuses_bars_that_pay_or_miss_something(name):
    bars = random_bars(np.random.default_rng(0), LENGTH, 2)
    column = np.full(bars.close.shape, name != "present", float)
    column[7, 1] = 1.0 - column[7, 1]
    column = 1.0 - column if name == "present" else 1e-3 * column
    says = "missing bars \\(S1 at 2020-01-08" if name == "present" else f"the bars' {name};"
    config = EnvConfig(reward="pnl", features=("bollinger",))
    with pytest.raises(ConfigError, match=says):
        TradingEnv(dataclasses.replace(bars, **{name: column}), config)


SPEC = EnvSpec(symbols=("A", "B", "C"), features=("x",), targets=(-0.5, 0.0, 0.5), warmup=0)


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


def test_drawn_costs_multiply_the_quoted_spread_as_well():
    quoted = np.random.default_rng(2).uniform(1e-3, 5e-3, (LENGTH, 2))
    drawing, tripled = make_env(random_costs=(3.0, 3.0)), make_env(costs=COSTS.scaled(3.0))
    bars = drawing.bars
    drawing = TradingEnv(dataclasses.replace(bars, half_spread=quoted), drawing.config)
    tripled = TradingEnv(dataclasses.replace(bars, half_spread=3 * quoted), tripled.config)
    ours, theirs = (np.asarray(live(env, drawn(env)).reward) for env in (drawing, tripled))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_feature_dropout_hides_features_and_nothing_else():
    env = make_env(feature_dropout=0.3, fill="next_open")
    actions = drawn(env)
    reset = jax.jit(env.reset)
    state, _ = reset(jax.random.key(5))
    rows = np.arange(env.spec.warmup, len(env))
    there = np.asarray(keep_mask(0.3, state.drop, jnp.asarray(rows), 2))
    assert 0.5 < there.mean() < 0.9 and not (there[:, 0] == there[:, 1]).all()
    steps, plain = live(env, actions, 5), live(make_env(fill="next_open"), actions, 5)
    for ours, theirs in zip(
        jax.tree.leaves((steps.observation.account, steps.reward)),
        jax.tree.leaves((plain.observation.account, plain.reward)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    observation = jax.tree.map(lambda a: a[-1], steps.observation)
    window = np.asarray(env.window(observation, 8))
    expected = np.where(there[-8:, :, None], env.features[-8:], 0.0)
    np.testing.assert_array_equal(window, expected)
    assert (window[there[-8:]] != 0.0).all() and not there[-8:].all()
    # Another episode hides others; the same key the same.
    (other, _), (again, _) = (reset(jax.random.key(key)) for key in (6, 5))
    assert again.drop == state.drop != other.drop


def test_nothing_is_drawn_that_is_not_asked_for():
    state, _ = make_env().reset(jax.random.key(0))
    assert (
        state.drop is None
        and state.episode.cost_scale is None
        and state.episode.account.memory == ()
    )


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
        (dict(feature_dropout=1.0), "feature_dropout=1.0 is outside its range"),
        (dict(market_bars=1), "market_bars=1 is below"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        EnvConfig(**wrong)
