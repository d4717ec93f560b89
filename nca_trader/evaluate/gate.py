"""The gate: whether an agent is shown to be better than the best simple baseline.

An agent that wins on a few years may have been lucky, and so may the baseline that it is compared
with. The gate compares Sharpe ratios on out-of-sample returns. Its bound allows for both choices.
An agent that tilts a base rule answers a second question: whether it does no harm to that base.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nca_trader.agents.baselines import MATCHED, baseline_rules, constant_exposure, year_of
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.envs.account.risk import sizes
from nca_trader.envs.account.state import Rules
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate import metrics
from nca_trader.evaluate.backtest import backtest
from nca_trader.evaluate.inference import resampled
from nca_trader.evaluate.result import Result
from nca_trader.runs.manifest import Deployment, Run, seen_rows
from nca_trader.runs.trials import data_record
from nca_trader.types import Bars

LEVEL = 0.95  # of the one-sided bound
POWER = 0.84  # standard normal quantile of 80%
LEAST_YEARS = 8.0  # below which a gate can hardly say yes: see docs/guides/walk-forward.md
# Of annual Sharpe ratios: an agent that may be worse than its base by more does not trade.
TOLERATED = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarmResult:
    """What out-of-sample returns show of an agent against the rule that it tilts.

    Attributes:
      agent: the name of the best agent.
      base: the name of its base.
      differences: the agent's Sharpe ratio less its base's, at true and at doubled costs.
      bounds: one-sided 95% lower bounds of these; NaN where they are undefined.
      needed: the difference above the tolerated harm that passes in 4 of 5 cases.
      years: of returns.
    """

    agent: str
    base: str
    differences: tuple[float, float]
    bounds: tuple[float, float]
    needed: float
    years: float

    @property
    def passed(self) -> bool:
        """Whether larger harm than is tolerated was excluded at both costs."""
        return all(bound > -TOLERATED for bound in self.bounds)

    @property
    def gained(self) -> bool:
        """Whether the agent was shown to be better than its base at both costs."""
        return all(bound > 0.0 for bound in self.bounds)

    @property
    def finding(self) -> str:
        """What was shown, in plain words."""
        if self.gained:
            return f"Gain shown: {self.agent} was shown to be better than its base, {self.base}"
        if self.passed:
            return (
                f"No harm shown, no gain shown: the Sharpe ratio of {self.agent} was shown to be "
                f"less than {TOLERATED} below that of its base, {self.base}, and not shown to be "
                "above it"
            )
        return (
            f"No gain shown, and harm not excluded: the Sharpe ratio of {self.agent} may be "
            f"{TOLERATED} or more below that of its base, {self.base}"
        )

    @property
    def numbers(self) -> str:
        """The differences and their bounds."""
        if math.isnan(sum(self.bounds)):
            return "The bound of the difference from its base is undefined."
        (true, low), (doubled, lower) = zip(self.differences, self.bounds, strict=True)
        found = (
            f"Sharpe ratio less that of its base {true:+.2f}, one-sided 95% bound {low:+.2f}; at "
            f"doubled costs {doubled:+.2f} and {lower:+.2f}; {self.years:.1f} years"
        )
        if not self.passed and self.needed > TOLERATED:
            # The error of a Sharpe ratio falls with the root of the years.
            years = self.years * (self.needed / TOLERATED) ** 2
            found += f", and {years:.0f} would pass its equal in 4 of 5 cases"
        return f"{found}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateResult:
    """What out-of-sample returns show of an agent against its best baseline.

    Attributes:
      agent: the name of the best agent.
      baseline: the name of the best baseline.
      sharpe: annual Sharpe ratios of the two; 0 for an account that never moves.
      difference: the agent's Sharpe ratio less the baseline's.
      bound: one-sided 95% lower bound of the difference; NaN where it is undefined.
      most: one-sided 95% upper bound, which lets the luckiest baseline pay; likewise.
      detectable: the difference that years like these show in 4 of 5 cases.
      years: of returns.
      fall: the deepest fall of a baseline from a high, a negative fraction of it.
      fallen: the agent's Sharpe ratio with one more bar, in which it falls as far.
      harm: of an agent that tilts a base rule, what is shown against that; else None.
    """

    agent: str
    baseline: str
    sharpe: tuple[float, float]
    difference: float
    bound: float
    most: float
    detectable: float
    years: float
    fall: float
    fallen: float
    harm: HarmResult | None = None

    @property
    def passed(self) -> bool:
        """Whether the agent was shown to be better: the bound is above 0."""
        return self.bound > 0.0

    @property
    def worse(self) -> bool:
        """Whether the agent was shown to be worse."""
        return self.most < 0.0

    @property
    def trades(self) -> bool:
        """Whether the agent should trade: it was shown to be better, or to do its base no harm."""
        return self.passed or (self.harm is not None and self.harm.passed)

    @property
    def deployed(self) -> str:
        """The name of what should trade.

        In the place of an agent with a base it is the base, which was chosen before these bars were
        seen. The best of several baselines on these bars is in part the luckiest.
        """
        if self.trades:
            return self.agent
        return self.baseline if self.harm is None else self.harm.base

    @property
    def finding(self) -> str:
        """Whether the agent was shown to be better, in plain words."""
        shown = "shown" if self.passed else "not shown"
        return f"{self.agent} was {shown} to be better than {self.baseline}. {self.numbers}"

    @property
    def sentence(self) -> str:
        """The finding, and what is deployed by it."""
        found = "No agent was shown to be better" if self.harm is None else self.harm.finding
        if self.passed:
            gain = "" if self.harm is None else "Gain shown: "
            found = f"{gain}{self.agent} was shown to be better than {self.baseline}"
        numbers = self.numbers if self.harm is None else f"{self.harm.numbers} {self.numbers}"
        return f"{found}; deployed: {self.deployed}. {numbers}"

    @property
    def evidence(self) -> str:
        """What is shown against the base, where there is one, and all numbers."""
        if self.harm is None:
            return self.numbers
        return f"{self.harm.finding}. {self.harm.numbers} {self.numbers}"

    @property
    def numbers(self) -> str:
        """The numbers behind the finding, and what one bar as bad as a crash would change."""
        ours, theirs = self.sharpe
        limits = "its bound is undefined"
        if not math.isnan(self.bound):
            limits = (
                f"one-sided 95% bound {self.bound:+.2f}; {self.years:.1f} years show a difference "
                f"of {self.detectable:.2f} in 4 of 5 cases"
            )
            if self.years < LEAST_YEARS and not self.passed and self.harm is None:
                limits += ", so this gate could hardly have said yes"
        found = (
            f"Sharpe ratio of {self.agent} {ours:.2f}, of the "
            f"best baseline, {self.baseline}, {theirs:.2f}; difference {self.difference:+.2f}, "
            f"{limits}."
        )
        if not self.passed:
            return found
        # Returns without a crash do not show how large one would be: see docs/limits.md.
        still = "still pass" if self.bound - (ours - self.fallen) > 0.0 else "not pass"
        return (
            f"{found} With one bar as bad as the deepest fall of a baseline, {self.fall:.0%}, its "
            f"Sharpe ratio would be {self.fallen:.2f}, and it would {still}."
        )


def gate(
    agents: Mapping[str, ArrayLike],
    baselines: Mapping[str, ArrayLike],
    bars_per_year: float,
    repetitions: int = 2000,
    seed: int = 0,
) -> GateResult:
    """Judge agents against baselines on the same out-of-sample bars.

    The bound is `d - q95(e*)` over stationary resamples that keep all series together. The error
    `e* = max_k (s*_k - s_k) - (max_b s*_b - max_b s_b)` of a resample takes the luckiest of the
    agents k, so that a choice among many pays for its luck, and chooses the best baseline b again.

    Args:
      agents: `[T]` simple returns by name, e.g. of checkpoints.
      baselines: `[T]` simple returns by name, of the same bars and costs.
      bars_per_year: P.
      repetitions: resamples.
      seed: the same seed gives the same bound.

    Raises:
      ConfigError: no agent or no baseline, or series of different lengths.

    Source: White, A Reality Check for Data Snooping (2000), for the recentred maximum; Politis and
    Romano, The Stationary Bootstrap (1994).

    Example:
      >>> import numpy as np
      >>> rng = np.random.default_rng(0)
      >>> hold = rng.normal(0.0003, 0.01, 2520)
      >>> found = gate({"agent": hold + 0.001}, {"hold": hold, "flat": 0 * hold}, 252)
      >>> found.passed, found.baseline
      (True, 'flat')
    """
    rows = _rows("gate", agents, baselines)
    names, split = [*agents, *baselines], len(agents)
    found, luck = _ratios(rows, bars_per_year, repetitions, seed)
    best = int(found[:split].argmax())
    other = split + int(found[split:].argmax())
    apart = float(found[best] - found[other])
    bound = most = detectable = math.nan
    if luck is not None:
        again = found + luck
        errors = luck[:, :split].max(axis=1) - (again[:, split:].max(axis=1) - found[other])
        high = float(np.quantile(errors, LEVEL))
        # The best baseline was chosen among several, and here it is the one that may be lucky.
        others = luck[:, best] - luck[:, split:].max(axis=1)
        bound, most = apart - high, apart - float(np.quantile(others, 1.0 - LEVEL))
        detectable = high + POWER * float(errors.std(ddof=1))
    fall, fallen = 0.0, float(found[best])
    if len(rows) > 1:
        fall = min(metrics.max_drawdown(r) for r in rows[:, split:].T)
        fallen = metrics.sharpe(np.append(rows[:, best], fall), bars_per_year)
        fallen = float(np.nan_to_num(fallen))
    return GateResult(
        agent=names[best],
        baseline=names[other],
        sharpe=(float(found[best]), float(found[other])),
        difference=apart,
        bound=bound,
        most=most,
        detectable=detectable,
        years=len(rows) / bars_per_year,
        fall=fall,
        fallen=fallen,
    )


def harm(
    agents: Mapping[str, ArrayLike],
    base: tuple[str, ArrayLike],
    doubled: tuple[ArrayLike, ArrayLike],
    bars_per_year: float,
    repetitions: int = 2000,
    seed: int = 0,
) -> HarmResult:
    """Judge whether an agent does no harm to its base, on the same out-of-sample bars.

    The bounds are those of `gate` with the base as the only baseline. At doubled costs only the
    best agent is known; the luck of the others is taken from true costs.

    Args:
      agents: `[T]` simple returns by name, of all that could have been chosen on these bars.
      base: its name and `[T]` returns.
      doubled: `[T]` returns of the best agent and of the base, at doubled costs.
      bars_per_year: P.
      repetitions: resamples.
      seed: the same seed gives the same bounds.

    Raises:
      ConfigError: no agent, or series of different lengths.

    Example:
      >>> import numpy as np
      >>> base = np.random.default_rng(0).normal(0.0003, 0.01, 2520)
      >>> found = harm({"agent": base}, ("hold", base), (base, base), 252)
      >>> found.passed, found.gained, found.bounds
      (True, False, (0.0, 0.0))
    """
    name, returns = base
    others = {"base": returns, "doubled agent": doubled[0], "doubled base": doubled[1]}
    rows, split = _rows("harm", agents, others), len(agents)
    found, luck = _ratios(rows, bars_per_year, repetitions, seed)
    best = int(found[:split].argmax())
    pairs = ((best, split), (split + 1, split + 2))
    apart = [float(found[ours] - found[theirs]) for ours, theirs in pairs]
    bounds, needed = [math.nan, math.nan], math.nan
    if luck is not None:
        for k, (ours, theirs) in enumerate(pairs):
            candidates = luck[:, :split].copy()
            candidates[:, best] = luck[:, ours]
            errors = candidates.max(axis=1) - luck[:, theirs]
            high = float(np.quantile(errors, LEVEL))
            bounds[k] = apart[k] - high
            needed = np.fmax(needed, high + POWER * errors.std(ddof=1))
    return HarmResult(
        agent=[*agents][best],
        base=name,
        differences=(apart[0], apart[1]),
        bounds=(bounds[0], bounds[1]),
        needed=float(needed),
        years=len(rows) / bars_per_year,
    )


def with_harm(
    found: GateResult, result: Result, base: Result, agents: Mapping[str, ArrayLike]
) -> GateResult:
    """Return what a gate found with what is shown against the agent's base, at both costs.

    Args:
      found: of the gate.
      result: of the best agent.
      base: of its base on the same bars at the same costs.
      agents: those of the gate.
    """

    def doubled(each: Result) -> np.ndarray:
        assert each.again is not None
        return each.again(costs=each.charged.scaled(2.0)).excess_returns

    rule = (base.name, base.excess_returns)
    judged = harm(agents, rule, (doubled(result), doubled(base)), result.bars_per_year)
    return dataclasses.replace(found, harm=judged)


def _rows(what: str, agents: Mapping[str, Any], others: Mapping[str, Any]) -> np.ndarray:
    """Return `[T, K]` the series of the agents and the others on the bars that all of them have."""
    series = [np.asarray(r, np.float64) for r in (*agents.values(), *others.values())]
    shapes = {r.shape for r in series}
    if not (agents and others) or len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise ConfigError(
            f"{what}: {len(agents)} agents and {len(others)} baselines with returns of shapes "
            f"{sorted(shapes)}; give at least one of each, [T] of the same bars."
        )
    rows = np.column_stack(series)
    # A bar counts where every series has it, so that all are resampled by the same bars.
    return rows[~np.isnan(rows).any(axis=1)]


def _ratios(
    rows: np.ndarray, bars_per_year: float, repetitions: int, seed: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return annual Sharpe ratios `[K]` of rows `[T, K]`, and the luck of resamples `[R, K]`.

    The luck is the ratios of a resample less those found, so that it has no advantage of its own;
    None where nothing can be resampled. Cash is a choice as well, and its ratio counts as 0.
    """
    if len(rows) < 2:
        return np.zeros(rows.shape[1]), None
    found = np.nan_to_num([metrics.sharpe(r, bars_per_year) for r in rows.T])
    drawn = resampled(rows, repetitions, seed)
    return found, None if drawn is None else np.nan_to_num(drawn.sharpe(bars_per_year)) - found


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
        # Computed on all bars and then cut, because the sizes of the first bars depend on earlier
        # ones.
        size = sizes(result.bars, scale)[result.bars.index.isin(result.targets.index)]
        ordered = np.divide(ordered, size, out=np.zeros_like(ordered), where=size > 0.0)
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
    rules = result.rules._asdict()
    # At most as long as the history: with less history than that, the trend rules never decide.
    year = year_of(bars.bars_per_year, bars.row(start, "start"))
    known = baseline_rules(year, result.rules.sizing == "volatility")
    # Its own base is one of the baselines, by which the second question is judged.
    if result.run is not None and (base := result.run.base) is not None:
        known[base.name] = base
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
    # How long it trains may differ: folds are shorter than the whole.
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
    held = deployable(result, bars, start)
    others = {name: each.excess_returns for name, each in held.items() if name != MATCHED}
    found = gate(agents, others, bars.bars_per_year)
    if run.base is not None:
        found = with_harm(found, result, held[run.base.name], agents)
    first = bars.row(start, "start")
    year = year_of(bars.bars_per_year, first)
    deploy(run, found, bars[first:], year)
    return found
