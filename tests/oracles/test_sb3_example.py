"""The example that trains Stable-Baselines3's PPO, run for a moment: `make test-oracles`."""

import importlib.util
import pathlib

import pytest

if importlib.util.find_spec("stable_baselines3") is None:
    pytest.skip("stable-baselines3 is not installed here", allow_module_level=True)

import numpy as np
from stable_baselines3.common.env_checker import check_env as check_sb3

import nca_trader as nca
from nca_trader.envs.gym.environment import GymEnv

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
    figures = example.main(["--steps", "256", "--seed", "0"])
    bars = nca.sample_bars("sp500").select("SP500")
    row = bars.row(example.SPLIT)
    # Bought at the next bar's open at a price 2 bp worse, with 5 bp of commission.
    grown = bars.close[-1, 0] / bars.open[row + 1, 0] / ((1 + 2e-4) * (1 + 5e-4))
    assert figures["buy and hold"] == pytest.approx(grown, rel=1e-6)
    assert 0.3 < figures["agent"] < 3.0 and np.isfinite(list(figures.values())).all()
    assert 0.0 <= figures["share of bars long"] <= 1.0
    assert "out of sample, 2013-01-01 to 2018-12-31" in capsys.readouterr().out
