"""`check_env` passes every preset, and finds what is planted into an environment."""

import dataclasses
import functools
import inspect
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars

from nca_trader.config import EnvConfig
from nca_trader.envs import check, load_env, trading
from nca_trader.envs.check import Check, CheckReport, check_env
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import CheckFailed
from nca_trader.types import Costs

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "envs").glob("*.toml"))
CONFIG = EnvConfig(features=("bollinger",), costs=Costs(commission=5e-4), episode_bars=30)
BARS = random_bars(np.random.default_rng(0), 80, 1)
COUNT = itertools.count()


def bars_for(config):
    """Bars that a preset trades; None where it draws its own market."""
    return None if config.market else random_bars(np.random.default_rng(1), 400, 2, missing=0.05)


# Between them every cost, limit, kind of action and kind of market; `make test-slow` runs the rest.
QUICK = ("index_daily", "multi_asset", "ou_mid", "kelly")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in PRESETS]
)
@pytest.mark.heavy
def test_every_preset_keeps_every_promise(name):
    config = load_env(name)
    if config.market:
        config = dataclasses.replace(config, market_bars=min(config.market_bars, 300))
    report = check_env(config, bars_for(config))
    assert report.passed, str(report)
    assert len(report.checks) == 13
    assert len([check for check in report.checks if check.skipped]) <= 3, str(report)


# Each takes the function of `nca_trader.envs.trading` that all users of an environment call.
def leaks(step, market, state, action):
    """Pays the next bar's move to whoever waits."""
    after, timestep = step(market, state, action)
    leak = market.legs.intraday[state.index + 2, 0]
    return after, timestep._replace(reward=timestep.reward + 0.1 * leak)


def ignores_the_key(reset, market, key):
    return reset(market, jnp.zeros_like(key))


def remembers(step, market, state, action):
    """Keeps a count beside its state."""
    after, timestep = step(market, state, action)
    return after, timestep._replace(reward=timestep.reward + 1e-3 * next(COUNT))


def breaks(step, market, state, action):
    after, timestep = step(market, state, action)
    broken = timestep.observation.index % 8 == 0
    return after, timestep._replace(reward=jnp.where(broken, jnp.nan, timestep.reward))


def truncates_late(reset, market, key):
    state, timestep = reset(market, key)
    return state._replace(last=state.last + 1), timestep


def truncates_early(reset, market, key):
    state, timestep = reset(market, key)
    return state._replace(last=state.last - 1), timestep


def takes_the_end_for_ruin(step, market, state, action):
    after, timestep = step(market, state, action)
    discount = jnp.where(timestep.truncated, 0.0, timestep.discount)
    return after, timestep._replace(discount=discount)


def resurrects(step, market, state, action):
    after, timestep = step(market, state, action)
    return after, timestep._replace(discount=jnp.ones_like(timestep.discount))


def changes_type(step, market, state, action):
    after, timestep = step(market, state, action)
    return after, timestep._replace(truncated=timestep.truncated.astype(jnp.float32))


def changes_its_state(step, market, state, action):
    """The step after the first takes an index of another type, and is traced again."""
    after, timestep = step(market, state, action)
    return after._replace(index=after.index.astype(jnp.int16)), timestep


def skips_a_bar(step, market, state, action):
    return step(market, state._replace(index=state.index + (state.index == 45)), action)


def sees_the_future(_window, market, observation, length):
    return _window(market, observation._replace(index=observation.index + 1), length)


def test_what_is_sound_is_not_reported():
    report = check_env(TradingEnv(BARS, CONFIG))
    assert report.passed and len(report.checks) == 13, str(report)
    assert not [check for check in report.checks if check.skipped]


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (leaks, {"reward is the difference of log equity"}),
        (ignores_the_key, {"a key decides the episode"}),
        (remembers, {"the same call gives the same result"}),
        (breaks, {"rewards and equity are finite"}),
        (truncates_late, {"an episode goes bar by bar to its last"}),
        (truncates_early, {"an episode goes bar by bar to its last"}),
        (takes_the_end_for_ruin, {"an episode goes bar by bar to its last"}),
        (resurrects, {"ruin ends an account for good"}),
        (changes_type, {"steps keep every shape and type"}),
        (changes_its_state, {"steps keep every shape and type", "nothing is traced twice"}),
        (skips_a_bar, {"an episode goes bar by bar to its last"}),
        (sees_the_future, {"a window is what was seen"}),
    ],
)
@pytest.mark.few(4)
def test_what_is_planted_is_found(planted, found, monkeypatch):
    name = next(iter(inspect.signature(planted).parameters))
    monkeypatch.setattr(trading, name, functools.partial(planted, getattr(trading, name)))
    report = check_env(TradingEnv(BARS, CONFIG), only=found)
    assert set(report.faults) == found, str(report)


@pytest.mark.parametrize(("config", "symbols", "length"), [
    (CONFIG, ("SP500", "NASDAQ"), 400),
    (dataclasses.replace(load_env("ou_mid"), market_bars=300), ("OU",), 300),
])  # fmt: skip
def test_a_config_alone_is_checked_on_sample_bars_or_on_the_market_that_it_names(
    config, symbols, length, monkeypatch
):
    monkeypatch.setattr(check, "report_of", lambda checks, run, only: run.env)
    bars = check_env(config).bars
    assert (bars.symbols, len(bars)) == (symbols, length)


def test_a_report_names_its_faults_in_lines():
    report = CheckReport((Check("one"), Check("two", "2 is 3"), Check("three", skipped="no bars")))
    assert str(report).splitlines() == [
        "ok       one",
        "FAILED   two: 2 is 3",
        "skipped  three: no bars",
    ]
    with pytest.raises(CheckFailed, match=r"^two: 2 is 3$"):
        report.raise_if_failed()
    CheckReport((Check("one"),)).raise_if_failed()
