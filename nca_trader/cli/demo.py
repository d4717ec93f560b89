"""`nca-trader demo`: the whole system on real bars, and an honest page about what came out."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HELP = "train, backtest and paper-replay on real sample bars, then write a report page"
TRAIN_UNTIL, SELECT_UNTIL = "2011-01-01", "2013-01-01"
TABLE, BARS, JOURNAL, PAGE = "backtest.parquet", "bars.parquet", "journal.sqlite", "report.html"
NUM_SEEDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--out", default="runs", help="folder for the run's folder (default runs)")
    parser.add_argument("--resume", metavar="RUN", help="go on with this demo's run folder")
    parser.add_argument("--env", default="index_daily", help="environment (default %(default)s)")
    parser.add_argument("--agent", default="nano", help="agent (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=1_600_000, help="of each seed (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the demo; returns the page's path and the figures of its table."""
    from nca_trader.cli.interrupt import stop_on_signal

    path = pathlib.Path(args.resume or pathlib.Path(args.out) / _new_name())
    seconds: dict[str, float] = {}
    with stop_on_signal() as stop:
        trained = _train(args, path, seconds, stop)
        if trained is None or stop():
            remedy = f"nca-trader demo --resume {path}{_options(args)}"
            print(f"stopped, all is saved in {path}; go on with: {remedy}")
            return {"run": str(path), "complete": False}
        return _evaluate(args, trained, seconds)


def _new_name() -> str:
    return "demo-" + datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")


def _options(args: argparse.Namespace) -> str:
    """The options that differ from the defaults and that going on needs again."""
    defaults = {"env": "index_daily", "agent": "nano", "steps": 1_600_000, "seed": 0}
    given = {key: getattr(args, key) for key in defaults}
    return "".join(f" --{key} {value}" for key, value in given.items() if value != defaults[key])


def _train(
    args: argparse.Namespace,
    path: pathlib.Path,
    seconds: dict[str, float],
    stop: Callable[[], bool],
) -> Any:
    """Trains the seeds in one program; None where it was stopped before the end."""
    import dataclasses

    from nca_trader.agents.presets import load_agent
    from nca_trader.data.samples import sample_bars
    from nca_trader.envs.presets import load_env
    from nca_trader.envs.trading import TradingEnv
    from nca_trader.learner.train import planned_steps, steps_done, train
    from nca_trader.watch.progress import progress, stage

    began = time.perf_counter()
    with stage("read bars, compute features"):
        bars = sample_bars("sp500")
        env = TradingEnv(bars.between(None, TRAIN_UNTIL), load_env(args.env))
    agent = dataclasses.replace(load_agent(args.agent), num_seeds=NUM_SEEDS)
    seconds["features"], began = time.perf_counter() - began, time.perf_counter()
    total = planned_steps(agent, args.steps)
    with progress(total, f"train {NUM_SEEDS} seeds") as bar:
        seen = 0

        def report(row: dict[str, Any]) -> None:
            nonlocal seen
            bar.update(row["steps"] - seen, reward=row["reward"], entropy=row["entropy"])
            seen = row["steps"]

        run = train(env, agent, path, steps=args.steps, seed=args.seed, report=report, stop=stop)
    seconds["train"] = time.perf_counter() - began
    return run if steps_done(run) >= total else None


def _evaluate(args: argparse.Namespace, run: Any, seconds: dict[str, float]) -> dict[str, Any]:
    """Selects, backtests on the test span, replays it on paper, compares, writes the page."""
    from nca_trader.agents import rules
    from nca_trader.data.bars import write_bars
    from nca_trader.data.samples import sample_bars
    from nca_trader.errors import CheckFailed
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.paper.parity import compare
    from nca_trader.runs import trials
    from nca_trader.runs.manifest import Run
    from nca_trader.watch.progress import stage

    bars = sample_bars("sp500")
    began = time.perf_counter()
    seeds = [Run(run.path, seed=i) for i in range(run.agent_config.num_seeds)]
    with stage("select a seed on 2011-2012"):
        scores = [
            backtest(bars, seed, start=TRAIN_UNTIL, stop=SELECT_UNTIL).metrics["sharpe"]
            for seed in seeds
        ]
        # An agent that never traded has no Sharpe ratio; any that has one comes before it.
        best = max(range(len(seeds)), key=lambda i: (scores[i] == scores[i], scores[i]))
        run.write_json(
            "selection.json", {"selected": best, "sharpe": [_or_none(s) for s in scores]}
        )
    seconds["select"], began = time.perf_counter() - began, time.perf_counter()
    with stage("backtest 2013-2018"):
        touch = {"kind": "test", "run": run.name, "data": bars.digest(), "span": "2013-2018"}
        trials.record(run.root, touch | {"time": _now()})
        results = [
            backtest(bars, seed, start=SELECT_UNTIL, name=_seed_name(i))
            for i, seed in enumerate(seeds)
        ]
        costs = run.env_config.costs
        baselines = {
            strategy.name: backtest(
                bars, strategy, costs, run.env_config.fill, run.env_config.order, start=SELECT_UNTIL
            )
            for strategy in (rules.buy_and_hold(), rules.sma_cross(50, 200), rules.always_flat())
        }
        results[best].save(run.path / TABLE)
    seconds["backtest"], began = time.perf_counter() - began, time.perf_counter()
    with stage("replay 2013-2018 on paper, in a process of its own"):
        write_bars(bars, run.path / BARS)
        paper = _replay(run.path)
        parity = compare(run.path, run.path / JOURNAL)
    seconds["paper"] = time.perf_counter() - began
    page = _write_page(args, run, bars, results, best, scores, baselines, parity, seconds)
    _print_table(results[best], baselines)
    print(parity.sentence)
    print(
        f"{trials.count(run.root, 'train')} agents trained so far in {run.root.name}/; see the page:"
    )
    print(page)
    if not parity.ok:
        raise CheckFailed(parity.sentence)
    return {
        "run": str(run.path),
        "page": str(page),
        "complete": True,
        "parity": parity.ok,
        "paper": paper,
        "results": {r.name: r.metrics for r in (results[best], *baselines.values())},
        "seconds": seconds,
    }


def _seed_name(index: int) -> str:
    return f"NCA agent, seed {index}"


def _or_none(value: float) -> float | None:
    return value if value == value else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _replay(path: pathlib.Path) -> dict[str, Any]:
    """Paper-trades the test span in another process, from the run folder and a bar file alone."""
    from nca_trader.errors import CheckFailed

    journal = path / JOURNAL
    command = [
        *(sys.executable, "-m", "nca_trader", "paper", "--run", str(path)),
        *("--feed", f"replay:{path / BARS}", "--broker", "simulated"),
        *("--journal", str(journal), "--start", SELECT_UNTIL, "--json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckFailed(f"the paper replay ended with exit code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _write_page(
    args: argparse.Namespace,
    run: Any,
    bars: Any,
    results: list[Any],
    best: int,
    scores: list[float],
    baselines: dict[str, Any],
    parity: Any,
    seconds: dict[str, float],
) -> pathlib.Path:
    """Fills the report from what is on disk and from the results."""
    from nca_trader.evaluate import report
    from nca_trader.runs import trials

    manifest, digest = run.manifest, bars.digest()
    spans = [
        _span(report, "training", bars.between(None, TRAIN_UNTIL)),
        _span(report, "selection", bars.between(TRAIN_UNTIL, SELECT_UNTIL)),
        _span(report, "test", bars.between(SELECT_UNTIL, None)),
    ]
    page = report.Report(
        title="NCA agents on S&P 500 and NASDAQ",
        agent=results[best],
        baselines=baselines,
        evidence=report.weigh(results[best], baselines, bars.bars_per_year),
        other_seeds=[result for i, result in enumerate(results) if i != best],
        selected_seed=best,
        seeds=[
            report.SeedScore(seed=i, selection=scores[i], out_of_sample=result.metrics["sharpe"])
            for i, result in enumerate(results)
        ],
        training=[row | row.get("seeds", {}) for row in run.metrics()],
        parity=report.Parity(
            decisions=parity.bars,
            equal=parity.bars - parity.decisions_differ,
            max_equity_difference=max(parity.equity_off, parity.ledger_off),
            max_logit_difference=parity.logits_off,
        ),
        spans=spans,
        symbols=bars.symbols,
        features=run.spec.features,
        data_source=bars.source,
        data_note=bars.note,
        data_digest=digest,
        trials=report.Trials(
            count=trials.count(run.root, "train"),
            test_touched=trials.count(run.root, "test", digest),
        ),
        env_toml=(run.path / "env.toml").read_text(),
        agent_toml=(run.path / "agent.toml").read_text(),
        versions=manifest["versions"],
        commit=manifest["commit"],
        device=manifest["device"],
        wall_times=seconds,
        command=f"nca-trader demo{_options(args)}",
        created=_now(),
    )
    return report.write_report(run.path / PAGE, page)


def _span(report: Any, name: str, bars: Any) -> Any:
    first, last = (str(bars.time[i].astype("datetime64[D]")) for i in (0, -1))
    return report.Span(name=name, start=first, stop=last, bars=len(bars))


def _print_table(agent: Any, baselines: dict[str, Any]) -> None:
    """A short table of the test span."""
    print(
        f"\n{'2013-2018, out of sample':<26}{'return':>9}{'Sharpe':>8}{'drawdown':>10}{'turnover':>10}"
    )
    for result in (agent, *baselines.values()):
        m = result.metrics
        ratio = f"{m['sharpe']:.2f}" if m["sharpe"] == m["sharpe"] else "n/a"
        print(
            f"{result.name:<26}{m['total_return']:>8.1%}{ratio:>8}"
            f"{m['max_drawdown']:>10.1%}{m['turnover']:>9.1f}x"
        )
