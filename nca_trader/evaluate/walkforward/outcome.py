"""What a walk-forward found: its account, its baselines and what they show."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pandas as pd

from nca_trader.cloud import Place
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.envs.account.state import rules_of
from nca_trader.errors import argument
from nca_trader.evaluate import metrics, statistics
from nca_trader.evaluate.deploy import deploy, mean_exposure, refuse_other
from nca_trader.evaluate.gate import Gate, gate
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.statistics import Interval
from nca_trader.evaluate.verdict import count, decimal, percent
from nca_trader.evaluate.walkforward.refit import Fitted, Setup
from nca_trader.runs.manifest import Deployment, Run
from nca_trader.types import Bars

CONSTANT = "best constant weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkForward:
    """The result of a walk-forward.

    Attributes:
      result: one account over the stitched test spans; of several paths the one of
        median Sharpe ratio.
      folds: one row per fold: its spans, the SHA-256 of its bars, what was chosen on the train
        span, and the stitched account's metrics in its test span.
      baselines: results of the baselines on the same bars, costs and fills, by name.
      paths: results of all paths; a walk-forward has one, combinatorial folds several.
      difference: mean return per year of `result` less that of the best constant weight.
      interval: its 95% interval.
      verdict: what the test spans do and do not show, in one sentence.
      bars: all bars of the walk-forward.
      recipe: environment and agent that each fold trained; None of a strategy.
      seeds: agents of each fold.
      year: bars that the baselines' trend looks back.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500").select("SP500")[-1000:]
      >>> grid = {"fast": (5, 10), "slow": (30,)}
      >>> walk = nca.walk_forward(bars, nca.rules.sma_cross, grid=grid, train=500, test=250)
      >>> len(walk.folds), len(walk.result.equity)
      (2, 500)
    """

    result: Result
    folds: pd.DataFrame
    baselines: dict[str, Result]
    paths: tuple[Result, ...]
    difference: float
    interval: Interval
    verdict: str
    bars: Bars
    recipe: tuple[EnvConfig, AgentConfig] | None = None
    seeds: int = 1
    year: int = 252

    @functools.cached_property
    def gate(self) -> Gate:
        """Whether `result` was shown to be better than the best baseline, see `gate`.

        The best constant weight is known in hindsight only, and is not among those to deploy.
        """
        others = {n: r.judged_returns for n, r in self.baselines.items() if n != CONSTANT}
        own = {self.result.name: self.result.judged_returns}
        return gate(own, others, self.result.bars_per_year)

    def deploy(self, run: Run) -> Deployment:
        """Record in a run's folder what trades in its place, by the gate of this walk-forward.

        The folds judge the recipe, and the run is the agent that the recipe made of all years.

        Args:
          run: trained by the recipe of the folds, on bars that reach at least as far as they do.

        Raises:
          ConfigError: this is a walk-forward of a strategy; the run is of another recipe; the
            folds judge on bars after those that trained or selected the run.
        """
        last = int(self.bars.index.searchsorted(self.result.equity.index[-1]))
        refuse_other(run, self.recipe, self.seeds, self.bars, last)
        assert self.recipe is not None
        rules = rules_of(self.recipe[0])
        judged = self.bars.between(str(self.result.equity.index[0]), None)
        judged = judged[: len(self.result.equity)]
        return deploy(run, self.gate, judged, self.year, mean_exposure(self.result, rules))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of `result`."""
        return self.result.metrics

    @property
    def table(self) -> pd.DataFrame:
        """One row for the walk-forward and for each baseline, one column per metric."""
        rows = {self.result.name: self.metrics}
        return pd.DataFrame(rows | {name: r.metrics for name, r in self.baselines.items()}).T

    def __repr__(self) -> str:
        shown = self.table[["total_return", "sharpe", "max_drawdown", "turnover"]]
        # A strategy is not deployed by the gate.
        found = self.gate.sentence if self.recipe else self.gate.finding
        return f"{shown.to_string(float_format='{:.3f}'.format)}\n{self.verdict}\n{found}"


def verdict_of(
    result: Result,
    baseline: Result,
    difference: float,
    interval: Interval,
    where: str,
    log: Place | None,
) -> str:
    """State what the test spans show, against a baseline that was fixed before."""
    found = "is not distinguishable from"
    if interval.low > 0.0 or interval.high < 0.0:
        found = "earned more than" if interval.low > 0.0 else "earned less than"
    limits = "with too little movement for an interval"
    if not math.isnan(interval.low):
        limits = f"95% interval {percent(interval.low)} to {percent(interval.high)}"
    ours, theirs = result.metrics, baseline.metrics
    index = result.equity.index
    tried = f"No trial log counts what was tried before; name one with {argument('trials')}."
    if log is not None and result.tried is not None:
        tried = f"The trial log of {log.name} has {count(result.tried, 'trial')}"
        tried += " on these symbols."
    return (
        f"{where}, {index[0]:%Y-%m-%d} to {index[-1]:%Y-%m-%d}, {result.name} {found} the "
        f"{CONSTANT}: total return {percent(ours['total_return'])} against "
        f"{percent(theirs['total_return'])}, Sharpe ratio {decimal(ours['sharpe'])} against "
        f"{decimal(theirs['sharpe'])}; the difference in mean return is {percent(difference)} "
        f"per year, {limits}. {tried}"
    )


def difference_of(result: Result, baseline: Result, bars_per_year: float) -> tuple[float, Interval]:
    """Return the difference in mean return per year, and its 95% interval."""
    ours, theirs = (metrics.simple_returns(r.equity) for r in (result, baseline))
    interval = statistics.mean_difference_interval(ours, theirs, bars_per_year)
    return float(np.mean(ours - theirs) * bars_per_year), interval


def table_of(setup: Setup, fitted: list[Fitted], result: Result) -> pd.DataFrame:
    """Return one row per fold."""
    index, rows = setup.bars.index, []
    returns = pd.Series(metrics.simple_returns(result.equity), result.equity.index)
    for fold, one in zip(setup.folds, fitted, strict=True):
        inside = np.concatenate([np.arange(first, last) for first, last in fold.test])
        own = returns.reindex(index[inside]).to_numpy()
        rows.append(
            {
                "train_start": index[fold.train[0][0]],
                "train_stop": index[fold.train[-1][1] - 1],
                "train_bars": sum(last - first for first, last in fold.train),
                "test_start": index[fold.test[0][0]],
                "test_stop": index[fold.test[-1][1] - 1],
                "test_bars": len(inside),
                **one.chosen,
                "tried": one.tried,
                "train_score": one.score,
                "total_return": metrics.total_return(own),
                "sharpe": metrics.sharpe(own, setup.bars.bars_per_year),
                "train_sha256": one.train_sha256,
                "test_sha256": one.test_sha256,
                "seconds": one.seconds,
            }
        )
    return pd.DataFrame(rows, index=pd.RangeIndex(len(rows), name="fold"))
