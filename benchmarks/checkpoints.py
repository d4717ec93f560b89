"""What saving a checkpoint costs training: seconds of a core, in the loop and in the thread.

    python -m benchmarks.checkpoints [--agents nano wide] [--saves 20]

Seconds are those that the processor spent, so that a machine with other work shows them as well.
The share is that of one core at the default interval, as if training had no core to spare.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import jax

from nca_trader import TradingEnv, load_agent, load_env, make_policy, sample_bars
from nca_trader.config import CheckpointConfig
from nca_trader.learner.learner import make_learner
from nca_trader.runs.checkpoint import Checkpoints, flatten


def measure(name, saves):
    """Median seconds of one save of an agent's state, and the state's size."""
    env, agent = TradingEnv(sample_bars("sp500"), load_env("index_daily")), load_agent(name)
    state = make_learner(env, make_policy(agent, env.spec), agent).init(jax.random.key(0))
    loop, thread = [], []
    with tempfile.TemporaryDirectory() as folder, Checkpoints(pathlib.Path(folder) / "c") as saved:
        for update in range(1, saves + 1):
            before_all, before = time.process_time(), time.thread_time()
            saved.save(update, state)
            loop.append(time.thread_time() - before)
            saved.wait()
            thread.append(time.process_time() - before_all - loop[-1])
    size = sum(leaf.nbytes for leaf in flatten(state).values())
    return statistics.median(loop), statistics.median(thread), size


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", nargs="+", default=["nano", "wide"])
    parser.add_argument("--saves", type=int, default=20)
    args = parser.parse_args()
    every = CheckpointConfig().every_seconds
    for name in args.agents:
        loop, thread, size = measure(name, args.saves)
        print(
            f"{name}: {size / 1e6:.2f} MB, in the loop {1e3 * loop:.1f} ms, in the thread "
            f"{1e3 * thread:.0f} ms, {(loop + thread) / every:.2%} of a core at one in {every:g} s"
        )


if __name__ == "__main__":
    main()
