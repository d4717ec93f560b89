"""The self-contained HTML page of a backtest.

`report.html` holds the text and the layout. This module collects the `contents` from the bars, the
result and the run, and draws them with `plots`. See `render` for what a page may do.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from numpy.typing import ArrayLike

from nca_trader.config.records import plain
from nca_trader.config.toml import to_toml
from nca_trader.evaluate.evidence import inference
from nca_trader.evaluate.evidence import verdict as words
from nca_trader.evaluate.evidence.verdict import weigh
from nca_trader.evaluate.figures import Curve
from nca_trader.evaluate.report import plots
from nca_trader.evaluate.report.chart import CHART, TABLE, price_chart
from nca_trader.evaluate.report.contents import ReportPage
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
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.stress import Stress
from nca_trader.evaluate.wording import few, percent
from nca_trader.progress import Progress
from nca_trader.runs import trials
from nca_trader.runs.folder import commit, now, versions
from nca_trader.runs.manifest import Run
from nca_trader.strategies import rules
from nca_trader.types import Bars

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
# Fields that a page does not read of a baseline once its metrics are computed.
UNREAD = ("trace", "turnover", "cost", "log_equity", "fills", "trades")


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
      ConfigError: `path` does not end in .html, or an indicator has another shape.
      StateError: the page cannot be written.

    Example:
      >>> import nca_trader as nca
      >>> bars = nca.sample_bars("sp500")[-100:]
      >>> result = nca.backtest(bars, nca.rules.momentum(20), nca.Costs(commission=5e-4))
      >>> nca.report(bars, result, "page.html").name
      'page.html'
    """
    path = page_path(path)
    with Progress(None, "page"):
        if run is None and sweep is not None:  # each combination is a trial, logged or not
            known = {"trials": len(sweep), "trials_variance": 1.0} | sweep.attrs.get("search", {})
            if known["trials"] > (result.tried or 0):
                more = {"tried": known["trials"], "tried_variance": known["trials_variance"]}
                result = dataclasses.replace(result, **more)
        # In the result's own account: otherwise the page would compare settings. The sentence comes
        # first, since its account is dropped again.
        _, hold = result.uncharged, result.hold
        baselines = {hold.name: hold}
        base = [run.base] if run is not None and run.base is not None else []
        for rule in (*base, rules.sma_cross(50, 200), rules.always_flat()):
            baselines[rule.name] = baseline = result.again(rule)
            if baseline.rules == hold.rules:  # then each is compared with the same
                vars(baseline)["hold"] = hold
            # Its metrics are computed and the account dropped: half a gigabyte of 5 M bars.
            vars(baseline).update({"metrics": baseline.metrics} | dict.fromkeys(UNREAD))
        shown = report_on(bars, result, baselines, run, command)
        sections = [] if stress is None else [stress_section(stress)]
        if sweep is not None:
            sections.append(sweep_section(sweep))
        if folds is not None:  # its verdict is at the top of the page
            sections.append(folds_section(folds)._replace(verdict=""))
        more = {"sweep": sweep, "folds": folds, "sections": sections, "indicators": indicators}
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
            # `evaluations` is None where the backtest was not to be counted.
            "test_touched": result.evaluations
            or trials.count(run.root, "test", trials.data_record(tested)),
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
            known |= {"deployment": decided.sentence, "deployed": not decided.baseline}
    return ReportPage(
        title=f"{run.name if run else result.name} on {few(bars.symbols)}",
        evidence=weigh(result, baselines, bars.bars_per_year),
        spans=[
            (name, _time(record["first"]), _time(record["last"]), record["rows"])
            for name, record in spans.items()
            if record
        ],
        note=" ".join(filter(None, [result.note, *result.cautions])),
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
    evidence = report.evidence
    agent, baselines = evidence.agent, evidence.baselines
    # The first ones: a plot of all has no room left on a phone.
    drawn = list(baselines)[:DRAWN]
    lines = [
        Curve(report.label, agent.equity, "agent"),
        *(Curve(name, baselines[name].equity, "baseline") for name in drawn),
        *(Curve("other seeds", seed.equity, "seed") for seed in report.other_seeds),
    ]
    # Both are shaded, but only an in-sample part that is not the whole gets a line around it.
    seen = agent.seen
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
    best = baselines[evidence.best]
    years = len(agent.equity) / agent.bars_per_year
    pair = {report.label: agent, evidence.best: best}
    monthly = {name: monthly_returns(result.equity) for name, result in pair.items()}
    return render(
        "report.html",
        scripts=[script(LIBRARY), script(TABLE), script(CHART)],
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
