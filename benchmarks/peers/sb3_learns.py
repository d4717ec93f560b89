"""A learner of Stable-Baselines3 or sb3-contrib on a frozen market, its agents saved on the way.

Hyper-parameters are the library's own but for those given. As its guide to reinforcement learning
advises, `envs` environments are one batch, observations and rewards are normalised by a
`VecNormalize`, and actions that are numbers are learnt within -1 and 1.
"""

import contextlib
import json
import math
from collections.abc import Iterator

import numpy as np
import sb3_contrib
import stable_baselines3
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize

from benchmarks.peers.clock import row, run
from benchmarks.peers.looks import Looks
from nca_trader.envs.sb3 import SB3VecEnv

RECURRENT = ("RecurrentPPO",)


class Rescaled(VecEnvWrapper):
    """Environments whose actions are numbers within -1 and 1."""

    def __init__(self, env):
        """Takes environments whose actions are a `Box`."""
        self.inner = env.action_space
        self.half = (self.inner.high - self.inner.low) / 2.0
        self.middle = (self.inner.high + self.inner.low) / 2.0
        super().__init__(env, action_space=Box(-1.0, 1.0, self.inner.shape, np.float32))

    def reset(self):
        return self.venv.reset()

    def step_async(self, actions) -> None:
        self.venv.step_async(self.middle + self.half * actions)

    def step_wait(self):
        return self.venv.step_wait()

    @contextlib.contextmanager
    def in_own_units(self, model) -> Iterator[None]:
        """Makes a model order the same in the environments' own units while it is saved.

        Its mean is a linear layer, and clipping commutes with the map.
        """
        layer, spread, inside = model.policy.action_net, model.policy.log_std, model.action_space
        before = [x.detach().clone() for x in (layer.weight, layer.bias, spread)]
        half, middle = torch.from_numpy(self.half), torch.from_numpy(self.middle)
        with torch.no_grad():
            layer.weight.mul_(half[:, None])
            layer.bias.mul_(half).add_(middle)
            spread.add_(half.log())
        model.action_space = model.policy.action_space = self.inner
        yield
        with torch.no_grad():
            for x, was in zip((layer.weight, layer.bias, spread), before, strict=True):
                x.copy_(was)
        model.action_space = model.policy.action_space = inside


class Saves(BaseCallback):
    """Saves the agent, and the moments of its `VecNormalize`, where a look is due."""

    def __init__(self, looks: Looks, env: VecNormalize):
        """Takes the looks, and the environment that the agent trains in."""
        super().__init__()
        self.looks, self.env, self.on = looks, env, True

    def save(self, path: str) -> None:
        """Writes the agent and the moments."""
        scaled = isinstance(self.env.venv, Rescaled)
        with self.env.venv.in_own_units(self.model) if scaled else contextlib.nullcontext():
            self.model.save(path)
        self.env.save(path.replace(".zip", ".pkl"))

    def _on_training_start(self) -> None:
        self.looks.start()

    def _on_rollout_start(self) -> None:  # after each update
        if self.num_timesteps:
            self.on = self.looks.look(self.num_timesteps, self.save)

    def _on_step(self) -> bool:
        return self.on


def main(
    market: str = "ou_mid",
    algorithm: str = "PPO",
    envs: int = 8,
    steps: int = 100_000,
    seconds: float = 0.0,
    seed: int = 0,
    given: str = "{}",
    out: str = "build/learns",
) -> dict[str, object]:
    """Trains for `steps`, or for `seconds` where these are above 0; `given` is JSON."""
    env = SB3VecEnv(envs, f"nca_trader/{market}-v1")
    env.reset()
    env.step([env.action_space.sample() for _ in range(envs)])  # compiles our step
    if isinstance(env.action_space, Box):
        env = Rescaled(env)
    env = VecNormalize(env)
    package = sb3_contrib if algorithm in RECURRENT else stable_baselines3
    policy = "MlpLstmPolicy" if algorithm in RECURRENT else "MlpPolicy"
    params = json.loads(given)
    agent = getattr(package, algorithm)(policy, env, device="cpu", seed=seed, **params)
    looks = Looks(out, steps, seconds, ".zip")
    saves = Saves(looks, env)
    agent.learn(math.inf if seconds else steps, callback=saves)
    if saves.on:
        looks.look(agent.num_timesteps, saves.save, end=True)
    rate = agent.num_timesteps / max(looks.spent, 1e-9)
    name = package.__name__.replace("_", "-")
    found = {"looks": looks.found, "before": looks.before}
    return row(f"{name} {algorithm}", name, envs, rate, **found)


if __name__ == "__main__":
    run(main)
