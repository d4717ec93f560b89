"""TorchTrade's batched environment: random actions, commission and slippage, windows gathered."""

import itertools

import pandas as pd
import torch
from torchtrade.envs.offline import (
    VectorizedSequentialTradingEnv,
    VectorizedSequentialTradingEnvConfig,
)

from benchmarks.peers.clock import row, run, steps_per_second, walk

EPISODE = 512


def make(envs: int, window: int, features: int) -> VectorizedSequentialTradingEnv:
    """The environment, with observations `[envs, window, features]` beside the account's six."""
    frame = pd.DataFrame(walk())
    frame.insert(0, "timestamp", pd.date_range("2020-01-01", periods=len(frame), freq="h"))

    def lags(bars: pd.DataFrame) -> pd.DataFrame:
        change = bars["close"].pct_change().fillna(0.0)
        columns = {f"features_{lag}": change.shift(lag).fillna(0.0) for lag in range(features)}
        return pd.DataFrame(columns, bars.index).reset_index()

    config = VectorizedSequentialTradingEnvConfig(
        num_envs=envs,
        time_frames="1Hour",
        execute_on="1Hour",
        window_sizes=window,
        transaction_fee=5e-4,
        slippage=2e-4,
        max_traj_length=EPISODE,
    )
    return VectorizedSequentialTradingEnv(frame, config, lags)


def main(
    envs: int = 4096, seconds: float = 5.0, window: int = 10, features: int = 5
) -> dict[str, object]:
    """Steps a second through TorchRL's interface with its resets, and of the bare `_step`."""
    env = make(envs, window, features)
    actions = itertools.cycle(torch.randint(0, 3, (64, envs)).unbind())
    carry = env.reset()
    shape = next(list(carry[key].shape) for key in carry.keys() if key.startswith("market_data"))

    def step() -> None:
        nonlocal carry
        carry["action"] = next(actions)
        _, carry = env.step_and_maybe_reset(carry)

    whole = steps_per_second(step, envs, seconds)
    carry = env.reset()

    def bare() -> None:
        carry["action"] = next(actions)
        env._step(carry)

    return row(
        "torchtrade",
        "torchtrade",
        envs,
        whole,
        bare_steps_per_s=steps_per_second(bare, envs, seconds),
        observation=shape[1:],
        episode=EPISODE,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    run(main)
