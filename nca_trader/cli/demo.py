"""`nca-trader demo`: the whole system on real bars, and an honest page about what came out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from nca_trader.cli.reading import typed

HELP = "train, backtest and paper-replay on real sample bars, then write a report page"
# Train before the first date, select between the two, and touch what is after them once.
TRAIN_UNTIL, SELECT_UNTIL = "2011-01-01", "2013-01-01"
NUM_SEEDS = 3
DEFAULTS = {"env": "index_daily", "agent": "nano", "steps": 3_000_000, "seed": 0}
TABLE, BARS, JOURNAL, PAGE = "backtest.parquet", "bars.parquet", "journal.sqlite", "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--out", default="runs", help="where the run's folder goes (%(default)s)")
    parser.add_argument("--resume", metavar="RUN", help="go on with the run folder of a demo")
    parser.add_argument("--env", help="environment (%(default)s)")
    parser.add_argument("--agent", help="agent (%(default)s)")
    parser.add_argument("--steps", type=int, help="environment steps of each seed (%(default)s)")
    parser.add_argument("--seed", type=int, help="of everything random (%(default)s)")
    parser.set_defaults(**DEFAULTS)


@dataclasses.dataclass
class Demo:
    """What the stages hand to each other; each stage's seconds are noted as it ends."""

    args: argparse.Namespace
    path: pathlib.Path
    bars: Any
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str, label: str | None) -> Iterator[None]:
        """Times a stage; `label` is said on the terminal where the stage says nothing itself."""
        from nca_trader.watch.progress import stage

        began = time.perf_counter()
        with stage(label) if label else contextlib.nullcontext():
            yield
        self.seconds[name] = time.perf_counter() - began

    @property
    def command(self) -> str:
        """The command that makes this run again."""
        return typed("demo", **self._changed)

    @property
    def command_to_resume(self) -> str:
        """The command that goes on with this run."""
        return typed("demo", **self._changed, resume=str(self.path))

    @property
    def _changed(self) -> dict[str, Any]:
        given = {key: getattr(self.args, key) for key in DEFAULTS}
        return {key: value for key, value in given.items() if value != DEFAULTS[key]}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the demo; returns the page's path and the figures of its table."""
    from nca_trader.cloud import local
    from nca_trader.data.samples import sample_bars
    from nca_trader.runs.manifest import Run

    name = datetime.datetime.now(datetime.UTC).strftime("demo-%Y%m%d-%H%M%S")
    path = local(args.resume or local(args.out, "a demo") / name, "a demo")
    if args.resume:
        Run(path)  # refused here where there is none, else a run would begin there
    demo = Demo(args, path, sample_bars("sp500"))
    try:
        trained = train(demo)
        if trained is not None:
            return evaluate(demo, trained)
    except KeyboardInterrupt:
        # Training that was interrupted twice may have saved nothing yet.
        if not (path / "run.json").exists():
            raise
    print(f"stopped, all is saved; go on with: {demo.command_to_resume}")
    return {"run": str(path), "complete": False}


def train(demo: Demo) -> Any:
    """Trains the seeds in one program; returns the run, or None where it was asked to stop."""
    from nca_trader.agents import load_agent
    from nca_trader.cli.interrupt import stop_on_signal
    from nca_trader.cli.train import shown
    from nca_trader.envs import load_env
    from nca_trader.envs.trading import TradingEnv
    from nca_trader.learner.train import planned_steps, steps_done, train

    args = demo.args
    print(f"the run's folder is {demo.path}")
    with demo.stage("features", "read bars, compute features"):
        env = TradingEnv(demo.bars.between(None, TRAIN_UNTIL), load_env(args.env))
    agent = dataclasses.replace(load_agent(args.agent), num_seeds=NUM_SEEDS)
    total = planned_steps(agent, args.steps)
    with (
        demo.stage("train", None),
        stop_on_signal("update") as stop,
        shown(total, f"train {NUM_SEEDS} seeds") as report,
    ):
        run = train(
            env, agent, demo.path, steps=args.steps, seed=args.seed, report=report, stop=stop
        )
    return run if steps_done(run) >= total else None


def evaluate(demo: Demo, run: Any) -> dict[str, Any]:
    """Selects, backtests on the test span, replays it on paper, compares, writes the page."""
    from nca_trader.cli.backtest import looks_sentence
    from nca_trader.errors import CheckFailed
    from nca_trader.paper.parity import compare
    from nca_trader.runs import trials

    with demo.stage("select", "select a seed on 2011-2012"):
        scores = select(demo, run)
    with demo.stage("backtest", "backtest 2013-2018"):
        results, baselines = backtest_all(demo, run)
    agent = results[run.selected]
    with demo.stage("paper", "replay 2013-2018 on paper, in another process"):
        paper = replay(demo)
        parity = compare(run.path, run.path / JOURNAL)
    with demo.stage("page", "write the page"):
        page = write_page(demo, run, results, scores, baselines, parity)
    print_table([agent, *baselines.values()])
    print(parity.sentence)
    trained = trials.count(run.root, "train", run.manifest.data)
    print(f"  {run.described}")
    print(f"Agents trained so far: {trained}. {looks_sentence(agent)}")
    print(f"The page: {page}")
    if not parity.ok:
        raise CheckFailed(parity.sentence)
    return {
        "run": str(run.path),
        "page": str(page),
        "complete": True,
        "parity": parity.ok,
        "paper": paper,
        "results": {r.name: r.metrics for r in (agent, *baselines.values())},
        "seconds": demo.seconds,
    }


def select(demo: Demo, run: Any) -> list[float]:
    """Sharpe ratio of each seed on the selection span; the best is noted in the run's folder."""
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.runs.manifest import Run, Selection
    from nca_trader.runs.trials import data_record

    scores = [
        backtest(
            demo.bars, Run(run.path, seed=i), start=TRAIN_UNTIL, stop=SELECT_UNTIL, look=False
        ).metrics["sharpe"]
        for i in range(NUM_SEEDS)
    ]
    # A seed that never traded has no Sharpe ratio; any that has one comes before it.
    best = max(range(NUM_SEEDS), key=lambda i: (scores[i] == scores[i], scores[i]))
    known = [score if score == score else None for score in scores]
    seen = data_record(demo.bars.between(TRAIN_UNTIL, SELECT_UNTIL))
    run.write_json("selection.json", Selection(selected=best, sharpe=known, data=seen))
    return scores


def backtest_all(demo: Demo, run: Any) -> tuple[list[Any], dict[str, Any]]:
    """Every seed and every baseline on the test span: the one look at it, counted first."""
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.evaluate.report.page import backtest_baselines
    from nca_trader.runs.manifest import Run

    results = [
        backtest(
            demo.bars,
            Run(run.path, seed=i),
            start=SELECT_UNTIL,
            name=f"NCA, seed {i}",
            look=i == run.selected,  # the others show how much a seed matters: none is chosen by it
        )
        for i in range(NUM_SEEDS)
    ]
    agent = results[run.selected]
    agent.save(run.path / TABLE)
    return results, backtest_baselines(demo.bars, agent, start=SELECT_UNTIL)


def replay(demo: Demo) -> dict[str, Any]:
    """Paper-trades the test span in another process, from the run folder and a bar file alone."""
    from nca_trader.data.bars import write_bars
    from nca_trader.errors import CheckFailed

    path = demo.path
    write_bars(demo.bars, path / BARS)
    command = [
        *(sys.executable, "-m", "nca_trader", "paper", "--run", str(path)),
        *("--feed", f"replay:{path / BARS}", "--broker", "simulated"),
        *("--journal", str(path / JOURNAL), "--start", SELECT_UNTIL, "--json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckFailed(f"the paper replay ended with exit code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def write_page(
    demo: Demo,
    run: Any,
    results: list[Any],
    scores: list[float],
    baselines: dict[str, Any],
    parity: Any,
) -> pathlib.Path:
    """Fills the report from the results and from what is on disk."""
    from nca_trader.evaluate.report import page as report
    from nca_trader.evaluate.report.page import report_on

    best = run.selected
    page = dataclasses.replace(
        report_on(demo.bars, results[best], baselines, run, demo.command),
        title="NCA agents on the S&P 500 and NASDAQ indexes",
        other_seeds=[result for i, result in enumerate(results) if i != best],
        seeds=[
            report.SeedScore(seed=i, selection=scores[i], out_of_sample=result.metrics["sharpe"])
            for i, result in enumerate(results)
        ],
        parity=report.Parity(
            decisions=parity.bars,
            equal=parity.bars - parity.decisions_differ,
            max_equity_difference=max(parity.equity_off, parity.ledger_off),
            max_logit_difference=parity.logits_off,
        ),
        wall_times=demo.seconds,
    )
    return report.write_report(run.path / PAGE, page)


def print_table(results: list[Any]) -> None:
    """A short table of the test span."""
    print(f"\n{'2013-2018':<20}{'return':>10}{'Sharpe':>10}{'drawdown':>10}{'turnover':>10}")
    for result in results:
        m = result.metrics
        ratio = f"{m['sharpe']:.2f}" if m["sharpe"] == m["sharpe"] else "n/a"
        print(
            f"{result.name:<20}{m['total_return']:>10.1%}{ratio:>10}"
            f"{m['max_drawdown']:>10.1%}{m['turnover']:>9.1f}x"
        )
