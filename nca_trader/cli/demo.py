"""`nca-trader demo`: the whole system on real bars, and a page about the result."""

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

from nca_trader.cli import stop_on_signal
from nca_trader.cli.backtest import looks_sentence
from nca_trader.cli.options import add_options, training_progress, typed
from nca_trader.cli.train import selection_line

# Train before the first date, decide what is deployed between the two, evaluate after them once.
TRAIN_UNTIL, SELECT_UNTIL = "2011-01-01", "2013-01-01"
NUM_SEEDS, MEAN = 3, "the mean of the seeds"
FIRST = "2000-03-01"  # after the warm-up of the first bars
OFTEN_SEEN = (
    "The years 2013 to 2018 have been looked at dozens of times: they illustrate, and nothing is "
    "judged on them."
)
AS_FUTURES = (
    " The account trades the indexes as futures are traded: a position is not paid for, and the "
    "interest that the price of a future contains is left out."
)
# What `command_of` leaves out.
DEFAULTS = {"env": "panel_daily", "agent": "panel_nca", "steps": 3_000_000, "seed": 0}
# Files in the run's folder.
TABLE, BARS, JOURNAL, PAGE = "backtest.parquet", "bars.parquet", "journal.sqlite", "report.html"


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--out", default="runs", help="where the run's folder goes (%(default)s)")
    parser.add_argument("--resume", metavar="RUN", help="continue the run folder of a demo")
    add_options(
        parser,
        env={"help": "environment (%(default)s)"},
        agent={"help": "agent (%(default)s)"},
        seed={"help": "of everything random (%(default)s)"},
    )
    parser.add_argument("--steps", type=int, help="environment steps of each seed (%(default)s)")
    parser.set_defaults(**DEFAULTS)


def command_of(args: argparse.Namespace, resume: pathlib.Path | None = None) -> str:
    """Return the command that makes a demo again, or that resumes its run folder."""
    given = {key: getattr(args, key) for key in DEFAULTS}
    changed = {key: value for key, value in given.items() if value != DEFAULTS[key]}
    return typed("demo", **changed, resume=resume and str(resume))


def run_demo(args: argparse.Namespace) -> dict[str, Any]:
    """Train, select, backtest, paper-trade and write the page.

    Returns:
      The run's path, the page's path, and the metrics of each row of the table.

    Raises:
      CheckFailed: the paper session differs from the backtest.
    """
    from nca_trader.agents import load_agent
    from nca_trader.cloud import local
    from nca_trader.data.samples import sample_bars
    from nca_trader.envs import load_env
    from nca_trader.envs.trading import TradingEnv
    from nca_trader.evaluate.selection import Selector
    from nca_trader.learner.train import planned_steps, steps_done, train
    from nca_trader.runs.manifest import Run

    name = datetime.datetime.now(datetime.UTC).strftime("demo-%Y%m%d-%H%M%S")
    path = local(args.resume or local(args.out, "a demo") / name, "a demo")
    if args.resume:
        Run(path)  # refused here where there is none, else a run would begin there
    print(f"the run's folder is {path}")
    stage = Stages()
    bars = sample_bars("sp500")
    try:
        with stage("features", "read bars, compute features"):
            # Training gets no later bar, so it cannot learn from one.
            env = TradingEnv(bars.between(None, TRAIN_UNTIL), load_env(args.env))
        agent = dataclasses.replace(load_agent(args.agent), num_seeds=NUM_SEEDS)
        total = planned_steps(agent, args.steps)
        with (
            stage("train"),
            stop_on_signal("update") as stop,
            training_progress(total, f"train {NUM_SEEDS} seeds") as report,
        ):
            select = Selector(bars, TRAIN_UNTIL, SELECT_UNTIL)
            given = {"steps": args.steps, "seed": args.seed, "select": select}
            run = train(env, agent, path, **given, report=report, stop=stop)
        # `train` also returns where it was asked to stop.
        chosen = run.selection
        if chosen is not None and (steps_done(run) >= total or bool(chosen.ended)):
            print(selection_line(chosen, agent.selection.patience))
            return _evaluate(args, run, bars, stage)
    except KeyboardInterrupt:
        # Training that was interrupted twice may have saved nothing yet.
        if not (path / "run.json").exists():
            raise
    print(f"stopped, all is saved; go on with: {command_of(args, resume=path)}")
    return {"run": str(path), "complete": False}


class Stages:
    """Times the stages of a demo, and shows each one on the terminal while it runs."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, label: str | None = None) -> Iterator[None]:
        """Run a stage; without `label`, the stage shows its own progress."""
        from nca_trader.watch.progress import stage

        began = time.perf_counter()
        with stage(label) if label else contextlib.nullcontext():
            yield
        self.seconds[name] = time.perf_counter() - began


def _evaluate(args: argparse.Namespace, run: Any, bars: Any, stage: Stages) -> dict[str, Any]:
    """Decide on the selection span what is deployed, evaluate it, and write the page."""
    from nca_trader.agents.baselines import baseline_rules, year_of
    from nca_trader.errors import CheckFailed
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.evaluate.gate import gate
    from nca_trader.evaluate.report.contents import SeedScore, backtest_baselines
    from nca_trader.learner.stopping import read_returns
    from nca_trader.paper.parity import compare
    from nca_trader.runs import trials
    from nca_trader.runs.manifest import Deployment, Run

    path = run.path
    mean = Run(path, force_agent=True)
    agents = [*(Run(path, seed=i, force_agent=True) for i in range(NUM_SEEDS)), mean]
    selecting: dict[str, Any] = {"start": TRAIN_UNTIL, "stop": SELECT_UNTIL}
    with stage("select", "compare with the baselines on 2011-2012"):
        # `look=False`: only test bars count as evaluations.
        before = [
            backtest(bars, each, stop=TRAIN_UNTIL, start=FIRST, look=False) for each in agents
        ]
        chosen = [backtest(bars, each, **selecting, look=False) for each in agents]
        year = year_of(bars.bars_per_year, bars.row(TRAIN_UNTIL, "start"))
        held = {
            name: backtest(
                bars, rule, chosen[-1].charged, **selecting, **chosen[-1].rules._asdict()
            )
            for name, rule in baseline_rules(year, chosen[-1].rules.sizing == "volatility").items()
        }
        found = gate(
            # Each of them could have been chosen, and the bound allows for that.
            {f"{MEAN} after update {name}": column for name, column in read_returns(run).items()},
            {name: result.judged_returns for name, result in held.items()},
            bars.bars_per_year,
        )
        seen = trials.data_record(bars.between(TRAIN_UNTIL, SELECT_UNTIL))
        baseline = "" if found.passed else found.baseline
        decided = Deployment(baseline=baseline, year=year, sentence=found.sentence, data=seen)
        run.write_json("deployment.json", decided)
    with stage("backtest", "backtest 2013-2018"):
        # The seeds show how much a seed matters. None is chosen, so only the mean counts as an
        # evaluation of the test span.
        results = [
            backtest(bars, each, start=SELECT_UNTIL, name=f"NCA, {name}", look=each is mean)
            for each, name in zip(
                agents, [*map("seed {}".format, range(NUM_SEEDS)), "mean"], strict=True
            )
        ]
        agent = results[-1]
        agent.save(path / TABLE)
        # On the same bars and at the same costs; `weigh` refuses others.
        baselines = backtest_baselines(bars, agent, start=SELECT_UNTIL)
        if baseline and baseline not in baselines:
            deployed = backtest(bars, Run(path), start=SELECT_UNTIL, name=baseline)
            baselines[baseline] = deployed
    with stage("paper", "replay 2013-2018 on paper, in another process"):
        paper = _replay(path, bars)
        parity = compare(path, path / JOURNAL)
    with stage("page", "write the page"):
        table = [
            SeedScore(
                seed=None if i == NUM_SEEDS else i,
                training=spans[0].metrics["sharpe"],
                selection=spans[1].metrics["sharpe"],
                out_of_sample=spans[2].metrics["sharpe"],
            )
            for i, spans in enumerate(zip(before, chosen, results, strict=True))
        ]
        page = _write_page(
            args, bars, mean, results, table, baselines, found.sentence, parity, stage.seconds
        )
    rows = [agent, *baselines.values()]
    print(f"\n{'2013-2018':<28}{'return':>10}{'Sharpe':>10}{'drawdown':>10}{'turnover':>10}")
    for result in rows:
        m = result.metrics
        ratio = f"{m['sharpe']:.2f}" if m["sharpe"] == m["sharpe"] else "n/a"
        print(
            f"{result.name:<28}{m['total_return']:>10.1%}{ratio:>10}"
            f"{m['max_drawdown']:>10.1%}{m['turnover']:>9.1f}x"
        )
    print(parity.sentence)
    print(f"  {mean.described}")
    print(found.sentence)
    trained = trials.count(run.root, "train", run.manifest.data)
    print(f"Agents trained so far: {trained}. {looks_sentence(agent)}")
    print(f"The page: {page}")
    # After the page, which shows where they differ.
    if not parity.ok:
        raise CheckFailed(parity.sentence)
    return {
        "run": str(path),
        "page": str(page),
        "complete": True,
        "deployed": found.deployed,
        "parity": parity.ok,
        "paper": paper,
        "results": {result.name: result.metrics for result in rows},
        "seconds": stage.seconds,
    }


def _replay(path: pathlib.Path, bars: Any) -> dict[str, Any]:
    """Paper-trade the test span in another process, from only the run folder and a bar file."""
    from nca_trader.data.bars import write_bars
    from nca_trader.errors import CheckFailed

    write_bars(bars, path / BARS)  # all bars: features need those before the span
    command = [
        # This interpreter, since `nca-trader` need not be on the PATH.
        *(sys.executable, "-m", "nca_trader", "paper", "--run", str(path)),
        *("--feed", f"replay:{path / BARS}", "--broker", "simulated"),
        *("--journal", str(path / JOURNAL), "--start", SELECT_UNTIL, "--json"),
        # Deployed or not, the agent's own decisions are what the replay has to repeat.
        "--force-agent",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        # A command reports an error as one line, the last of its stderr.
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckFailed(f"the paper replay ended with exit code {done.returncode}: {last}")
    # With --json the object is the last line of stdout.
    return json.loads(done.stdout.splitlines()[-1])


def _write_page(
    args: argparse.Namespace,
    bars: Any,
    run: Any,
    results: list[Any],
    scores: list[Any],
    baselines: dict[str, Any],
    deployment: str,
    parity: Any,
    seconds: dict[str, float],
) -> pathlib.Path:
    """Fill the report from the results and the run folder, and write the page."""
    from nca_trader.evaluate.report import contents, page
    from nca_trader.evaluate.report.contents import report_on

    report = dataclasses.replace(
        report_on(bars, results[-1], baselines, run, command_of(args)),
        title="NCA agents on the S&P 500 and NASDAQ indexes",
        deployment=f"{deployment} {OFTEN_SEEN}" + (AS_FUTURES if run.env_config.borrow else ""),
        deployed=run.deployment.baseline == "",
        other_seeds=results[:-1],
        seeds=scores,
        parity=contents.Parity(
            decisions=parity.bars,
            equal=parity.bars - parity.decisions_differ,
            max_equity_difference=max(parity.equity_off, parity.ledger_off),
            max_logit_difference=parity.logits_off,
        ),
        wall_times=seconds,
    )
    return page.write_report(run.path / PAGE, report)
