"""The form of Stable-Baselines3 is the vector environment, and its PPO learns from it."""

import importlib.util

import pytest

if importlib.util.find_spec("stable_baselines3") is None:
    pytest.skip("stable-baselines3 is not installed here", allow_module_level=True)

import dataclasses

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

import nca_trader as nca
from nca_trader.envs.gym.environment import ID, GymEnv
from nca_trader.envs.sb3 import SB3VecEnv, targets_of
from nca_trader.errors import ConfigError

CONFIG = dataclasses.replace(nca.load_env("index_daily"), episode_bars=5)


@pytest.fixture(scope="module")
def bars():
    return nca.sample_bars("sp500").select("SP500")


def test_it_is_stable_baselines3s_own_vector_environment_step_by_step(bars):
    """Their `DummyVecEnv`, with their monitor, over as many single environments."""
    ours = SB3VecEnv(3, bars, CONFIG, window=2)
    theirs = make_vec_env(ID, 3, env_kwargs={"bars": bars, "config": CONFIG, "window": 2})
    ours.seed(4), theirs.seed(4)
    np.testing.assert_allclose(ours.reset(), theirs.reset(), atol=1e-6)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(12):
        actions = rng.integers(0, ours.action_space.n, 3)
        found, expected = ours.step(actions), theirs.step(actions)
        for a, b in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
            assert a.dtype == b.dtype and a.shape == b.shape
        for one, other in zip(found[3], expected[3], strict=True):
            assert ("terminal_observation" in one) == ("terminal_observation" in other)
            if "terminal_observation" not in one:
                continue
            ended += 1
            np.testing.assert_allclose(
                one["terminal_observation"], other["terminal_observation"], atol=1e-6
            )
            assert one["TimeLimit.truncated"] == other["TimeLimit.truncated"]
            assert one["episode"]["l"] == other["episode"]["l"] == 5
            assert one["episode"]["r"] == pytest.approx(other["episode"]["r"], abs=1e-5)
    assert ended == 6


def test_its_ppo_trains_on_it_and_logs_the_episodes(bars):
    agent = PPO("MlpPolicy", SB3VecEnv(8, bars, CONFIG), n_steps=16, batch_size=64, device="cpu")
    agent.learn(256)
    assert len(agent.ep_info_buffer) >= 8 * 3
    assert all(episode["l"] == 5 for episode in agent.ep_info_buffer)


def test_what_a_batch_cannot_do_is_refused(bars):
    env = SB3VecEnv(2, bars, CONFIG)
    assert env.get_attr("window") == [1, 1] and env.env_is_wrapped(object, [0]) == [False]
    with pytest.raises(ConfigError, match="in one environment of a batch"):
        env.set_attr("window", 3)
    with pytest.raises(ConfigError, match="make_vec_env"):
        env.env_method("reset")


def test_a_model_sees_what_it_was_trained_to_see(bars, tmp_path):
    """The statistics of `VecNormalize` are applied, as the model's own environment would."""
    made = VecNormalize(SB3VecEnv(2, bars[:400], CONFIG))
    made.obs_rms.mean, made.obs_rms.var = made.obs_rms.mean + 0.3, made.obs_rms.var * 4.0
    model = PPO("MlpPolicy", made, n_steps=8, batch_size=16, seed=0)
    found = targets_of(model, bars[:400], CONFIG)

    class Within:
        """The same network, that normalises by itself."""

        def predict(self, seen, deterministic):
            z = (seen - made.obs_rms.mean) / np.sqrt(made.obs_rms.var + made.epsilon)
            return model.predict(np.clip(z, -10, 10).astype(np.float32), deterministic=True)

    np.testing.assert_array_equal(found, targets_of(Within(), bars[:400], CONFIG))


WRAPS = {
    "none": lambda env: env,
    "stack": lambda env: VecFrameStack(env, 3),
    "inside": lambda env: VecFrameStack(VecNormalize(env), 3),
    "outside": lambda env: VecNormalize(VecFrameStack(env, 3)),
}


def odd_rows(env):
    """A mask that moves: of long at each third row, of short at each other."""
    row = int(np.asarray(env.unwrapped._words)[0])
    return np.array([row % 2 == 1, True, row % 3 != 0])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "wrap"),
    [("PPO", "stack"), ("PPO", "inside"), ("PPO", "outside"),
     ("RecurrentPPO", "none"), ("RecurrentPPO", "inside"), ("MaskablePPO", "outside")],
)  # fmt: skip
def test_a_model_decides_as_in_the_librarys_own_loop(bars, name, wrap):
    """Its state, its stack, its statistics in either order, and its masks."""
    library = pytest.importorskip("sb3_contrib") if name != "PPO" else None
    bars, config = bars[:230], dataclasses.replace(CONFIG, short=True, random_start=False)
    config = dataclasses.replace(config, episode_bars=None)

    def make():
        env = GymEnv(bars, config)
        if name != "MaskablePPO":
            return env
        return library.common.wrappers.ActionMasker(env, odd_rows)

    env = WRAPS[wrap](DummyVecEnv([make]))
    policy = "MlpLstmPolicy" if name == "RecurrentPPO" else "MlpPolicy"
    made = PPO if library is None else getattr(library, name)
    model = made(policy, env, n_steps=32, batch_size=32, learning_rate=3e-3, seed=0, device="cpu")
    model.learn(96)
    found = targets_of(model, bars, config)[:, 0]
    if (normal := model.get_vec_normalize_env()) is not None:
        normal.training = False
    trading = env.unwrapped.envs[0].unwrapped.trading
    env.set_options({"start": trading.spec.warmup})
    seen, state, begins, row = env.reset(), None, np.ones(1, bool), trading.spec.warmup
    env.set_options()
    expected = np.full(len(bars), np.nan)
    while np.isnan(expected).any() and (row == trading.spec.warmup or not begins[0]):
        masks = {"action_masks": odd_rows(env.unwrapped.envs[0])} if "Mask" in name else {}
        action, state = model.predict(seen, state, begins, deterministic=True, **masks)
        expected[row] = action[0] - 1.0
        seen, _, begins, (info,) = env.step(action)
        row = info["row"]
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found[np.isfinite(found)])) > 1


def test_a_wrapper_that_changes_what_a_model_sees_is_refused(bars):
    doubled = gymnasium.wrappers.TransformObservation(
        GymEnv(bars[:200], CONFIG), lambda seen: 2.0 * seen, None
    )
    model = PPO("MlpPolicy", doubled, n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(ConfigError, match="TransformObservation of its environment is not played"):
        targets_of(model, bars[:200], CONFIG)


def test_a_frozen_market_is_one_line():
    env = SB3VecEnv(4, "nca_trader/ou_mid-v1", draw=2)
    assert env.envs.trading.task.seed == 2 and env.num_envs == 4
    agent = PPO("MlpPolicy", env, n_steps=16, batch_size=64, device="cpu").learn(64)
    assert agent.num_timesteps == 64
    for given in ({"window": 5}, {"autoreset_mode": "NextStep"}):
        with pytest.raises((ConfigError, TypeError), match=next(iter(given))):
            SB3VecEnv(4, "nca_trader/ou_mid-v1", **given)
    with pytest.raises(ConfigError, match="is frozen and takes no config, window;"):
        SB3VecEnv(4, "nca_trader/ou_mid-v1", "index_daily", 5)


@pytest.mark.parametrize("name", ["ou_mid", "garleanu_pedersen", "ring_hop3"])
@pytest.mark.filterwarnings("ignore:.*symmetric and normalized:UserWarning")
def test_its_own_check_of_each_kind_of_actions_is_clean(name):
    check_env(gymnasium.make(f"nca_trader/{name}-v1"))
