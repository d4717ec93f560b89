"""What the HTML page of a backtest shows, and the sentence at its top."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.evaluate.evidence import verdict as words
from nca_trader.evaluate.evidence.verdict import Evidence
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.wording import count

if TYPE_CHECKING:
    from markupsafe import Markup


class Section(NamedTuple):
    """A section of a page. An empty field is left out.

    Attributes:
      title: of the section.
      verdict: sentences below the title; the first one is in bold.
      facts: name and text of each.
      caption: of the table.
      headers: of its columns.
      rows: name and cells of each.
      plots: what each shows, for readers, and the plot.
    """

    title: str
    verdict: str = ""
    facts: Sequence[tuple[str, str]] = ()
    caption: str = ""
    headers: Sequence[str] = ()
    rows: Sequence[tuple[str, Sequence[str]]] = ()
    plots: Sequence[tuple[str, Markup]] = ()

    def __str__(self) -> str:
        table = [[*self.headers]] * bool(self.headers)
        table += [[name, *cells] for name, cells in self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ["  ".join(map(str.ljust, ["", *row], [0, *widths])).rstrip() for row in table]
        facts = [f"  {name}: {text}" for name, text in self.facts]
        return "\n".join(filter(None, [self.title, self.verdict, *facts, self.caption, *rows]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportPage:
    """The contents of a backtest's page. An empty field, or None, has no section.

    Attributes:
      title: of the page.
      evidence: of the agent that acts (of several seeds the selected one), or of a strategy, and
        of baselines by their names as shown, see `weigh`.
      spans: name, first bar, last bar and number of bars of each split of the data, in order of
        time, e.g. of training, selection and test; the last is evaluated.
      note: of the bars, and cautions.
      versions: package -> version, and the commit of the source.
      command: that makes this page again.
      created: date and time as text.
      trials: of the trial log, with this one and each of its seeds; None for a strategy, whose
        trials its result counts, if any.
      test_touched: how often the test span was evaluated, with this time.
      selected: whether the agent was chosen among its seeds by their scores on a selection span.
      seed: number of the agent that acts, also its column in `training`; None is the mean of all.
      scored: updates among which the selection span chose one; 0 where it chose none.
      training: rows of `metrics.jsonl`; a value is a number, or a list with one per seed.
      features: in the environment's order.
      configs: the resolved configurations by name, as TOML.
      device: that trained.
      deployment: what was decided to trade, in words.
      deployed: whether the agent is what trades.
      other_seeds: backtests of the seeds that do not act.
      sections: further ones, in their order.
      sweep: the table of a sweep that chose the parameters.
      folds: the fold table of a walk-forward.
      indicators: lines on the price chart; None takes those of the strategy.
    """

    title: str
    evidence: Evidence
    spans: Sequence[tuple[str, str, str, int]]
    note: str
    versions: Mapping[str, str]
    command: str
    created: str
    trials: int | None = None
    test_touched: int = 0
    selected: bool = False
    seed: int | None = 0
    scored: int = 0
    training: Sequence[Mapping[str, object]] = ()
    features: Sequence[str] = ()
    configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    device: str = ""
    deployment: str = ""
    deployed: bool = True
    other_seeds: Sequence[Result] = ()
    sections: Sequence[Section] = ()
    sweep: pd.DataFrame | None = None
    folds: pd.DataFrame | None = None
    indicators: Mapping[str, ArrayLike] | None = None

    @property
    def verdict(self) -> str:
        """The verdict, whose first sentence is at the top; of a walk-forward its own."""
        if self.folds is not None and (walked := self.folds.attrs.get("verdict")):
            return " ".join(filter(None, [walked, self.note]))
        agent = self.evidence.agent
        spread = agent.tried_variance / max(self.evidence.moments.num_bars - 1, 1)
        text = words.verdict(
            self.evidence,
            num_trials=agent.tried if self.trials is None else self.trials,
            selected=self.selected,
            sharpe_variance=spread if self.trials is None else None,
            note=self.note,
        )
        if self.sweep is None:
            return text
        chosen = f"Chosen as the best of {count(len(self.sweep), 'combination')}"
        return f"{chosen}: {text[0].lower()}{text[1:]}"

    @property
    def label(self) -> str:
        """The name of the agent or strategy in tables and plots."""
        averaged = self.trials is not None and self.seed is None
        name = "mean agent" if averaged else self.evidence.noun
        name = "selected agent" if self.selected else name
        return name if self.deployed else f"{name}, not deployed"

    @property
    def unit(self) -> str:
        """The unit of the evaluated span for readers: "years", or "bars" where it is short."""
        index = self.evidence.agent.equity.index
        return "years" if (index[-1] - index[0]).days >= 365 else "bars"

    @property
    def spans_apart(self) -> bool:
        """Whether each span ends before the next begins."""
        # Dates are ISO text, which sorts as time does.
        return all(a[2] < b[1] for a, b in itertools.pairwise(self.spans))
