# %% [markdown]
# # Stable-Baselines3's PPO in the trading environment
#
# The environment is a plain Gymnasium one, so that an agent of another library trains on it
# unchanged. Here: S&P 500 index, trained on 1999 to 2012, judged on 2013 to 2018, which training
# never saw, beside buy-and-hold and doing nothing, after costs. Needs `pip install
# stable-baselines3`, which is no dependency of this package.
#
#     python notebooks/sb3_ppo.py --steps 200000 --seed 0

# %%
import argparse
import dataclasses

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

import nca_trader as nca
from nca_trader.envs.gym.environment import ID  # registers the name; "nca_trader/Trading-v0"
from nca_trader.envs.sb3 import targets_of

SPLIT = "2013-01-01"


# %%
def settings() -> tuple[nca.Bars, nca.EnvConfig]:
    """One asset, flat or long, costs of 5 bp commission and 2 bp slippage; 64-bar episodes."""
    config = dataclasses.replace(nca.load_env("index_daily"), episode_bars=64)
    return nca.sample_bars("sp500").select("SP500"), config


def train(bars: nca.Bars, config: nca.EnvConfig, steps: int, seed: int, num_envs: int = 8) -> PPO:
    """PPO with its own defaults but for the sizes of its batches, on the bars before the split."""
    torch.set_num_threads(1)  # networks this small are slower on several
    given = {"bars": bars.between(stop=SPLIT), "config": config, "window": 5}
    envs = make_vec_env(ID, n_envs=num_envs, seed=seed, env_kwargs=given)
    rollout = min(256, max(steps // num_envs, 2))
    agent = PPO("MlpPolicy", envs, n_steps=rollout, batch_size=256, seed=seed, device="cpu")
    agent.learn(steps)
    return agent


def out_of_sample(agent: PPO, bars: nca.Bars, config: nca.EnvConfig) -> dict[str, float]:
    """Final equity, from 1, of the agent's likeliest actions over all bars from the split on."""
    # The features warm up on the bars before; trading begins at the split.
    chosen = targets_of(agent, bars, config, window=5, start=SPLIT)
    held = np.full(len(bars), np.nan)
    held[bars.row(SPLIT)] = 1.0
    agent_result, hold = (
        nca.backtest(bars, targets, config.costs, config.fill, config.order, start=SPLIT)
        for targets in (chosen, held)
    )
    return {
        "agent": float(agent_result.equity.iloc[-1]),
        "buy and hold": float(hold.equity.iloc[-1]),
        "always flat": 1.0,
        "share of bars long": float((agent_result.weights > 0.01).to_numpy().mean()),
    }


# %%
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, then prints what it was worth on bars that training did not see."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    bars, config = settings()
    agent = train(bars, config, options.steps, options.seed)
    figures = out_of_sample(agent, bars, config)
    print(f"out of sample, {SPLIT} to {str(bars.time[-1])[:10]}, after costs, 1.0 at the start:")
    for name, value in figures.items():
        print(f"  {name:>20}: {value:.3f}")
    print(
        "One seed says little: an index rose in these years, so an agent that is mostly long looks "
        "good. Compare it with buy-and-hold, over several seeds. " + bars.note
    )
    return figures


if __name__ == "__main__":
    main()
