"""What trades: a run's agent, or the baseline that it was not shown to be better than."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nca_trader.agents.baselines import MATCHED, baseline_rules, constant_exposure, year_of
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.envs.account.risk import sizes
from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.gate import Gate, gate
from nca_trader.evaluate.result import Result
from nca_trader.runs.manifest import Deployment, Run, seen_rows
from nca_trader.runs.trials import data_record
from nca_trader.types import Bars

# Of an agent, what a walk-forward and a run must share; how often and where it is saved may differ.
RECIPE = ("policy", "optimizer", "curriculum", "population", "precision", "ensemble")


def mean_exposure(result: Result, rules: Rules | None = None) -> tuple[float, ...]:
    """Return the target of each asset that a result had on average, 0 where it ordered nothing.

    Where the account sizes positions by volatility it is the target before it was sized, so that a
    hold of it bears the same volatility at all times.

    Args:
      result: of a backtest.
      rules: of the account that will hold it; None are the result's.
    """
    ordered = result.targets.ffill().fillna(0.0).to_numpy()
    scale = (rules or result.rules).scale
    if scale is not None and result.bars is not None:
        size = sizes(result.bars, scale)[result.bars.index.isin(result.targets.index)]
        ordered = np.divide(ordered, size, out=np.zeros_like(ordered), where=size > 0.0)
    return tuple(float(x) for x in ordered.mean(0))


def deployable(result: Result, bars: Bars, start: str, stop: str | None = None) -> dict[str, Any]:
    """Backtest what could trade in the place of `result`'s agent, under its costs and limits.

    Args:
      result: of the agent on these bars.
      bars: those of the span, and earlier ones as history.
      start: the span begins with the first bar at or after this date.
      stop: it ends before this date.

    Returns:
      Results by name, the exposure-matched hold last.
    """
    rules = result.rules._asdict()
    year = year_of(bars.bars_per_year, bars.row(start, "start"))
    known = baseline_rules(year, result.rules.sizing == "volatility")
    known[MATCHED] = constant_exposure(mean_exposure(result))
    common: dict[str, Any] = {"start": start, "stop": stop} | rules
    return {name: backtest(bars, rule, result.charged, **common) for name, rule in known.items()}


def refuse_other(
    run: Run, recipe: tuple[EnvConfig, AgentConfig] | None, seeds: int, bars: Bars, last: int
) -> None:
    """Validate that a walk-forward of this recipe can decide what trades in a run's place.

    Args:
      run: the run.
      recipe: environment and agent that each fold trains; None of a strategy.
      seeds: agents of each fold.
      bars: of the walk-forward.
      last: row of the last bar that the folds judge on.

    Raises:
      ConfigError: this is a walk-forward of a strategy; the run is of another recipe; the folds
        judge on bars after those that trained or selected the run.
    """
    if recipe is None:
        raise ConfigError("a walk-forward of a strategy decides on no run; walk the agent.")
    env, agent = recipe
    steps = run.agent_config.learner.steps
    learners = (dataclasses.replace(x.learner, steps=steps) for x in (agent, run.agent_config))
    for name, there, here in (
        ("env", env, run.env_config),
        ("learner", *learners),
        *((part, getattr(agent, part), getattr(run.agent_config, part)) for part in RECIPE),
        ("num_seeds", seeds, run.agent_config.num_seeds),
    ):
        if there != here:
            raise ConfigError(
                f"{run.path}: another recipe than the one that is walked: its {name} differs; "
                f"walk {argument('env')} and {argument('agent')} as the run has them."
            )
    if seen_rows(bars, run) <= last:
        raise ConfigError(
            f"{run.path}: the walk-forward judges on bars up to {bars.index[last].date()}, after "
            "those that trained or selected the run, which could then be no test; walk earlier "
            f"bars ({argument('until')})."
        )


def deploy(
    run: Run, found: Gate, judged: Bars, year: int, targets: tuple[float, ...] = ()
) -> Deployment:
    """Record in a run's folder what trades: its agent where the gate passed, else the baseline.

    Args:
      run: the run.
      found: of the gate.
      judged: the bars that the gate judged on.
      year: bars that the baselines' trend looks back.
      targets: of the exposure-matched hold.
    """
    decided = Deployment(
        baseline="" if found.passed else found.baseline,
        year=year,
        sentence=found.sentence,
        data=data_record(judged),
        targets=targets if found.baseline == MATCHED and not found.passed else (),
    )
    run.write_json("deployment.json", decided)
    return decided


def decide(
    run: Run, result: Result, agents: Mapping[str, ArrayLike], bars: Bars, start: str
) -> Gate:
    """Judge a run on a span that it did not train on, and record what trades.

    Args:
      run: the run.
      result: of its agent on the span.
      agents: `[T]` returns of everything that could have been chosen on the span, by name; the
        bound allows for the choice.
      bars: up to the end of the span, with earlier ones as history.
      start: the span begins with the first bar at or after this date.
    """
    held = deployable(result, bars, start)
    others = {name: each.judged_returns for name, each in held.items()}
    found = gate(agents, others, bars.bars_per_year)
    first = bars.row(start, "start")
    year = year_of(bars.bars_per_year, first)
    deploy(run, found, bars[first:], year, mean_exposure(result))
    return found
