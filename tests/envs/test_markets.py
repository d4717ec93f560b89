"""Markets whose optimum is known, run through `TradingEnv`: what is stated is what is earned."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known import make, market_of

from nca_trader import TradingEnv
from nca_trader.config import EnvConfig
from nca_trader.envs import load_env
from nca_trader.errors import ConfigError

MARKETS = {
    "ou_mid": ("ou", {}),
    "ou_log": ("ou", dict(cost=0.001)),
    "ou_expensive": ("ou", dict(cost=0.005)),
    "ar1": ("ar1", {}),
    "ar1_weak": ("ar1", dict(phi=0.1, cost=0.0005)),
    "markov": ("markov_drift", {}),
    "hidden": ("markov_drift", dict(hidden=True)),
    "garleanu_pedersen": ("garleanu_pedersen", {}),
    "sine": ("sine", {}),
    "martingale": ("martingale", {}),
    "kelly": ("kelly", {}),
    "merton": ("merton", dict(gamma=2.0)),
    "ring": ("ring", {}),
    "ring_hop3": ("ring", dict(hop=3)),
    "lagged_ar": ("lagged_ar", {}),
    "hidden_level": ("hidden_level", {}),
    "factor_panel": ("factor_panel", {}),
    "moving_volatility": ("moving_volatility", {}),
    "lead_lag": ("lead_lag", {}),
}
# At other parameters than the presets', so that nothing holds for the table alone.
OTHERS = {
    "ou simple": ("ou", dict(phi=0.9, sigma=0.02, cost=0.004, reward="simple")),
    "merton averse": ("merton", dict(gamma=3.0, mu=0.12, sigma=0.3)),
    "kelly tails": ("kelly", dict(p=0.4, move=0.1)),
    "small ring": ("ring", dict(assets=5, hop=2, beta=-0.5)),
    "quick predictor": ("garleanu_pedersen", dict(phi_mr=0.4, lambda_cost=3.0)),
    "restless drift": ("markov_drift", dict(stay=0.9, mu=0.004)),
    "short memory": ("lagged_ar", dict(lag=2, phi=-0.4)),
    "two of a panel": ("factor_panel", dict(assets=2, gross=1.2, cost=0.001, own_stay=0.6)),
    "log utility": ("moving_volatility", dict(gamma=1.0, low=0.3, high=0.1, mu=0.02)),
    "quick level": ("hidden_level", dict(phi=0.9, spread=0.008, cost=0.002)),
    "late followers": ("lead_lag", dict(assets=5, delay=6, graph=9, beta=-0.5)),
}
BARS = 20_000


def rewards_of(task, policy):
    """What `policy(state, position)` earns in the environment, flat at the start, bar by bar."""
    config = dataclasses.replace(task.config, random_start=False)
    env = TradingEnv(task, config)
    spec = env.spec
    states = jnp.asarray(task.states, jnp.float32)

    def step(state, _):
        position = state.episode.account.ordered
        target = policy(states[state.index], position)
        action = target
        if spec.actions == "direction":  # an index into (-size, 0, size)
            # Of a vector that a limit scales down, the signs are what is chosen.
            action = jnp.sign(target).astype(jnp.int32) + len(spec.targets) - 2
        state, timestep = env.step(state, action)
        return state, (timestep.reward, timestep.discount)

    state, _ = env.reset(jax.random.key(0))
    assert int(state.index) == spec.warmup
    length = len(env) - 1 - spec.warmup
    scan = jax.jit(lambda s: jax.lax.scan(step, s, None, length=length)[1])
    reward, discount = (np.asarray(x, np.float64) for x in scan(state))
    assert (discount == 1.0).all()
    return reward


def standard_error(x):
    """Of a mean of dependent values: means of 100 blocks."""
    blocks = x[: len(x) // 100 * 100].reshape(100, -1).mean(1)
    return blocks.std(ddof=1) / 10


@pytest.mark.parametrize("name", [*MARKETS, *OTHERS])
@pytest.mark.few(2)
def test_the_optimal_policy_earns_its_stated_value_in_the_environment(name):
    market, given = (MARKETS | OTHERS)[name]
    task = make(market, num_bars=BARS, seed=11, **given)
    reward = rewards_of(task, task.optimal_policy)
    if task.expected_return is not None:
        # The noise of the returns, which no position earns anything on, is known and taken out.
        expected = np.asarray(task.expected_return(task.states[:-1]), np.float64)
        held = positions(task, task.optimal_policy)[:-1]
        noise = (held * (task.returns[1:] - expected)).sum(-1)[-len(reward) :]
        reward = reward - noise
    error = standard_error(reward)
    value = task.score_reward(reward.mean())  # for some a logarithm of a mean, so its slope counts
    error *= abs(task.score_reward(reward.mean() + 1e-6) - value) / 1e-6
    assert value == pytest.approx(task.optimum, abs=3 * error + 2e-7)
    # It is no empty statement: three errors are a fraction of what is to be earned.
    if task.optimum:
        assert 3 * error < 0.5 * abs(task.optimum)


def positions(task, policy):
    """`[N, A]` in float64, from flat."""
    step = jax.jit(lambda p, s: (policy(s, p),) * 2)
    with jax.enable_x64(True):
        start = jnp.zeros(task.returns.shape[1])
        return np.asarray(jax.lax.scan(step, start, jnp.asarray(task.states))[1])


@pytest.mark.parametrize(
    "name",
    ["ou_mid", "ar1", "kelly", "merton", "ring", "garleanu_pedersen", "hidden_level",
    "factor_panel", "moving_volatility", "lead_lag"],
)  # fmt: skip
@pytest.mark.few(2)
def test_rewards_in_the_environment_are_those_of_the_market(name):
    """Step by step, to rounding: `Task.rewards` is the market's own account of it."""
    market, given = MARKETS[name]
    task = make(market, num_bars=300, seed=2, **given)
    reward = rewards_of(task, task.optimal_policy)
    pay = task.rewards(positions(task, task.optimal_policy))
    if name == "merton":  # whose pay is wealth^(1 - gamma), and gamma 2
        pay = (pay - 1.0) / (1.0 - 2.0)
    gap = len(pay) - len(reward)  # features that warm up
    scale = np.abs(pay).mean()
    np.testing.assert_allclose(reward[1:], pay[gap + 1 :], atol=2e-5 * scale + 2e-7)


@pytest.mark.parametrize("name", MARKETS)
@pytest.mark.few(6)
def test_a_preset_is_its_market(name):
    market, given = MARKETS[name]
    expected = market_of(market, **given).config
    config = load_env(name)
    # The state is the answer: returns alone.
    if name in ("hidden", "lagged_ar", "hidden_level", "moving_volatility", "lead_lag"):
        assert config.features and not config.market_state
        config = dataclasses.replace(config, features=(), market_state=True)
    assert config == expected


def test_a_preset_draws_its_own_bars():
    env = TradingEnv(None, dataclasses.replace(load_env("ring_hop3"), market_bars=300))
    assert len(env) == 300 and env.spec.symbols[3] == "RING3"
    assert env.spec.features == ("state:own_return",) and env.features.shape == (300, 16, 1)
    # Each asset sees its own return alone, as a standard number.
    own = env.features[:, 3, 0]
    ours = env.task.returns[:, 3]
    assert np.corrcoef(own, ours)[0, 1] > 1 - 1e-6 and 0.8 < own.std() < 1.2


@pytest.mark.parametrize(
    ("name", "given", "mean", "deviation"),
    [
        ("ou", dict(phi=0.999, cost=0.0), 0.0, 0.01 / math.sqrt(1 - 0.999**2)),
        ("ar1", dict(phi=-0.6), 0.0, 0.01 / 0.8),
        ("markov_drift", {}, 0.0, 1.0),
        ("sine", dict(period=5), 2.0, math.sqrt(2.0)),
        ("garleanu_pedersen", {}, 0.0, 0.0005 / math.sqrt(1 - 0.9**2)),
        ("ring", dict(assets=3), 0.0, 0.01 / math.sqrt(1 - 0.3**2)),
        ("lagged_ar", dict(lag=3), 0.0, 0.01 / math.sqrt(1 - 0.3**2)),
    ],
)
@pytest.mark.slow
def test_a_state_is_shown_by_its_moments_in_the_long_run(name, given, mean, deviation):
    """Two paths show the same state as the same number; another draw's moments differ by draw."""
    one, two = (make(name, num_bars=400, seed=s, **given) for s in (1, 2))
    for task in (one, two):
        shown = task.signals.reshape(400, -1)[:, : task.states.shape[1]]
        np.testing.assert_allclose(shown, (task.states - mean) / deviation, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "given", "level", "error"),
    [
        ("markov_drift", dict(hidden=True), 0.5, 0.01),
        ("markov_drift", dict(hidden=True, stay=0.1, mu=-0.006), 0.5, 0.005),
        ("hidden_level", {}, 0.0, 0.01),
        ("hidden_level", dict(phi=0.8, spread=0.02), 0.0, 0.005),
    ],
)
@pytest.mark.few(1)
def test_moments_that_are_solved_for_are_those_of_many_draws(name, given, level, error):
    market = market_of(name, **given)
    keys = jax.random.split(jax.random.key(3), 400)
    draws = jax.vmap(lambda key: market.generate(key, 1_500).states)(keys)
    states = np.asarray(draws, np.float64)[:, 500:, 0]  # a hidden drift's belief begins at 1 / 2
    (mean,), (deviation,) = market.moments
    assert mean == level
    per_path = states.mean(1)
    assert states.mean() == pytest.approx(mean, abs=4 * per_path.std() / 20 + 1e-12)
    assert states.std() == pytest.approx(deviation, rel=3 * error)


@pytest.mark.parametrize(
    ("market", "says"),
    [
        ("", "names no market; give a bar file"),
        ("ou(", "is not a market; write a name and its parameters"),
        ("ou(phi=)", "is not a market"),
        ("uo(phi=0.9)", "did you mean 'ou'"),
        ("ou(phy=0.9)", "did you mean 'phi'"),
        ("ou(phi=2.0)", "phi=2.0 is outside"),
    ],
)
def test_a_market_that_cannot_be_drawn_is_refused(market, says):
    with pytest.raises(ConfigError, match=says):
        TradingEnv(None, EnvConfig(market=market))


def test_bars_alone_do_not_hold_the_state_that_a_preset_observes():
    task = make("ou", num_bars=300)
    with pytest.raises(ConfigError, match="observes the state of the market"):
        TradingEnv(task.bars, task.config)
    config = dataclasses.replace(task.config, market_state=False, features=("bollinger",))
    assert TradingEnv(task.bars, config).spec.features == ("bollinger",)


def test_the_best_is_better_than_what_a_beginner_would_do():
    task = make("ou", num_bars=BARS, seed=5, cost=0.005)
    sign = rewards_of(task, lambda state, position: -jnp.sign(state[:1]))
    best = rewards_of(task, task.optimal_policy)
    assert best.mean() > 2 * sign.mean() + 0.0002
    assert math.isclose(best.mean(), task.optimum, rel_tol=0.3)
