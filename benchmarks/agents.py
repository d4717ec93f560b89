"""Agents on real bars, walked forward by a recipe that was fixed before a test span was looked at.

    python -m benchmarks.agents selection --data ../shared/data --runs /tmp/runs
    python -m benchmarks.agents test --data ../shared/data --runs /tmp/runs --only futures
    python -m benchmarks.agents table                     # what is in the results; trains nothing

The recipe, the same for each data set and policy, is `agent_of` and `env_of`. At each date of
`Study` an agent is trained on all bars before it and trades until the next one. The stitched
account of its dates in `selecting` is the selection span, on which recipes may be compared. That
of `testing` is the test span, which each recipe sees once: a row that is in the results is not
computed again. Every row is written when it is known, with its manifest; runs are resumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np

import nca_trader as nca
from nca_trader.agents.baselines import MATCHED, baseline_rules, year_of
from nca_trader.config import AgentConfig, EnvConfig, PolicyConfig
from nca_trader.envs.account.state import rules_of
from nca_trader.evaluate import inference
from nca_trader.evaluate.gate import gate
from nca_trader.evaluate.result import Result
from nca_trader.evaluate.walkforward.outcome import matched_hold
from nca_trader.runs.manifest import Run, commit, now, versions
from nca_trader.runs.trials import data_record
from nca_trader.types import Bars, Costs

RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "agents.jsonl"
# The recipe is these two presets. `agents/panel.toml` has the first of the policies below.
AGENT, ENV = nca.load_agent("panel"), nca.load_env("panel_daily")
# Looked at on the futures' selection span, 1986 to 1995, before the recipe was fixed, by Sharpe
# ratio of the mean agent. The other data sets take what was chosen there.
LOOKED = {
    "mlp, log-return, 500,000 steps": 0.70,
    "mlp, mean-variance, 500,000 steps": 0.77,  # taken
    "mlp, mean-variance, 150,000 steps": 0.74,
    "linear with a head of 1, 150,000 steps": 0.24,
    "linear with a head of 1, 500,000 steps": 0.47,
    "nca, mean-variance, 500,000 steps": 0.63,
}
WARM = 300  # bars of a training span before its account is judged: features warm up
HOLD, HALF = "buy and hold", "half equal weight, half time-series momentum"
POLICIES = {
    # One linear combination of the features, whose response the head learns. With a head of one
    # unit it hardly left 0 in as many steps.
    "linear": PolicyConfig(kind="mlp", channels=1, hidden=0, window=1, head_hidden=32),
    "mlp": PolicyConfig(kind="mlp", channels=16, hidden=32, window=1),
    "gru": PolicyConfig(kind="gru", channels=8, window=3),
    "nca": PolicyConfig(channels=16, hidden=32, steps=1, dilations=(1,)),
}

# The same objects again: jax finds what it compiled for them.
rules_once = functools.cache(baseline_rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """One data set.

    Attributes:
      file: of the bars. read: arguments of `nca.read_bars`. symbols: those taken; () is all.
      costs: of trading. size_cap: the largest factor of a position; 1 needs no borrowed money.
      selecting, testing: dates of training; a selection span ends at the first of `testing`.
      earlier: times that the test span was seen before this study, in words.
    """

    file: str
    read: dict[str, Any]
    costs: Costs
    selecting: tuple[str, ...]
    testing: tuple[str, ...]
    symbols: tuple[str, ...] = ()
    size_cap: float = 5.0
    earlier: str = "none known"


EQUITY: dict[str, Any] = {
    "timezone": "America/New_York",
    "columns": "split=split_factor,dividend=price_factor",
}
ONE_LOOK = "one, by five rules (docs/lab-notes/studies.md)"
STUDIES = {
    "futures": Study(
        file="futures_daily.parquet",
        read={"repair": "close-only,no-volume,keep-jumps"},
        costs=Costs(commission=2e-4),
        selecting=("1986-01-01", "1991-01-01"),
        testing=("1996-01-01", "2001-01-01", "2006-01-01"),
        earlier="about 40, by prototypes that this recipe descends from",
    ),
    "EURUSD hourly": Study(
        file="eurusd_hourly_quotes.parquet",
        read={"timezone": "UTC", "columns": "bid=bid_close,ask=ask_close", "repair": "no-volume"},
        costs=Costs(),  # the quoted spread is in the bars
        selecting=("2009-01-01", "2011-01-01"),
        testing=("2012-08-02", "2013-10-01"),
        earlier=ONE_LOOK,
    ),
    "BTCUSD hourly": Study(
        file="btcusd_hourly_2018_2022.parquet",
        read={"timezone": "UTC"},
        costs=Costs(commission=1e-3, slippage=2e-4),
        selecting=("2019-07-01", "2020-04-01"),
        testing=("2021-01-09", "2021-08-01"),
        size_cap=1.0,
        earlier=ONE_LOOK,
    ),
    "stocks": Study(
        file="us_equity_daily.parquet",
        # Without symbols whose jumps are not adjusted (GOOG, EEM), and ones used again.
        read=EQUITY | {"repair": "part-reuse,keep-jumps"},
        costs=Costs(commission=1e-4, slippage=1e-4),
        symbols=(
            "SPY", "IWM", "AAPL", "IBM", "BAC", "AIG", "QQQ-2011", "USO-2006", "WM-2009", "FB-2012",
        ),
        selecting=("2001-01-01", "2005-01-01"),
        testing=("2009-01-01", "2013-01-01"),
        size_cap=1.0,
    ),
    "equities hourly": Study(
        file="us_equity_hourly.parquet",
        read=EQUITY | {"repair": "keep-jumps"},
        costs=Costs(commission=1e-4, slippage=1e-4),
        selecting=("2003-01-01", "2007-01-01"),
        testing=("2011-04-18", "2014-01-01"),
        size_cap=1.0,
        earlier=ONE_LOOK,
    ),
}  # fmt: skip


def env_of(study: Study) -> EnvConfig:
    """Return the recipe's environment at the costs of the study."""
    return dataclasses.replace(ENV, costs=study.costs, size_cap=study.size_cap)


def agent_of(policy: str) -> AgentConfig:
    """Return the recipe's agent with another policy."""
    return dataclasses.replace(AGENT, policy=POLICIES[policy])


def read(study: Study, folder: pathlib.Path) -> Bars:
    """Return the bars of a study."""
    bars = nca.read_bars(folder / study.file, **study.read)
    return bars.select(*study.symbols) if study.symbols else bars


def trained(bars: Bars, study: Study, policy: str, date: str, folder: pathlib.Path) -> Run:
    """Return the agents that are trained on the bars before `date`; a run that is there resumes."""
    env = nca.TradingEnv(bars.between(None, date), env_of(study))
    return nca.train(env, agent_of(policy), folder / policy / date)


def stitched(bars: Bars, study: Study, runs: list[Run], spans: list[tuple[str, Any]]) -> Result:
    """Return the account over the spans of some runs, each trading its own."""
    targets = np.full(bars.close.shape, np.nan)
    for run, (start, stop) in zip(runs, spans, strict=True):
        acted = nca.backtest(bars.between(None, stop), run, start=start, look=False)
        first = bars.row(start)
        targets[first : first + len(acted.targets)] = acted.targets
    # Targets are weights, which each run's own sizes have scaled.
    rules: dict[str, Any] = rules_of(env_of(study))._asdict() | {"sizing": "fixed"}
    span: dict[str, Any] = {"start": spans[0][0], "stop": spans[-1][1]}
    return nca.backtest(bars, targets, study.costs, name="agent", **span, **rules)


def baselines(bars: Bars, study: Study, start: str, stop: Any) -> dict[str, Result]:
    """Return the accounts of the baselines, sized as the agent's."""
    year = year_of(bars.bars_per_year, bars.row(start))
    rules = rules_of(env_of(study))._asdict()
    return {
        name: nca.backtest(bars, rule, study.costs, start=start, stop=stop, **rules)
        for name, rule in rules_once(year, sized=True).items()
    }


def figures(result: Result) -> dict[str, Any]:
    """Return what a row shows of an account."""
    years = len(result.equity) / result.bars_per_year
    gross = float(result.weights.abs().sum(axis=1).mean())
    moved = float(result.turnover.sum()) / years
    interval = inference.sharpe_interval(result.judged_returns, result.bars_per_year)
    return {
        "sharpe": result.metrics["sharpe"],
        "interval": [interval.low, interval.high],
        "total_return": result.metrics["total_return"],
        "max_drawdown": result.metrics["max_drawdown"],
        "gross": gross,
        "turnover_of_gross": moved / gross if gross else 0.0,
    }


def less(result: Result, other: Result) -> list[float]:
    """Return the difference of two Sharpe ratios, and its 95% interval."""
    ours, theirs = (np.nan_to_num(r.metrics["sharpe"]) for r in (result, other))
    found = inference.sharpe_difference_interval(
        result.judged_returns, other.judged_returns, result.bars_per_year
    )
    return [float(ours - theirs), found.low, found.high]


class Walked(NamedTuple):
    """The agents of a policy, trained date by date, and the stitched account of their means.

    known: bars up to the end of the span. spans: first date and end of each agent's trades.
    """

    known: Bars
    runs: list[Run]
    spans: list[tuple[str, Any]]
    account: Result


def walked(bars: Bars, study: Study, policy: str, phase: str, folder: pathlib.Path) -> Walked:
    """Train what is missing, and trade one span."""
    dates = list(study.selecting if phase == "selection" else study.testing)
    end = study.testing[0] if phase == "selection" else None
    known = bars.between(None, end) if end else bars  # no later bar is even in memory
    runs = [trained(known, study, policy, date, folder) for date in dates]
    runs = [Run(run.path, force_agent=True) for run in runs]
    spans = list(zip(dates, [*dates[1:], end], strict=True))
    return Walked(known, runs, spans, stitched(known, study, runs, spans))


def row_of(bars: Bars, study: Study, policy: str, phase: str, folder: pathlib.Path) -> Any:
    """Train what is missing, trade one span, and return its row."""
    began = time.process_time()
    known, runs, spans, account = walked(bars, study, policy, phase, folder)
    (start, _), (last, end) = spans[0], spans[-1]
    seeds = [
        stitched(known, study, [Run(r.path, seed=i, force_agent=True) for r in runs], spans)
        for i in range(AGENT.num_seeds)
    ]
    others = baselines(known, study, start, end)
    verdict = gate(
        {"mean agent": account.judged_returns},
        {name: each.judged_returns for name, each in others.items()},
        account.bars_per_year,
    )
    # A control, which the gate does not see: it knows the span's mean exposure.
    fixed: Any = {"sizing": "fixed", "order": "rebalance"}
    others[MATCHED] = nca.backtest(
        known,
        matched_hold(known, account.weights),
        study.costs,
        start=start,
        stop=end,
        **rules_of(env_of(study))._asdict() | fixed,
    )
    # The newest agent on the bars that trained it.
    inside = known.between(None, last)
    warm = str(inside.index[min(WARM, len(inside) // 2)])
    learnt = nca.backtest(inside, runs[-1], start=warm, look=False)
    held = baselines(inside, study, warm, None)[HOLD]
    sharpes = [each.metrics["sharpe"] for each in seeds]
    return {
        "agent": figures(account),
        "seeds": sharpes,
        "seeds_deviation": float(np.std(sharpes, ddof=1)),
        "baselines": {
            name: figures(each) | {"agent_less": less(account, each)}
            for name, each in others.items()
        },
        "training": {"sharpe": learnt.metrics["sharpe"], "less_hold": less(learnt, held)},
        "gate": verdict.sentence,
        "bound": verdict.bound,
        "deployed": verdict.deployed,
        "span": [str(account.equity.index[0]), str(account.equity.index[-1])],
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def budget(bars: Bars, study: Study, phase: str, folder: pathlib.Path) -> None:
    """Print how long training takes, from a few updates of each policy."""
    dates = study.selecting if phase == "selection" else study.testing
    env = nca.TradingEnv(bars.between(None, dates[0]), env_of(study))
    seeds, steps, total = AGENT.num_seeds, AGENT.learner.steps, 0.0
    for policy in POLICIES:
        rows = nca.train(
            env, agent_of(policy), folder / "budget" / dates[0] / policy, steps=20_000
        ).metrics()
        seconds = seeds * steps / rows[-1]["steps_per_s"] * len(dates)
        total += seconds
        print(f"  {policy}: {seeds} seeds x {steps:,} steps x {len(dates)} dates: {seconds:.0f} s")
    print(f"  training-time budget: {total / 60:.1f} min, without compilation", flush=True)


def rows_of(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of the results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| bars | policy | training less hold | net Sharpe | less hold | less half and half "
        "| seeds' deviation | turnover / gross | gate's bound |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for row in rows:
        a, t = row["agent"], row["training"]["less_hold"]
        hold = row["baselines"][HOLD]["agent_less"]
        half = next(v for k, v in row["baselines"].items() if k.startswith("half"))["agent_less"]
        spread = "{:+.2f} [{:.2f}, {:.2f}]"
        overfit = " overfit" if row["phase"] == "selection" and t[0] > hold[2] else ""
        lines.append(
            f"| {row['bars']}, {row['phase']} {row['span'][0][:4]}-{row['span'][1][:4]} "
            f"| {row['policy']} | {spread.format(*t)}{overfit} "
            f"| {a['sharpe']:.2f} [{a['interval'][0]:.2f}, {a['interval'][1]:.2f}] "
            f"| {spread.format(*hold)} | {spread.format(*half)} | {row['seeds_deviation']:.2f} "
            f"| {a['turnover_of_gross']:.1f} | {row['bound']:+.2f} |"
        )
    return "\n".join(lines)


def brief(rows: list[dict[str, Any]]) -> str:
    """Return one line of Markdown per data set: the values of its policies, without intervals."""
    lines = ["| bars | net Sharpe | less hold | training less hold | gate's bound |", "|-|-|-|-|-|"]
    for name in dict.fromkeys(row["bars"] for row in rows):
        of = [
            next(r for r in rows if (r["bars"], r["policy"]) == (name, kind)) for kind in POLICIES
        ]
        years = f"{of[0]['span'][0][:4]}-{of[0]['span'][1][:4]}"
        columns = (
            [f"{r['agent']['sharpe']:.2f}" for r in of],
            [f"{r['baselines'][HOLD]['agent_less'][0]:+.2f}" for r in of],
            [f"{r['training']['less_hold'][0]:+.2f}" for r in of],
            [f"{r['bound']:+.2f}" for r in of],
        )
        lines.append(" | ".join([f"| {name}, {years}", *map(", ".join, columns)]) + " |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    """Compute the rows of a phase that are not in the results yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("phase", choices=("selection", "test", "table"))
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("../shared/data"))
    parser.add_argument("--runs", type=pathlib.Path, help="folder of the runs")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    args = parser.parse_args(words)
    for name in () if args.phase == "table" else args.only:
        study, done = (
            STUDIES[name],
            {(r["bars"], r["policy"], r["phase"]) for r in rows_of(args.out)},
        )
        todo = [p for p in args.policies if (name, p, args.phase) not in done]
        if not todo:
            continue
        bars, folder = read(study, args.data), args.runs / name.replace(" ", "-")
        print(f"{name}, {args.phase}: {len(bars):,} bars of {bars.num_assets} assets")
        budget(bars, study, args.phase, folder)
        for policy in todo:
            found = row_of(bars, study, policy, args.phase, folder)
            manifest = {
                "sha256": data_record(bars).sha256,
                "symbols": list(bars.symbols),
                "env": dataclasses.asdict(env_of(study)),
                "agent": dataclasses.asdict(agent_of(policy)),
                "dates": [*study.selecting, *study.testing],
                "earlier_looks": study.earlier,
                "configurations": LOOKED,
                "commit": commit(),
                "versions": versions(),
                "date": now(),
            }
            row = {"bars": name, "policy": policy, "phase": args.phase, **found}
            with args.out.open("a") as file:
                file.write(json.dumps(row | {"manifest": manifest}, default=float) + "\n")
            print(f"  {policy}: {found['agent']['sharpe']:.2f}, {found['gate']}", flush=True)
    print(table(rows_of(args.out)))


if __name__ == "__main__":
    main()
