"""Composes a backtest's page from the result, its baselines, the bars and the run.

The demo, `backtest --out FILE.html` and `nca.report` share it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nca_trader.agents import rules
from nca_trader.config.toml import to_toml
from nca_trader.evaluate.backtest import backtest, looks_at
from nca_trader.evaluate.report.page import Report, Span, Trials, weigh, write_report
from nca_trader.evaluate.result import Result
from nca_trader.runs import trials
from nca_trader.runs.manifest import Run, commit, now, versions
from nca_trader.types import Bars


def report(
    bars: Bars,
    result: Result,
    path: str | os.PathLike[str],
    *,
    run: Run | None = None,
    command: str = "",
) -> Path:
    """Writes a backtest as one self-contained HTML page, compared with baselines.

    Args:
      bars: all bars that the backtest was given. result: of `nca.backtest`.
      path: of the page, e.g. "page.html". run: the run that acted; None for a strategy.
      command: shown on the page as what makes it again.

    Returns:
      The path.

    Raises:
      StateError: the page cannot be written.
    """
    index = result.equity.index
    after = bars.index.searchsorted(index[-1]) + 1
    stop = str(bars.index[after]) if after < len(bars) else None
    baselines = backtest_baselines(bars, result, str(index[0]), stop)
    return write_report(path, report_on(bars, result, baselines, run, command))


def backtest_baselines(
    bars: Bars, result: Result, start: str | None = None, stop: str | None = None
) -> dict[str, Result]:
    """What every result stands beside, by name: on its bars, at its costs, filled as it was."""
    return {
        rule.name: backtest(
            bars, rule, result.charged, start=start, stop=stop, **result.rules._asdict()
        )
        for rule in (rules.buy_and_hold(), rules.sma_cross(50, 200), rules.always_flat())
    }


def report_on(
    bars: Bars, result: Result, baselines: Mapping[str, Result], run: Run | None, command: str
) -> Report:
    """The page of one backtest, with all that the bars and the run say.

    Args:
      bars: all that the backtest was given, of which it traded a span.
      result: of that. baselines: from `backtest_baselines`.
      run: that acted; None where a strategy did.
      command: that makes the page again.
    """
    return Report(
        title=f"{run.name if run else result.name} on {', '.join(bars.symbols)}",
        agent=result,
        baselines=baselines,
        evidence=weigh(result, baselines, bars.bars_per_year),
        spans=_spans(result, run),
        symbols=bars.symbols,
        data_source=bars.source,
        data_note=" ".join(filter(None, [bars.note, *result.cautions])),
        data_digest=bars.digest(),
        command=command,
        created=now(),
        **(_made_here() if run is None else _of_run(run, bars, result)),
    )


def _made_here() -> dict[str, Any]:
    return {"versions": versions(), "commit": commit()}


def _of_run(run: Run, bars: Bars, result: Result) -> dict[str, Any]:
    """The fields of `Report` that only a run has, and what it was trained with."""
    here, manifest = versions(), run.manifest
    judged = bars.between(str(result.equity.index[0]), None)[: len(result.equity)]
    trained = manifest["versions"]
    seeds = run.agent_config.num_seeds
    return {
        "trials": Trials(
            # A run folder that was copied came without its ledger, but its own seeds are trials.
            count=max(trials.count(run.root, "train", run.manifest["data"]), seeds),
            test_touched=result.looks or looks_at(run, judged),
            selected=run.selection.get("selected") == run.selected,
        ),
        "seed": run.selected,
        "training": [row | row.get("seeds", {}) for row in run.metrics()],
        "features": run.spec.features,
        "env_toml": to_toml(run.env_config),
        "agent_toml": to_toml(run.agent_config),
        "versions": {name: _both(trained.get(name, "unknown"), here[name]) for name in here},
        "commit": _both(manifest["commit"], commit()),
        "device": manifest["device"],
    }


def _both(trained: str, here: str) -> str:
    """A version; two where the run was trained with another than this page is made with."""
    return here if trained == here else f"{trained} to train, {here} here"


def _spans(result: Result, run: Run | None) -> list[Span]:
    """What the run saw, and then what was traded."""
    index = result.equity.index
    traded = {"first": index[0], "last": index[-1], "rows": len(index)}
    if run is None:
        return [_span("backtest", traded)]
    spans = [_span("training", run.manifest["data"])]
    if "data" in run.selection:
        spans.append(_span("selection", run.selection["data"]))
    return [*spans, _span("backtest" if result.in_sample else "test", traded)]


def _span(name: str, record: Mapping[str, Any]) -> Span:
    """A span as the page states it: dates, and times of day where a bar does not begin at 0:00."""
    first, last = (
        str(np.datetime64(str(record[end])[:19], "s")).removesuffix("T00:00:00").replace("T", " ")
        for end in ("first", "last")
    )
    return Span(name=name, start=first, stop=last, bars=record["rows"])
