"""gym-anytrading, one environment: random actions, episodes of all bars.

It charges its fee in an episode's profit only, not in the reward.
"""

import itertools

import gymnasium
import numpy as np
import pandas as pd
from gym_anytrading.envs import StocksEnv

from benchmarks.peers.clock import row, run, steps_per_second, walk

CALL = 256  # steps between two looks at the clock


def environment(window: int = 10) -> gymnasium.Env:
    """The last `window` prices and their differences are seen."""
    frame = pd.DataFrame({name.capitalize(): values for name, values in walk().items()})
    return StocksEnv(frame, window, (window, len(frame)))


def main(envs: int = 1, seconds: float = 5.0, window: int = 10) -> dict[str, object]:
    """Steps a second, resets included; observations are `window` prices and their differences."""
    if envs != 1:
        raise SystemExit("gym-anytrading steps one environment; give --envs 1")
    env = environment(window)
    observation, _ = env.reset(seed=0)
    actions = itertools.cycle(np.random.default_rng(0).integers(0, 2, 4096).tolist())

    def call() -> None:
        for _ in range(CALL):
            _, _, terminated, truncated, _ = env.step(next(actions))
            if terminated or truncated:
                env.reset()

    return row(
        "gym-anytrading",
        "gym-anytrading",
        envs,
        steps_per_second(call, CALL, seconds),
        observation=list(observation.shape),
        gymnasium=gymnasium.__version__,
    )


if __name__ == "__main__":
    run(main)
