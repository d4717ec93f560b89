# %% [markdown]
# # Stable-Baselines3's PPO in the trading environment
#
# The environment is a plain Gymnasium one, so that an agent of another library trains on it
# unchanged. Here: S&P 500 index, trained on 1999 to 2012, judged on 2013 to 2018, which training
# never saw, next to buy-and-hold and doing nothing, after costs. It needs the extra `sb3`:
# `pip install '.[sb3]'`.
#
# *Pictures and numbers are of `make notebooks` on two cores of a shared machine, November 2026.*

# %%
import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

import nca_trader as nca
from nca_trader.envs.gym.environment import ID  # registers the name; "nca_trader/Trading-v0"
from nca_trader.envs.sb3 import targets_of

SPLIT = "2013-01-01"


# %% [markdown]
# ## Settings, training, judgement


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


# %% [markdown]
# ## Train, and trade unseen years
#
# 20,000 steps take seconds and are few: 200,000 are a start.


# %%
def main(steps: int = 20_000, seed: int = 0) -> dict[str, float]:
    """Trains, then prints what it was worth on bars that training did not see."""
    bars, config = settings()
    agent = train(bars, config, steps, seed)
    figures = out_of_sample(agent, bars, config)
    print(f"out of sample, {SPLIT} to {str(bars.time[-1])[:10]}, after costs, 1.0 at the start:")
    for name, value in figures.items():
        print(f"  {name:>20}: {value:.3f}")
    return figures


if __name__ == "__main__":
    results = {seed: main(seed=seed) for seed in range(2)}

# %% [markdown]
# ## Seeds disagree
#
# One seed says little. An index rose in these years, so an agent that is mostly long looks good:
# compare it with buy and hold, over several seeds.

# %%
if __name__ == "__main__":
    table = pd.DataFrame(results).rename(columns="seed {}".format)
    print(table.round(3).to_string())
    figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    ax.bar(list(table.columns), table.loc["agent"] - 1, label="agent")
    ax.axhline(table.loc["buy and hold"].iloc[0] - 1, color="black", label="buy and hold")
    ax.set_ylabel("return from 2013 to 2018, after costs")
    ax.legend()
    plt.show()
