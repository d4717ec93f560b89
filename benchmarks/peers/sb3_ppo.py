"""Stable-Baselines3's PPO on a trading environment: ours, or one of those that ours replaces.

`--market one` steps our environments one after the other, as that library does by itself, and
`--market batch` all of them in one call.
"""

import functools
from collections.abc import Callable
from importlib import import_module

import torch
from gymnasium.spaces import Dict
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.peers.clock import row, run, steps_per_second


def _one_by_one(envs: int) -> VecEnv:
    from benchmarks.ppo import environment
    from nca_trader.envs.gym.environment import ID

    return make_vec_env(ID, n_envs=envs, env_kwargs={"env": environment()})


def _batch(envs: int) -> VecEnv:
    from benchmarks.ppo import environment
    from nca_trader.envs.sb3 import SB3VecEnv

    return SB3VecEnv(envs, env=environment())


def _theirs(module: str, envs: int) -> VecEnv:
    return make_vec_env(import_module(f"benchmarks.peers.{module}").environment, n_envs=envs)


# Package that is measured, and its environments.
MARKETS: dict[str, tuple[str, Callable[[int], VecEnv]]] = {
    "one": ("stable-baselines3", _one_by_one),
    "batch": ("stable-baselines3", _batch),
    "gym-trading-env": (
        "gym-trading-env", functools.partial(_theirs, "gym_trading_env_single")
    ),
    "gym-anytrading": ("gym-anytrading", functools.partial(_theirs, "gym_anytrading_single")),
}  # fmt: skip


def main(
    envs: int = 8, seconds: float = 5.0, market: str = "one", steps: int = 128
) -> dict[str, object]:
    """Environment steps a second of iterations of `steps` each; 4 epochs, 4 minibatches, 64x64."""
    package, make = MARKETS[market]
    env = make(envs)
    size = envs * steps // 4
    policy = "MultiInputPolicy" if isinstance(env.observation_space, Dict) else "MlpPolicy"
    agent = PPO(policy, env, n_steps=steps, batch_size=size, n_epochs=4, device="cpu")

    def call() -> None:
        agent.learn(envs * steps, reset_num_timesteps=False)

    name = "same market" if package == "stable-baselines3" else package
    return row(
        f"Stable-Baselines3 PPO, {name}",
        package,
        envs,
        steps_per_second(call, envs * steps, seconds),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    run(main)
