"""A strategy in the Gymnasium environment earns what its backtest of the same bars does."""

import dataclasses

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import nca_trader as nca
from nca_trader.agents.targets import strategy_targets
from nca_trader.envs.account.state import rules_of
from nca_trader.envs.gym import GymEnv
from nca_trader.errors import BarError, ConfigError

CONFIG = nca.EnvConfig(
    features=("return_1", "return_5"),
    costs=nca.Costs(commission=5e-4, slippage=2e-4, interest_lend=0.03),
    episode_bars=None,
    random_start=False,
)


@pytest.fixture(scope="module")
def bars():
    return nca.sample_bars("sp500")[-400:]


def patient(bars_held=5):
    def act(before, bar, portfolio):
        fell = bar.close < before
        target = jnp.where(portfolio.bars_held >= bars_held, 0.0, jnp.where(fell, 0.5, jnp.nan))
        return bar.close, target

    return nca.Strategy(lambda num_assets: jnp.full(num_assets, jnp.nan), act)


SUBJECTS = {
    "rule": nca.rules.momentum(20),
    "stop": nca.rules.sma_cross(5, 20).with_stop(0.01),
    "portfolio": patient(),
    "function": lambda bars: np.where(bars.close > np.roll(bars.close, 1, 0), 0.4, 0.0),
}


@pytest.mark.heavy
@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.few(1)
def test_the_baseline_is_the_backtest_from_the_episodes_start(bars, name, fill):
    config = dataclasses.replace(CONFIG, fill=fill)
    env = nca.WithBaseline(GymEnv(bars, config), SUBJECTS[name])
    limits = rules_of(config)._asdict() | {"fill": None, "order": None}
    del limits["fill"], limits["order"]
    for row in (60, 340):
        _, info = env.reset(seed=0, options={"start": row})
        found, ended = [info["baseline"]], False
        while not ended and len(found) < 100:
            _, _, terminated, truncated, info = env.step([1] * 2)
            found.append(info["baseline"])
            ended = terminated or truncated
        assert ended == (row == 340)
        start = str(bars.index[row])
        result = nca.backtest(bars, SUBJECTS[name], config.costs, fill, start=start, **limits)
        # At its first close the environment has not filled yet, and the account is 1.
        expected = result.equity.to_numpy()[1 : len(found)]
        np.testing.assert_allclose(found[1:], expected, rtol=1e-12)
        assert found[0] == 1.0 and result.num_fills > 3


@pytest.mark.heavy
def test_an_agent_with_the_same_targets_earns_the_same(bars):
    """The environment's own account, in float32, of actions that are the strategy's targets."""
    costs = nca.Costs(commission=5e-4)
    config = dataclasses.replace(CONFIG, size=0.5, short=False, costs=costs)
    rule = nca.rules.sma_cross(5, 20)
    targets = strategy_targets(bars, rule)
    assert set(np.unique(targets)) == {0.0, 0.5}  # of two assets each has half
    env = nca.WithBaseline(GymEnv(bars, config), rule)
    _, info = env.reset(options={"start": 70})
    for _ in range(200):
        _, _, _, _, info = env.step((targets[info["row"]] > 0.0).astype(int))
        assert info["equity"] == pytest.approx(info["baseline"], rel=2e-5)
    assert abs(info["baseline"] - 1.0) > 1e-3


def test_wrapped_environments_still_pass_the_checker(bars):
    env = gymnasium.make("nca_trader/Trading-v0", bars=bars, config=CONFIG)
    check_env(nca.WithBaseline(env, SUBJECTS["rule"]).unwrapped, skip_render_check=True)
    wrapped = nca.WithBaseline(env, SUBJECTS["rule"])
    assert wrapped.reset(seed=3)[1]["baseline"] == 1.0


def test_what_is_no_strategy_or_no_environment_is_one_line(bars):
    with pytest.raises(ConfigError, match=r"targets is .*; give weights"):
        nca.WithBaseline(GymEnv(bars, CONFIG), 3)
    with pytest.raises(BarError, match="shape"):
        nca.WithBaseline(GymEnv(bars, CONFIG), np.ones((3, 2)))
    with pytest.raises(ConfigError, match="give a GymEnv"):
        nca.WithBaseline(gymnasium.make("CartPole-v1"), SUBJECTS["rule"])
