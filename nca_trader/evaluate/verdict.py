"""What a backtest does and does not show, by rules that are fixed before the result is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import pandas as pd

from nca_trader.errors import ConfigError
from nca_trader.evaluate import statistics
from nca_trader.evaluate.statistics import Interval, Moments

if TYPE_CHECKING:
    from nca_trader.evaluate.result import Result

COPY_SHARE = 0.95  # share of bars with a baseline's targets from which an agent is called a copy
SAME_WEIGHT = 1e-6  # a float32 target and its float64 twin are the same target
# Above this many bars, returns are summed over neighbouring bars before they are resampled: the
# intervals of 100,000 bars would take two minutes.
RESAMPLED = 10_000
DEFLATED_ENOUGH = 0.95  # deflated Sharpe ratio below which the search itself explains the result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """One account's numbers.

    Attributes:
      metrics: of `Result.metrics`.
      sharpe_interval: 95%, of the annualised ratio.
      costs_paid: sum over bars of all costs, as fractions of equity.
      gross: mean over bars of the sum of absolute weights, in equities.
    """

    metrics: dict[str, float]
    sharpe_interval: Interval
    costs_paid: float
    gross: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The agent or strategy less one baseline, bar by bar.

    Attributes:
      mean_return: of returns per year, `P * mean(r - r_baseline)`.
      mean_return_interval: its 95% interval.
      sharpe: of annualised ratios.
      sharpe_interval: its 95% interval.
    """

    mean_return: float
    mean_return_interval: Interval
    sharpe: float
    sharpe_interval: Interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """The basis of a verdict; made by `weigh`.

    Attributes:
      agent: numbers of the agent, or of the strategy where a rule is judged.
      baselines: their numbers, by name.
      differences: agent less each baseline, by name.
      best: the baseline with the highest Sharpe ratio. One that is always flat has none, and is
        the best only where no other has one.
      nearest: the baseline whose targets the agent holds most often.
      nearest_share: on which share of bars.
      moments: of the agent's returns, for PSR and DSR.
      start: the first bar.
      stop: the last bar.
      in_sample: number of these bars at or before the last that trained or selected the
        agent; None for a strategy, whose choice is not recorded.
    """

    agent: Scored
    baselines: dict[str, Scored]
    differences: dict[str, Difference]
    best: str
    nearest: str
    nearest_share: float
    moments: Moments
    start: pd.Timestamp
    stop: pd.Timestamp
    in_sample: int | None

    @property
    def noun(self) -> str:
        """The word for what is judged: an "agent" was trained, a "strategy" is a chosen rule."""
        return "strategy" if self.in_sample is None else "agent"

    @property
    def standing(self) -> str:
        """The standing of these bars: "out of sample", "IN SAMPLE", or "" for a strategy."""
        if self.in_sample is None:
            return ""
        return "IN SAMPLE" if self.in_sample else "out of sample"

    @property
    def copies(self) -> bool:
        """Whether the agent holds the nearest baseline's targets on 95% of bars or more."""
        return self.nearest_share >= COPY_SHARE


def nearest_baseline(
    agent_weights: pd.DataFrame, baselines: Mapping[str, pd.DataFrame]
) -> tuple[str, float]:
    """Find the baseline that the agent's target weights agree with most often.

    Args:
      agent_weights: `[N, A]` target weights; NaN means no order, the last target stays in force.
      baselines: name -> `[N, A]` likewise, on the same bars and assets.

    Returns:
      Its name, and the share of bars on which every asset's target is the same to 1e-6; the
      first of the baselines where two agree equally often.
    """
    if not baselines:
        raise ConfigError("nearest_baseline was given no baseline; pass at least one.")
    # Before its first order an account is flat.
    ours, *others = (
        targets.astype(np.float64).ffill().fillna(0.0).to_numpy()
        for targets in (agent_weights, *baselines.values())
    )
    shares = {}
    for name, theirs in zip(baselines, others, strict=True):
        if theirs.shape != ours.shape:
            raise ConfigError(
                f"baseline {name} has targets {theirs.shape} where the agent's are {ours.shape}; "
                "run both on the same bars."
            )
        shares[name] = float((np.abs(ours - theirs) <= SAME_WEIGHT).all(axis=1).mean())
    # `max` returns the first of several that are equal.
    nearest = max(shares, key=lambda name: shares[name])
    return nearest, shares[nearest]


def weigh(
    agent: Result, baselines: Mapping[str, Result], bars_per_year: float, seed: int = 0
) -> Evidence:
    """Compute the numbers of the agent and each baseline on the same bars, and their differences.

    Args:
      agent: its backtest, or that of a strategy.
      baselines: name for readers -> backtest on the same bars with the same costs.
      bars_per_year: of these bars' calendar.
      seed: of the bootstrap.

    Raises:
      ConfigError: a baseline on other bars, costs or fills.
    """
    returns, ratios, scored = {}, {}, {}
    joined = -(-len(agent.equity) // RESAMPLED)
    resampled_per_year = bars_per_year / joined
    # The agent last and under None, so that it cannot take a baseline's name.
    for name, result in [*baselines.items(), (None, agent)]:
        # Numbers compare only on the same bars, at the same costs and fills.
        same_rules = (result.charged, result.fill) == (agent.charged, agent.fill)
        if not (same_rules and result.equity.index.equals(agent.equity.index)):
            raise ConfigError(
                f"baseline {name} was run on other bars, costs or fills than the agent; "
                "backtest both alike."
            )
        returns[name], ratios[name] = (
            _summed(r, joined) for r in (result.returns, result.judged_returns)
        )
        scored[name] = Scored(
            metrics=result.metrics,
            sharpe_interval=statistics.sharpe_interval(ratios[name], resampled_per_year, seed),
            costs_paid=float(result.cost.sum()),
            gross=float(result.weights.abs().sum(axis=1).mean()),
        )
    ours = scored.pop(None)
    differences = {
        name: Difference(
            mean_return=float(np.mean(agent.returns - baselines[name].returns) * bars_per_year),
            mean_return_interval=statistics.mean_difference_interval(
                returns[None], returns[name], resampled_per_year, seed
            ),
            sharpe=ours.metrics["sharpe"] - scored[name].metrics["sharpe"],
            sharpe_interval=statistics.sharpe_difference_interval(
                ratios[None], ratios[name], resampled_per_year, seed
            ),
        )
        for name in baselines
    }
    # By targets and not by equity: a copy with other costs earns something else.
    nearest, share = nearest_baseline(
        agent.targets, {name: result.targets for name, result in baselines.items()}
    )
    return Evidence(
        agent=ours,
        baselines=scored,
        differences=differences,
        # As NaN, the ratio of a flat baseline would win or lose a max by its place.
        best=max(scored, key=lambda name: np.nan_to_num(scored[name].metrics["sharpe"], nan=-9e9)),
        nearest=nearest,
        nearest_share=share,
        moments=statistics.moments(agent.judged_returns),
        start=cast(pd.Timestamp, agent.equity.index[0]),
        stop=cast(pd.Timestamp, agent.equity.index[-1]),
        in_sample=agent.in_sample,
    )


def _summed(returns: np.ndarray, joined: int) -> np.ndarray:
    """Sum returns `[T]` over neighbouring bars, `joined` at a time; the last few are left out."""
    whole = len(returns) // joined * joined
    return returns[:whole].reshape(-1, joined).sum(axis=1)


def percent(value: float, digits: int = 1) -> str:
    """Write 0.123 as 12.3% and NaN as n/a. A value that rounds to zero has no minus sign."""
    # `z` takes the sign from a value that rounds to zero.
    return "n/a" if math.isnan(value) else f"{value:z.{digits}%}"


def decimal(value: float, digits: int = 2) -> str:
    """Write 1.234 as 1.23 and NaN as n/a."""
    return "n/a" if math.isnan(value) else f"{value:z.{digits}f}"


def count(number: int, noun: str) -> str:
    """Write "1 bar" or "2,000 bars"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def times(number: int) -> str:
    """Write "once" or "2 times"."""
    return "once" if number == 1 else f"{number} times"


def copy_sentence(evidence: Evidence) -> str:
    """Name the baseline that the agent copies, or is nearest to."""
    share = percent(evidence.nearest_share)
    if evidence.copies:
        return (
            f"This {evidence.noun} copies {evidence.nearest}: {share} of its bars hold the same "
            "weights."
        )
    return (
        f"It is not a copy of a baseline: the nearest, {evidence.nearest}, has the same target "
        f"weights on {share} of the bars."
    )


def in_sample_sentence(in_sample: int, num_bars: int) -> str:
    """Say that the agent had seen `in_sample` of the `num_bars` bars."""
    return (
        f"IN SAMPLE: {in_sample:,} of these {num_bars:,} bars are not later than the last that the "
        "agent was trained or selected on. What it did here is not evidence of what it would do on "
        "others."
    )


def verdict(
    evidence: Evidence,
    *,
    num_trials: int | None,
    selected: bool = True,
    sharpe_variance: float | None = None,
    note: str = "",
) -> str:
    """Write the verdict in a few sentences, by fixed rules.

    1. Against the baseline of the highest Sharpe ratio: "earned more" or "earned less" only where
       the 95% interval of the difference in mean return excludes 0, else "not distinguishable".
    2. An agent that holds a baseline's targets on 95% of bars or more copies it, by name.
    3. "Earned more" is followed by the deflated Sharpe ratio, and by a warning below 0.95.
    4. Always: one market, one period, the number of trials, and the data's own `note`.
    5. For an agent on bars that it has seen: that first, and no allowance for luck. For a
       strategy: never "out of sample", and how many trials the log counts, or that none does.

    Args:
      evidence: from `weigh`.
      num_trials: trials in the trial log, with this one; None where no log counts them.
      selected: whether the agent was chosen among its seeds by their scores on other bars.
      sharpe_variance: of the trials' Sharpe ratios per bar; None where unknown.
      note: what must be said of the data, e.g. that an index is not tradable.
    """
    span = f"{evidence.start:%Y-%m-%d} to {evidence.stop:%Y-%m-%d}"
    where = f"Out of sample, {span}" if evidence.standing == "out of sample" else f"From {span}"
    difference = evidence.differences[evidence.best]
    interval = difference.mean_return_interval
    ours, theirs = evidence.agent.metrics, evidence.baselines[evidence.best].metrics
    low, high = percent(interval.low), percent(interval.high)
    # Comparisons with NaN are False: without an interval nothing is distinguishable.
    found, ends = "is not distinguishable from", f"{low} to {high}, includes 0"
    if interval.low > 0 or interval.high < 0:
        found = "earned more than" if interval.low > 0 else "earned less than"
        ends = f"{low} to {high}, excludes 0"
    limits = f"and its {interval.level:.0%} interval, {ends}"
    if math.isnan(interval.low):
        limits = "with too little movement for an interval"
    never = ""
    if math.isnan(ours["sharpe"]):
        filled = ours.get("turnover") != 0.0
        never = "had a return other than 0" if filled else "had an order filled"
        never = f"never {never}, so it has no Sharpe ratio; it "
    sentences = [
        f"{where}, the {evidence.noun} {never}{found} {evidence.best}: total return "
        f"{percent(ours['total_return'])} against {percent(theirs['total_return'])}, Sharpe ratio "
        f"{decimal(ours['sharpe'])} against {decimal(theirs['sharpe'])}; the difference in mean "
        f"return is {percent(difference.mean_return)} per year, {limits}.",
    ]
    # First: it changes what the numbers after it mean.
    if evidence.in_sample:
        sentences.insert(0, in_sample_sentence(evidence.in_sample, evidence.moments.num_bars))
    if evidence.copies:
        sentences.append(copy_sentence(evidence))
    if interval.low > 0 and not evidence.in_sample and num_trials is not None:
        # Success alone needs it: the best of many trials earns more than a baseline by luck.
        deflated = statistics.deflated_sharpe(evidence.moments, num_trials, sharpe_variance)
        luck = f", below {DEFLATED_ENOUGH}: luck in the search is not ruled out"
        sentences.append(
            f"Allowing for the trials, the deflated Sharpe ratio is {decimal(deflated)}"
            f"{'' if deflated >= DEFLATED_ENOUGH else luck}."
        )
    if num_trials is None:
        tried = (
            "one rule with parameters of its user's choice: no trial log counts how many were "
            "tried before, so luck in that search is not ruled out"
        )
    # With one trial nothing was selected.
    elif num_trials == 1:
        tried = "one trial"
    elif evidence.in_sample is None:
        tried = f"one of {num_trials:,} trials that the trial log counts on this market"
    else:
        tried = f"{'the one selected' if selected else 'one'} of {num_trials:,} trials"
    sentences.append(f"This is one market, one period and {tried}.")
    if note:
        sentences.append(note.rstrip(".") + ".")
    return " ".join(sentences)
