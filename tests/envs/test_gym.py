"""The Gymnasium face against `TradingEnv` itself, and the batch against single environments."""

import dataclasses
import gc
import subprocess
import sys
import warnings
import weakref

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from jax.extend.core import Primitive

from nca_trader.config import EnvConfig
from nca_trader.envs.gym import environment as adapter
from nca_trader.envs.gym.environment import split_observation
from nca_trader.envs.gym.packed import Packing, account_row, pack
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.types import Costs

COSTS = Costs(commission=5e-4, slippage=2e-4)
CONFIG = EnvConfig(features=("bollinger", "rsi"), costs=COSTS, episode_bars=6)
WARMUP, WINDOW = 19, 3
BARS = random_bars(np.random.default_rng(0), 60, 2, missing=0.1)


def make(bars=BARS, config=CONFIG, window=WINDOW, **given):
    made = gymnasium.make(adapter.ID, bars=bars, config=config, window=window, **given)
    return made.unwrapped


def make_vec(num_envs, bars=BARS, config=CONFIG, mode="vector_entry_point", **given):
    return gymnasium.make_vec(
        adapter.ID, num_envs, mode, bars=bars, config=config, window=WINDOW, **given
    )


@pytest.fixture(scope="module")
def env():
    """Kept for the whole module, so that every other of its kind shares its compiled steps."""
    return make()


def sampled(env, num, seed=0):
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(num)]


def same(one, other, where=""):
    """Asserts that two results of Gymnasium are equal in type and value; floats to rounding."""
    assert type(one) is type(other), where
    if isinstance(one, np.ndarray | np.generic) and one.dtype.kind == "M":
        # Gymnasium's own batch knows no array of dates.
        one, other = (np.asarray(x, "datetime64[ns]").astype(np.int64) for x in (one, other))
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}[{key}]")
    elif isinstance(one, tuple | list):
        for i, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}[{i}]")
    elif isinstance(one, np.ndarray) and one.dtype == object:
        assert one.shape == other.shape
        for i, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{where}[{i}]")
    elif one is not None:
        np.testing.assert_allclose(one, other, 1e-6, 1e-6, err_msg=where, strict=True)


@pytest.mark.heavy
def test_the_id_is_known_where_the_module_is_named():
    code = f"import gymnasium; gymnasium.make('nca_trader.envs.gym:{adapter.ID}', window=0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.stderr.strip().endswith("window=0 is below 1 bar; give at least 1.")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"actions": "orders", "short": False},
        {"actions": "weights", "feature_dropout": 0.2},
    ],
)
@pytest.mark.few(2)
def test_gymnasiums_own_check_is_clean(changes, env):
    config = dataclasses.replace(CONFIG, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(config=config, flatten="feature_dropout" not in changes))


@pytest.mark.parametrize("num_assets", [1, 2])
@pytest.mark.parametrize("actions", ["direction", "orders", "weights"])
@pytest.mark.parametrize("short", [True, False])
def test_the_spaces_are_those_of_the_spec(num_assets, actions, short):
    config = dataclasses.replace(CONFIG, actions=actions, short=short)
    spec = TradingEnv(BARS.select(*BARS.symbols[:num_assets]), config).spec
    space, size = adapter.action_space(spec), 1.0 / num_assets
    if actions == "weights":
        assert space == gymnasium.spaces.Box(-size if short else 0.0, size, (num_assets,))
    else:
        num = 3 if short or actions == "orders" else 2
        one, several = gymnasium.spaces.Discrete(num), gymnasium.spaces.MultiDiscrete([num] * 2)
        assert space == (one if num_assets == 1 else several)
    flat = adapter.observation_space(spec, 4, True)
    assert flat.shape == (4 * num_assets * 2 + 2 * num_assets + 1,)
    split = adapter.observation_space(spec, 4, False)
    assert split["window"].shape == (4, num_assets, 2) and split["account"].shape == (
        2 * num_assets + 1,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("feature_dropout", [0.0, 0.3])
def test_an_episode_is_the_trading_envs_own(env, feature_dropout):
    config = dataclasses.replace(CONFIG, feature_dropout=feature_dropout)
    env = make(config=config)
    inner = TradingEnv(BARS, config)
    observation, info = env.reset(seed=5)
    key = jax.random.fold_in(jax.random.wrap_key_data(env._seed), 0)
    state, timestep = jax.jit(inner.reset)(key)
    step = jax.jit(inner.step)
    for action in [*sampled(env, 6), None]:
        window = inner.window(timestep.observation, WINDOW)
        expected = [
            np.ravel(window),
            np.asarray(account_row(env.trading.spec, timestep.observation)),
        ]
        np.testing.assert_array_equal(observation[:-5], expected[0])
        np.testing.assert_allclose(observation[-5:], expected[1], rtol=0, atol=1e-6)
        row = int(timestep.observation.index)
        assert info["row"] == row and info["time"] == BARS.time[row]
        account = timestep.observation.account
        assert info["equity"] == pytest.approx(float(jnp.exp(account.log_equity)), rel=1e-6)
        np.testing.assert_array_equal(info["weights"], observation[-5:-3])
        if action is None:
            break
        observation, reward, terminated, truncated, info = env.step(action)
        state, timestep = step(state, jnp.asarray(action))
        assert reward == pytest.approx(float(timestep.reward), abs=1e-7)
        assert truncated is bool(timestep.truncated)
        assert terminated is False
    assert truncated


def test_early_windows_begin_with_zeros():
    config = dataclasses.replace(CONFIG, features=("day_of_week_sin",), episode_bars=50)
    env = make(config=config, window=20, flatten=False)
    observation, info = env.reset(seed=0, options={"start": 2})
    assert observation["window"].shape == (20, 2, 1) and info["row"] == 2
    assert not observation["window"][:17].any()
    np.testing.assert_array_equal(observation["window"][17:], env.trading.features[:3])


def test_a_dict_holds_what_the_flat_observation_holds(env):
    flat, split = env.reset(seed=1)[0], make(flatten=False).reset(seed=1)[0]
    np.testing.assert_array_equal(split["window"].ravel(), flat[:-5])
    np.testing.assert_array_equal(split["account"], flat[-5:])
    held, ordered, cash = split["account"][:2], split["account"][2:4], split["account"][4]
    assert cash == pytest.approx(1.0 - held.sum()) and set(ordered) <= {-0.5, 0.0, 0.5}


def test_the_same_seed_is_the_same_stream_of_episodes(env):
    def starts(env, seed, num=4):
        first = env.reset(seed=seed)
        return [first, *(env.reset() for _ in range(num - 1))]

    same(starts(env, 3), starts(make(), 3))
    rows = {tuple(info["row"] for _, info in starts(env, seed)) for seed in range(6)}
    assert len(rows) == 6
    assert len({info["row"] for _, info in starts(env, 0, 12)}) > 3


def test_a_seed_may_be_a_whole_number_of_numpys(env):
    one = env.reset(seed=1)[0]
    np.testing.assert_array_equal(env.reset(seed=np.int64(1))[0], one)
    batch = make_vec(2)
    two = batch.reset(seed=1)[0]
    for seeds in (np.int64(1), np.array([1, 2]), [np.uint8(1), 2]):
        np.testing.assert_array_equal(batch.reset(seed=seeds)[0], two)


def test_an_episode_starts_where_it_is_told_to(env):
    date = str(BARS.time[30].astype("datetime64[D]"))
    for start in (30, np.int64(30), date, BARS.time[30]):
        _, info = env.reset(seed=0, options={"start": start})
        assert info["row"] == 30 and info["equity"] == 1.0
        ends = [env.step(action)[3] for action in sampled(env, 6)]
        assert ends == [False] * 5 + [True]
    env.reset(options={"start": 57})
    assert [env.step(action)[3] for action in sampled(env, 2)] == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 18}, "start=18 is row 18, outside rows 19 .2020-01-20T00:00"),
        ({"start": 59}, "outside rows 19 .* to 58"),
        ({"start": "2030-01-01"}, "row 60, outside"),
        ({"start": "soon"}, 'start="soon" is not a date'),
        ({"begin": 20}, r"no option \['begin'\]; there is 'start'"),
    ],
)
def test_a_start_that_cannot_be_is_refused(env, options, message):
    with pytest.raises(ConfigError, match=message):
        env.reset(options=options)


def crash():
    """Bars that triple over the gap before row 40."""
    bars = random_bars(np.random.default_rng(0), 60, 1, spread=0.001)
    fields = {name: getattr(bars, name).copy() for name in ("open", "high", "low", "close")}
    for values in fields.values():
        values[40:] *= 3.0
    return dataclasses.replace(bars, **fields)


def test_ruin_terminates_and_the_end_of_the_data_truncates():
    config = dataclasses.replace(CONFIG, random_start=False, episode_bars=None)
    env = make(crash(), config)
    ends = {}
    for action in (0, 2):  # short, then long
        env.reset(seed=0, options={"start": 37})
        for step in range(1, 30):
            _, reward, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                ends[action] = (step, terminated, truncated)
                break
        with pytest.raises(ResetNeeded, match=r"call reset\(\)"):
            env.step(action)
        assert np.isfinite(reward)
        assert info["equity"] == pytest.approx(1e-3) if terminated else info["equity"] > 2.5
    assert ends == {0: (3, True, False), 2: (22, False, True)}


@pytest.mark.parametrize(
    ("actions", "bad"),
    [
        ("direction", [0, 3]),
        ("direction", [-1, 0]),
        ("direction", [0]),
        ("direction", [0.5, 1.0]),
        ("weights", [0.1, np.nan]),
        ("weights", [0.1, np.inf]),
        ("weights", [-np.inf, 0.1]),
        ("weights", 0.1),
    ],
)
def test_an_action_that_does_not_exist_is_refused(env, actions, bad):
    env = make(config=dataclasses.replace(CONFIG, actions=actions))
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=r"^action .* is not "):
        env.step(bad)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_in_a_batch(env, bad):
    batch = make_vec(2, config=dataclasses.replace(CONFIG, actions="weights"))
    batch.reset(seed=0)
    with pytest.raises(ConfigError, match="of finite numbers"):
        batch.step(np.array([[0.1, 0.1], [bad, 0.1]], np.float32))


MODES = {"NextStep": AutoresetMode.NEXT_STEP, "SameStep": AutoresetMode.SAME_STEP}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(("num_envs", "flatten"), [(1, True), (3, False)])
@pytest.mark.few(2)
def test_a_batch_is_single_environments_step_by_step(env, mode, num_envs, flatten):
    """Gymnasium's own batch of single environments is the reference, its infos included."""
    ours = make_vec(num_envs, autoreset_mode=mode, flatten=flatten)
    theirs = make_vec(
        num_envs, mode="sync", flatten=flatten, vector_kwargs={"autoreset_mode": MODES[mode]}
    )
    assert ours.metadata["autoreset_mode"] is MODES[mode]
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    same(ours.reset(seed=4), theirs.reset(seed=4))
    ended = 0
    for t, actions in enumerate(sampled(ours, 24)):
        if t == 10:  # in the midst of episodes, and without a seed
            same(ours.reset(), theirs.reset(), "second reset")
        if t == 13:  # from here on, episodes end at different steps
            options = [{"reset_mask": np.arange(num_envs) == 0} for _ in range(2)]
            same(*(e.reset(options=o) for e, o in zip((ours, theirs), options, strict=True)))
        one, other = ours.step(actions), theirs.step(actions)
        same(one, other, f"step {t}")
        ended += one[3].sum()
    assert ended >= 2 * num_envs


def test_episodes_that_are_reset_by_hand_are_gymnasiums_too(env):
    starts = {"seed": [1, None, 7], "options": {"start": 30}}
    ours = make_vec(3, autoreset_mode="Disabled")
    theirs = make_vec(3, mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED})
    first = {"seed": 9}
    same(ours.reset(**first), theirs.reset(**first))
    actions = sampled(ours, 20)
    for t in range(3):
        same(ours.step(actions[t]), theirs.step(actions[t]))
    mask = np.array([True, False, True])
    options = [{"start": 30, "reset_mask": mask} for _ in range(2)]
    same(
        ours.reset(seed=starts["seed"], options=options[0]),
        theirs.reset(seed=starts["seed"], options=options[1]),
    )
    for t in range(3, 6):
        same(ours.step(actions[t]), theirs.step(actions[t]))
    with pytest.raises(ResetNeeded, match=r"environments \[1\] are over"):
        ours.step(actions[6])
    with pytest.raises(ConfigError, match="reset_mask"):
        ours.reset(options={"reset_mask": np.zeros(3, bool)})


@pytest.mark.parametrize(("reward", "shown"), [("drawdown", 1), ("differential_sharpe", 2)])
def test_an_observation_ends_with_what_the_reward_remembers(reward, shown):
    env = make(config=dataclasses.replace(CONFIG, reward=reward))
    plain = make(config=CONFIG)
    observation, _ = env.reset(seed=3)
    before, _ = plain.reset(seed=3)
    assert len(observation) == len(before) + shown == env.observation_space.shape[0]
    np.testing.assert_array_equal(observation[-shown:], 0.0)
    deepest, equity = 0.0, [1.0]
    for action in sampled(env, 40):
        observation, _, _, truncated, info = env.step(action)
        account = split_observation(observation, env.trading.spec, WINDOW)["account"]
        assert account.shape == (5 + shown,)
        np.testing.assert_array_equal(info["weights"], account[:2])
        equity.append(info["equity"])
        if truncated:
            break
        below = np.log(max(equity) / equity[-1])
        if reward == "drawdown":
            deviation = np.sqrt(env.trading.spec.variance)
            assert observation[-1] == pytest.approx(np.log1p(below / deviation), abs=1e-4)
        deepest = max(deepest, below)
    assert deepest > 0.0 and (observation[-shown:] != 0.0).any()


@pytest.mark.heavy
def test_copies_share_one_kernel_and_the_last_one_frees_it():
    config = dataclasses.replace(CONFIG, ruin_floor=2e-3)
    one, other = make(config=config), make(dataclasses.replace(BARS), config)
    batch = make_vec(2, config=config)
    assert one.kernel is other.kernel and one.trading is batch.trading
    one.reset(seed=0)
    kernel, trading = weakref.ref(one.kernel), weakref.ref(one.trading)
    one.close()
    assert other.reset(seed=0) and kernel() is not None
    other.close()
    other.close()
    batch.close()
    for closed in (one, other):
        with pytest.raises(ClosedEnvironmentError):
            closed.reset()
    with pytest.raises(ClosedEnvironmentError):
        batch.reset()
    del one, other, batch, closed
    gc.collect()
    assert kernel() is None and trading() is None


def test_a_picture_shows_the_episode_and_nothing_else(env):
    drawn = make(render_mode="rgb_array")
    drawn.reset(seed=0)
    first = drawn.render()
    assert first.shape == (640, 960, 3) and first.dtype == np.uint8
    drawn.step(sampled(drawn, 1)[0])
    assert (drawn.render() != first).mean() > 0.001
    drawn.reset(seed=0)
    assert (drawn.render() == first).all()


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="render_mode='human' is not offered; take 'rgb_array'"):
        adapter.GymEnv(BARS, CONFIG, render_mode="human")
    with pytest.raises(ConfigError, match="a batch is not drawn"):
        make_vec(2, render_mode="rgb_array")
    with pytest.raises(ConfigError, match="window=0 is below 1"):
        make(window=0)


def test_words_come_back_bit_for_bit():
    rng = np.random.default_rng(0)
    tree = {
        "key": jax.random.key(7),
        "float": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32),
        "nan": jnp.array([jnp.nan, -0.0, 1e-40], jnp.float32),
        "small": jnp.array([-1, 2], jnp.int8),
        "bool": jnp.array([True, False]),
        "int": jnp.array(2**31 - 1, jnp.int32),
    }
    packing = Packing(jax.eval_shape(lambda: tree))
    words = jax.jit(pack)(tree)
    assert words.shape == (packing.size,) and words.dtype == jnp.uint32
    back = jax.jit(packing.unpack)(words)
    assert (jax.random.key_data(back.pop("key")) == jax.random.key_data(tree.pop("key"))).all()
    for name, value in tree.items():
        assert back[name].dtype == value.dtype
        assert np.asarray(back[name]).tobytes() == np.asarray(value).tobytes(), name


@pytest.mark.heavy
def test_a_step_of_a_batch_is_one_compiled_call(env, monkeypatch):
    ours = make_vec(4)
    ours.reset(seed=0)
    actions = sampled(ours, 12)
    for given in actions[:2]:
        ours.step(given)
    calls, eager, compiled = [], [], []
    inner, bind = ours._batch._step, Primitive.bind
    ours._batch._step = lambda *given: calls.append(1) or inner(*given)

    def bound(self, *given, **parameters):
        eager.append(self)
        return bind(self, *given, **parameters)

    def listen(name, *_, **__):
        compiled.append(name)

    monkeypatch.setattr(Primitive, "bind", bound)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for given in actions[2:]:  # episodes of 6 bars: some end and begin among them
            ours.step(given)
        assert len(calls) == 10 and not eager and not compiled
        ours._batch._step = lambda *given: jnp.sin(1.25) and inner(*given)
        ours.step(actions[0])  # what this test counts does count
        assert eager
    finally:
        jax.monitoring.clear_event_listeners()
