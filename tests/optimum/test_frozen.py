"""Frozen environments: what their digests fix, and that they pay what their market pays."""

import dataclasses
import functools
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

import nca_trader as nca
from nca_trader.config import toml
from nca_trader.config.toml import preset_folder
from nca_trader.data import features
from nca_trader.data.feature_sets import feature_set
from nca_trader.envs import FROZEN
from nca_trader.envs.gym.packed import observed
from nca_trader.errors import ConfigError, StateError
from nca_trader.markets import market_of
from nca_trader.optimum import frozen as frozen_markets
from nca_trader.optimum.frozen import digest_of, frozen
from nca_trader.optimum.prove import BARS

ONE_OF_EACH = ("garleanu_pedersen", "ou_mid", "ring_hop3")  # Box, Discrete, MultiDiscrete
# All that `nca_trader/ou_mid-v1` fixes, written by hand.
OU_MID = {
    "id": "nca_trader/ou_mid-v1", "window": 1, "episode_bars": 1024, "market_bars": 262144,
    "market": 'ou(phi=0.95, sigma=0.01, cost=0.002, reward="log")', "market_state": False,
    "features": ["return_1", "price_level", "volume_level"], "feature_dropout": 0.0,
    "sessions": "every_day", "random_start": False, "random_costs": None,
    "actions": "direction", "short": True, "size": 1.0, "fill": "close", "order": "on_change",
    "reward": "pnl", "pnl_returns": "log", "risk_aversion": 0.0, "quadratic_cost": 0.0,
    "drawdown_penalty": 0.01, "sharpe_decay": 0.01, "max_gross": None, "max_net": None,
    "borrow": True, "maintenance_margin": None, "capital": None, "lot": 0.0, "tick": 0.0,
    "min_notional": 0.0, "max_participation": None, "delist_after": None, "delist_haircut": 0.0,
    "sizing": "fixed", "volatility_target": 0.15, "volatility_span": 60, "volatility_floor": 0.01,
    "size_cap": 1.0, "dead_band": 0.0, "ruin_floor": 1e-300,
    "costs.commission": 0.002, "costs.slippage": 0.0, "costs.half_spread": 0.0,
    "costs.impact": 0.0, "costs.fixed_fee": 0.0, "costs.borrow_fee": 0.0,
    "costs.interest_lend": 0.0, "costs.interest_borrow": 0.0, "costs.funding": 0.0,
    "costs.liquidation_fee": 0.0, "costs.own": None, "costs.own_scale": None,
}  # fmt: skip


def sha(facts):
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", FROZEN)
def test_every_id_has_its_digest_in_its_spec(name):
    found = frozen(name)
    spec = gymnasium.spec(found.id)
    assert spec.kwargs == {"market": name, "digest": found.digest}
    assert found == frozen(found.id) and found.id == f"nca_trader/{name}-v1"
    assert EnvSpec.from_json(spec.to_json()).kwargs == spec.kwargs
    # The environment ends the episode itself.
    assert spec.max_episode_steps is None and found.config.episode_bars == 1024
    # Every parameter stands in the preset, so that a default that changes does not change it.
    assert found.config.market == market_of(found.config).config.market


def test_every_market_that_is_proven_is_frozen():
    assert list(FROZEN) == list(BARS)


def test_a_digest_is_of_all_that_a_version_fixes(monkeypatch):
    found = frozen("ou_mid")
    assert found.digest == sha(OU_MID)
    added = (*frozen_markets.ADDED, "dead_band", "costs.commission")
    monkeypatch.setattr(frozen_markets, "ADDED", added)
    without = {name: value for name, value in OU_MID.items() if name != "dead_band"}
    assert digest_of("ou_mid", found.config) == sha(without)


def test_an_edited_preset_is_refused(monkeypatch, tmp_path):
    shutil.copytree(preset_folder("envs"), tmp_path / "envs")
    file = tmp_path / "envs" / "ou_mid.toml"
    file.write_text(file.read_text().replace("commission = 0.002", "commission = 0.001"))
    monkeypatch.setattr(toml, "preset_folder", lambda folder: tmp_path / folder)
    with pytest.raises(ConfigError, match=r"^envs/ou_mid.toml was edited: .*; restore the file"):
        gymnasium.make("nca_trader/ou_mid-v1")
    frozen("ou_log")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"window": 5}, "nca_trader/ou_mid-v1 is frozen and takes no window;"),
        ({"bars": "sp500", "config": "hidden"}, "takes no bars, config;"),
        ({"market": "hidden"}, "nca_trader/hidden-v1 has the digest"),
        ({"digest": "0" * 64}, "the spec 000000000000"),
        ({"draw": -1}, "draw=-1"),
        ({"draw": "a"}, "draw is the text 'a'; give a whole number"),
        ({"draw": None}, "draw is a NoneType; give a whole number"),
        ({"market": ["ou_mid", "hidden"]}, "no frozen environment"),
        pytest.param({"render_mode": "ansi"}, "render_mode=.ansi.", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode:UserWarning")
def test_no_keyword_changes_what_is_frozen(given, says):
    with pytest.raises(ConfigError, match=says) as error:
        gymnasium.make("nca_trader/ou_mid-v1", **given)
    assert len(str(error.value).splitlines()) == 1
    if "draw" in given or "render_mode" in given:
        return
    with pytest.raises(ConfigError, match=says):
        gymnasium.make_vec("nca_trader/ou_mid-v1", 2, **given)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FROZEN)
def test_an_id_does_what_its_version_did(name, pytestconfig):
    """Observations and rewards of a fixed seed, on every supported jax; 17 ids are 30 s."""
    stored = json.loads(frozen_markets.STORED.read_text())
    if pytestconfig.getoption("--rewrite-golden") and name not in stored:
        short = jax.tree.map(lambda x: float(f"{x:.9g}"), frozen_markets.trajectory(name))
        stored[name] = short
        lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in stored.items())
        frozen_markets.STORED.write_text(f"{{\n{lines}\n}}\n")
    frozen_markets.verify.cache_clear()
    frozen_markets.verify(name)
    # It says something: no observation stays as it is, and some orders cost or earn.
    seen = np.array(stored[name]["observations"])
    assert np.ptp(seen, axis=0).max() > 0.01 and np.ptp(stored[name]["rewards"]) > 0.0


def forget():
    for cached in (feature_set, frozen_markets.env_of, frozen_markets.verify):
        cached.cache_clear()


def test_a_constant_of_a_feature_that_changed_is_refused(monkeypatch):
    """What the digest cannot see: it is of settings alone."""
    span = features.level(lambda bar: bar.close, lambda bar: bar.present, span=4095)
    monkeypatch.setitem(features.FEATURES.builtin, "price_level", span)
    forget()
    made = gymnasium.make("nca_trader/ou_mid-v1")
    with pytest.raises(
        ConfigError, match=r"ou_mid-v1 is no longer what .*: observation 8, number 1 is"
    ):
        made.reset()
    monkeypatch.undo()
    forget()
    made.reset()


@pytest.mark.parametrize("steps", [None, 3])
def test_an_id_pickles_with_its_episode(steps):
    """A worker goes on with the same episode; one that is not begun is not drawn for it."""
    one = gymnasium.make("nca_trader/ou_mid-v1", draw=0)
    many = gymnasium.make_vec("nca_trader/ou_mid-v1", 2)
    if steps:
        one.reset(seed=4), many.reset(seed=4)
        for _ in range(steps):
            one.step(2), many.step(np.array([2, 0]))
    data = [pickle.dumps(env) for env in (one, many)]
    assert max(map(len, data)) < 20_000
    other, others = map(pickle.loads, data)
    if not steps:
        one.reset(seed=4), many.reset(seed=4), other.reset(seed=4), others.reset(seed=4)
    for action in (0, 1):
        np.testing.assert_equal(other.step(action), one.step(action))
        np.testing.assert_equal(
            others.step(np.array([action, 1])), many.step(np.array([action, 1]))
        )
    np.testing.assert_equal(other.reset(), one.reset())
    np.testing.assert_equal(others.reset(), many.reset())


def test_an_environment_whose_file_changed_does_not_go_on(tmp_path):
    file, bars = tmp_path / "bars.csv", nca.sample_bars("sp500").select("SP500")[-300:]
    nca.write_bars(bars, file)
    one = gymnasium.make("nca_trader/Trading-v0", bars=str(file))
    many = gymnasium.make_vec("nca_trader/Trading-v0", 2, bars=str(file))
    one.reset(seed=1), many.reset(seed=1)
    kept = [pickle.dumps(env) for env in (one, many)]
    for data, env, action in zip(kept, (one, many), (1, np.array([1, 0])), strict=True):
        np.testing.assert_equal(pickle.loads(data).step(action), env.step(action))
    nca.write_bars(bars[:-1], file)
    for data, action in zip(kept, (1, np.array([1, 0])), strict=True):
        with pytest.raises(StateError, match=r"bars.csv changed since this environment was pick"):
            pickle.loads(data).step(action)


def test_float64_everywhere_is_refused():
    """The words of a step are of 32 bits; a step of 64 was read wrongly."""
    with jax.enable_x64(True), pytest.raises(ConfigError, match="unset JAX_ENABLE_X64"):
        gymnasium.make("nca_trader/Trading-v0", config="ou_mid")


ASYNC = """
import gymnasium, nca_trader
many = gymnasium.make_vec("nca_trader/ou_mid-v1", 2, vectorization_mode="async")
print(many.reset(seed=0)[0].tolist())
many.close()
alone = gymnasium.make("nca_trader/ou_mid-v1")
print(alone.reset(seed=0)[0].tolist())
import warnings
warnings.simplefilter("ignore")
try:
    gymnasium.make_vec(
        "nca_trader/ou_mid-v1", 2, vectorization_mode="async", vector_kwargs={"context": "fork"}
    ).reset()
except nca_trader.StateError as error:
    print(error)
"""


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_processes_of_gymnasium_step_an_id_without_a_warning():
    """They are forked by default, and a fork of a process in which JAX runs waits for ever."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-W", "error::UserWarning"]
    found = subprocess.run(
        [*command, "-c", ASYNC], capture_output=True, text=True, timeout=300, check=True
    )
    many, alone, says = map(str.strip, found.stdout.splitlines())
    assert json.loads(many)[0] == json.loads(alone)
    assert says.startswith("this process is a fork of") and says.endswith("context='spawn').")


@pytest.mark.parametrize("name", ["ou_mod", "index_daily", "nca_trader/ou_mid-v2", ""])
def test_a_market_that_is_not_frozen_is_refused(name):
    with pytest.raises(ConfigError, match=r"^no frozen environment .*There are ou_mid"):
        frozen(name)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.filterwarnings("ignore:.*symmetric and normalized space:UserWarning")
def test_an_episode_pays_what_the_market_pays(name):
    """The rewards are the market's own function of the positions, over a whole episode."""
    made = gymnasium.make(f"nca_trader/{name}-v1")
    check_env(made.unwrapped)
    env, task = made.unwrapped, made.unwrapped.trading.task
    num = task.num_assets
    seen, info = made.reset(seed=3)
    assert seen.dtype == np.float32 and seen.shape == (3 * num + 2 * num + 1,)
    np.testing.assert_array_equal(seen[3 * num :], [0.0] * (2 * num) + [1.0])  # flat
    first, positions, rewards, over = info["row"], [], [], False
    rng = np.random.default_rng(0)
    while not over:
        if name == "garleanu_pedersen":
            action = rng.uniform(-9.1, 9.1, 1).astype(np.float32)
            positions.append(action)
        else:
            action = rng.integers(0, 3, num)
            positions.append((action - 1) / num)
            action = action if num > 1 else int(action[0])
        seen, reward, terminated, truncated, info = made.step(action)
        over = terminated or truncated
        rewards.append(reward)
    assert len(rewards) == 1024 and truncated and info["row"] == first + 1024
    held = np.array(positions, np.float64)
    before = np.concatenate([np.zeros((1, num)), held[:-1]])
    paid = task.pay(before, held, task.returns[first + 1 : first + 1025])
    np.testing.assert_allclose(rewards, paid, rtol=1e-5, atol=1e-6)
    assert env.trading.spec.warmup <= first


def test_a_batch_is_single_environments_on_the_same_path():
    batch = gymnasium.make_vec("nca_trader/ou_mid-v1", num_envs=64)
    single = gymnasium.make("nca_trader/ou_mid-v1")
    assert batch.unwrapped.trading is single.unwrapped.trading
    seen, info = batch.reset(seed=10)
    alone, own = single.reset(seed=13)
    for action in (0, 2, 1, 1):
        assert info["row"][3] == own["row"]
        np.testing.assert_allclose(seen[3], alone, atol=1e-6)
        seen, rewards, *_, info = batch.step(np.full(64, action))
        alone, reward, *_, own = single.step(action)
        assert rewards[3] == pytest.approx(reward, abs=1e-7)


def test_a_draw_is_another_path_of_the_same_market():
    first, other, again = (
        gymnasium.make("nca_trader/ou_mid-v1", draw=draw).unwrapped.trading for draw in (0, 1, 1)
    )
    assert other is again and first.config == other.config
    assert not np.allclose(first.bars.close[:100], other.bars.close[:100])
    assert [env.task.seed for env in (first, other)] == [0, 1]
    with pytest.raises(ConfigError, match="draw=9223372036854775808"):
        gymnasium.make("nca_trader/ou_mid-v1", draw=2**63)


@pytest.mark.heavy
def test_moving_volatility_shows_the_size_of_returns():
    # `return_1` divides by a recent volatility, and so shows the size of a return less well.
    config = dataclasses.replace(frozen("moving_volatility").config, market_bars=15_000)
    env = frozen_markets.env_of(config, 0)
    names = config.features
    wild = np.abs(np.diff(np.log(env.bars.close[:, 0]), prepend=np.nan))
    features = np.asarray(env.features)[5_000:, 0]
    shown = {name: np.abs(features[:, names.index(name)]) for name in ("return_1", "return_level")}
    alike = {name: np.corrcoef(seen, wild[5_000:])[0, 1] for name, seen in shown.items()}
    assert alike["return_level"] > 0.99 and alike["return_1"] < 0.95, alike


ONE_ASSET = ("ou_mid", "hidden")  # one asset: an action is a number


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["ou_mid", "hidden", "garleanu_pedersen", "ring_hop3"])
@pytest.mark.few(2)
def test_the_pure_functions_are_the_episode_of_gymnasium(name):
    """Those of which `nca_trader.optimum.gymnax` is made, in one scan over an episode."""
    env = gymnasium.make(f"nca_trader/{name}-v1").unwrapped
    env.action_space.seed(0)
    actions = np.stack([env.action_space.sample() for _ in range(1024)]).reshape(1024, -1)
    trading = env.trading
    show = functools.partial(observed, trading.market, length=1)

    def step(state, action):
        state, timestep = trading.step(state, action)
        return state, (show(timestep.observation), timestep.reward, timestep.truncated)

    state, timestep = trading.reset(jax.random.key(2))
    _, (seen, rewards, ends) = jax.lax.scan(step, state, actions)
    expected, _ = env.reset(options={"start": int(state.index)})
    np.testing.assert_allclose(show(timestep.observation), expected, atol=1e-6)
    for i, action in enumerate(actions):
        expected, reward, _, truncated, _ = env.step(action[0] if name in ONE_ASSET else action)
        np.testing.assert_allclose(seen[i], expected, atol=1e-6)
        assert abs(rewards[i] - reward) <= 1e-6 and ends[i] == truncated
    assert truncated
