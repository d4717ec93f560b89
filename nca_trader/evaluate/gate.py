"""The gate: whether an agent is shown to be better than the best simple baseline.

An agent that wins on a few years may have been lucky, and so may the baseline that it is compared
with. The gate compares Sharpe ratios on out-of-sample returns. Its bound allows for both choices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics
from nca_trader.evaluate.statistics import bootstrap_values

LEVEL = 0.95  # of the one-sided bound
POWER = 0.84  # standard normal quantile of 80%
LEAST_YEARS = 8.0  # below which a gate can hardly say yes: see docs/guides/walk-forward.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """What out-of-sample returns show of an agent against its best baseline.

    Attributes:
      agent: the name of the best agent.
      baseline: the name of the best baseline.
      sharpe: annual Sharpe ratios of the two; 0 for an account that never moves.
      difference: the agent's Sharpe ratio less the baseline's.
      bound: one-sided 95% lower bound of the difference; NaN where it is undefined.
      detectable: the difference that years like these show in 4 of 5 cases.
      years: of returns.
    """

    agent: str
    baseline: str
    sharpe: tuple[float, float]
    difference: float
    bound: float
    detectable: float
    years: float

    @property
    def passed(self) -> bool:
        """Whether the agent was shown to be better: the bound is above 0."""
        return self.bound > 0.0

    @property
    def deployed(self) -> str:
        """The name of what should trade."""
        return self.agent if self.passed else self.baseline

    @property
    def finding(self) -> str:
        """Whether the agent was shown to be better, in plain words."""
        shown = "shown" if self.passed else "not shown"
        return f"{self.agent} was {shown} to be better than {self.baseline}. {self._figures}"

    @property
    def sentence(self) -> str:
        """The finding, and what is deployed by it."""
        found = f"{self.agent} was shown to be better than {self.baseline}"
        if not self.passed:
            found = "No agent was shown to be better"
        return f"{found}; deployed: {self.deployed}. {self._figures}"

    @property
    def _figures(self) -> str:
        ours, theirs = self.sharpe
        limits = "its bound is undefined"
        if not math.isnan(self.bound):
            limits = (
                f"one-sided 95% bound {self.bound:+.2f}; {self.years:.1f} years show a difference "
                f"of {self.detectable:.2f} in 4 of 5 cases"
            )
            if self.years < LEAST_YEARS and not self.passed:
                limits += ", so this gate could hardly have said yes"
        return (
            f"Sharpe ratio of {self.agent} {ours:.2f}, of the "
            f"best baseline, {self.baseline}, {theirs:.2f}; difference {self.difference:+.2f}, "
            f"{limits}."
        )


def gate(
    agents: Mapping[str, ArrayLike],
    baselines: Mapping[str, ArrayLike],
    bars_per_year: float,
    repetitions: int = 2000,
    seed: int = 0,
) -> Gate:
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
    series = {name: np.asarray(r, np.float64) for name, r in {**agents, **baselines}.items()}
    shapes = {r.shape for r in series.values()}
    if not (agents and baselines) or len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise ConfigError(
            f"gate: {len(agents)} agents and {len(baselines)} baselines with returns of shapes "
            f"{sorted(shapes)}; give at least one of each, [T] of the same bars."
        )
    rows = np.column_stack(list(series.values()))
    rows = rows[~np.isnan(rows).any(axis=1)]
    names, split = list(series), len(agents)

    def sharpes(rows: np.ndarray) -> np.ndarray:
        deviation = rows.std(axis=0, ddof=1)
        moving = deviation > metrics.NO_VOLATILITY
        # Cash is a choice as well, and its Sharpe ratio counts as 0.
        found = np.where(moving, rows.mean(axis=0) / np.where(moving, deviation, 1.0), 0.0)
        return found * math.sqrt(bars_per_year)

    found = sharpes(rows) if len(rows) > 1 else np.zeros(len(names))

    def error(rows: np.ndarray) -> float:
        again = sharpes(rows)
        lucky = (again - found)[:split].max()
        return float(lucky - (again[split:].max() - found[split:].max()))

    best = int(found[:split].argmax())
    other = split + int(found[split:].argmax())
    apart = float(found[best] - found[other])
    errors = bootstrap_values(error, rows, repetitions, seed)
    bound = detectable = math.nan
    if errors is not None:
        bound = apart - float(np.quantile(errors, LEVEL))
        detectable = float(np.quantile(errors, LEVEL)) + POWER * float(errors.std(ddof=1))
    return Gate(
        agent=names[best],
        baseline=names[other],
        sharpe=(float(found[best]), float(found[other])),
        difference=apart,
        bound=bound,
        detectable=detectable,
        years=len(rows) / bars_per_year,
    )
