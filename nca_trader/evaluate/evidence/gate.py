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

from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics
from nca_trader.evaluate.evidence.inference import resampled

LEVEL = 0.95  # of the one-sided bound
POWER = 0.84  # standard normal quantile of 80%
LEAST_YEARS = 8.0  # below which a gate can hardly say yes: see docs/guides/walk-forward.md
# Of annual Sharpe ratios: an agent that may be worse than its base by more does not trade.
TOLERATED = 0.15
# A smaller gain says nothing: a tilt of almost nothing has almost no error either.
LEAST_GAIN = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarmResult:
    """What out-of-sample returns show of an agent against the rule that it tilts.

    Attributes:
      agent: the name of the best agent.
      base: the name of its base.
      differences: the agent's Sharpe ratio less its base's, at true and at doubled costs.
      bounds: one-sided 95% lower bounds of these; NaN where they are undefined. most: upper ones.
      needed: the difference above the tolerated harm that passes in 4 of 5 cases.
      years: of returns.
      on_base: both against cash and hold in one line, see `verdict.compare_base`.
    """

    agent: str
    base: str
    differences: tuple[float, float]
    bounds: tuple[float, float]
    most: tuple[float, float]
    needed: float
    years: float
    on_base: str = ""

    @property
    def passed(self) -> bool:
        """Whether larger harm than is tolerated was excluded at both costs."""
        return all(bound > -TOLERATED for bound in self.bounds)

    @property
    def gained(self) -> bool:
        """Whether the agent was shown to be better than its base at both costs."""
        return all(bound > LEAST_GAIN for bound in self.bounds)

    @property
    def finding(self) -> str:
        """What was shown, in plain words."""
        if self.gained:
            return f"Gain shown: {self.agent} was shown to be better than its base, {self.base}"
        if self.passed and min(self.most) < 0.0:
            return (
                f"Harm shown, of less than {TOLERATED}: the Sharpe ratio of {self.agent} was shown "
                f"to be below that of its base, {self.base}, by less than that"
            )
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
        return f"{found}. {self.on_base}".rstrip()


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
        """Whether the agent should trade: by the second question where it has a base."""
        return self.passed if self.harm is None else self.harm.passed

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
        found = "No agent was shown to be better"
        if self.harm is not None:
            found = self.harm.finding
        elif self.passed:
            found = f"{self.agent} was shown to be better than {self.baseline}"
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
                f"one-sided 95% bound {self.bound:+.2f}; {self.years:.1f} years would show a "
                f"difference of {self.detectable:.2f} in 4 of 5 cases"
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
    bounds, most, needed = [math.nan, math.nan], [math.nan, math.nan], math.nan
    if luck is not None:
        for k, (ours, theirs) in enumerate(pairs):
            candidates = luck[:, :split].copy()
            candidates[:, best] = luck[:, ours]
            errors = candidates.max(axis=1) - luck[:, theirs]
            high = float(np.quantile(errors, LEVEL))
            bounds[k] = apart[k] - high
            most[k] = apart[k] - float(np.quantile(errors, 1.0 - LEVEL))
            needed = np.fmax(needed, high + POWER * errors.std(ddof=1))
    return HarmResult(
        agent=[*agents][best],
        base=name,
        differences=(apart[0], apart[1]),
        bounds=(bounds[0], bounds[1]),
        most=(most[0], most[1]),
        needed=float(needed),
        years=len(rows) / bars_per_year,
    )


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
