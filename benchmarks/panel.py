"""Memory and time of training on panels of a growing number of assets.

    python -m benchmarks.panel 25 50 100 500

Each number of assets is a process of its own, so that its peak memory is its own. Bars are random
walks; a fifth of the assets start late. The agent and the environment are `panel` and
`panel_daily`. Nothing else should run at the same time.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

BARS, UPDATES = 2000, 3


def panel(num_assets):
    """Daily bars `[BARS, num_assets]`; each fifth asset starts at a third of them."""
    from nca_trader.types import Bars

    rng = np.random.default_rng(0)
    close = 100.0 * np.exp(np.cumsum(rng.normal(0, 0.01, (BARS, num_assets)), axis=0))
    present = np.ones(close.shape, bool)
    present[: BARS // 3, ::5], present[:, 1] = False, True
    close[~present] = np.nan
    return Bars(
        time=np.datetime64("2000-01-01", "ns") + np.arange(BARS) * np.timedelta64(1, "D"),
        symbols=tuple(f"S{i}" for i in range(num_assets)),
        **dict.fromkeys(("open", "high", "low", "close"), close),
        volume=np.where(present, 1e6, 0.0),
        present=present,
        source="random",
    )


def measured(num_assets):
    """Train for a few updates; return seconds and gigabytes."""
    import nca_trader as nca

    agent = nca.load_agent("panel")
    size = agent.learner.num_segments * agent.learner.segment_length
    steps = UPDATES * size * agent.learner.envs_per_segment
    agent = dataclasses.replace(agent, learner=dataclasses.replace(agent.learner, steps=steps))
    began = time.perf_counter()
    env = nca.TradingEnv(panel(num_assets), "panel_daily")
    features_s = time.perf_counter() - began
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    with tempfile.TemporaryDirectory() as folder:
        rows = nca.train(env, agent, f"{folder}/run").metrics()
    last = rows[-1]  # the first compiles
    return {
        "assets": num_assets,
        "features_s": round(features_s, 2),
        "update_s": round(steps / UPDATES / last["steps_per_s"], 2),
        "steps_per_s": round(last["steps_per_s"]),
        "compiled_gb": round(last["memory_gb"], 3),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 3),
        "before_training_gb": round(before, 3),
        "micro_batches": last["micro_batches"],
    }


def main(words=None):
    """Print a line for each number of assets."""
    parser = argparse.ArgumentParser(description="Memory and time by the number of assets.")
    parser.add_argument("assets", type=int, nargs="+")
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args(words)
    for number in args.assets:
        if args.here:
            print(json.dumps(measured(number)), flush=True)
        else:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.panel", str(number), "--here"], check=True
            )


if __name__ == "__main__":
    main()
