"""Stable-Baselines3's PPO on the market of `nca-trader bench ppo`, through Gymnasium."""

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.peers.clock import row, run, steps_per_second
from nca_trader.cli.bench_ppo import environment
from nca_trader.envs.gym import ID

LENGTH = 128


def main(envs: int = 8, seconds: float = 5.0, window: int = 1) -> dict[str, object]:
    """Environment steps a second of whole iterations; 4 epochs, 4 minibatches, its MLP of 64x64."""
    env = make_vec_env(ID, n_envs=envs, env_kwargs={"env": environment(), "window": window})
    size = envs * LENGTH // 4
    agent = PPO("MlpPolicy", env, n_steps=LENGTH, batch_size=size, n_epochs=4, device="cpu")

    def call() -> None:
        agent.learn(envs * LENGTH, reset_num_timesteps=False)

    return row(
        "Stable-Baselines3 PPO, same market",
        "stable-baselines3",
        envs,
        steps_per_second(call, envs * LENGTH, seconds),
        window=window,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    run(main)
