"""What a backtest does and does not show, by rules fixed before the result is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol, cast

import numpy as np
import pandas as pd

from nca_trader.errors import ConfigError
from nca_trader.evaluate import metrics, statistics
from nca_trader.evaluate.statistics import Interval, Moments
from nca_trader.types import Costs

COPY_SHARE = 0.95  # share of bars with a baseline's targets from which an agent is said to copy it
SAME_WEIGHT = 1e-6  # a float32 target and its float64 twin are the same target
DEFLATED_ENOUGH = 0.95  # deflated Sharpe ratio below which the search itself explains the result


class Backtested(Protocol):
    """The part of a backtest's result that a report reads; `Result` of the backtest has it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def equity(self) -> pd.Series: ...  # noqa: D102
    @property
    def targets(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def weights(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def turnover(self) -> pd.Series: ...  # noqa: D102
    @property
    def cost(self) -> pd.Series: ...  # noqa: D102
    @property
    def costs(self) -> pd.DataFrame: ...  # noqa: D102
    @property
    def charged(self) -> Costs: ...  # noqa: D102
    @property
    def fill(self) -> str: ...  # noqa: D102
    @property
    def order(self) -> str: ...  # noqa: D102
    @property
    def in_sample(self) -> int | None: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """One account's numbers: `metrics.summary`, and all costs as a sum of fractions of equity."""

    metrics: dict[str, float]
    sharpe_interval: Interval
    costs_paid: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The agent, or the strategy judged, less one baseline, bar by bar.

    mean_return: of returns a year, `P * mean(r - r_baseline)`; sharpe: of annualised ratios.
    """

    mean_return: float
    mean_return_interval: Interval
    sharpe: float
    sharpe_interval: Interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a verdict rests on; made by `weigh`.

    Attributes:
      agent: numbers of the agent, or of the strategy where a rule is judged. baselines: theirs, by
        name. differences: agent less each, by name.
      best: the baseline with the highest Sharpe ratio (a flat one has none; it is best only where
        no other has one).
      nearest: the baseline whose targets the agent holds most often. nearest_share: on which
        share of bars.
      moments: of the agent's returns, for PSR and DSR.
      start, stop: first and last bar judged.
      in_sample: how many of them are no later than the last that trained or selected the agent;
        None for a strategy, whose choice nobody recorded.
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
        """What is judged: an "agent" was trained; a "strategy" is a rule that somebody chose."""
        return "strategy" if self.in_sample is None else "agent"

    @property
    def standing(self) -> str:
        """What these bars are to it: "out of sample", "IN SAMPLE", or "" for a strategy."""
        if self.in_sample is None:
            return ""
        return "IN SAMPLE" if self.in_sample else "out of sample"

    @property
    def copies(self) -> bool:
        """True where the agent holds the nearest baseline's targets on 95% of bars or more."""
        return self.nearest_share >= COPY_SHARE


def orders_in_force(targets: pd.DataFrame) -> np.ndarray:
    """`[N, A]` the last ordered target at each bar: NaN is no order, and flat before the first."""
    return targets.astype(np.float64).ffill().fillna(0.0).to_numpy()


def nearest_baseline(
    agent_weights: pd.DataFrame, baselines: Mapping[str, pd.DataFrame]
) -> tuple[str, float]:
    """The baseline that the agent's target weights agree with most often.

    Args:
      agent_weights: `[N, A]` target weights; NaN is no order, the last target stays in force.
      baselines: name -> `[N, A]` likewise, on the same bars and assets.

    Returns:
      Its name, and the share of bars on which every asset's target is the same to 1e-6; the
      first of the baselines where two agree equally often.
    """
    if not baselines:
        raise ConfigError("nearest_baseline was given no baseline; pass at least one.")
    ours = orders_in_force(agent_weights)
    shares = {}
    for name, weights in baselines.items():
        theirs = orders_in_force(weights)
        if theirs.shape != ours.shape:
            raise ConfigError(
                f"baseline {name} has targets {theirs.shape} where the agent's are {ours.shape}; "
                "run both on the same bars."
            )
        shares[name] = float((np.abs(ours - theirs) <= SAME_WEIGHT).all(axis=1).mean())
    nearest = max(shares, key=lambda name: shares[name])
    return nearest, shares[nearest]


def score(result: Backtested, bars_per_year: float, seed: int = 0) -> Scored:
    """The numbers of one backtest; `seed` draws the bootstrap's resamples."""
    r = metrics.simple_returns(result.equity)
    return Scored(
        metrics=metrics.summary(result.equity, result.weights, result.turnover, bars_per_year),
        sharpe_interval=statistics.sharpe_interval(
            metrics.judged(r, result.turnover), bars_per_year, seed
        ),
        costs_paid=float(result.cost.sum()),
    )


def weigh(
    agent: Backtested, baselines: Mapping[str, Backtested], bars_per_year: float, seed: int = 0
) -> Evidence:
    """Score the agent and each baseline on the same bars, and their differences.

    Args:
      agent: its backtest, or that of a strategy.
      baselines: name as a reader should see it -> backtest on the same bars with the same costs.
      bars_per_year: of these bars' calendar.
      seed: of the bootstrap.
    """
    r = metrics.simple_returns(agent.equity)
    ratios = metrics.judged(r, agent.turnover)
    scored = {name: score(result, bars_per_year, seed) for name, result in baselines.items()}
    ours = score(agent, bars_per_year, seed)
    differences = {}
    for name, result in baselines.items():
        same_rules = (result.charged, result.fill) == (agent.charged, agent.fill)
        if not (same_rules and result.equity.index.equals(agent.equity.index)):
            raise ConfigError(
                f"baseline {name} was run on other bars, costs or fills than the agent; "
                "backtest both alike."
            )
        other = metrics.simple_returns(result.equity)
        differences[name] = Difference(
            mean_return=float(np.mean(r - other) * bars_per_year),
            mean_return_interval=statistics.mean_difference_interval(r, other, bars_per_year, seed),
            sharpe=ours.metrics["sharpe"] - scored[name].metrics["sharpe"],
            sharpe_interval=statistics.sharpe_difference_interval(
                ratios, metrics.judged(other, result.turnover), bars_per_year, seed
            ),
        )
    nearest, share = nearest_baseline(
        agent.targets, {name: result.targets for name, result in baselines.items()}
    )
    return Evidence(
        agent=ours,
        baselines=scored,
        differences=differences,
        best=max(scored, key=lambda name: np.nan_to_num(scored[name].metrics["sharpe"], nan=-9e9)),
        nearest=nearest,
        nearest_share=share,
        moments=statistics.moments(ratios),
        start=cast(pd.Timestamp, agent.equity.index[0]),
        stop=cast(pd.Timestamp, agent.equity.index[-1]),
        in_sample=agent.in_sample,
    )


def percent(value: float, digits: int = 1) -> str:
    """0.123 as 12.3%; n/a for NaN. A value that rounds to zero has no minus sign."""
    return "n/a" if math.isnan(value) else f"{value:z.{digits}%}"


def decimal(value: float, digits: int = 2) -> str:
    """1.234 as 1.23; n/a for NaN."""
    return "n/a" if math.isnan(value) else f"{value:z.{digits}f}"


def count(number: int, noun: str) -> str:
    """As in "1 bar" and "2,000 bars"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def times(number: int) -> str:
    """As in "once" and "2 times"."""
    return "once" if number == 1 else f"{number} times"


def copy_sentence(evidence: Evidence) -> str:
    """Names the baseline that the agent copies, or is nearest to."""
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
    """Says that `in_sample` of the `num_bars` judged had been seen, so that this shows nothing."""
    return (
        f"IN SAMPLE: {in_sample:,} of these {num_bars:,} bars are no later than the last that the "
        "agent was trained or selected on. What it did here is no evidence of what it would do on "
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
    """The honest verdict, a few sentences, by fixed rules.

    1. Against the baseline of the highest Sharpe ratio: "earned more" or "earned less" only where
       the 95% interval of the difference in mean return excludes 0, else "not distinguishable".
    2. An agent that holds a baseline's targets on 95% of bars or more copies it, by name.
    3. "Earned more" is followed by the deflated Sharpe ratio, and by a warning below 0.95.
    4. Always: one market, one period, the number of trials, and the data's own `note`.
    5. An agent on bars that it has seen: that first, and no allowance for luck. A strategy: never
       "out of sample", and that nobody counted the tries.

    Args:
      evidence: from `weigh`.
      num_trials: trials in the ledger, this one among them; None where nobody counted.
      selected: whether the agent was chosen among its seeds by their scores on other bars.
      sharpe_variance: of the trials' Sharpe ratios per bar, None where unknown.
      note: what must be said of the data, e.g. that an index is not tradable.
    """
    span = f"{evidence.start:%Y-%m-%d} to {evidence.stop:%Y-%m-%d}"
    where = f"Out of sample, {span}" if evidence.standing == "out of sample" else f"From {span}"
    difference = evidence.differences[evidence.best]
    interval = difference.mean_return_interval
    ours, theirs = evidence.agent.metrics, evidence.baselines[evidence.best].metrics
    if interval.low > 0:
        found = f"earned more than {evidence.best}"
    elif interval.high < 0:
        found = f"earned less than {evidence.best}"
    else:
        found = f"is not distinguishable from {evidence.best}"
    if math.isnan(ours["sharpe"]):
        filled = ours.get("turnover") != 0.0
        never = "had a return other than 0" if filled else "had an order filled"
        found = f"never {never}, so it has no Sharpe ratio; it {found}"
    sentences = [
        f"{where}, the {evidence.noun} {found}: total return "
        f"{percent(ours['total_return'])} against {percent(theirs['total_return'])}, Sharpe ratio "
        f"{decimal(ours['sharpe'])} against {decimal(theirs['sharpe'])}; the difference in mean "
        f"return is {percent(difference.mean_return)} a year, {_interval_text(interval)}.",
    ]
    if evidence.in_sample:
        sentences.insert(0, in_sample_sentence(evidence.in_sample, evidence.moments.num_bars))
    if evidence.copies:
        sentences.append(copy_sentence(evidence))
    if interval.low > 0 and not evidence.in_sample and num_trials is not None:
        sentences.append(_luck_sentence(evidence, num_trials, sharpe_variance))
    sentences.append(f"This is one market, one period and {_trials_text(num_trials, selected)}.")
    if note:
        sentences.append(note.rstrip(".") + ".")
    return " ".join(sentences)


def _trials_text(num_trials: int | None, selected: bool) -> str:
    if num_trials is None:
        return (
            "one rule with parameters of its user's choice: nobody counted how many were tried "
            "before, so luck in that search is not ruled out"
        )
    if num_trials == 1:
        return "one trial"
    return f"the one selected of {num_trials} trials" if selected else f"one of {num_trials} trials"


def _interval_text(interval: Interval) -> str:
    if math.isnan(interval.low):
        return "with too little movement for an interval"
    ends = f"{percent(interval.low)} to {percent(interval.high)}"
    holds = "includes" if interval.holds_zero else "excludes"
    return f"and its {interval.level:.0%} interval, {ends}, {holds} 0"


def _luck_sentence(evidence: Evidence, num_trials: int, sharpe_variance: float | None) -> str:
    deflated = statistics.deflated_sharpe(evidence.moments, num_trials, sharpe_variance)
    text = f"Allowing for the trials, the deflated Sharpe ratio is {decimal(deflated)}"
    if deflated >= DEFLATED_ENOUGH:
        return text + "."
    return text + f", below {DEFLATED_ENOUGH}: luck in the search is not ruled out."
