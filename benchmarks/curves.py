"""Equity of the rows of `benchmarks.agents`, which record metrics and no curve.

    python -m benchmarks.curves --data ../shared/data --runs /tmp/runs --only futures
    python -m benchmarks.curves      # draws what is in the results; trains nothing

The first trades recorded spans again: the recipe, the seeds and the dates are those of the rows.
It is one more look at a test span, so nothing may be chosen by it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

from benchmarks.agents import (
    HALF,
    HOLD,
    POLICIES,
    RESULTS,
    STUDIES,
    Study,
    baselines,
    read,
    rows_of,
    walked,
)
from nca_trader.learner.pathwise import BANKRUPT
from nca_trader.runs.manifest import commit, now
from nca_trader.types import Bars

CURVES = RESULTS.with_name("agents-curves.jsonl")
PLOT = RESULTS.parents[2] / "docs" / "lab-notes" / "agents-on-real-bars.png"
AGENT = "mean agent"


def curve_of(
    bars: Bars, study: Study, policy: str, phase: str, folder: pathlib.Path
) -> dict[str, Any]:
    """Trade the span of a recorded row again; return equity at the end of each month."""
    began = time.process_time()
    known, runs, spans, account = walked(bars, study, policy, phase, folder)
    others = baselines(known, study, spans[0][0], spans[-1][1])
    half = next(each for name, each in others.items() if name.startswith(HALF))
    shown = {AGENT: account, HOLD: others[HOLD], HALF: half}
    months = {name: each.equity.resample("ME").last() for name, each in shown.items()}
    updates = [row for run in runs for row in run.metrics()]
    return {
        "months": [f"{month:%Y-%m}" for month in months[AGENT].index],
        "equity": {name: [round(float(x), 4) for x in found] for name, found in months.items()},
        "sharpe": {name: each.metrics["sharpe"] for name, each in shown.items()},
        "updates": len(updates),
        "bankrupt": sum(row[BANKRUPT] for row in updates),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw a panel for each phase: the mean agent of each policy, next to two baselines."""
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.dates import YearLocator

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, phase in zip(axes, ("selection", "test"), strict=True):
        own = [row for row in rows if row["phase"] == phase]
        for name, colour in ((HOLD, "0.6"), (HALF, "black")):
            x = np.array(own[0]["months"], "datetime64[M]")
            axis.plot(x, own[0]["equity"][name], color=colour, label=name)
        for row in own:
            x = np.array(row["months"], "datetime64[M]")
            axis.plot(x, row["equity"][AGENT], label=row["policy"], linewidth=1)
        axis.set(yscale="log", title=f"{own[0]['bars']}, {phase} span")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.xaxis.set_major_locator(YearLocator(4))
    axes[0].set_ylabel("equity, net of costs; log scale")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Trade the spans that have no curve yet, and draw those that have one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("../shared/data"))
    parser.add_argument("--runs", type=pathlib.Path, help="folder of the runs")
    parser.add_argument("--only", nargs="*", choices=STUDIES, default=[])
    parser.add_argument("--out", type=pathlib.Path, default=PLOT)
    args = parser.parse_args()
    for name in args.only:
        done = {(r["bars"], r["policy"], r["phase"]) for r in rows_of(CURVES)}
        bars, folder = read(STUDIES[name], args.data), args.runs / name.replace(" ", "-")
        for phase in ("selection", "test"):
            for policy in POLICIES:
                if (name, policy, phase) in done:
                    continue
                row: dict[str, Any] = {"bars": name, "policy": policy, "phase": phase}
                row |= curve_of(bars, STUDIES[name], policy, phase, folder)
                with CURVES.open("a") as file:
                    file.write(json.dumps(row | {"commit": commit(), "date": now()}) + "\n")
                print(name, phase, policy, row["sharpe"], row["cpu_seconds"], flush=True)
    plot([row for row in rows_of(CURVES) if row["bars"] == "futures"], args.out)


if __name__ == "__main__":
    main()
