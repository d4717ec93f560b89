"""Models of Stable-Baselines3 and rejax as `prove` plays them, against the library's own answers.

A script trains them and writes down what they answer, with the Python that has the library: this
one, or that of `make bench-peers`.
"""

import os
import subprocess
import sys

import numpy as np
import pytest

import nca_trader as nca
from nca_trader.errors import ConfigError
from nca_trader.optimum.outside import entry, paths

SPACES = """
import sys
import numpy as np
SEEN = np.load("seen.npy")
LOW = np.float32(3e38)
"""
SB3 = (
    SPACES
    + """
import gymnasium
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

class Env(gymnasium.Env):
    observation_space = spaces.Box(-LOW, LOW, (6,), np.float32)
    def __init__(self, space):
        self.action_space, self.rng = space, np.random.default_rng(0)
    def reset(self, seed=None, options=None):
        self.count, self.seen = 0, np.zeros(6, np.float32)
        return self.seen, {}
    def step(self, action):
        self.count += 1
        reward = float(self.seen[0] * (np.sum(action) - 1))
        self.seen = self.rng.normal(2.0, 3.0, 6).astype(np.float32)
        self.seen[5] = 1.0 - self.seen[3]  # cash and the weight held
        return self.seen, reward, False, self.count > 20, {}

class Replay(Env):
    def __init__(self, path):
        super().__init__(space)
        self.path = path
    def reset(self, seed=None, options=None):
        self.count = 0
        return SEEN[0, self.path], {}
    def step(self, action):
        self.count += 1
        return SEEN[self.count, self.path], 0.0, False, False, {}

def normalised(env):
    if env.num_envs == 1:
        return VecNormalize(env)
    fixed = VecNormalize.load("normal.pkl", env)  # the judge: as it was saved
    fixed.training = False
    return fixed

WRAPS = {
    "normal": normalised,
    "stack": lambda env: VecFrameStack(env, 3),
    "inside": lambda env: VecFrameStack(normalised(env), 3),
    "outside": lambda env: normalised(VecFrameStack(env, 3)),
}
name, package, policy, discrete, wrap = sys.argv[1:]
module = __import__(package)
space = spaces.Discrete(3) if discrete == "1" else spaces.Box(-9.1, 9.1, (1,), np.float32)
env = WRAPS[wrap](DummyVecEnv([lambda: Env(space)]))
model = getattr(module, name)(policy, env, device="cpu", seed=0, learning_rate=1e-3)
model.learn(300)
model.save("model.zip")
if wrap != "stack":
    model.get_vec_normalize_env().save("normal.pkl")
judge = WRAPS[wrap](DummyVecEnv([lambda i=i: Replay(i) for i in range(SEEN.shape[1])]))
answers, state, begins, seen = [], None, np.ones(len(SEEN[0]), bool), judge.reset()
for bar in range(len(SEEN)):
    action, state = model.predict(seen, state, begins, deterministic=True)
    answers.append(action.reshape(len(seen), 1))
    if bar + 1 < len(SEEN):
        seen, _, begins, _ = judge.step(action)
np.save("answers.npy", answers)
"""
)
REJAX = (
    SPACES
    + """
import cloudpickle
import jax, rejax
from nca_trader.optimum.gymnax import GymnaxEnv

env = GymnaxEnv("ou_mid" if sys.argv[2] == "1" else "garleanu_pedersen")
options = dict(num_envs=4, num_steps=8, num_minibatches=2) if sys.argv[1] == "ppo" else {}
algo = rejax.get_algo(sys.argv[1]).create(
    env=env, total_timesteps=64, eval_freq=64, normalize_observations=True, **options
)
state = algo.init_state(jax.random.key(0))
if sys.argv[1] == "ppo":
    for _ in range(2):
        state = algo.train_iteration(state)
else:
    state = state.replace(replay_buffer=None)  # rejax cannot unpickle its own
with open("state.pkl", "wb") as file:
    cloudpickle.dump((algo, state), file)

def best(one):
    one = algo.normalize_obs(state.obs_rms_state, one)
    if sys.argv[1] == "td3":
        return algo.actor.apply(state.actor_ts.params, one[None])[0]
    found = algo.actor.apply(state.actor_ts.params, one[None], method="_action_dist")
    return found.logits[0].argmax() if sys.argv[2] == "1" else found.mean()[0].clip(-9.1, 9.1)

np.save("answers.npy", [[np.asarray(best(one)).reshape(1) for one in seen] for seen in SEEN])
"""
)


@pytest.fixture(scope="module")
def python_with(root):
    """The first Python that has a module."""

    def find(module):
        for python in (sys.executable, str(root / ".venv-peers/bin/python")):
            try:
                subprocess.run([python, "-c", f"import {module}"], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            return python
        pytest.skip(f"{module} is not installed here; `make bench-peers` installs it")

    return find


def played(tmp_path, python, script, words, files, choices):
    """What the library answers itself, and what its model answers in a process of its own."""
    seen = np.random.default_rng(1).normal(0.0, 2.0, (4, 32, 6)).astype(np.float32)
    np.save(tmp_path / "seen.npy", seen)
    train(python, script, words, tmp_path)
    names = ",".join(str(tmp_path / file) for file in files)
    agent = entry.entry_of(names, allow_code=True, python=python)
    assert agent is not None
    with entry.Playing(agent, "ou_mid", 1, 6, choices) as playing:
        found = [playing.act(one, bar == 0) for bar, one in enumerate(seen)]
        np.testing.assert_allclose(playing.act(seen[0], True), found[0], atol=1e-6)
    expected = np.load(tmp_path / "answers.npy")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(np.unique(np.round(found, 4))) > 1  # not one answer for all
    return playing.facts


def train(python, script, words, folder):
    """Runs a script that leaves the model and its answers in the folder."""
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [python, "-c", script, *words], check=True, cwd=folder, capture_output=True, env=one
    )


CONTRIB = "sb3_contrib"


@pytest.mark.parametrize(
    ("name", "package", "policy", "discrete", "wrap"),
    [
        ("PPO", "stable_baselines3", "MlpPolicy", 1, "normal"),
        ("PPO", "stable_baselines3", "MlpPolicy", 0, "normal"),
        ("A2C", "stable_baselines3", "MlpPolicy", 1, "normal"),
        ("DQN", "stable_baselines3", "MlpPolicy", 1, "normal"),
        ("SAC", "stable_baselines3", "MlpPolicy", 0, "normal"),
        ("TD3", "stable_baselines3", "MlpPolicy", 0, "normal"),
        ("RecurrentPPO", CONTRIB, "MlpLstmPolicy", 1, "normal"),
        ("QRDQN", CONTRIB, "MlpPolicy", 1, "normal"),
        ("TQC", CONTRIB, "MlpPolicy", 0, "normal"),
        ("PPO", "stable_baselines3", "MlpPolicy", 1, "stack"),
        ("PPO", "stable_baselines3", "MlpPolicy", 1, "inside"),
        ("DQN", "stable_baselines3", "MlpPolicy", 1, "outside"),
        ("RecurrentPPO", CONTRIB, "MlpLstmPolicy", 1, "inside"),
    ],
)
@pytest.mark.few(3)
def test_a_model_of_stable_baselines3_answers_as_it_does_itself(
    tmp_path, python_with, name, package, policy, discrete, wrap
):
    words, files = [name, package, policy, str(discrete), wrap], ["model.zip", "normal.pkl"]
    files = files[:1] if wrap == "stack" else files
    facts = played(tmp_path, python_with(package), SB3, words, files, 3 * discrete)
    assert (facts["name"], facts["library"], facts["observation"]) == (name, package, 6)
    assert facts["space"] == ("Discrete(3)" if discrete else "Box(-9.1, 9.1, (1,), float32)")
    assert facts["memory"] == (name == "RecurrentPPO" or wrap != "normal")
    assert facts["steps"] >= 300
    if wrap != "stack":
        agent = entry.entry_of(tmp_path / "model.zip", True, python_with(package))
        with pytest.raises(ConfigError, match=r"trained in a VecNormalize.*model\.zip,VECNORM"):
            entry.Playing(agent, "ou_mid", 1, 6, 3 * discrete)


@pytest.mark.parametrize(("name", "discrete"), [("ppo", 1), ("ppo", 0), ("td3", 0)])
@pytest.mark.few(1)
def test_a_state_of_rejax_answers_with_its_most_probable_action(
    tmp_path, python_with, name, discrete
):
    words, files = [name, str(discrete)], ["state.pkl"]
    facts = played(tmp_path, python_with("rejax"), REJAX, words, files, 3 * discrete)
    assert facts["greedy"] and facts["name"] == name.upper() and facts["observation"] == 6
    assert facts["space"] == ("Discrete(3)" if discrete else "Box(-9.1, 9.1, (1,), float32)")


def test_a_pair_that_a_library_cannot_do_is_not_applicable(tmp_path, python_with, monkeypatch):
    """SAC has weights only: a row for `ou_mid`, and the other market is played."""
    monkeypatch.setattr(paths, "CELLS", 2**15)
    python = python_with("stable_baselines3")
    np.save(tmp_path / "seen.npy", np.zeros((1, 2, 6), np.float32))
    words = ["SAC", "stable_baselines3", "MlpPolicy", "0", "normal"]
    train(python, SB3, words, tmp_path)
    model = f"{tmp_path}/model.zip,{tmp_path}/normal.pkl"
    markets = ["ou_mid", "garleanu_pedersen"]
    first, second = nca.prove(markets, model, allow_code=True, python=python)
    reason = "it acts in Box(-9.1, 9.1, (1,), float32), and the market has Discrete(3)"
    assert first.reason == reason and first.row()["complaint"] == f"n/a: {reason}"
    assert not second.reason and second.row()["entry"]["name"] == "SAC"
    with pytest.raises(ConfigError, match="acts in Box"):
        nca.prove(["ou_mid"], model, allow_code=True, python=python)
