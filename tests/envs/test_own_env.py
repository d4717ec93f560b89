"""An environment in which something is overridden is refused by all who would not use it."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drawn import random_bars
from untrained import untrained_run

import nca_trader as nca
from nca_trader.config.learning import LearnerConfig
from nca_trader.envs import trading
from nca_trader.envs.gym import GymEnv, GymVectorEnv
from nca_trader.markets.market import Path, SyntheticMarket, draw, linear_pay

BARS = nca.sample_bars("sp500")[:160]
CONFIG = nca.EnvConfig(features=("return_1",), actions="weights", episode_bars=16)
AGENT = dataclasses.replace(
    nca.load_agent("nano"), learner=LearnerConfig(num_minibatches=1, segment_length=16)
)


def learner(env, path):
    return nca.make_learner(
        env, nca.make_policy(AGENT, trading.TradingEnv(BARS, CONFIG).spec), AGENT
    )


USERS = {
    "learner": learner,
    "train": lambda env, path: nca.train(env, AGENT, path / "run"),
    "gymnasium": lambda env, path: GymEnv(env=env),
    "vector": lambda env, path: GymVectorEnv(2, env=env),
    "checks": lambda env, path: nca.check_env(env, only=["a window is what was seen"]),
    "base": lambda env, path: nca.with_base(env, "half_and_half"),
}


class Mixin:
    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, timestep._replace(reward=0.0 * timestep.reward)


class WithStep(Mixin, nca.TradingEnv):
    pass


class WithFeatures(nca.TradingEnv):
    def __init__(self, *given):
        super().__init__(*given)
        self.features = 0.0 * self.features


class WithoutSuper(nca.TradingEnv):
    def __init__(self, *given):
        self.bars = BARS


def overriding(name, **body):
    """A subclass of the environment with these in the place of its own."""
    return types.new_class(name, (nca.TradingEnv,), {}, lambda space: space.update(body))


def patched(name, value):
    def make(*given):
        env = nca.TradingEnv(*given)
        setattr(env, name, value(env))
        return env

    return make


def spec_of(env):
    return dataclasses.replace(nca.TradingEnv.spec.fget(env), warmup=50)


def backwards(env, bars):
    return nca.TradingEnv.prepare(env, bars[::-1])


OBSERVED = r".*features=\('mine:f',\)"
OVERRIDDEN = {
    "WithStep.step: .*reward='mine:r', actions='mine:a'": WithStep,
    "WithReset.reset: .*EnvConfig .*market='mine:m'": overriding("WithReset", reset=print),
    f"WithWindow.window: {OBSERVED}": overriding("WithWindow", window=staticmethod(print)),
    f"WithView.observation: {OBSERVED}": overriding("WithView", observation=lambda env, x: x),
    f"WithSpec.spec: {OBSERVED}": overriding("WithSpec", spec=property(spec_of)),
    f"WithFeatures.features: {OBSERVED}": WithFeatures,
    "WithPrepare.prepare: .*other bars": overriding("WithPrepare", prepare=backwards),
    r"WithoutSuper.__init__: call super\(\).__init__": WithoutSuper,
    "TradingEnv.step: .*reward='mine:r'": patched("step", lambda env: lambda *given: None),
    "TradingEnv.bars: .*other bars": patched("bars", lambda env: env.bars[:60]),
    "TradingEnv.market: .*market='mine:m'": patched(
        "market", lambda e: dataclasses.replace(e.market)
    ),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("message", OVERRIDDEN)
def test_what_is_overridden_is_refused_by_all_in_one_line(user, message, tmp_path):
    env = OVERRIDDEN[message](BARS, CONFIG)
    with pytest.raises(nca.ConfigError, match=f"^{message}") as refused:
        USERS[user](env, tmp_path)
    assert len(str(refused.value).splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_method_of_the_class_itself_is_no_exception(monkeypatch):
    monkeypatch.setattr(nca.TradingEnv, "reset", lambda env, key: None)
    with pytest.raises(nca.ConfigError, match=r"^TradingEnv.reset: "):
        GymEnv(env=nca.TradingEnv(BARS, CONFIG))


def test_a_property_in_the_place_of_what_is_computed_is_refused_when_it_is_made():
    own = overriding("Own", market=property(len))
    with pytest.raises(nca.ConfigError, match=r"^Own.market: .*market='mine:m'"):
        own(BARS, CONFIG)


class Fixed(nca.TradingEnv):
    """Have bars, a config and one more method of its own, which changes nothing."""

    def __init__(self):
        super().__init__(BARS, CONFIG)

    def first(self):
        return self.reset(jax.random.key(0))


@pytest.mark.parametrize("user", [name for name in USERS if name != "train"])
def test_a_subclass_of_other_arguments_and_more_methods_is_used_by_all(user, tmp_path):
    assert Fixed().first() and USERS[user](Fixed(), tmp_path)
    assert user == "learner" or USERS[user](nca.with_base(Fixed(), "half_and_half"), tmp_path)


def test_the_checks_of_ruin_need_no_constructor_of_a_subclass():
    report = nca.check_env(Fixed(), only=["ruin ends an account for good"])
    assert report.passed, str(report)


def noise(num_bars, seed, states=0):
    """A market of one's own, whose draws show as many states."""

    def generate(key, length):
        returns = 0.01 * jax.random.normal(key, (length, 2))
        return Path(jnp.zeros((length, states)), returns, jnp.zeros(2))

    names, moments = tuple("xy"[:states]), ((0.0,) * states, (1.0,) * states)
    market = SyntheticMarket(
        reward="log", generate=generate, pay=linear_pay(0.0), num_assets=2, state_names=names,
        moments=moments,
    )  # fmt: skip
    return draw(market, num_bars, seed)


@pytest.mark.heavy
def test_an_agent_of_an_own_market_without_states_trades_any_bars(tmp_path):
    config = nca.EnvConfig(market=noise, market_bars=100, features=("return_1",))
    run = untrained_run(tmp_path / "run", None, config, tiny.AGENT)
    assert run.spec.states == () and run.tradable == "any symbols"
    bars = random_bars(np.random.default_rng(3), 90, 3)
    assert nca.backtest(bars, run).equity.notna().all()
    assert nca.TradingEnv(bars, config).spec.features == ("return_1",)
    seen = dataclasses.replace(config, market=f"{config.market}(states=1)")
    other = untrained_run(tmp_path / "seen", None, seen, tiny.AGENT)
    assert other.spec.states == ("state:x",)
    with pytest.raises(nca.ConfigError, match="observes the state of the market"):
        nca.TradingEnv(bars, seen)
    with pytest.raises(nca.BarError, match="it sees the state of its market"):
        nca.backtest(bars, other)
