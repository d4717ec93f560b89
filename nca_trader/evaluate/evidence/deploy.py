"""What trades of a run after a gate: its agent, its base or a baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nca_trader.config import AccountConfig, AgentConfig, EnvConfig
from nca_trader.envs.account.risk import sizes, undo_size
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.evidence.gate import GateResult, gate, harm
from nca_trader.evaluate.evidence.verdict import compare_base
from nca_trader.evaluate.result import Result
from nca_trader.runs.manifest import Deployment, Run, seen_rows
from nca_trader.runs.trials import data_record
from nca_trader.strategies.baselines import MATCHED, baseline_rules, constant_exposure, year_of
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bars

# Of an agent, what a walk-forward and a run must share; how often and where it is saved may differ.
RECIPE = "policy optimizer curriculum population precision ensemble num_seeds".split()


def mean_exposure(result: Result, rules: AccountConfig | None = None) -> tuple[float, ...]:
    """Return the target of each asset that a result had on average, 0 where it ordered nothing.

    Where the account sizes positions it is the target before it was sized, so that a hold of it
    bears the same volatility at all times.

    Args:
      result: of a backtest.
      rules: of the account that will hold it; None are the result's.
    """
    ordered = result.targets.ffill().fillna(0.0).to_numpy()
    sizing = (rules or result.rules).sizes
    if sizing is not None:
        # Sizes of the first bars depend on earlier ones.
        first = result.bars.row(result.targets.index[0])
        last = first + len(ordered)
        ordered = undo_size(ordered, sizes(result.bars[:last], sizing, first))
    return tuple(float(x) for x in ordered.mean(0))


def deployable(result: Result, bars: Bars, start: str, stop: str | None = None) -> dict[str, Any]:
    """Backtest the strategies that could replace the agent of `result`, and a control, alike.

    Args:
      result: of the agent on these bars.
      bars: those of the span, and earlier ones as history.
      start: the span begins with the first bar at or after this date.
      stop: it ends before this date.

    Returns:
      Results by name; the control is last, the exposure-matched hold, which knows the span.
    """
    # At most as long as the history: with less history than that, the trend rules never decide.
    year = year_of(bars.bars_per_year, bars.row(start, "start"))
    # Its own base is one of the baselines, by which the second question is judged.
    base = None if result.run is None else result.run.base
    known = baseline_rules(year, result.rules.sizing != "fixed", base)
    known[MATCHED] = constant_exposure(mean_exposure(result))
    common: dict[str, Any] = {"start": start, "stop": stop, "account": result.rules.without_levels}
    return {name: backtest(bars, rule, **common) for name, rule in known.items()}


def refuse_other(
    run: Run, recipe: tuple[EnvConfig, AgentConfig] | None, bars: Bars, last: int
) -> None:
    """Validate that a walk-forward of this recipe can decide what trades in a run's place.

    Args:
      run: the run.
      recipe: environment and agent that each fold trains; None of a strategy.
      bars: of the walk-forward.
      last: row of the last bar that the folds judge on.

    Raises:
      ConfigError: this is a walk-forward of a strategy; the run is of another recipe; the folds
        judge on bars after those that trained or selected the run.
    """
    if recipe is None:
        raise ConfigError("a walk-forward of a strategy decides on no run; walk the agent.")
    env, agent = recipe
    # How long it trains may differ: folds are shorter than the whole.
    steps = run.agent_config.learner.steps
    learners = (dataclasses.replace(x.learner, steps=steps) for x in (agent, run.agent_config))
    for name, there, here in (
        ("env", env, run.env_config),
        ("learner", *learners),
        *((part, getattr(agent, part), getattr(run.agent_config, part)) for part in RECIPE),
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


def deploy(run: Run, found: GateResult, judged: Bars, year: int) -> Deployment:
    """Record in a run's folder what trades: its agent, its base or a baseline.

    Args:
      run: the run.
      found: of the gate.
      judged: the bars that the gate judged on.
      year: bars that the baselines' trend looks back.
    """
    decided = Deployment(
        baseline="" if found.trades else found.deployed,
        year=year,
        sentence=found.sentence,
        data=data_record(judged),
    )
    run.write_json("deployment.json", decided)
    return decided


def judge(
    result: Result,
    agents: Mapping[str, ArrayLike],
    baselines: Mapping[str, Result],
    base: Strategy | None,
) -> GateResult:
    """Judge an agent by the gate, and where it tilts a base also against that, at both costs.

    Args:
      result: of the best agent.
      agents: `[T]` returns of all that could have been chosen on these bars, by name.
      baselines: on the same bars at the same costs, by name, with the base.
      base: the rule that the agent tilts; None without one.
    """

    def doubled(each: Result) -> np.ndarray:
        return each.at_costs(2.0).excess_returns

    others = {name: each.excess_returns for name, each in baselines.items() if name != MATCHED}
    found = gate(agents, others, result.bars_per_year)
    if base is None:
        return found
    tilted = baselines[base.name]
    rule = (tilted.name, tilted.excess_returns)
    judged = harm(agents, rule, (doubled(result), doubled(tilted)), result.bars_per_year)
    judged = dataclasses.replace(judged, on_base=compare_base(result, baselines, base))
    return dataclasses.replace(found, harm=judged)


def decide_deployment(
    run: Run, result: Result, agents: Mapping[str, ArrayLike], bars: Bars, start: str
) -> GateResult:
    """Judge a run on a span that it did not train on, and record what trades.

    Args:
      run: the run.
      result: of its agent on the span.
      agents: `[T]` returns of everything that could have been chosen on the span, by name; the
        bound allows for the choice.
      bars: up to the end of the span, with earlier ones as history.
      start: the span begins with the first bar at or after this date.
    """
    found = judge(result, agents, deployable(result, bars, start), run.base)
    first = bars.row(start, "start")
    year = year_of(bars.bars_per_year, first)
    deploy(run, found, bars[first:], year)
    return found
