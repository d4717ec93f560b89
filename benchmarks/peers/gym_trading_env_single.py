"""gym-trading-env, one environment: random positions of -1, 0 and 1, fees, episodes of all bars."""

import itertools

import gymnasium  # before the peer, which makes every warning an error
import numpy as np
import pandas as pd
from gym_trading_env.environments import TradingEnv

from benchmarks.peers.clock import row, run, steps_per_second, walk

CALL = 256  # steps between two looks at the clock


def environment(features: int = 5, window: int = 0) -> gymnasium.Env:
    """`features` lagged returns are seen."""
    bars = walk()
    frame = pd.DataFrame(bars, pd.date_range("2020-01-01", periods=len(bars["close"]), freq="h"))
    change = frame["close"].pct_change().fillna(0.0)
    for lag in range(features):
        frame[f"feature_{lag}"] = change.shift(lag).fillna(0.0)
    return TradingEnv(frame, [-1, 0, 1], windows=window or None, trading_fees=5e-4, verbose=0)


def main(
    envs: int = 1, seconds: float = 5.0, features: int = 5, window: int = 0
) -> dict[str, object]:
    """Steps a second, resets included; `window` 0 is the last bar's features alone."""
    if envs != 1:
        raise SystemExit("gym-trading-env steps one environment; give --envs 1")
    env = environment(features, window)
    observation, _ = env.reset(seed=0)
    actions = itertools.cycle(np.random.default_rng(0).integers(0, 3, 4096).tolist())

    def call() -> None:
        for _ in range(CALL):
            _, _, terminated, truncated, _ = env.step(next(actions))
            if terminated or truncated:
                env.reset()

    return row(
        "gym-trading-env",
        "gym-trading-env",
        envs,
        steps_per_second(call, CALL, seconds),
        observation=list(np.shape(observation)),
        gymnasium=gymnasium.__version__,
    )


if __name__ == "__main__":
    run(main)
