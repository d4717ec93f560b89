"""Rules and sweeps on real bars, by a recipe that was fixed before any test span was looked at.

    python -m benchmarks.studies                     # the indexes that ship with the package
    python -m benchmarks.studies --data ../shared/data
    python -m benchmarks.studies --table             # what is in the results; computes nothing

The recipe, the same for each data set:

1. The first 70% of the bars are for research. Five rules are swept there, each over the grid below.
   The best combination of all of them by Sharpe ratio is chosen; its verdict counts every trial.
   A walk-forward of the chosen rule's grid, in ten folds, is made there too.
2. The last 30% are the test span. The chosen combination, its rule with default parameters, a hold
   at constant volatility and buy and hold are evaluated on it, once. This is one look.

Each data set is written to benchmarks/results/studies.json with its manifest; bars are not. A data
set that is there is not computed again: a second look would be another study.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
import tempfile
from typing import Any

import nca_trader as nca
from nca_trader.evaluate import inference
from nca_trader.evaluate.result import Result
from nca_trader.runs.manifest import commit, now, versions
from nca_trader.runs.trials import data_record
from nca_trader.types import Bars, Costs

RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "studies.json"
RESEARCH = 0.7  # of the bars
FOLDS = 10
# In bars, whatever their length.
GRIDS: dict[str, dict[str, list[Any]]] = {
    "sma_cross": {"fast": [5, 10, 20, 40, 80], "slow": [20, 50, 100, 200, 400]},
    "momentum": {"lookback": [10, 20, 50, 100, 200, 400, 800]},
    "time_series_momentum": {"lookback": [50, 100, 252, 500, 1000]},
    "mean_reversion": {"lookback": [10, 20, 50, 100], "entry": [1.0, 1.5, 2.0]},
    "breakout": {"lookback": [20, 55, 110, 220], "leave": [10, 20, 55]},
}
INDEX = Costs(commission=5e-4, slippage=2e-4)
# Name: the bars, and what trading them costs.
SHIPPED = {name: ("sp500", {"symbol": name}, INDEX) for name in ("SP500", "NASDAQ")}
FETCHED: dict[str, tuple[str, dict[str, Any], Costs]] = {
    "SPY, AAPL, IBM hourly": (
        "us_equity_hourly.parquet",
        {
            "timezone": "America/New_York",
            "columns": "split=split_factor,dividend=price_factor",
            "repair": "keep-jumps",
        },
        Costs(commission=1e-4, slippage=1e-4),
    ),
    # The quoted spread is in the bars.
    "EURUSD hourly": (
        "eurusd_hourly_quotes.parquet",
        {
            "timezone": "UTC",
            "columns": "bid=bid_close,ask=ask_close",
            "repair": "no-volume",
        },
        Costs(),
    ),
    "BTCUSD hourly": (
        "btcusd_hourly_2018_2022.parquet",
        {"timezone": "UTC"},
        Costs(commission=1e-3, slippage=2e-4),
    ),
}


def study(bars: Bars, costs: Costs) -> dict[str, Any]:
    """Follow the recipe on one data set; return its numbers."""
    cut = int(RESEARCH * len(bars))
    research, start = bars[:cut], str(bars.index[cut])
    found, tried = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for name, grid in GRIDS.items():
            table = nca.sweep(research, getattr(nca.rules, name), grid, costs, trials=folder)
            tried += len(table)
            found[name] = table
    tables = {name: table.sort_values("sharpe", ascending=False) for name, table in found.items()}
    rule = max(tables, key=lambda name: tables[name]["sharpe"].iloc[0])
    best, parameters = tables[rule].iloc[0], tables[rule].attrs["parameters"]
    chosen = {p: int(best[p]) if float(best[p]).is_integer() else best[p] for p in parameters}
    moments = inference.Moments(
        best["sharpe"] / research.bars_per_year**0.5, cut, best["skewness"], best["kurtosis"]
    )
    walk = nca.walk_forward(
        research,
        getattr(nca.rules, rule),
        costs,
        grid=GRIDS[rule],
        train=len(research) // 3,
        test=(len(research) - len(research) // 3) // FOLDS,
    )
    subjects = {
        "chosen": getattr(nca.rules, rule)(**chosen),
        "default": getattr(nca.rules, rule)(),
        "volatility hold": nca.rules.volatility_hold(),
        "hold": nca.rules.buy_and_hold(),
    }
    tested = {
        name: nca.backtest(bars, subject, costs, start=start) for name, subject in subjects.items()
    }
    return {
        "research": {
            "first": str(bars.index[0]),
            "last": str(research.index[-1]),
            "trials": tried,
            "rules": {
                name: {
                    "best": {p: table.iloc[0][p] for p in table.attrs["parameters"]},
                    "sharpe": table["sharpe"].iloc[0],
                    "verdict": table.attrs["verdict"],
                    **{k: v for k, v in table.attrs["search"].items() if k != "combination"},
                }
                for name, table in tables.items()
            },
            "chosen": rule,
            "parameters": chosen,
            # With the trials of all five sweeps, on the spread that trials without skill have.
            "deflated_sharpe": inference.deflated_sharpe(moments, tried),
            "walk_forward": {
                "folds": len(walk.folds),
                "sharpe": walk.metrics["sharpe"],
                "verdict": walk.verdict,
                "baselines": {n: r.metrics["sharpe"] for n, r in walk.baselines.items()},
            },
        },
        "test": {
            "first": start,
            "last": str(bars.index[-1]),
            "looks": 1,
            **{name: judged(result, tested["hold"]) for name, result in tested.items()},
        },
    }


def judged(result: Result, hold: Result) -> dict[str, Any]:
    """Return the metrics of a test span, with intervals and the difference to buy and hold."""
    per_year = result.bars_per_year
    interval = inference.sharpe_interval(result.judged_returns, per_year)
    difference = inference.sharpe_difference_interval(
        result.judged_returns, hold.judged_returns, per_year
    )
    names = ("total_return", "sharpe", "max_drawdown", "turnover", "trades", "exposure")
    return {
        "name": result.name,
        **{name: result.metrics[name] for name in names},
        "sharpe_interval": [interval.low, interval.high],
        "less_hold": result.metrics["sharpe"] - hold.metrics["sharpe"],
        "less_hold_interval": [difference.low, difference.high],
        "probabilistic_sharpe": inference.probabilistic_sharpe(
            inference.moments(result.judged_returns)
        ),
    }


def read(folder: pathlib.Path | None) -> dict[str, tuple[Bars, Costs]]:
    """Return the bars of each data set that is there, and its costs."""
    found = {
        name: (nca.sample_bars(sample).select(options["symbol"]), costs)
        for name, (sample, options, costs) in SHIPPED.items()
    }
    for name, (file, options, costs) in FETCHED.items() if folder else ():
        path = pathlib.Path(folder or ".") / file
        if path.is_file():
            found[name] = nca.read_bars(path, **options), costs
        else:
            print(f"{name}: {path} is not there")
    return found


def table(results: dict[str, Any]) -> str:
    """Return the results as tables of Markdown."""
    lines = [
        "| bars | chosen of all trials | research | deflated | SPA against hold | walk-forward |",
        "|-|-|-|-|-|-|",
    ]
    for name, row in results.items():
        r = row["research"]
        chosen = r["rules"][r["chosen"]]
        values = ", ".join(f"{k} {v:g}" for k, v in r["parameters"].items())
        # Results from before the test was studentised have it under its older name.
        against = chosen.get("spa_hold", chosen.get("spa_benchmark"))
        lines.append(
            f"| {name} | {r['chosen']} {values}, of {r['trials']} | {chosen['sharpe']:.2f}, hold "
            f"{chosen['benchmark_sharpe']:.2f} | {r['deflated_sharpe']:.2f} | "
            f"{against:.2f} | {r['walk_forward']['sharpe']:.2f} |"
        )
    lines += [
        "",
        "| bars, test span | chosen | default | volatility hold | hold | chosen less hold |",
        "|-|-|-|-|-|-|",
    ]
    for name, row in results.items():
        t = row["test"]
        cells = []
        for kind in ("chosen", "default", "volatility hold", "hold"):
            low, high = t[kind]["sharpe_interval"]
            cells.append(f"{t[kind]['sharpe']:.2f} [{low:.2f}, {high:.2f}]")
        low, high = t["chosen"]["less_hold_interval"]
        cells.append(f"{t['chosen']['less_hold']:+.2f} [{low:.2f}, {high:.2f}]")
        span = f"{name}, {t['first'][:10]} to {t['last'][:10]}"
        lines.append(f"| {span} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Compute the data sets that are not in the results yet, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, help="folder of fetched bars")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.is_file() else {}
    for name, (bars, costs) in () if args.table else read(args.data).items():
        if name in results:
            continue
        print(f"{name}: {len(bars):,} bars")
        about = {
            "bars": data_record(bars).sha256,
            "symbols": list(bars.symbols),
            "rows": len(bars),
            "costs": {k: v for k, v in vars(costs).items() if v},
            "recipe": inspect.getsource(study),
            "grids": GRIDS,
            "commit": commit(),
            "versions": versions(),
            "date": now(),
        }
        results[name] = study(bars, costs) | {"manifest": about}
        # After each: what was looked at is never looked at again by a second run.
        args.out.write_text(json.dumps(results, indent=1, default=float) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
