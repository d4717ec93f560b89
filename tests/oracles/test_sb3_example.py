"""The example that trains Stable-Baselines3's PPO, run for a moment: `make test-oracles`."""

import dataclasses
import importlib.util
import pathlib

import pytest

if importlib.util.find_spec("stable_baselines3") is None:
    pytest.skip("stable-baselines3 is not installed here", allow_module_level=True)

import numpy as np
from stable_baselines3.common.env_checker import check_env as check_sb3

import nca_trader as nca
from nca_trader.envs.gym.environment import GymEnv
from nca_trader.envs.sb3 import targets_of

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "notebooks" / "sb3_ppo.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("sb3_ppo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stable_baselines3s_own_check_is_clean(example):
    bars, config = example.settings()
    check_sb3(GymEnv(bars, config, window=5))


def test_the_example_trains_and_reports_what_it_earned_beside_buy_and_hold(example, capsys):
    figures = example.main(steps=256, seed=0)
    bars = nca.sample_bars("sp500").select("SP500")
    row = bars.row(example.SPLIT)
    # Bought at the next bar's open at a price 2 bp worse, with 5 bp of commission.
    grown = bars.close[-1, 0] / bars.open[row + 1, 0] / ((1 + 2e-4) * (1 + 5e-4))
    assert figures["buy and hold"] == pytest.approx(grown, rel=1e-6)
    assert 0.3 < figures["agent"] < 3.0 and np.isfinite(list(figures.values())).all()
    assert 0.0 <= figures["share of bars long"] <= 1.0
    assert "out of sample, 2013-01-01 to 2018-12-31" in capsys.readouterr().out


class Fixed:
    """A model that answers with a drawn action, and counts."""

    def __init__(self, space):
        self.space = space
        space.seed(3)

    def predict(self, observation, deterministic=False):
        assert deterministic and np.isfinite(observation).all()
        return self.space.sample(), None


@pytest.mark.parametrize("preset", ["index_daily", "multi_asset"])
def test_targets_of_a_model_earn_in_a_backtest_what_it_earned_in_the_environment(preset):
    config = dataclasses.replace(nca.load_env(preset), episode_bars=None, random_start=False)
    symbols = ("SP500",) if preset == "index_daily" else ("SP500", "NASDAQ")
    bars = nca.sample_bars("sp500").select(*symbols)[:400]
    env = GymEnv(bars, config, window=3)
    targets = targets_of(Fixed(env.action_space), bars, config, window=3)
    model, ended = Fixed(env.action_space), False
    _, info = env.reset(seed=0, options={"start": env.trading.spec.warmup})
    first = info["row"]
    assert np.isnan(targets[:first]).all() and np.isfinite(targets[first:-1]).all()
    weights = {}
    while not ended:
        action, _ = model.predict(np.zeros(1), deterministic=True)
        _, _, terminated, truncated, info = env.step(action if action.shape else int(action))
        weights[info["row"]] = info["weights"]
        ended = terminated or truncated
    # From the first decision on: cash earns interest before it, which the environment does not see.
    start = str(bars.index[first].date())
    result = nca.backtest(bars, targets, account=config.account, start=start)
    assert result.equity.iloc[-1] == pytest.approx(info["equity"], rel=1e-4)
    # What the environment says that it holds is what the backtest holds.
    rows = np.array(list(weights))
    np.testing.assert_allclose(
        result.weights.to_numpy()[rows - first], np.array(list(weights.values())), atol=1e-4
    )
