"""A learner of Stable-Baselines3 or sb3-contrib on a frozen market, its agents saved on the way.

Hyper-parameters are the library's own but for those given. With `envs` above 1 they are one batch.
"""

import json

import sb3_contrib
import stable_baselines3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.peers.clock import row, run
from benchmarks.peers.looks import Looks
from nca_trader.envs.sb3 import SB3VecEnv

RECURRENT = ("RecurrentPPO",)


class Saves(BaseCallback):
    """Saves the agent, and the moments of a `VecNormalize`, where a look is due."""

    def __init__(self, looks: Looks, env):
        """Takes the looks, and the environment that the agent trains in."""
        super().__init__()
        self.looks, self.env = looks, env

    def save(self, path: str) -> None:
        """Writes the agent and the moments."""
        self.model.save(path)
        if isinstance(self.env, VecNormalize):
            self.env.save(path.replace(".zip", ".pkl"))

    def _on_training_start(self) -> None:
        self.looks.start()

    def _on_step(self) -> bool:
        return self.looks.look(self.num_timesteps, self.save)


def main(
    market: str = "ou_mid",
    algorithm: str = "PPO",
    envs: int = 1,
    steps: int = 100_000,
    seconds: float = 0.0,
    seed: int = 0,
    given: str = "{}",
    out: str = "build/learns",
) -> dict[str, object]:
    """Trains for `steps`, or for `seconds` where these are above 0; `given` is JSON."""
    params = json.loads(given)
    env = SB3VecEnv(envs, f"nca_trader/{market}-v1")
    env.reset()
    env.step([env.action_space.sample() for _ in range(envs)])  # compiles our step
    if params.pop("normalize", False):
        env = VecNormalize(env)
    package = sb3_contrib if algorithm in RECURRENT else stable_baselines3
    policy = "MlpLstmPolicy" if algorithm in RECURRENT else "MlpPolicy"
    agent = getattr(package, algorithm)(policy, env, device="cpu", seed=seed, **params)
    looks = Looks(out, steps, seconds, ".zip")
    saves = Saves(looks, env)
    agent.learn(steps, callback=saves)
    looks.look(agent.num_timesteps, saves.save, end=True)
    rate = agent.num_timesteps / max(looks.spent, 1e-9)
    name = package.__name__.replace("_", "-")
    return row(f"{name} {algorithm}", name, envs, rate, looks=looks.found)


if __name__ == "__main__":
    run(main)
