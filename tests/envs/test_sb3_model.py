"""How a model of Stable-Baselines3 is played, with stand-ins that have its interface."""

import json
import sys
import types
import zipfile

import numpy as np
import pytest
from drawn import random_bars

import nca_trader as nca
from nca_trader.envs.sb3_model import act_of, frames_of
from nca_trader.errors import ConfigError
from nca_trader.optimum.outside import entry

D = 6  # features of one bar, weight held, weight ordered, cash
# One network of what a model sees, written for the process of `prove` as well.
LIBRARY = '''
import json, zipfile
import numpy as np

class Space:
    def __init__(self, *shape):
        self.shape = shape
    def __str__(self):
        return "Discrete(3)"

class PPO:
    _last_obs = _last_original_obs = None
    num_timesteps, action_space = 300, Space()
    @classmethod
    def load(cls, path, device=None, env=None):
        model = cls()
        about = json.loads(zipfile.ZipFile(path).read("data"))
        model.observation_space = Space(about["observes"])
        for name in ("_last_obs", "_last_original_obs"):
            if about.get(name):
                setattr(model, name, np.asarray(about[name]))
        return model
    def predict(self, seen, state=None, episode_start=None, deterministic=False):
        assert deterministic and seen.shape[1:] == self.observation_space.shape
        weights = np.arange(1, seen.shape[1] + 1)
        state = np.where(episode_start, 0, 0 if state is None else state)
        return (np.abs(seen @ weights * 100).astype(int) + state) % 3, state + 1

class VecNormalize:
    """z = (x - 1) / 2, of so many numbers."""
    def __init__(self, size):
        self.observation_space = Space(size)
    def normalize_obs(self, seen):
        assert seen.shape[1:] == self.observation_space.shape
        return ((seen - 1.0) / 2.0).astype(np.float32)
__version__ = "0"
'''


def drawn(rows, seed=0):
    """`[rows, D]` float32 whose cash and weight held sum to 1."""
    seen = np.random.default_rng(seed).normal(size=(rows, D)).astype(np.float32)
    seen[:, 5] = 1.0 - seen[:, 3]
    return seen


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The stand-in as a module here, and as a package of the process."""
    (tmp_path / "stable_baselines3").mkdir()
    (tmp_path / "stable_baselines3" / "__init__.py").write_text(LIBRARY)
    (tmp_path / "torch.py").write_text("def set_num_threads(n): pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    space = types.ModuleType("stable_baselines3")
    exec(LIBRARY, vars(space))
    return space


def by_hand(steps, frames, kind):
    """What a model sees, decision by decision: frames of zeros before the first."""

    def z(x):
        return ((x - 1.0) / 2.0).astype(np.float32)

    rows = [z(x) if kind == "inside" else x for x in steps]
    rows = [np.zeros_like(rows[0])] * (frames - 1) + rows
    seen = [np.concatenate(rows[i : i + frames], axis=1) for i in range(len(steps))]
    return [z(x) if kind == "outside" else x for x in seen]


@pytest.mark.parametrize(
    ("frames", "kind"), [(1, ""), (3, ""), (1, "inside"), (3, "inside"), (3, "outside")]
)
def test_a_stack_and_statistics_in_either_order_are_those_of_the_formula(library, frames, kind):
    model = library.PPO()
    model.observation_space = library.Space(D * frames)
    normal = library.VecNormalize({"inside": D, "outside": D * frames}[kind]) if kind else None
    act, memory = act_of(model, D, frames, normal, ""), None
    steps = [drawn(4, bar) for bar in range(6)]
    state = np.zeros(4, int)
    for bar, seen in enumerate(by_hand(steps, frames, kind)):
        expected, state = model.predict(seen, state, np.full(4, bar == 0), deterministic=True)
        found, memory = act(steps[bar], memory)
        np.testing.assert_array_equal(found, expected)


def test_a_file_tells_a_stack_from_a_longer_window(library):
    model = library.PPO()
    model.observation_space = library.Space(2 * D)
    assert frames_of(model, D, 1) == 0  # it never saw anything
    model._last_obs = np.concatenate([drawn(3), drawn(3, 1)], axis=1)
    assert frames_of(model, D, 1) == 2
    model._last_obs[0, :D] = 0.0  # before an episode
    assert frames_of(model, D, 1) == 2
    model._last_obs = np.random.default_rng(0).normal(size=(3, 2 * D))  # three bars, one account
    assert frames_of(model, D, 1) == 0
    model._last_original_obs = drawn(3)  # normalised before it is stacked
    assert frames_of(model, D, 1) == 2
    for other in ((7,), (2, D), None):
        model.observation_space = types.SimpleNamespace(shape=other)
        assert frames_of(model, D, 1) == 0
    assert frames_of(object(), D, 1) == 1


@pytest.mark.parametrize("kind", ["", "outside"])
def test_prove_plays_a_file_as_the_formula(library, tmp_path, kind):
    frames, last = 3, drawn(2)
    about = {"policy_class": {"__module__": "stable_baselines3.common.policies"}, "n_epochs": 1}
    about |= {"observes": frames * D, "_last_obs": np.tile(last, (1, frames)).tolist()}
    if kind:
        about["_last_original_obs"] = np.tile(last, (1, frames)).tolist()
    files = [str(tmp_path / "model.zip")]
    with zipfile.ZipFile(files[0], "w") as archive:
        archive.writestr("data", json.dumps(about))
    if kind:
        size = frames * D
        with pytest.raises(ConfigError, match=r"give model\.zip,VECNORMALIZE\.pkl, which"):
            entry.Playing(entry.entry_of(files[0], True), "ou_mid", 1, D, 3)
        files.append(str(tmp_path / "normal.pkl"))
        # As pickle writes an object of the library.
        (tmp_path / "normal.pkl").write_bytes(b"cstable_baselines3\nVecNormalize\n(I%d\ntR." % size)
    model = library.PPO.load(files[0])
    state, steps = None, [drawn(4, bar) for bar in range(5)]
    with entry.Playing(entry.entry_of(",".join(files), True), "ou_mid", 1, D, 3) as playing:
        assert playing.facts["memory"] and playing.facts["observation"] == D
        for bar, seen in enumerate(by_hand(steps, frames, kind)):
            begins = np.full(4, bar == 0)
            expected, state = model.predict(seen, state, begins, deterministic=True)
            np.testing.assert_array_equal(playing.act(steps[bar], bar == 0)[:, 0], expected)


def test_prove_refuses_masks_with_the_remedy(tmp_path):
    about = {"policy_class": {"__module__": "sb3_contrib.common.maskable.policies"}}
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("data", json.dumps(about))
    with pytest.raises(ConfigError, match=r"hold the masks of its actions; give FILE\.py:NAME"):
        entry.Playing(entry.entry_of(tmp_path / "model.zip", True), "ou_mid", 1, D, 3)


@pytest.fixture
def targets_of(monkeypatch):
    """`targets_of`, with a stand-in for the library where it is not installed."""
    try:
        import stable_baselines3.common.vec_env  # noqa: F401
    except ImportError:
        names = "DummyVecEnv VecCheckNan VecEnv VecEnvWrapper VecFrameStack VecMonitor VecNormalize"
        fake = types.ModuleType("stable_baselines3.common.vec_env")
        vars(fake).update({name: type(name, (), {}) for name in names.split()})
        for name in ("stable_baselines3", "stable_baselines3.common"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        monkeypatch.delitem(sys.modules, "nca_trader.envs.sb3", raising=False)
    from nca_trader.envs.sb3 import targets_of

    yield targets_of
    if "names" in locals():  # it was imported with the stand-in
        sys.modules.pop("nca_trader.envs.sb3", None)


class Counts:
    """Long from its sixth decision on; its state is how many it has made."""

    observation_space = types.SimpleNamespace(shape=(4,))

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        seen = 0 if state is None or episode_start[0] else state
        assert observation.shape == (4,)
        return np.array(2 if seen >= 5 else 1), seen + 1


class Fixed:
    """As the docstring asks, and without a memory."""

    def predict(self, observation, deterministic):
        return int(2 + 0 * observation[0]), None


@pytest.mark.heavy
def test_a_model_keeps_its_state_through_an_episode(targets_of):
    bars = random_bars(np.random.default_rng(0), 90, 1)
    config = nca.EnvConfig(features=("return_1",))
    found = targets_of(Counts(), bars, config)[:, 0]
    known = found[~np.isnan(found)]
    np.testing.assert_array_equal(known, [0.0] * 5 + [1.0] * (len(known) - 5))
    held = targets_of(Fixed(), bars, config)[:, 0]
    assert (held[~np.isnan(found)] == 1.0).all()


def test_a_model_that_sees_something_else_is_refused_in_one_line(targets_of):
    bars = random_bars(np.random.default_rng(0), 90, 1)
    config, model = nca.EnvConfig(features=("return_1",)), Counts()
    model.observation_space = types.SimpleNamespace(shape=(7,))
    with pytest.raises(ConfigError, match="the environment shows 4 numbers; give the config and w"):
        targets_of(model, bars, config)
    model = Counts()
    model._last_original_obs = np.zeros((1, 4))
    with pytest.raises(ConfigError, match=r"VecNormalize.*; load it with its environment, Counts"):
        targets_of(model, bars, config)
