"""When training stops: the update after which the agents do best on bars that none trains on."""

from __future__ import annotations

import io
import math
from typing import Any, Protocol

import jax
import numpy as np
import pandas as pd

from nca_trader.agents.policy import Params, unstack
from nca_trader.config import SelectionConfig
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import RunError, argument
from nca_trader.learner.learner import number_or_null
from nca_trader.learner.update import LearnerState
from nca_trader.machine import write_atomically
from nca_trader.parallel import hosts
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.folder import RETURNS, read_returns
from nca_trader.runs.manifest import Run, Selection
from nca_trader.runs.trials import DataRecord

SELECTED = "selected"  # in the run's folder: the states of the best updates


class Scoring(Protocol):
    """What scores agents while they train, see `evaluate.evidence.selection.Selector`."""

    @property
    def data(self) -> DataRecord:
        """The selection span."""
        ...

    def refuse_seen(self, env: TradingEnv) -> None:
        """Raise a ConfigError if `env` has bars of the span."""
        ...

    def returns(self, run: Run, params: Params, seed: int | None = None) -> np.ndarray:
        """Return the `[T]` returns of an agent on the span; `seed` None is the mean of all."""
        ...

    def score(self, returns: np.ndarray) -> float:
        """Return the score of returns; more is better."""
        ...


class Stopping:
    """Scores a run at intervals, keeps the best update, and ends training when it is long past.

    The state is in the run's folder, so that a resumed run goes on as if it had not stopped.

    Args:
      run: the run.
      select: scores the agents; None never scores and never ends.
      config: how often, and for how long.
      updates: of the whole run.
    """

    def __init__(self, run: Run, select: Scoring | None, config: SelectionConfig, updates: int):
        """Read nothing yet; see `resume`.

        Raises:
          RunError: the run was selected on other bars.
        """
        self._run, self._select, self._config = run, select, config
        self._every = max(updates // config.scores, 1)
        self._updates = updates
        self._table = pd.DataFrame()
        self._best, self._since = -1, 0  # updates; scores since then
        there = run.selection
        known = there.data if there and there.update is not None else None
        here = select.data if select else None
        if known is not None and (here is None or known.sha256 != here.sha256):
            raise RunError(
                f"{run.path}: its training stops by a score on {known.first[:10]} to "
                f"{known.last[:10]}; give {argument('select')} for the same bars, or another "
                f"{argument('run_dir')}."
            )

    @property
    def ended(self) -> bool:
        """Whether training ends here: no better score came for `patience` scores."""
        return self._since >= self._config.patience

    def due(self, done: int) -> bool:
        """Whether the agents are scored after `done` updates."""
        return self._select is not None and (done % self._every == 0 or done == self._updates)

    def resume(self, done: int) -> None:
        """Read the scores up to `done` updates; later ones will be made again.

        Raises:
          StateError: the file of returns is damaged.
        """
        if self._select is None:
            return
        if hosts.first():
            table = read_returns(self._run)
            kept = [name for name in table if int(str(name)) <= done]
            self._table = table[kept]
            if len(kept) < len(table.columns):
                self._write()
        self._agree()

    def score(self, state: LearnerState, done: int, row: dict[str, Any]) -> None:
        """Score the agents of `state`; record the score in `row` and in the run's folder.

        A collective: every process must call it.
        """
        assert self._select is not None
        params = jax.tree.map(hosts.copy_to_host, state.params)
        hosts.on_first(lambda: self._score(params, done, row))
        before = self._best
        self._agree()
        if self._best != before:
            # Before the row and the checkpoint of this update are written: both may rely on it.
            with Checkpoints(self._run.path / SELECTED, keep=2) as selected:
                selected.save(done, state)
        hosts.on_first(lambda: self._record(params if self._best != before else None))

    def _score(self, params: Params, done: int, row: dict[str, Any]) -> None:
        assert self._select is not None
        found = self._select.returns(self._run, params)
        row["selection"] = number_or_null(self._select.score(found))
        self._table = self._table.assign(**{str(done): found})

    def _record(self, best: Params | None) -> None:
        """Write selection.json, then the returns: a score without its record is made again."""
        assert self._select is not None
        there = self._run.selection
        sharpe = there.sharpe if there else None
        if best is not None:
            num_agents = self._run.agent_config.num_seeds
            alone = unstack(best, num_agents) if num_agents > 1 else [best]
            each = [self._select.returns(self._run, one, i) for i, one in enumerate(alone)]
            sharpe = [number_or_null(self._select.score(one)) for one in each]
        found = Selection(
            sharpe=sharpe,
            data=self._select.data,
            update=self._best,
            score=number_or_null(self._select.score(self._table[str(self._best)].to_numpy())),
            scored=len(self._table.columns),
            ended=self.ended,
        )
        self._run.write_json("selection.json", found)
        self._write()

    def _write(self) -> None:
        content = io.BytesIO()
        self._table.to_parquet(content)
        write_atomically(self._run.path / RETURNS, content.getvalue())

    def _agree(self) -> None:
        """Find the best update in process 0, and tell the others."""
        best, since = -1, 0
        if hosts.first() and self._select is not None and len(self._table.columns):
            # An agent that never trades has no ratio; it is as good as cash, whose ratio is 0.
            scores = [self._select.score(self._table[name].to_numpy()) for name in self._table]
            known = [0.0 if math.isnan(score) else score for score in scores]
            place = int(np.argmax(known))  # the first of equals
            best, since = int(str(self._table.columns[place])), len(known) - 1 - place
        found = (np.int32(best), np.int32(since))
        self._best, self._since = map(int, hosts.broadcast(found) if hosts.count() > 1 else found)
