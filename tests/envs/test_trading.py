"""The environment against the float64 backtest of the same orders, and its boundaries."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars

from nca_trader import BarError, Costs, EnvConfig, TradingEnv
from nca_trader.envs import market
from nca_trader.envs.account.state import equity, log_return, open_account
from nca_trader.envs.trading import EnvState, Episode, Observation
from nca_trader.machine import Memory

COSTS = Costs(commission=5e-4, slippage=2e-4)
FEATURES = ("bollinger", "rsi")  # 19 bars of warm-up
WARMUP = 19


def make_env(bars=None, **changes):
    bars = random_bars(np.random.default_rng(0), 150, 2, missing=0.1) if bars is None else bars
    return TradingEnv(bars, EnvConfig(**{"features": FEATURES, "costs": COSTS, **changes}))


def state_at(env, index, last=None):
    """An episode that begins flat at row `index`."""
    episode = Episode(open_account(jnp.zeros(env.spec.num_assets)))
    last = len(env) - 1 if last is None else last
    return EnvState(jax.random.key(0), jnp.asarray(index), None, episode, jnp.asarray(last))


@pytest.fixture(scope="module")
def env():
    return make_env()


def test_features_that_memory_does_not_hold_are_refused_before_they_are_made(monkeypatch):
    need = 3 * 4 * 150 * 2 * 2  # copies, bytes, bars, assets, features
    for free, refused in ((need, False), (need - 1, True)):
        monkeypatch.setattr(market, "memory", lambda free=free: Memory(10**9, free))
        if not refused:
            make_env()
            continue
        with pytest.raises(BarError, match=r"2 features of 150 bars of 2 assets need .* are free"):
            make_env()


def test_a_step_sees_the_bar_after_the_one_it_was_decided_at(env):
    # One action at row 30, none after: only rows 31 and later may pay.
    step = jax.jit(env.step)
    state, timestep = step(state_at(env, 30), jnp.array([2, 0]))
    legs = env.market.legs
    # Bought half at the open of row 31 (short the same of the other), held to its close.
    assert bool(legs.present[31].all())
    intraday = np.asarray(legs.intraday[31], np.float64)
    s, f = COSTS.slippage, COSTS.commission
    cost = 0.5 * (s + f * (1 + s)) + 0.5 * (s + f * (1 - s))
    held = np.array([0.5, -0.5]) / (1 - cost)
    expected = math.log1p(-cost) + math.log1p(held @ intraday)
    assert timestep.reward == pytest.approx(expected, abs=1e-7)
    assert int(state.observation.index) == 31


def test_an_episode_ends_by_truncation_at_its_last_bar():
    env = make_env(episode_bars=5)
    step = jax.jit(env.step)
    state, first = jax.jit(env.reset)(jax.random.key(1))
    assert not first.truncated and first.discount == 1.0 and first.reward == 0.0
    ends = []
    for _ in range(5):
        state, timestep = step(state, jnp.array([2, 1]))
        assert timestep.discount == 1.0
        ends.append(bool(timestep.truncated))
    assert ends == [False] * 4 + [True]
    assert timestep.observation.index == first.observation.index + 5


def test_ruin_sets_the_discount_to_zero_and_is_no_truncation():
    bars = random_bars(np.random.default_rng(0), 60, 1, spread=0.001)
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    for name, values in fields.items():
        values[41 if name == "open" else 40 :] *= 3.0  # row 40 triples within its bar
        if name in ("high", "low"):
            values[40] = (fields["open"][40], fields["close"][40])[name == "high"]
    fields["low"] = np.minimum(fields["open"], fields["close"])
    env = make_env(dataclasses.replace(bars, **fields), size=1.0)
    step = jax.jit(env.step)
    for last in (58, 40):  # also where ruin and the episode's end fall together
        before, _ = step(state_at(env, 38, last), jnp.array([0]))
        state, timestep = step(before, jnp.array([0]))
        assert timestep.discount == 0.0 and not timestep.truncated
        account = state.observation.account
        assert bool(account.bankrupt) and equity(account) == pytest.approx(1e-3)
        assert timestep.reward == log_return(before.observation.account, account)
        assert timestep.reward < math.log(1e-3) + 0.1
    # Long, the same bar is the best that could happen.
    state, timestep = step(state_at(env, 39), jnp.array([2]))
    assert timestep.discount == 1.0 and timestep.reward > 1.0


def test_a_key_means_the_same_episode_and_other_keys_reach_every_start():
    env = make_env(episode_bars=100)
    reset = jax.jit(env.reset)
    (a, first), (b, _) = reset(jax.random.key(7)), reset(jax.random.key(7))
    jax.tree.map(
        np.testing.assert_array_equal, a._replace(key=first.reward), b._replace(key=first.reward)
    )
    assert (jax.random.key_data(a.key) == jax.random.key_data(b.key)).all()
    assert (jax.random.key_data(a.key) != jax.random.key_data(jax.random.key(7))).any()
    keys = jax.random.split(jax.random.key(0), 2000)
    states, _ = jax.jit(jax.vmap(env.reset))(keys)
    # From the end of the warm-up to the last bar that leaves a whole episode.
    assert set(np.asarray(states.observation.index)) == set(range(WARMUP, 150 - 100))
    assert (states.last == states.observation.index + 100).all()
    assert int(states.last.max()) == 149
    held = {tuple(np.sign(w)) for w in np.asarray(states.observation.account.weight)}
    assert len(held) == 9


def test_an_episode_longer_than_the_data_is_all_of_it(env):
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    assert int(state.observation.index) == WARMUP and int(state.last) == 149
    assert env.config.episode_bars is None


@pytest.mark.heavy
@pytest.mark.parametrize(("size", "max_gross"), [(None, 1.0), (1.0, 1.0), (0.8, None), (2.0, 3.0)])
@pytest.mark.parametrize("short", [True, False])
@pytest.mark.few(4)
def test_a_random_start_is_a_position_that_an_order_could_have_reached(size, max_gross, short):
    env = make_env(size=size, max_gross=max_gross, short=short)
    accounts = jax.vmap(env.begin)(jax.random.split(jax.random.key(0), 100)).account
    weights, ordered = np.asarray(accounts.weight), np.asarray(accounts.ordered)
    targets = np.float32(env.spec.targets)
    assert np.isin(ordered, targets).all() and len(np.unique(ordered, axis=0)) == len(targets) ** 2
    assert (np.sign(weights) == np.sign(ordered)).all()
    assert np.abs(weights).sum(1).max() <= (max_gross or np.inf) * (1 + 1e-6)
    assert (1.0 - weights.sum(1) >= -1e-6).all()  # no cash is borrowed
    assert (accounts.log_equity == 0.0).all() and not accounts.bankrupt.any()


def test_a_start_may_be_flat():
    env = make_env(random_start=False)
    accounts = jax.vmap(env.begin)(jax.random.split(jax.random.key(0), 20)).account
    assert (accounts.weight == 0).all() and (accounts.ordered == 0).all()


@pytest.mark.parametrize("length", [1, 7, 40])
def test_a_window_is_a_slice_that_ends_at_the_bar(env, length):
    account = open_account(jnp.zeros(2))
    for index in (length - 1, 50, len(env) - 1):
        window = env.window(Observation(jnp.asarray(index), account), length)
        np.testing.assert_array_equal(window, env.features[index - length + 1 : index + 1])
    early = env.window(Observation(jnp.asarray(3), account), 7)
    np.testing.assert_array_equal(early, np.vstack([np.zeros((3, 2, 2)), env.features[:4]]))


def test_too_few_bars_are_refused_in_one_line():
    bars = random_bars(np.random.default_rng(0), WARMUP + 2, 1)
    assert len(make_env(bars)) == WARMUP + 2
    with pytest.raises(BarError, match=r"^random: 20 bars, but the features need 19 .*; give more"):
        make_env(bars[: WARMUP + 1])


def test_steps_keep_every_type_and_trace_once(env):
    traces = []

    def counted(state, action):
        traces.append(1)
        return env.step(state, action)

    step, reset = jax.jit(counted), jax.jit(env.reset)
    state, timestep = reset(jax.random.key(0))
    types = jax.tree.map(jax.typeof, (state, timestep))
    for key in range(3):
        for action in ([0, 1], [2, 2]):
            state, timestep = step(state, jnp.array(action))
            assert jax.tree.map(jax.typeof, (state, timestep)) == types
        state, timestep = reset(jax.random.key(key))
    assert len(traces) == 1


def test_the_market_is_float32_and_its_returns_were_taken_in_float64(env):
    assert env.market.features.dtype == env.market.legs.overnight.dtype == jnp.float32
    bars = env.bars
    there = bars.present[1:]
    np.testing.assert_array_equal(
        np.asarray(env.market.legs.overnight)[1:][there],
        (bars.open[1:] / bars.close[:-1] - 1.0).astype(np.float32)[there],
    )
    assert not np.asarray(env.market.legs.intraday)[~bars.present].any()
