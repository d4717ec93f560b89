"""Latency of a bar in paper trading, by the number of agents whose mean is traded.

    python -m benchmarks.live 1 8

The agents are `nano` on the two sample indexes, after one short update. A bar is everything that
a session does for it: features, the policies, the account, the broker and the journal on disk.
Seconds are of this process's own CPU and of the clock; the first do not count other work on the
machine.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time

import numpy as np

WARM, BARS = 300, 1000


def measured(num_seeds, agent="nano", env="index_daily"):
    """Return the row of one number of agents."""
    import nca_trader as nca
    from nca_trader.paper.feeds.feed import ReplayFeed
    from nca_trader.paper.journal.journal import Journal
    from nca_trader.paper.session.agents import run_agent
    from nca_trader.paper.session.trade import open_session
    from nca_trader.paper.venues.exchange import Exchange

    bars = nca.sample_bars("sp500")
    config = nca.load_agent(agent)
    short = dataclasses.replace(config.learner, num_segments=8, num_minibatches=1)
    config = dataclasses.replace(config, num_seeds=num_seeds, learner=short)
    steps = short.num_segments * short.segment_length * short.envs_per_segment
    with tempfile.TemporaryDirectory() as folder:
        trading = nca.TradingEnv(bars.between(None, "2005-01-01"), env)
        run = nca.train(trading, config, f"{folder}/run", steps=steps)
        acting = run_agent(run, run.account)
        decided = []

        def act(*given):
            began = time.process_time()
            found = acting.act(*given)
            decided.append(time.process_time() - began)
            return found

        nca.write_bars(bars[: acting.first_decision + WARM + BARS], f"{folder}/bars.parquet")
        source = ReplayFeed(nca.read_bars(f"{folder}/bars.parquet"), acting.symbols)
        journal = Journal(pathlib.Path(folder) / "paper.db", clock=source.now)
        exchange = Exchange(None, 1e6, acting.symbols, run.account)
        session = open_session(acting._replace(act=act), source, exchange, journal, 1e6)
        spent, clock = [], []
        for bar in source:
            began, wall = time.process_time(), time.perf_counter()
            session.on_bar(bar)
            spent.append(time.process_time() - began)
            clock.append(time.perf_counter() - wall)
        journal.close()
    row = {"agents": num_seeds}
    for name, each in (("decision_cpu", decided), ("bar_cpu", spent), ("bar_clock", clock)):
        low, high = np.percentile(each[-BARS:], [50, 99]) * 1e3
        row |= {f"{name}_p50_ms": round(float(low), 3), f"{name}_p99_ms": round(float(high), 3)}
    return row


def main(words=None):
    """Print a line for each number of agents."""
    parser = argparse.ArgumentParser(description="Latency of a bar in paper trading.")
    parser.add_argument("agents", type=int, nargs="+")
    args = parser.parse_args(words)
    for number in args.agents:
        print(json.dumps(measured(number)), flush=True)


if __name__ == "__main__":
    main()
