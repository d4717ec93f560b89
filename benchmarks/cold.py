"""Seconds from a new process to its first answer, with and without compiled programs on disk."""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from nca_trader.errors import StateError

PROCESSES = 5  # the median of them counts
STEPS = 65_536
WALK = """
import numpy as np, nca_trader as nca
def walk(num, assets, unit):
    steps = 0.01 * np.random.default_rng(0).standard_normal((num, assets))
    close = 100.0 * np.exp(steps.cumsum(0))
    open_ = np.vstack([close[:1], close[:-1]])
    time = np.datetime64("2005-01-01") + np.arange(num) * np.timedelta64(1, unit)
    return nca.Bars(
        time=time.astype("datetime64[ns]"), symbols=tuple(f"S{i}" for i in range(assets)),
        open=open_, high=np.maximum(open_, close), low=np.minimum(open_, close), close=close,
        volume=np.ones(close.shape), present=np.ones(close.shape, bool),
    )
"""
README = """
import pandas as pd, nca_trader as nca
bars, costs = nca.sample_bars("sp500"), nca.Costs(commission=5e-4, slippage=2e-4)
def trend(bars, fast=10, slow=100):
    close = pd.DataFrame(bars.close)
    return (close.rolling(fast).mean() > close.rolling(slow).mean()).to_numpy() / 2
nca.backtest(bars, trend, costs, start="2013-01-01").report("page.html")
"""
SWEEP = f"""{WALK}
pairs = {{"fast": range(5, 35), "slow": range(40, 190, 5)}}
nca.sweep(walk(5_000, 1, "h"), nca.rules.sma_cross, pairs)
"""
PAGE = f"""{WALK}
nca.backtest(walk(2_500, 3_000, "D"), nca.rules.sma_cross(60, 100)).report("page.html")
"""
LEAKCHECK = f"""{WALK}
import pandas as pd
def strength(close):
    change = pd.Series(close).diff()
    rise, fall = (x.ewm(alpha=1 / 14).mean() for x in (change.clip(lower=0), -change.clip(upper=0)))
    return 100.0 - 100.0 / (1.0 + rise / (fall + 1e-12))
nca.leakcheck(nca.indicator(strength, "close", lookback=100), walk(26_000, 1, "h"))
"""
VECTORBT = """
from benchmarks.peers import vectorbt_sweep
vectorbt_sweep.steps_per_second = lambda call, *_: call() or 1.0  # once
vectorbt_sweep.main(bars=5_000)
"""


class Job(NamedTuple):
    """What a new process does: arguments of the command line, or a script of Python.

    Attributes:
      name: of the row.
      does: `nca-trader` arguments, or a script.
      warm: whether its programs were compiled by an earlier process; None means both.
      before: arguments of the process that goes before, in the same folder.
      peer: a script of the peer that does the same job, and its name.
    """

    name: str
    does: list[str] | str
    warm: bool | None = None
    before: list[str] | None = None
    peer: tuple[str, str] | None = None


TRAIN = ["train", "--agent", "nano", "--env", "index_daily", "--run"]
RULE = ["backtest", "--strategy", "sma_cross"]
TRAINED = [*TRAIN, "run", "--steps", f"{STEPS}"]
JOBS = (
    Job("README script", README),
    Job("prove ou_mid", ["prove", "ou_mid", "--steps", "100000", "--alone"]),
    Job(f"train {STEPS:,} steps", [*TRAIN, "new", "--steps", f"{STEPS}"]),
    Job("train twice the steps", [*TRAIN, "new", "--steps", f"{2 * STEPS}"], True, TRAINED),
    Job("backtest of a run", ["backtest", "--run", "run"], True, TRAINED),
    Job("backtest of a rule", RULE, True),
    Job("sweep of 900 pairs, 5,000 bars", SWEEP, peer=(VECTORBT, "vectorbt")),
    Job("page of 3,000 assets, 2,500 bars", PAGE, False),
    Job("leakcheck of pandas, 26,000 hours", LEAKCHECK, False),
)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each job, cold and warm.

    Args:
      args: `peers`, an interpreter with the peers, or None.
    """
    for job in JOBS:
        for warm in (False, True) if job.warm is None else (job.warm,):
            seconds, cpu = measured(job, warm)
            row = {"name": f"{job.name}, {'warm' if warm else 'cold'}", "first_answer_s": seconds}
            row |= {"cpu_s": cpu, "peer": None, "ratio": None, "compile_s": None}
            if args.peers and job.peer:
                script, peer = job.peer
                theirs, _ = timed([args.peers, "-c", script], None)
                row |= {"peer": peer, "ratio": theirs / seconds}
            yield row | {"steps_per_s": 1.0 / seconds}


def measured(job: Job, warm: bool) -> tuple[float, float]:
    """Returns the median seconds of new processes, and their CPU seconds."""
    found = []
    with tempfile.TemporaryDirectory() as kept:
        cache = pathlib.Path(kept, "cache")
        for number in range(PROCESSES + warm):
            with tempfile.TemporaryDirectory() as folder:
                if job.before is not None:
                    timed(command(job.before), folder, cache)
                one = timed(command(job.does), folder, cache if warm else pathlib.Path(folder))
            if number or not warm:  # the first fills the cache
                found.append(one)
    seconds, cpu = (statistics.median(each) for each in zip(*found, strict=True))
    return seconds, cpu


def command(does: list[str] | str) -> list[str]:
    """Returns the command line of a job."""
    if isinstance(does, str):
        return [sys.executable, "-c", does]
    return [sys.executable, "-m", "nca_trader", *does, "--quiet"]


def timed(
    line: list[str], folder: str | None, cache: pathlib.Path | None = None
) -> tuple[float, float]:
    """Returns the seconds and CPU seconds of a new process.

    Raises:
      StateError: it fails.
    """
    root = str(pathlib.Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": root, "MPLBACKEND": "agg"}
    environment |= {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    # Where Python keeps no bytecode, each process compiles the source of all it imports: 2 s more.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), os.times().elapsed
    done = subprocess.run(line, cwd=folder or root, env=environment, capture_output=True, text=True)
    seconds, after = os.times().elapsed - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    # `prove` ends with 1 where so few steps miss the bar.
    if done.returncode > ("prove" in line):
        raise StateError(f"{' '.join(line)[:200]} failed: {done.stderr[-500:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
