"""The self-contained HTML page of a backtest.

`report.html` holds the text and the layout. This module collects what it shows from the bars, the
result and the run, and draws it with `plots`. See `render` for what a page may do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.agents import rules
from nca_trader.config.records import plain
from nca_trader.config.toml import to_toml
from nca_trader.errors import ConfigError
from nca_trader.evaluate import inference
from nca_trader.evaluate import verdict as words
from nca_trader.evaluate.report import plots
from nca_trader.evaluate.report.chart import CHART, TABLE, price_chart
from nca_trader.evaluate.report.figures import Curve, seen_by
from nca_trader.evaluate.report.render import LIBRARY, page_path, render, script, write
from nca_trader.evaluate.report.summary import annual
from nca_trader.evaluate.report.tables import (
    by_asset,
    cell,
    details,
    drawdown_periods,
    folds_section,
    monthly_returns,
    relative,
    stress_section,
    sweep_section,
)
from nca_trader.evaluate.verdict import Evidence, weigh
from nca_trader.evaluate.wording import count, few, percent
from nca_trader.progress import Progress
from nca_trader.runs import trials
from nca_trader.runs.folder import commit, now, versions
from nca_trader.runs.manifest import Run
from nca_trader.types import Bars

if TYPE_CHECKING:
    from nca_trader.evaluate.result import Result
    from nca_trader.evaluate.stress import Stress

# Metrics of training in the order shown; a run that did not write one has no plot of it.
TRAINING = {
    "reward": "mean reward per bar",
    "mean_reward": "mean reward per bar",
    "equity": "equity",
    "entropy": "entropy of the policy",
    "approx_kl": "approximate KL per update",
    "explained_variance": "explained variance of the value",
    "clip_fraction": "share of ratios clipped",
    "loss": "loss",
}
# Costs that a reader may expect, where they are zero.
NOT_CHARGED = {
    "commission": "commission",
    "slippage": "slippage",
    "half_spread": "a spread in addition to the slippage and the bars' own quotes",
    "impact": "market impact",
    "borrow_fee": "borrowing fees",
    "interest_lend": "interest on cash",
}
DRAWN = 3  # baselines in a plot


class Seed(NamedTuple):
    """Annualised Sharpe ratios of one seed on the three spans; NaN where one is unknown.

    `seed` is its number; None is the mean of all.
    """

    seed: int | None
    training: float
    selection: float
    test: float


class Learnt(NamedTuple):
    """What an agent's network learnt on a market whose optimum is known.

    market: its name. fraction, untrained: of the optimum, after and before training. seconds: of
    training, without compilation.
    """

    market: str
    fraction: float
    untrained: float
    seconds: float


class Demo(NamedTuple):
    """What the demo knows of its agent in addition. An empty field has no section.

    lead: the one sentence above the first plot. first: of the baselines, those in that plot. tilt:
    name and finding of what the agent changed of its base.
    learnt: of the same network on a known market.
    deployment: what was decided to trade, in words. deployed: whether the agent is what trades.
    checks: name and finding of each further check. advice: what to try next, in words. seeds: every
    seed, and the mean of all. other_seeds: backtests of the seeds that do not act. parity: of the
    paper replay of the same bars, as `paper.parity.compare` returns it. wall_times: stage ->
    seconds.
    """

    lead: str = ""
    first: Sequence[str] = ()
    tilt: Sequence[tuple[str, str]] = ()
    learnt: Learnt | None = None
    deployment: str = ""
    deployed: bool = True
    checks: Sequence[tuple[str, str]] = ()
    advice: Sequence[str] = ()
    seeds: Sequence[Seed] = ()
    other_seeds: Sequence[Result] = ()
    parity: Any = None
    wall_times: Mapping[str, float] = MappingProxyType({})


NO_DEMO = Demo()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportPage:
    """The contents of a backtest's page. An empty field, or None, has no section.

    Attributes:
      title: of the page.
      agent: backtest of the agent that acts (of several seeds the selected one), or of a strategy.
      baselines: name as shown -> backtest on the same bars and costs.
      evidence: `weigh(agent, baselines, bars_per_year)`.
      spans: name, first bar, last bar and number of bars of each split of the data, in order of
        time, e.g. of training, selection and test; the last is evaluated.
      symbols: in the environment's order.
      source, note, digest: of the bars.
      versions: package -> version, and the commit of the source.
      command: that makes this page again.
      created: date and time as text.
      trials: of the trial log, with this one and each of its seeds; None for a strategy, whose
        trials `agent.tried` counts, if any.
      test_touched: how often the test span was evaluated, with this time.
      selected: whether the agent was chosen among its seeds by their scores on a selection span.
      seed: number of the agent that acts, also its column in `training`; None is the mean of all.
      scored: updates among which the selection span chose one; 0 where it chose none.
      training: rows of `metrics.jsonl`; a value is a number, or a list with one per seed.
      features: in the environment's order.
      configs: the resolved configurations by name, as TOML.
      device: that trained.
      demo: what the demo adds.
      sweep: the table of a sweep that chose the parameters.
      folds: the fold table of a walk-forward.
      stress: the backtest under worse conditions.
      indicators: lines on the price chart; None takes those of the strategy.
    """

    title: str
    agent: Result
    baselines: Mapping[str, Result]
    evidence: Evidence
    spans: Sequence[tuple[str, str, str, int]]
    symbols: Sequence[str]
    source: str
    note: str
    digest: str
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
    demo: Demo = NO_DEMO
    sweep: pd.DataFrame | None = None
    folds: pd.DataFrame | None = None
    stress: Stress | None = None
    indicators: Mapping[str, ArrayLike] | None = None

    @property
    def headline(self) -> str:
        """The one sentence that says what happened, next to the best baseline and to holding."""
        if self.demo.lead:
            return self.demo.lead
        evidence, best = self.evidence, self.evidence.best

        def earned(name: str, m: Mapping[str, float]) -> str:
            way = "gained" if m["total_return"] >= 0.0 else "lost"
            return f"{name} {way} {percent(abs(m['total_return']))}"

        ours, baselines = evidence.agent.metrics, evidence.baselines
        names = [best, *(name for name in ("buy and hold",) if name in baselines and name != best)]
        accounts = [earned(f"the {self.label}", ours)]
        accounts += [earned(name, baselines[name].metrics) for name in names]
        difference = evidence.differences[best]
        ends, better = difference.sharpe_interval, difference.sharpe >= 0.0
        found = f"for the risk taken that is {'better' if better else 'worse'} than {best}, "
        apart = ends.low > 0.0 or ends.high < 0.0
        found += "by more than chance explains" if apart else "though the difference may be chance"
        if math.isnan(ends.low):
            found = "too little moved to compare their risk"
        if evidence.copies:
            found = f"it held the same weights as {evidence.nearest}"
        of_days = (evidence.stop - evidence.start).days >= 2
        form = "%Y-%m-%d" if of_days else "%Y-%m-%d %H:%M"
        start, stop = (end.strftime(form) for end in (evidence.start, evidence.stop))
        origin = evidence.standing
        if self.sweep is not None:
            origin = f"chosen as the best of {count(len(self.sweep), 'combination')}"
        elif self.folds is not None:
            origin = f"in the test spans of {count(len(self.folds), 'fold')}"
        where = f"{origin}, from {start} to {stop}, ".removeprefix(", ")
        listed = ", ".join(accounts[:-1]) + f" and {accounts[-1]}"
        said = f"{where}{listed}; {found}."
        return said[0].upper() + said[1:]

    @property
    def verdict(self) -> str:
        """The sentences at the top of the page; of a walk-forward its own: a page has one."""
        if self.folds is not None and (walked := self.folds.attrs.get("verdict")):
            return " ".join(filter(None, [walked, self.note]))
        spread = self.agent.tried_variance / max(self.evidence.moments.num_bars - 1, 1)
        return words.verdict(
            self.evidence,
            num_trials=self.agent.tried if self.trials is None else self.trials,
            selected=self.selected,
            sharpe_variance=spread if self.trials is None else None,
            note=self.note,
        )

    @property
    def label(self) -> str:
        """The name of the agent or strategy in tables and plots."""
        averaged = self.trials is not None and self.seed is None
        name = "mean agent" if averaged else self.evidence.noun
        name = "selected agent" if self.selected else name
        return name if self.demo.deployed else f"{name}, not deployed"

    @property
    def unit(self) -> str:
        """The unit of the evaluated span for readers: "years", or "bars" where it is short."""
        return "years" if (self.evidence.stop - self.evidence.start).days >= 365 else "bars"

    @property
    def spans_apart(self) -> bool:
        """Whether each span ends before the next begins."""
        # Dates are ISO text, which sorts as time does.
        return all(a[2] < b[1] for a, b in itertools.pairwise(self.spans))

    @property
    def gap(self) -> str:
        """How much of what was learnt in training is left on later bars, in words."""
        row = next((row for row in self.demo.seeds if row.seed == self.seed), None)
        if row is None or math.isnan(row.training):
            return ""
        what = "the mean agent" if row.seed is None else f"seed {row.seed}"
        lost = row.training - row.test
        found = (
            f"Generalisation gap: the Sharpe ratio of {what} was {row.training:.2f} in training, "
            f"{row.selection:.2f} on the selection span and {row.test:.2f} on the test "
            f"span, {abs(lost):.2f} {'less' if lost >= 0.0 else 'more'} than in training."
        )
        if row.training > 2.0 * max(row.test, 0.0):
            found += " Most of what it learnt in training is noise of those years: it is overfit."
        return found

    def seed_spread(self) -> tuple[float, float, float, float]:
        """Compute mean, standard deviation (ddof=1), least and greatest Sharpe ratio of the seeds.

        Seeds without a Sharpe ratio (they never traded) are left out; NaN where too few remain.
        """
        each = [row.test for row in self.demo.seeds if row.seed is not None]
        scores = pd.Series(each, dtype=float)
        return scores.mean(), scores.std(), scores.min(), scores.max()


def report(
    bars: Bars,
    result: Result,
    path: str | os.PathLike[str],
    *,
    run: Run | None = None,
    command: str = "",
    sweep: pd.DataFrame | None = None,
    folds: pd.DataFrame | None = None,
    stress: Stress | None = None,
    indicators: Mapping[str, ArrayLike] | None = None,
) -> Path:
    """Write a backtest as one self-contained HTML page, compared with baselines.

    Args:
      bars: all bars that the backtest was given.
      result: of `nca.backtest`.
      path: of the page, e.g. "page.html".
      run: the run that acted; None for a strategy.
      command: shown on the page as the command that makes it again.
      sweep: the table of `nca.sweep` that chose the parameters, for a heat map and its verdict.
      folds: the fold table of `nca.walk_forward`.
      stress: of `result.stress()`.
      indicators: lines on the price chart by name, `[N]` or `[N, A]` for the N bars, in units of
        the price; None takes those of the strategy.

    Returns:
      The path.

    Raises:
      ConfigError: `path` does not end in .html, `nca.backtest` did not make `result`, or an
        indicator has another shape.
      StateError: the page cannot be written.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-100:]
      >>> result = nca.backtest(bars, nca.rules.momentum(20), nca.Costs(commission=5e-4))
      >>> nca.report(bars, result, "page.html").name
      'page.html'
    """
    path, again, index = page_path(path), result.again, result.equity.index
    if again is None:
        raise ConfigError(
            "this result can't be compared with baselines; it was not made by nca.backtest."
        )
    after = bars.index.searchsorted(index[-1]) + 1
    # Baselines stop where the result did, which may be before the last bar.
    stop = str(bars.index[after]) if after < len(bars) else None
    with Progress(None, "page"):
        # At the result's own costs, fills and limits: otherwise the page would compare settings.
        how = {"start": str(index[0]), "stop": stop, **result.rules._asdict()}
        how |= {"bars": bars, "costs": result.charged, "name": None}
        baselines = {
            rule.name: again(targets=rule, **how)
            for rule in (rules.buy_and_hold(), rules.sma_cross(50, 200), rules.always_flat())
        }
        if run is None and sweep is not None:  # each combination is a trial, logged or not
            known = {"trials": len(sweep), "trials_variance": 1.0} | sweep.attrs.get("search", {})
            if known["trials"] > (result.tried or 0):
                more = {"tried": known["trials"], "tried_variance": known["trials_variance"]}
                result = dataclasses.replace(result, **more)
        shown = report_on(bars, result, baselines, run, command)
        more = {"sweep": sweep, "folds": folds, "stress": stress, "indicators": indicators}
        shown = dataclasses.replace(shown, **more)
        return write_report(path, shown)


def report_on(
    bars: Bars, result: Result, baselines: Mapping[str, Result], run: Run | None, command: str
) -> ReportPage:
    """Collect the contents of one backtest's page from the bars and the run.

    Args:
      bars: all that the backtest was given; it traded a span of them.
      result: of the backtest.
      baselines: on the same bars, at its costs, fills and limits, by name.
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
            "trials": max(logged, run.agent_config.num_seeds),
            # `looks` is None where the backtest was not to be counted.
            "test_touched": result.looks or trials.looks(run.root, trials.data_record(tested)),
            "selected": run.selected is not None
            and chosen is not None
            and chosen.selected == run.selected,
            "seed": run.selected,
            "scored": (chosen and chosen.scored) or 0,
            # A metric that each seed has takes the place of the one number.
            "training": [row | row.get("seeds", {}) for row in run.metrics()],
            "features": run.spec.features,
            "configs": {
                "Environment (TOML)": to_toml(run.env_config),
                "Agent (TOML)": to_toml(run.agent_config),
            },
            "device": manifest.device,
        }
        if (decided := run.deployment) is not None:
            known["demo"] = Demo(deployment=decided.sentence, deployed=not decided.baseline)
    return ReportPage(
        title=f"{run.name if run else result.name} on {few(bars.symbols)}",
        agent=result,
        baselines=baselines,
        evidence=weigh(result, baselines, bars.bars_per_year),
        spans=[
            (name, _time(record["first"]), _time(record["last"]), record["rows"])
            for name, record in spans.items()
            if record
        ],
        symbols=bars.symbols,
        source=bars.source,
        note=" ".join(filter(None, [result.note, *result.cautions])),
        digest=bars.digest(),
        command=command,
        created=now(),
        versions=made,
        **known,
    )


def _time(of: Any) -> str:
    """Write the time of a bar: its date, and the time of day where that is not 0:00."""
    # 19 characters are the time to the second, without the zone, which is UTC.
    return str(of)[:19].replace("T", " ").removesuffix(" 00:00:00")


def write_report(path: str | os.PathLike[str], report: ReportPage) -> Path:
    """Write the page of a backtest, and the folder where it is missing.

    Returns:
      The path. The file appears whole or not at all.

    Raises:
      StateError: it cannot be written there.
    """
    return write(Path(path), page(report))


def fold_starts(folds: pd.DataFrame | None) -> dict[str, pd.Timestamp]:
    """Return the first test bar of each fold, by its number; none where the table lacks it."""
    if folds is None or "test_start" not in folds:
        return {}
    return {str(name): pd.Timestamp(at) for name, at in folds["test_start"].items()}


def page(report: ReportPage) -> str:
    """Render the page of a backtest."""
    agent, evidence, demo = report.agent, report.evidence, report.demo
    # The first ones: a plot of all has no room left on a phone.
    drawn = demo.first or list(report.baselines)[:DRAWN]
    lines = [
        Curve(report.label, agent.equity, "agent"),
        *(Curve(name, report.baselines[name].equity, "baseline") for name in drawn),
        *(Curve("other seeds", seed.equity, "seed") for seed in demo.other_seeds),
    ]
    # Both are shaded, but only an in-sample part that is not the whole gets a line around it.
    seen = seen_by(agent) if agent.in_sample else None
    # A metric is shown where every update has it.
    rows = report.training
    keys = [key for key in TRAINING if rows and all(key in row for row in rows)]
    # A seed that was selected is marked, because selection makes its metrics too good.
    seed_name = "the selected seed" if report.selected else f"seed {report.seed}"
    seed_name = "the mean of the seeds" if report.seed is None else seed_name
    costs = dataclasses.asdict(agent.charged)
    # A cost of the user's own has a name and no rate, so it is listed apart.
    own, scale = costs.pop("own") or (), costs.pop("own_scale")
    chart = price_chart(agent, report.indicators)
    # The strongest baseline, which is the one that an agent has to beat.
    best = report.baselines[evidence.best]
    years = len(agent.equity) / agent.bars_per_year
    pair = {report.label: agent, evidence.best: best}
    monthly = {name: monthly_returns(result.equity) for name, result in pair.items()}
    return render(
        "report.html",
        scripts=[] if chart is None else [script(LIBRARY), script(TABLE), script(CHART)],
        report=report,
        equity=plots.equity_plot(lines, evidence.standing, seen, fold_starts(report.folds)),
        rolling=plots.rolling_plot(pair, agent.bars_per_year, seen),
        yearly=plots.yearly_plot({name: x["Year"] for name, x in monthly.items()}, seen),
        monthly=monthly[report.label],
        drawdowns=[
            [percent(row.pop("depth")), *(cell(str(name), x) for name, x in row.items())]
            for row in drawdown_periods(agent.equity).to_dict("records")
        ],
        uncharged_sentence=agent.uncharged,
        histogram=plots.histogram(agent.excess_returns),
        exposure=plots.exposure_plot(agent.exposure, seen),
        chart=chart,
        details=details(agent, best),
        relative=relative(agent.metrics),
        annual=functools.partial(annual, years=years),
        sweep=None if report.sweep is None else sweep_section(report.sweep),
        folds=None
        if report.folds is None
        else folds_section(report.folds)._replace(verdict=""),  # it is at the top of the page
        stress=None if report.stress is None else stress_section(report.stress),
        training=[
            plots.training_plot(rows, key, TRAINING[key], report.seed, seed_name) for key in keys
        ],
        seed_name=seed_name,
        several_seeds=any(plots.per_seed(rows, key).shape[1] > 1 for key in keys),
        copy_share=words.COPY_SHARE,
        assets=by_asset(agent),
        uncharged=[text for name, text in NOT_CHARGED.items() if not costs[name]],
        other_costs={
            name.replace("_", " ").capitalize(): cost
            for name, cost in costs.items()
            if cost and name not in ("commission", "slippage")
        }
        | {f"{name}, your own, times": 1.0 if scale is None else scale for name in own},
        probabilistic=inference.probabilistic_sharpe(evidence.moments),
        deflated=report.trials and inference.deflated_sharpe(evidence.moments, report.trials),
    )
