"""What a result does and does not show, by rules that are fixed before it is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate.benchmark import HOLD
from nca_trader.evaluate.evidence import inference
from nca_trader.evaluate.evidence.gate import GateResult
from nca_trader.evaluate.evidence.inference import ConfidenceInterval, Moments
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.wording import count, decimal, in_sample_sentence, percent, significant
from nca_trader.runs.trials import Tried
from nca_trader.strategies.baselines import MATCHED
from nca_trader.strategies.strategy import Strategy
from nca_trader.types import Bars

COPY_SHARE = 0.95  # share of bars with a baseline's targets from which an agent is called a copy
CELLS = 2**18  # weights that are compared at once
SAME_WEIGHT = 1e-6  # a float32 target and its float64 twin are the same target
# Above `LONG` bars, returns are summed over neighbouring bars before they are resampled, to at most
# `RESAMPLED` sums: the intervals of 100,000 bars would take two minutes.
LONG, RESAMPLED = 10_000, 2500
DEFLATED_ENOUGH = 0.95  # deflated Sharpe ratio below which the search itself explains the result
SIGNIFICANT = 0.05  # p-value below which a search has found something
# Probability of overfitting below which the choice within a grid is more than luck. On noise two
# combinations are below 0.05 in 11 of 100 cases and below 0.005 in 4, three below 0.05 in 5, and
# more of them more rarely.
CHOSEN, CHOSEN_OF_TWO = 0.05, 0.005


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
    mean_return_interval: ConfidenceInterval
    sharpe: float
    sharpe_interval: ConfidenceInterval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """The basis of a verdict; made by `weigh`.

    Attributes:
      agent: backtest of the agent, or of the strategy where a rule is judged.
      baselines: backtests on the same bars with the same costs, by name.
      intervals: 95%, of the annualised Sharpe ratio of each baseline, by name, and of the agent
        under None.
      differences: agent less each baseline, by name.
      best: the baseline with the highest Sharpe ratio, and no control, which knows the span. One
        that is always flat has none, and is the best only where no other has one.
      nearest: the baseline whose targets the agent holds most often.
      nearest_share: on which share of bars.
      moments: of the agent's returns, for PSR and DSR.
      on_base: of an agent that tilts one of the baselines, see `compare_base`; else "".
    """

    agent: Result
    baselines: Mapping[str, Result]
    intervals: Mapping[str | None, ConfidenceInterval]
    differences: dict[str, Difference]
    best: str
    nearest: str
    nearest_share: float
    moments: Moments
    on_base: str = ""

    @property
    def in_sample(self) -> int | None:
        """Of `agent`; None for a strategy, whose choice is not recorded."""
        return self.agent.in_sample

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


def _in_force(targets: pd.DataFrame) -> np.ndarray:
    """Return `[N, A]` targets, the last one where none was ordered; 0 before the first."""
    found = targets.to_numpy(np.float64)
    return targets.ffill().fillna(0.0).to_numpy(np.float64) if np.isnan(found).any() else found


def _agreement(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the share of rows `[N, A]` in which all values are the same to `SAME_WEIGHT`."""
    rows = max(1, CELLS // ours.shape[1])  # some at a time: of all, differences take a gigabyte
    same = (
        (np.abs(ours[at : at + rows] - theirs[at : at + rows]) <= SAME_WEIGHT).all(axis=1)
        for at in range(0, len(ours), rows)
    )
    return float(np.concatenate([*same]).mean())


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
    ours = _in_force(agent_weights)
    shares = {name: _agreement(ours, _in_force(theirs)) for name, theirs in baselines.items()}
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
    returns, ratios, intervals = {}, {}, {}
    most, resampled_per_year = _resampled(len(agent.equity), bars_per_year)
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
            inference.block_returns(r, most) for r in (result.returns, result.excess_returns)
        )
        intervals[name] = inference.sharpe_interval(ratios[name], resampled_per_year, seed)
    sharpes = {name: result.metrics["sharpe"] for name, result in baselines.items()}
    differences = {
        name: Difference(
            mean_return=float(np.mean(agent.returns - baselines[name].returns) * bars_per_year),
            mean_return_interval=inference.mean_difference_interval(
                returns[None], returns[name], resampled_per_year, seed
            ),
            sharpe=agent.metrics["sharpe"] - sharpes[name],
            sharpe_interval=inference.sharpe_difference_interval(
                ratios[None], ratios[name], resampled_per_year, seed
            ),
        )
        for name in baselines
    }
    # By targets and not by equity: a copy with other costs earns something else.
    nearest, share = nearest_baseline(
        agent.targets, {name: result.targets for name, result in baselines.items()}
    )
    known = [name for name in baselines if name != MATCHED] or [*baselines]
    return Evidence(
        agent=agent,
        baselines=baselines,
        intervals=intervals,
        differences=differences,
        # The NaN ratio of a flat baseline would make `max` depend on the order of its arguments.
        best=max(known, key=lambda name: np.nan_to_num(sharpes[name], nan=-9e9)),
        nearest=nearest,
        nearest_share=share,
        moments=inference.moments(agent.excess_returns),
        on_base=compare_base(agent, baselines, agent.run.base) if agent.run else "",
    )


def _resampled(num_bars: int, bars_per_year: float) -> tuple[int, float]:
    """Return into how many sums at most bars are resampled, and how many of them are a year."""
    most = RESAMPLED if num_bars > LONG else num_bars
    return most, bars_per_year / inference.block_length(num_bars, most)


def compare_base(agent: Result, baselines: Mapping[str, Result], base: Strategy | None) -> str:
    """Compare an agent with its base, the base with cash and both with hold, in one line.

    Args:
      agent: its result.
      baselines: on the same bars, by name.
      base: the rule that it tilts; None without one.

    Returns:
      Differences of annual Sharpe ratios with 95% intervals, paired by bar; "" without a base, or
      where it or hold is not among the baselines.
    """
    if base is None or not {base.name, HOLD.name} <= baselines.keys():
        return ""
    rule, hold = baselines[base.name], baselines[HOLD.name]
    most, per_year = _resampled(len(agent.equity), agent.bars_per_year)
    ours, theirs, held = (
        inference.block_returns(x.excess_returns, most) for x in (agent, rule, hold)
    )
    between = inference.sharpe_difference_interval
    found = {
        "agent less its base": (agent, rule, between(ours, theirs, per_year)),
        "its base less cash": (rule, None, inference.sharpe_interval(theirs, per_year)),
        "agent less hold": (agent, hold, between(ours, held, per_year)),
        "its base less hold": (rule, hold, between(theirs, held, per_year)),
    }
    words = []
    for name, (first, second, ends) in found.items():
        apart = first.metrics["sharpe"] - (second.metrics["sharpe"] if second else 0.0)
        known = f"{apart:+.2f} [{ends.low:+.2f}, {ends.high:+.2f}]"
        words.append(f"{name} {'n/a' if math.isnan(apart) else known}")
    return f"Sharpe ratios with 95% intervals: {', '.join(words)}."


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


def verdict(
    evidence: Evidence,
    *,
    num_trials: int | None,
    selected: bool = True,
    sharpe_variance: float | None = None,
    note: str = "",
) -> str:
    """Write the verdict in a few sentences, by fixed rules.

    1. Against the baseline of the highest Sharpe ratio: "earned more for its risk" or "earned less"
       only where the 95% interval of the difference of Sharpe ratios excludes 0, else "not
       distinguishable".
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
    index = evidence.agent.equity.index
    form = "%Y-%m-%d" if (index[-1] - index[0]).days >= 2 else "%Y-%m-%d %H:%M"
    span = " to ".join(end.strftime(form) for end in (index[0], index[-1]))
    where = f"Out of sample, {span}" if evidence.standing == "out of sample" else f"From {span}"
    difference = evidence.differences[evidence.best]
    interval = difference.sharpe_interval
    ours, theirs = evidence.agent.metrics, evidence.baselines[evidence.best].metrics
    # Comparisons with NaN are False: without an interval nothing is distinguishable.
    apart = interval.low > 0 or interval.high < 0
    ends = f"{decimal(interval.low)} to {decimal(interval.high)}"
    limits = f"and its {interval.level:.0%} interval, {ends}, {'ex' if apart else 'in'}cludes 0"
    if math.isnan(interval.low):
        limits = "with too little movement for an interval"
    never = ""
    if math.isnan(ours["sharpe"]):
        filled = ours.get("turnover") != 0.0
        never = "had a return other than 0" if filled else "had an order filled"
        never = f"never {never}, so it has no Sharpe ratio; it "
    sentences = [
        f"{where}, the {evidence.noun} {never}{compared(evidence.best, apart, interval.low > 0)}: "
        f"total return {percent(ours['total_return'])} against {percent(theirs['total_return'])}, "
        f"Sharpe ratio {decimal(ours['sharpe'])} against {decimal(theirs['sharpe'])}; the "
        f"difference is {decimal(difference.sharpe)}, {limits}.",
    ]
    # This comes first, because it changes what the later numbers mean.
    if evidence.in_sample:
        sentences.insert(0, in_sample_sentence(evidence.in_sample, evidence.moments.num_bars))
    if evidence.copies:
        sentences.append(copy_sentence(evidence))
    sentences += filter(None, [evidence.on_base])
    if interval.low > 0 and not evidence.in_sample and num_trials is not None:
        # Only a success is deflated: the best of many trials can earn more than a baseline by luck.
        deflated = inference.deflated_sharpe(evidence.moments, num_trials, sharpe_variance)
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


def compared(baseline: str, apart: bool, more: bool) -> str:
    """Say how an account did for its risk against a baseline that it is `apart` from, or not."""
    if not apart:
        return f"is not distinguishable from {baseline}"
    return f"earned {'more' if more else 'less'} than {baseline} for its risk"


def walk_verdict(
    where: str,
    result: Result,
    baselines: Mapping[str, Result],
    gate: GateResult,
    difference: float,
    interval: ConfidenceInterval,
    log: str | None,
) -> str:
    """Write the verdict of a walk-forward: one judgement, that of the gate, and its numbers.

    Args:
      where: e.g. "Out of sample over 5 folds".
      result: of the stitched test spans.
      baselines: by name, on the same bars.
      gate: of the result against those that could be deployed.
      difference: in mean return per year from the best constant weight.
      interval: its 95% interval.
      log: name of the project whose trial log counts it; None for none.
    """
    found = compared(gate.baseline, gate.passed or gate.worse, gate.passed)
    limits = "with too little movement for an interval"
    if not math.isnan(interval.low):
        limits = f"95% interval {percent(interval.low)} to {percent(interval.high)}"
    ours, theirs = (r.metrics["total_return"] for r in (result, baselines[gate.baseline]))
    first, second = gate.sharpe
    tried = f"No trial log counts what was tried before; name one with {argument('trials')}."
    if log is not None and result.tried is not None:
        tried = f"The trial log of {log} has {count(result.tried, 'trial')} on these symbols."
    return (
        f"{where}, {result.equity.index[0]:%Y-%m-%d} to {result.equity.index[-1]:%Y-%m-%d}, "
        f"{result.name} {found}: total return {percent(ours)} against "
        f"{percent(theirs)}, Sharpe ratio {decimal(first)} against {decimal(second)}. The "
        "difference in mean return from the best constant weight, which is known in hindsight, is "
        f"{percent(difference)} per year, {limits}. {tried}"
    )


def sweep_verdict(
    table: pd.DataFrame,
    blocks: np.ndarray,
    hold: np.ndarray,
    hold_sharpe: float,
    bars: Bars,
    tried: Tried,
) -> dict[str, Any]:
    """Judge the best combination of a sweep by Sharpe ratio, in sentences.

    One says whether there is an edge, allowing for the search: against cash where the deflated
    Sharpe ratio is at least 0.95 and the p-value below 0.05, and then also against buy and hold
    where that p-value is below 0.05. Another says whether the choice of this combination among all
    is more than luck: there may be an edge that all share.

    Args:
      table: one row per combination, with its parameters, `sharpe`, `skewness` and `kurtosis`.
      blocks: `[T, M]` returns in excess of cash, summed over blocks of bars.
      hold: `[T]` of buy and hold, likewise.
      hold_sharpe: of buy and hold, annualised.
      bars: of the sweep.
      tried: so far, with these.

    Returns:
      `{"verdict": sentences, "search": numbers}`.
    """
    parameters = table.attrs["parameters"]
    sharpes = table["sharpe"].to_numpy(np.float64)
    of, traded = count(len(table), "combination"), bool(np.isfinite(sharpes).any())
    chosen = int(np.nanargmax(sharpes)) if traded else 0
    row = table.iloc[chosen]
    moments = Moments(
        row["sharpe"] / math.sqrt(bars.bars_per_year), len(bars), row["skewness"], row["kurtosis"]
    )
    variance = tried.variance / max(len(bars) - 1, 1)
    deflated = inference.deflated_sharpe(moments, tried.number, variance)
    over = cash = other = math.nan
    if traded:
        cash = inference.superiority(blocks, chosen)
        other = inference.superiority(blocks, chosen, hold)
    if len(table) > 1:
        over = inference.overfit_probability(blocks).probability
    near = sharpes[neighbours(table, parameters, chosen)]
    near = near[np.isfinite(near)]
    # By column: a row of whole numbers and fractions would have fractions alone.
    cells = {p: table[p].iloc[chosen] for p in parameters}
    values = {p: x.item() if isinstance(x, np.generic) else x for p, x in cells.items()}
    written = (f"{p} = {x:g}" if isinstance(x, float) else f"{p} = {x}" for p, x in values.items())
    search = {
        "combination": values,
        "sharpe": float(row["sharpe"]),
        "benchmark_sharpe": float(hold_sharpe),
        "deflated_sharpe": float(deflated),
        "trials": tried.number,
        "trials_variance": tried.variance,
        "pbo": float(over),
        "spa_cash": cash,
        "spa_hold": other,
        "neighbours": len(near),
        "neighbours_mean": float(near.mean()) if len(near) else math.nan,
        "neighbours_worst": float(near.min()) if len(near) else math.nan,
    }
    if not traded:
        return {"verdict": f"None of {of} ever traded.", "search": search}
    # Here and below, a NaN compares as False and so counts as luck.
    conclusion = "luck in the search explains it"
    if deflated >= DEFLATED_ENOUGH and cash < SIGNIFICANT:
        conclusion = "better than cash, but not shown to be better than buy and hold"
        if other < SIGNIFICANT:
            conclusion = "better than cash and than buy and hold, also allowing for the search"
    around = ""
    if len(near) == 1:
        around = f"; the one combination next to it has a Sharpe ratio of {near[0]:.2f}"
    elif len(near):
        around = (
            f"; the {len(near)} combinations next to it have a Sharpe ratio of {near.mean():.2f} "
            f"on average and {near.min():.2f} at worst"
        )
    choice = "which of them is the best is more than luck"
    if not over < (CHOSEN if len(table) > 2 else CHOSEN_OF_TWO):
        choice = "which of them is the best may be luck"
    sentences = [
        f"The best of {of} by Sharpe ratio is {', '.join(written)}, with {row['sharpe']:.2f}; buy "
        f"and hold has {hold_sharpe:.2f}.",
        f"Edge: {conclusion} (deflated Sharpe ratio {deflated:.2f} with {tried.number:,} trials "
        f"counted, p-value {significant(cash)} against cash and {significant(other)} against buy "
        "and hold).",
        f"Choice: {choice} (probability of overfitting, PBO, {significant(over)}{around}).",
    ]
    # With one combination there was no choice to judge.
    return {"verdict": " ".join(sentences[: 2 + (len(table) > 1)]), "search": search}


def neighbours(table: pd.DataFrame, parameters: list[str], row: int) -> np.ndarray:
    """Return the rows of the combinations next to one, to see whether an optimum is stable.

    Next to it are those whose every parameter is at most one of its values away; where a sample
    has fewer than three of them, the eight nearest by rank. A parameter that is not a number is
    the same.

    Args:
      table: one row per combination.
      parameters: their names.
      row: of the combination.
    """
    ranks, same = [], np.ones(len(table), bool)
    for name in parameters:
        column = table[name]
        if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
            ranks.append(np.unique(column.to_numpy(), return_inverse=True)[1])
        else:
            # None is missing to pandas, and equals another None here.
            same &= (column == column.iloc[row]).to_numpy() | column.isna().to_numpy()
    same[row] = False
    if not ranks or not same.any():
        return np.zeros(0, int)
    away = np.abs(np.stack(ranks, axis=1) - np.stack(ranks, axis=1)[row])
    near = np.flatnonzero(same & (away <= 1).all(1))
    if len(near) >= min(3, same.sum()):
        return near
    far = np.where(same, np.linalg.norm(away / np.maximum(away.max(0), 1), axis=1), np.inf)
    return np.argsort(far, kind="stable")[: min(8, int(same.sum()))]
