"""Speed of sweeps and of one backtest, with vectorbt and backtesting.py as peers."""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nca_trader.config.account import PLAIN
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.simulate import legs_between, scan_targets
from nca_trader.evaluate.sweep.sweep import sweep
from nca_trader.numerics import float64_on_cpu
from nca_trader.strategies import rolling
from nca_trader.strategies.rules import sma_cross
from nca_trader.strategies.strategy import Strategy
from nca_trader.strategies.targets import scan_decisions, strategy_targets
from nca_trader.types import Bars, Costs

from .peers.clock import walk
from .timing import compared, measured_by

NUM_BARS, COLD_BARS = 100_000, 5_000
CALLS = 5  # the median of them counts
COSTS = Costs(commission=5e-4, slippage=2e-4)
GRID = {"fast": range(5, 35), "slow": range(40, 190, 5)}
OWN = {"span": range(5, 35), "loss": [0.02 + 0.005 * k for k in range(30)]}
OURS = {
    "sweep": "equity, return, volatility, Sharpe, Sortino, drawdown, trades, profit factor, "
    "turnover and more of each pair, and the verdict on the search",
    "backtest": "the result with its trades and metrics",
}
THEIRS = {
    "sweep": "the total return of each pair",
    "backtest": "its statistics and trades",
}
COLD = (
    "import time; began = time.perf_counter(); import nca_trader as nca; "
    f"bars = nca.synthetic.make('ou', num_bars={COLD_BARS}, seed=0).bars; "
    "nca.backtest(bars, nca.rules.sma_cross(10, 30)); print(time.perf_counter() - began)"
)


def made(num_bars: int = NUM_BARS) -> Bars:
    """Returns the peers' random walk as bars."""
    prices: dict[str, Any] = {name: x[:, None] for name, x in walk(num_bars).items()}
    hours = np.datetime64("2000-01-01") + np.arange(num_bars) * np.timedelta64(1, "h")
    present = np.ones((num_bars, 1), bool)
    return Bars(time=hours, symbols=("X",), present=present, **prices)


def own(span: Any = 20, loss: Any = 0.05) -> Strategy:
    """Returns a user's strategy: a feature of its own, and a stop."""
    mean = rolling.ew_mean(span)

    def act(state: Any, bar: Any) -> Any:
        state, average = mean.update(state, bar.close, bar.present)
        return state, jnp.where(bar.close > average, 1.0, 0.0)

    return Strategy(mean.init, act, "own").with_stop(loss)


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields rows of a sweep, of a sweep of a user's strategy, and of one backtest.

    Args:
      args: `peers`, an interpreter with vectorbt and backtesting.py, or None.
    """
    bars, num = made(), NUM_BARS * 900
    table: list[Any] = []

    def run(rule: Callable[..., Strategy], grid: Any) -> None:
        table[:] = [sweep(bars, rule, grid, COSTS, trials=None)]

    row = _timed("sweep of 900 pairs x 100,000 bars", num, lambda: run(sma_cross, GRID))
    row["ours"] = OURS["sweep"]
    if args.peers:
        theirs = measured_by(args.peers, "vectorbt_sweep", {"bars": NUM_BARS})
        equity = np.array(theirs.pop("equity"))
        row = compared(row, theirs) | {"theirs": THEIRS["sweep"]}
        row["difference"] = float(np.abs(table[0]["equity"] / equity - 1.0).max())
    yield row
    times = _timed("sweep of a user's strategy with a stop", num, lambda: run(own, OWN))
    yield times | {"slower": row["steps_per_s"] / times["steps_per_s"]}
    rule = sma_cross(10, 30)

    def single() -> None:
        result = backtest(bars, rule, COSTS)
        _ = result.trades, result.metrics

    one = _timed("backtest of 100,000 bars", NUM_BARS, single)
    one["ours"] = OURS["backtest"]
    one["floor_ms"] = 1e3 * _floor(bars, rule)
    one["over_floor"] = 1e3 * NUM_BARS / one["steps_per_s"] / one["floor_ms"]
    if args.peers:
        theirs = measured_by(args.peers, "backtesting_single", {"bars": NUM_BARS})
        one = compared(one, theirs) | {"theirs": THEIRS["backtest"]}
    yield one
    seconds = float(subprocess.check_output([sys.executable, "-c", COLD], text=True))
    cold = one | {"peer": None, "ratio": None, "compile_s": None}
    cold |= {"over_floor": None, "floor_ms": None}
    cold |= {"name": f"backtest of {COLD_BARS:,} bars in a new process", "first_call_s": seconds}
    yield cold | {"steps_per_s": COLD_BARS / seconds, "ours": "", "theirs": ""}


def _timed(name: str, steps: int, call: Callable[[], Any]) -> dict[str, Any]:
    """Returns the row of a call that compiles at its first time."""
    seconds = []
    for _ in range(CALLS + 1):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    later = statistics.median(seconds[1:])
    return {
        "name": name,
        "envs": None,
        "envs_per_segment": None,
        "steps_per_s": steps / later,
        "compile_s": seconds[0] - later,
        "first_call_s": seconds[0],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "retraces": 0,
        "peer": None,
        "ratio": None,
        "device": jax.devices()[0].device_kind,
    }


def _floor(bars: Bars, rule: Strategy) -> float:
    """Return the seconds of the two scans of a backtest alone: the rule's, and the account's.

    Nothing of a bar is kept but the equity that it leaves, so there are no trades and no metrics.
    """
    with float64_on_cpu():
        targets = strategy_targets(bars, rule)
        rules = dataclasses.replace(PLAIN, costs=COSTS)
        bar = jax.tree.map(jnp.asarray, bars.as_bar())
        legs = jax.tree.map(jnp.asarray, legs_between(bars, rules, 0, len(bars)))

        @jax.jit
        def last_equity(legs: Any, targets: Any) -> Any:
            return scan_targets(legs, targets, rules).log_equity[-1]

        seconds = []
        for _ in range(CALLS + 1):
            began = time.perf_counter()
            jax.block_until_ready(scan_decisions(bar, rule))
            jax.block_until_ready(last_equity(legs, targets))
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
