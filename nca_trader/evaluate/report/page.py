"""The report: one self-contained HTML page on one agent's, or one strategy's, backtest.

No script, no font, image or style from elsewhere: the file can be mailed, archived and printed.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nca_trader.errors import ConfigError, StateError
from nca_trader.evaluate.report import sections as report_sections
from nca_trader.evaluate.report.html import Html, escaped, join, tag
from nca_trader.evaluate.verdict import Backtested, Evidence, verdict, weigh

__all__ = ["Parity", "Report", "SeedScore", "Span", "Trials", "weigh", "write_report"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """One split of the data. start, stop: dates of its first and last bar, e.g. "2013-01-02"."""

    name: str
    start: str
    stop: str
    bars: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedScore:
    """One seed's Sharpe ratios, annualised: what it was selected by, and what came of it."""

    seed: int
    selection: float
    out_of_sample: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """What the ledger says of the search.

    Attributes:
      count: trials made so far, this one and each of its seeds among them.
      test_touched: how often the test span was evaluated, this time included.
      sharpe_variance: of the trials' Sharpe ratios per bar; None where it is not known.
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
      decisions: how many were compared. equal: how many were the same.
      max_equity_difference: the largest, relative. max_logit_difference: the largest over all
        decisions and actions; None where logits were not compared.
    """

    decisions: int
    equal: int
    max_equity_difference: float
    max_logit_difference: float | None = None

    @property
    def holds(self) -> bool:
        """Every decision the same and equity equal to 1e-9."""
        return self.equal == self.decisions > 0 and self.max_equity_difference <= 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that the page shows. What is empty or None has no section, and nothing is said of it.

    Attributes:
      title: of the page.
      agent: backtest of the agent that acts (of several seeds the selected one), or of a strategy.
      baselines: name as shown -> backtest on the same bars and costs.
      evidence: `weigh(agent, baselines, bars_per_year)`.
      spans: of the data in order of time, e.g. training, selection, test; the last is judged.
      symbols: in the environment's order.
      data_source, data_note, data_digest: `Bars.source`, `.note` and `.digest()`.
      versions: package -> version. commit: of the source, or what is known instead.
      command: that makes this page again. created: date and time as text.
      wall_times: stage -> seconds.
      trials: from the ledger; None exactly of a strategy, whose tries nobody counts.
      seed: number of the agent that acts, also its column in `training`.
      seeds: every seed's scores. other_seeds: backtests of the seeds that do not act.
      training: rows of `metrics.jsonl`; a value is a number, or a list of one a seed.
      parity: with a paper replay of the same bars.
      features: in the environment's order. env_toml, agent_toml: the resolved configuration.
      device: that trained.
    """

    title: str
    agent: Backtested
    baselines: Mapping[str, Backtested]
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
    seed: int = 0
    seeds: Sequence[SeedScore] = ()
    other_seeds: Sequence[Backtested] = ()
    training: Sequence[Mapping[str, object]] = ()
    parity: Parity | None = None
    features: Sequence[str] = ()
    env_toml: str = ""
    agent_toml: str = ""
    device: str = ""

    def __post_init__(self):
        if self.seeds and self.seed not in [row.seed for row in self.seeds]:
            raise ConfigError(f"seed = {self.seed} has no row in seeds; score every seed.")
        if (self.trials is None) != (self.evidence.in_sample is None):
            raise ConfigError(
                "trials and evidence.in_sample belong together: an agent has both, a strategy none."
            )
        if set(self.baselines) != set(self.evidence.baselines):
            raise ConfigError("evidence is of other baselines; use weigh(agent, baselines, ...).")

    @property
    def verdict(self) -> str:
        """The sentences at the top of the page."""
        trials = self.trials
        if trials is None:
            return verdict(self.evidence, num_trials=None, note=self.data_note)
        return verdict(
            self.evidence,
            num_trials=trials.count,
            selected=trials.selected,
            sharpe_variance=trials.sharpe_variance,
            note=self.data_note,
        )

    @property
    def label(self) -> str:
        """What the one judged is called in tables and plots."""
        selected = self.trials is not None and self.trials.selected
        return "selected agent" if selected else self.evidence.noun

    @property
    def unit(self) -> str:
        """What the judged span is made of, for readers: "years", or "bars" where it is short."""
        return "years" if (self.evidence.stop - self.evidence.start).days >= 365 else "bars"

    @property
    def idealised(self) -> bool:
        """True where fills are at the close that was seen, which no one can trade."""
        return self.agent.fill == "close"

    @property
    def spans_apart(self) -> bool:
        """True where each span ends before the next begins; dates compare as ISO text."""
        edges = [date for span in self.spans for date in (span.start, span.stop)]
        return all(a < b for a, b in zip(edges[1::2], edges[2::2], strict=False))

    def seed_spread(self) -> tuple[float, float, float, float]:
        """Mean, standard deviation (ddof=1), least and greatest out-of-sample Sharpe ratio.

        Seeds without a Sharpe ratio (never traded) are left out; NaN where too few are left.
        """
        scores = np.array([row.out_of_sample for row in self.seeds])
        scores = scores[~np.isnan(scores)]
        if not scores.size:
            return np.nan, np.nan, np.nan, np.nan
        deviation = float(np.std(scores, ddof=1)) if scores.size > 1 else np.nan
        return float(scores.mean()), deviation, float(scores.min()), float(scores.max())


def page(report: Report) -> Html:
    """The whole document."""
    style = (
        importlib.resources.files("nca_trader.evaluate.report").joinpath("report.css").read_text()
    )
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", report.title),
            tag("style", Html(style)),
        ]
    )
    body = tag("main", *report_sections.all_sections(report))
    document = tag("html", tag("head", head), tag("body", body), lang="en")
    return Html(f"<!DOCTYPE html>\n{escaped(document)}\n")


def write_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write the page; the folder is made where it is missing.

    Returns:
      The path written. The file appears whole or not at all.

    Raises:
      StateError: if it cannot be written there.
    """
    path = Path(path)
    text = page(report)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or error
        raise StateError(
            f"{path}: the report cannot be written ({reason}); choose another folder."
        ) from error
    return path
