"""`check_env` passes every preset, and finds what is planted into an environment."""

import dataclasses
import itertools
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import random_bars

from nca_trader.config import EnvConfig
from nca_trader.envs import load_env
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
@pytest.mark.few(1)
def test_every_preset_keeps_every_promise(name):
    config = load_env(name)
    if config.market:
        config = dataclasses.replace(config, market_bars=min(config.market_bars, 300))
    report = check_env(config, bars_for(config))
    assert report.passed, str(report)
    assert len(report.checks) == 13
    assert len([check for check in report.checks if check.skipped]) <= 3, str(report)


class Leaks(TradingEnv):
    """Pays the next bar's move to whoever waits."""

    def step(self, state, action):
        after, timestep = super().step(state, action)
        leak = self.market.legs.intraday[state.index + 2, 0]
        return after, timestep._replace(reward=timestep.reward + 0.1 * leak)


class IgnoresTheKey(TradingEnv):
    def reset(self, key):
        return super().reset(jnp.zeros_like(key))


class Remembers(TradingEnv):
    """Keeps a count beside its state."""

    def step(self, state, action):
        after, timestep = super().step(state, action)
        return after, timestep._replace(reward=timestep.reward + 1e-3 * next(COUNT))


class Breaks(TradingEnv):
    def step(self, state, action):
        after, timestep = super().step(state, action)
        broken = timestep.observation.index % 8 == 0
        return after, timestep._replace(reward=jnp.where(broken, jnp.nan, timestep.reward))


class TruncatesLate(TradingEnv):
    def reset(self, key):
        state, timestep = super().reset(key)
        return state._replace(last=state.last + 1), timestep


class TruncatesEarly(TradingEnv):
    def reset(self, key):
        state, timestep = super().reset(key)
        return state._replace(last=state.last - 1), timestep


class TakesTheEndForRuin(TradingEnv):
    def step(self, state, action):
        after, timestep = super().step(state, action)
        discount = jnp.where(timestep.truncated, 0.0, timestep.discount)
        return after, timestep._replace(discount=discount)


class Resurrects(TradingEnv):
    def step(self, state, action):
        after, timestep = super().step(state, action)
        return after, timestep._replace(discount=jnp.ones_like(timestep.discount))


class ChangesType(TradingEnv):
    def step(self, state, action):
        after, timestep = super().step(state, action)
        return after, timestep._replace(truncated=timestep.truncated.astype(jnp.float32))


class ChangesItsState(TradingEnv):
    """The step after the first takes an index of another type, and is traced again."""

    def step(self, state, action):
        after, timestep = super().step(state, action)
        return after._replace(index=after.index.astype(jnp.int16)), timestep


class SkipsABar(TradingEnv):
    def step(self, state, action):
        return super().step(state._replace(index=state.index + (state.index == 45)), action)


class SeesTheFuture(TradingEnv):
    def window(self, observation, length):
        return super().window(observation._replace(index=observation.index + 1), length)


@pytest.mark.slow
def test_what_is_sound_is_not_reported():
    report = check_env(TradingEnv(BARS, CONFIG))
    assert report.passed and not [check for check in report.checks if check.skipped], str(report)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (Leaks, {"reward is the difference of log equity"}),
        (IgnoresTheKey, {"a key decides the episode"}),
        (Remembers, {"the same call gives the same result"}),
        (Breaks, {"rewards and equity are finite"}),
        (TruncatesLate, {"an episode goes bar by bar to its last"}),
        (TruncatesEarly, {"an episode goes bar by bar to its last"}),
        (TakesTheEndForRuin, {"an episode goes bar by bar to its last"}),
        (Resurrects, {"ruin ends an account for good"}),
        (ChangesType, {"steps keep every shape and type"}),
        (ChangesItsState, {"steps keep every shape and type", "nothing is traced twice"}),
        (SkipsABar, {"an episode goes bar by bar to its last"}),
        (SeesTheFuture, {"a window is what was seen"}),
    ],
)
@pytest.mark.few(5)
def test_what_is_planted_is_found(planted, found):
    report = check_env(planted(BARS, CONFIG), only=found)
    assert set(report.faults) == found, str(report)


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
