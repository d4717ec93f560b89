"""A frozen market in gymnax's form is the one in Gymnasium's, and gymnax's learners train on it."""

import importlib.util
import pickle

import pytest

if importlib.util.find_spec("gymnax") is None:
    pytest.skip("gymnax is not installed here", allow_module_level=True)

import gymnasium
import jax
import numpy as np
from gymnax.environments import spaces

from nca_trader.errors import ConfigError
from nca_trader.optimum.frozen import env_of
from nca_trader.optimum.gymnax import GymnaxEnv, MultiDiscrete, Params

# gymnax asks for an int64, which jax does not have by default.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")


def episode(env, actions):
    """Rows, observations, rewards and ends of `actions`, in one scan from the key 7."""
    seen, state = env.reset(jax.random.key(7))

    def step(state, action):
        seen, state, reward, done, info = env.step(jax.random.key(8), state, action)
        return state, (state.index, seen, reward, done, info["discount"])

    return seen, int(state.index), jax.lax.scan(step, state, actions)[1]


@pytest.mark.parametrize("name", ["ou_mid", "hidden", "garleanu_pedersen", "ring_hop3"])
def test_an_episode_is_the_one_of_gymnasium(name):
    env, theirs = GymnaxEnv(name), gymnasium.make(f"nca_trader/{name}-v1")
    theirs.action_space.seed(0)
    actions = np.stack([theirs.action_space.sample() for _ in range(1024)])
    first, start, (rows, seen, rewards, done, discount) = episode(env, actions)
    expected, _ = theirs.reset(options={"start": start})
    np.testing.assert_allclose(first, expected, atol=1e-6)
    for i, action in enumerate(actions):
        expected, reward, terminated, truncated, info = theirs.step(action)
        assert done[i] == (terminated or truncated) and (discount[i] == 0.0) == terminated
        assert abs(rewards[i] - reward) <= 1e-6
        if not done[i]:
            np.testing.assert_allclose(seen[i], expected, atol=1e-6)
            assert rows[i] == info["row"]
    # The last step shows the first observation of the next episode, which begins elsewhere.
    assert done[-1] and truncated and rows[-1] != info["row"]
    assert seen[-1][-1] == 1.0  # in cash


def test_spaces_are_those_of_gymnasium():
    kinds = {"ou_mid": spaces.Discrete, "garleanu_pedersen": spaces.Box, "ring_hop3": MultiDiscrete}
    for name, kind in kinds.items():
        env, theirs = GymnaxEnv(name), gymnasium.make(f"nca_trader/{name}-v1")
        space = env.action_space(env.default_params)
        assert type(space) is kind and space.shape == theirs.action_space.shape
        drawn = space.sample(jax.random.key(0))
        assert space.contains(drawn) and theirs.action_space.contains(np.asarray(drawn))
        assert env.observation_space(env.default_params).shape == theirs.observation_space.shape
        assert env.name == f"nca_trader/{name}-v1"
    assert [GymnaxEnv(name).num_actions for name in kinds] == [3, 1, 3]
    assert not MultiDiscrete(3, (2,)).contains(np.array([0, 3]))


def test_many_accounts_are_stepped_at_once():
    env = GymnaxEnv("ou_mid")
    keys = jax.random.split(jax.random.key(0), 8)
    seen, states = jax.vmap(env.reset)(keys)
    assert seen.shape == (8, 6) and len(set(states.index.tolist())) == 8
    actions = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    _, states, rewards, done, _ = jax.vmap(env.step)(keys, states, actions)
    held = states.episode.account.ordered[:, 0]
    assert held.tolist() == [-1, 0, 1, -1, 0, 1, -1, 0] and not done.any()
    assert (rewards[actions == 1] == 0.0).all() and (rewards[actions != 1] != 0.0).all()


def test_it_is_stored_by_name():
    env = GymnaxEnv("ou_mid", draw=3)
    stored = pickle.dumps(env)
    assert len(stored) < 200 and pickle.loads(stored) == env != GymnaxEnv("ou_mid")
    assert pickle.loads(stored).trading is env.trading is env_of(env.trading.config, 3)


def test_what_is_frozen_cannot_be_changed():
    env = GymnaxEnv("ou_mid")
    with pytest.raises(ConfigError, match="nca_trader/ou_mid-v1 is frozen: an episode has 1024"):
        env.reset(jax.random.key(0), Params(max_steps_in_episode=5))
    with pytest.raises(ConfigError, match="no frozen environment 'index_daily'"):
        GymnaxEnv("index_daily")


@pytest.mark.parametrize("name", ["ou_mid", "garleanu_pedersen"])
def test_rejax_trains_on_it(name):
    rejax = pytest.importorskip("rejax")
    agent = rejax.PPO.create(
        env=GymnaxEnv(name), num_envs=8, num_steps=64, num_minibatches=4,
        total_timesteps=2048, eval_freq=2048, normalize_observations=True,
    )  # fmt: skip
    with jax.numpy_rank_promotion("allow"):
        _, (lengths, returns) = jax.jit(agent.train)(jax.random.key(0))
    assert (lengths == 1024).all() and np.isfinite(returns).all()


def test_rejax_has_no_agent_for_several_assets():
    rejax = pytest.importorskip("rejax")
    with pytest.raises(AttributeError, match="'MultiDiscrete' object has no attribute 'low'"):
        rejax.PPO.create(env=GymnaxEnv("ring_hop3"))


@pytest.mark.parametrize("action", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_orders_nothing(action):
    env = GymnaxEnv("garleanu_pedersen")
    key = jax.random.key(7)
    _, state = env.reset(key)
    _, state, *_ = env.step(key, state, np.array([0.5], np.float32))
    seen, after, reward, *_ = env.step(key, state, np.array([action], np.float32))
    np.testing.assert_array_equal(after.episode.account.ordered, state.episode.account.ordered)
    assert np.isfinite(reward) and np.isfinite(seen).all()
