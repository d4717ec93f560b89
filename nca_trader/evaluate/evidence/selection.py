"""The selection span: bars that no agent trains on, whose scores say when training stops."""

from __future__ import annotations

import functools

import numpy as np

from nca_trader.agents.policy import Params
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate import metrics
from nca_trader.evaluate.backtest import backtest, rows_between
from nca_trader.evaluate.evidence.deploy import decide_deployment
from nca_trader.evaluate.evidence.gate import GateResult
from nca_trader.runs.folder import read_returns
from nca_trader.runs.manifest import Run
from nca_trader.runs.trials import DataRecord, data_record, record_of_env
from nca_trader.types import Bars


class Selector:
    """Scores the mean agent of a run on a span of bars by its Sharpe ratio, net of true costs.

    `nca.train(..., select=Selector(bars, start, stop))` scores the agents at intervals, stops when
    no better score came for a while, and keeps the update with the best one. All seeds stop at the
    same update: one number is chosen.

    Args:
      bars: those of the span, and earlier ones as history.
      start: the span begins with the first bar at or after this date.
      stop: it ends before this date; None is the end of the bars.

    Raises:
      BarError: fewer than two bars in the span.
      ConfigError: an invalid date.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")
      >>> env = nca.TradingEnv(bars.between(None, "2011-01-01"))
      >>> select = nca.Selector(bars, "2011-01-01", "2013-01-01")
      >>> run = nca.train(env, "nano", "runs/one", select=select)  # doctest: +SKIP
    """

    def __init__(self, bars: Bars, start: str, stop: str | None = None):
        self.first, last = rows_between(bars, start, stop, least=2)
        # No later bar, so that nothing after the span can decide.
        self.bars = bars[:last]
        self._start = start

    @functools.cached_property
    def data(self) -> DataRecord:
        """The selection span, as a run records it."""
        return data_record(self.bars[self.first :])

    def refuse_seen(self, env: TradingEnv) -> None:
        """Validate that an agent which trains in `env` sees no bar of the span.

        Raises:
          ConfigError: it does.
        """
        if env.task is not None:
            return  # other draws of a synthetic market have the same times
        trained = record_of_env(env).last
        if np.datetime64(trained) >= np.datetime64(self.data.first):
            raise ConfigError(
                f"{argument('select')} begins on {self.data.first[:10]}, and the environment's "
                f"bars end on {trained[:10]}: train on bars before the selection span alone."
            )

    def returns(self, run: Run, params: Params, seed: int | None = None) -> np.ndarray:
        """Return the `[T]` returns on the span, in excess of the interest on cash.

        Args:
          run: of the agents.
          params: of one agent where `seed` is given, else of all.
          seed: index of the agent that acts; None is the mean of all.
        """
        # Parameters in memory, which need no checkpoint.
        acting = Acting(run, params, seed)
        return backtest(self.bars, acting, start=self._start, look=False).excess_returns

    def decide(self, run: Run) -> GateResult:
        """Judge the selected agent by its baselines on the span, and record what trades.

        Each score of training could have been chosen, and the bound allows for that. The finding is
        in the run's deployment.json: a backtest and paper trading then take the base or baseline
        where the gate did not pass the agent.

        Args:
          run: trained with `select=self`.
        """
        agent = Run(run.path, force_agent=True)
        result = backtest(self.bars, agent, start=self._start, look=False)
        scored = {
            f"the mean agent after update {name}": column.to_numpy()
            for name, column in read_returns(run).items()
        }
        return decide_deployment(run, result, scored, self.bars, self._start)

    def score(self, returns: np.ndarray) -> float:
        """Return the annualised Sharpe ratio of `[T]` returns; NaN where nothing was traded."""
        return metrics.sharpe(returns, self.bars.bars_per_year)


class Acting(Run):
    """A run whose agents act with other parameters than those that it saved."""

    def __init__(self, run: Run, params: Params, seed: int | None = None):
        """Read the run's folder again; `params` are of agent `seed`, None of all."""
        super().__init__(run.path, seed=seed, force_agent=True)
        self._params = params

    def params(self) -> Params:
        """Return the given parameters."""
        return self._params
