"""What the page of a backtest shows: collected from the bars, the result and the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nca_trader.agents import rules
from nca_trader.config.records import plain
from nca_trader.config.toml import to_toml
from nca_trader.errors import ConfigError
from nca_trader.evaluate import verdict as words
from nca_trader.evaluate.backtest import backtest, looks_at
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.stress import Stress
from nca_trader.evaluate.verdict import Evidence, weigh
from nca_trader.runs import trials
from nca_trader.runs.manifest import Run, commit, now, versions
from nca_trader.types import Bars


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """One split of the data.

    Attributes:
      name: e.g. "training".
      start: date of its first bar, e.g. "2013-01-02".
      stop: date of its last bar.
      bars: how many.
    """

    name: str
    start: str
    stop: str
    bars: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedScore:
    """Annualised Sharpe ratios of one seed, or of the mean of all.

    Attributes:
      seed: its number; None is the mean of all.
      training, selection, out_of_sample: on the three spans; NaN where one is unknown.
    """

    seed: int | None
    training: float = math.nan
    selection: float
    out_of_sample: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """What the trial log says of the search.

    Attributes:
      count: trials so far, with this one and each of its seeds.
      test_touched: how often the test span was evaluated, with this time.
      sharpe_variance: of the trials' Sharpe ratios per bar; None where it is unknown.
      selected: whether the agent was chosen among its seeds by their scores on a selection span.
    """

    count: int
    test_touched: int
    sharpe_variance: float | None = None
    selected: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """The backtest against the paper replay of the same bars.

    Attributes:
      decisions: how many were compared.
      equal: how many were the same.
      max_equity_difference: the largest, relative.
      max_logit_difference: the largest over all decisions and actions; None where logits were not
        compared.
    """

    decisions: int
    equal: int
    max_equity_difference: float
    max_logit_difference: float | None = None

    @property
    def holds(self) -> bool:
        """Whether every decision is the same and equity is equal to 1e-9."""
        return self.equal == self.decisions > 0 and self.max_equity_difference <= 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a backtest's page. An empty field, or None, has no section.

    Attributes:
      title: of the page.
      agent: backtest of the agent that acts (of several seeds the selected one), or of a strategy.
      baselines: name as shown -> backtest on the same bars and costs.
      evidence: `weigh(agent, baselines, bars_per_year)`.
      spans: of the data in order of time, e.g. training, selection, test; the last is evaluated.
      symbols: in the environment's order.
      data_source: `Bars.source`.
      data_note: `Bars.note`.
      data_digest: `Bars.digest()`.
      versions: package -> version.
      commit: of the source, or what is known instead.
      command: that makes this page again.
      created: date and time as text.
      wall_times: stage -> seconds.
      trials: from the trial log; None for a strategy, whose trials `agent.tried` counts, if any.
      seed: number of the agent that acts, also its column in `training`; None is the mean of all.
      scored: updates among which the selection span chose one; 0 where it chose none.
      seeds: every seed's scores, and those of the mean.
      deployment: what was decided to trade, in words; "" where nothing was.
      deployed: whether the agent is what trades.
      checks: name and finding of each further check, in words.
      advice: what to try next, in words.
      other_seeds: backtests of the seeds that do not act.
      training: rows of `metrics.jsonl`; a value is a number, or a list with one per seed.
      parity: with a paper replay of the same bars.
      features: in the environment's order.
      env_toml: the resolved configuration of the environment.
      agent_toml: the resolved configuration of the agent.
      device: that trained.
      sweep: the table of a sweep that chose the parameters.
      folds: the fold table of a walk-forward.
      stress: the backtest under worse conditions.
    """

    title: str
    agent: Result
    baselines: Mapping[str, Result]
    evidence: Evidence
    spans: Sequence[Span]
    symbols: Sequence[str]
    data_source: str
    data_note: str
    data_digest: str
    versions: Mapping[str, str]
    commit: str
    command: str
    created: str
    wall_times: Mapping[str, float] = dataclasses.field(default_factory=dict)
    trials: Trials | None = None
    seed: int | None = 0
    scored: int = 0
    seeds: Sequence[SeedScore] = ()
    deployment: str = ""
    deployed: bool = True
    checks: Sequence[tuple[str, str]] = ()
    advice: Sequence[str] = ()
    other_seeds: Sequence[Result] = ()
    training: Sequence[Mapping[str, object]] = ()
    parity: Parity | None = None
    features: Sequence[str] = ()
    env_toml: str = ""
    agent_toml: str = ""
    device: str = ""
    sweep: pd.DataFrame | None = None
    folds: pd.DataFrame | None = None
    stress: Stress | None = None

    def __post_init__(self):
        known = [None, *(row.seed for row in self.seeds)]
        if self.seeds and self.seed not in known:
            raise ConfigError(f"seed = {self.seed} has no row in seeds; score every seed.")
        # The page of a strategy must not claim what only a trial log can show.
        if (self.trials is None) != (self.evidence.in_sample is None):
            raise ConfigError(
                "trials and evidence.in_sample belong together: an agent has both, a strategy none."
            )
        if set(self.baselines) != set(self.evidence.baselines):
            raise ConfigError("evidence is of other baselines; use weigh(agent, baselines, ...).")

    @property
    def verdict(self) -> str:
        """The sentences at the top of the page; of a walk-forward its own: a page has one."""
        if self.walked:
            return " ".join(filter(None, [self.walked, self.data_note]))
        tried = self.trials or Trials(count=0, test_touched=0)
        variance = tried.sharpe_variance
        if self.trials is None:
            variance = self.agent.tried_variance / max(self.evidence.moments.num_bars - 1, 1)
        return words.verdict(
            self.evidence,
            num_trials=tried.count if self.trials else self.agent.tried,
            selected=tried.selected,
            sharpe_variance=variance,
            note=self.data_note,
        )

    @property
    def walked(self) -> str:
        """The verdict of the walk-forward whose folds the page shows; "" for none."""
        return "" if self.folds is None else str(self.folds.attrs.get("verdict", ""))

    @property
    def label(self) -> str:
        """The name of the agent or strategy in tables and plots."""
        selected = self.trials is not None and self.trials.selected
        averaged = self.trials is not None and self.seed is None
        name = "selected agent" if selected else "mean agent" if averaged else self.evidence.noun
        return name if self.deployed else f"{name}, not deployed"

    @property
    def unit(self) -> str:
        """The unit of the evaluated span for readers: "years", or "bars" where it is short."""
        return "years" if (self.evidence.stop - self.evidence.start).days >= 365 else "bars"

    @property
    def idealised(self) -> bool:
        """Whether orders fill at the close that the decision saw: no real order is that fast."""
        return self.agent.fill == "close"

    @property
    def spans_apart(self) -> bool:
        """Whether each span ends before the next begins."""
        edges = [date for span in self.spans for date in (span.start, span.stop)]
        # Dates are ISO text, which sorts as time does.
        return all(a < b for a, b in zip(edges[1::2], edges[2::2], strict=False))

    @property
    def gap(self) -> str:
        """How much of what was learnt in training is left on later bars, in words."""
        row = next((row for row in self.seeds if row.seed == self.seed), None)
        if row is None or math.isnan(row.training):
            return ""
        what = "the mean agent" if row.seed is None else f"seed {row.seed}"
        lost = row.training - row.out_of_sample
        found = (
            f"Generalisation gap: the Sharpe ratio of {what} was {row.training:.2f} in training, "
            f"{row.selection:.2f} on the selection span and {row.out_of_sample:.2f} on the test "
            f"span, {abs(lost):.2f} {'less' if lost >= 0.0 else 'more'} than in training."
        )
        if row.training > 2.0 * max(row.out_of_sample, 0.0):
            found += " Most of what it learnt in training is noise of those years: it is overfit."
        return found

    def seed_spread(self) -> tuple[float, float, float, float]:
        """Compute mean, standard deviation (ddof=1), least and greatest Sharpe ratio of the seeds.

        Seeds without a Sharpe ratio (they never traded) are left out; NaN where too few remain.
        """
        each = [row.out_of_sample for row in self.seeds if row.seed is not None]
        scores = pd.Series(each, dtype=float)
        return scores.mean(), scores.std(), scores.min(), scores.max()


def backtest_baselines(
    bars: Bars, result: Result, start: str | None = None, stop: str | None = None
) -> dict[str, Result]:
    """Backtest the baselines on the bars, costs and fills of `result`; return them by name."""
    return {
        rule.name: backtest(
            # With the costs, fills and limits of the result, so that only the targets differ.
            bars,
            rule,
            result.charged,
            start=start,
            stop=stop,
            **result.rules._asdict(),
        )
        for rule in (rules.buy_and_hold(), rules.sma_cross(50, 200), rules.always_flat())
    }


def report_on(
    bars: Bars, result: Result, baselines: Mapping[str, Result], run: Run | None, command: str
) -> Report:
    """Collect the contents of one backtest's page from the bars and the run.

    Args:
      bars: all that the backtest was given; it traded a span of them.
      result: of the backtest.
      baselines: from `backtest_baselines`.
      run: that acted; None where a strategy did.
      command: that makes the page again.
    """
    index, made = result.equity.index, versions() | {"commit": commit()}
    traded = {"first": index[0], "last": index[-1], "rows": len(index)}
    spans: dict[str, Any] = {"backtest": traded}
    known: dict[str, Any] = {}
    if run is not None:
        manifest, chosen = run.manifest, run.selection
        spans = {"training": plain(manifest.data), "selection": plain(chosen and chosen.data)}
        # Bars that the agent has seen are not a test.
        spans |= {"backtest" if result.in_sample else "test": traded}
        # Two versions where the run was trained with another than this page is made with.
        trained = manifest.versions | {"commit": manifest.commit}
        for name, here in made.items():
            if trained.get(name) != here:
                made[name] = f"{trained.get(name, 'unknown')} to train, {here} here"
        # A run folder that was copied has no trial log, but its own seeds are trials.
        logged = trials.count(run.root, "train", manifest.data)
        # Only the traded bars: evaluations are counted by years that overlap.
        tested = bars.between(str(index[0]), None)[: len(index)]
        known = {
            "trials": Trials(
                count=max(logged, run.agent_config.num_seeds),
                # `looks` is None where the backtest was not to be counted.
                test_touched=result.looks or looks_at(run, tested),
                selected=chosen is not None
                and run.selected is not None
                and chosen.selected == run.selected,
            ),
            "seed": run.selected,
            "scored": (chosen and chosen.scored) or 0,
            # A metric that each seed has takes the place of the one number.
            "training": [row | row.get("seeds", {}) for row in run.metrics()],
            "features": run.spec.features,
            "env_toml": to_toml(run.env_config),
            "agent_toml": to_toml(run.agent_config),
            "device": manifest.device,
        }
        if (decided := run.deployment) is not None:
            known |= {"deployment": decided.sentence, "deployed": not decided.baseline}
    return Report(
        title=f"{run.name if run else result.name} on {', '.join(bars.symbols)}",
        agent=result,
        baselines=baselines,
        evidence=weigh(result, baselines, bars.bars_per_year),
        spans=[_span(name, record) for name, record in spans.items() if record],
        symbols=bars.symbols,
        data_source=bars.source,
        data_note=" ".join(filter(None, [result.note, *result.cautions])),
        data_digest=bars.digest(),
        command=command,
        created=now(),
        commit=made.pop("commit"),
        versions=made,
        **known,
    )


def _span(name: str, record: Mapping[str, Any]) -> Span:
    """Build a span with dates, and with times of day where a bar does not begin at 0:00."""
    # 19 characters are the time to the second, without the zone, which is UTC.
    first, last = (
        str(np.datetime64(str(record[end])[:19], "s")).removesuffix("T00:00:00").replace("T", " ")
        for end in ("first", "last")
    )
    return Span(name=name, start=first, stop=last, bars=record["rows"])
