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

from nca_trader.cli import end_stopped, stop_on_signal
from nca_trader.cli.demo_bars import DemoJob, job_of
from nca_trader.cli.options import add_options, again
from nca_trader.cli.train import selection_line
from nca_trader.cloud import local
from nca_trader.config.agent import LEAST_SEEDS
from nca_trader.errors import CheckFailed
from nca_trader.evaluate.wording import decimal, percent
from nca_trader.progress import Progress

AS_FUTURES = (
    " The account trades the assets as futures are traded: a position is not paid for, and the "
    "interest that the price of a future contains is left out."
)
AGENT = "panel_nca"  # by default
# Files in the run's folder.
TABLE, BARS, JOURNAL, PAGE = "backtest.parquet", "bars.parquet", "journal.sqlite", "report.html"


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add where the demo's files go, its panel and what it trains."""
    parser.add_argument("--resume", metavar="RUN", help="continue the run folder of a demo")
    add_options(
        parser,
        env={"help": "environment (%(default)s)"},
        agent={"help": "agent (%(default)s; of two assets on half_and_half)"},
        seed={"help": "of everything random (%(default)s)"},
        steps={"help": "environment steps of each seed (the agent's)"},
        out={"default": "runs", "help": "where the run's folder goes (%(default)s)"},
    )
    parser.add_argument(
        "--panel",
        nargs="?",
        const="",
        metavar="FILE",
        help="a panel of assets: FILE, or futures that lie next to the checkout; without them, or "
        "with `simulated`, drawn ones",
    )
    parser.set_defaults(env="panel_daily", agent=AGENT, seed=0)


def command_of(args: argparse.Namespace, resume: pathlib.Path | None = None) -> str:
    """Return the command that makes a demo again, or that resumes its run folder."""
    # A run folder that is resumed has its place, so `--out` has no effect there.
    changes = {} if resume is None else {"out": None, "resume": str(resume)}
    # An empty FILE is the option alone.
    return again(args, **changes | ({"panel": True} if args.panel == "" else {}))


def run_demo(args: argparse.Namespace) -> dict[str, Any]:
    """Train, select, backtest, paper-trade and write the page.

    Returns:
      The run's path, the page's path, and the metrics of each row of the table.

    Raises:
      CheckFailed: the paper session differs from the backtest.
    """
    from nca_trader.agents import load_agent
    from nca_trader.envs import load_env
    from nca_trader.envs.trading import TradingEnv
    from nca_trader.evaluate.evidence.selection import Selector
    from nca_trader.learner.train import planned_steps, steps_done, train
    from nca_trader.runs.manifest import Run

    name = datetime.datetime.now(datetime.UTC).strftime("demo-%Y%m%d-%H%M%S")
    path = local(args.resume or local(args.out, "a demo") / name, "a demo")
    if args.resume:
        Run(path, allow_code=None)  # refused here where there is none, else a run would begin there
    print(f"the run's folder is {path}")
    stage = Stages()
    job = job_of(args.panel)
    bars = job.bars
    try:
        with stage("features", "read bars, compute features"):
            # Training gets no later bar, so it cannot learn from one.
            env = TradingEnv(bars.between(None, job.train_until), load_env(args.env))
        agent = load_agent(args.agent)
        if args.agent == AGENT and bars.num_assets < 3:
            # Among two assets a rank says nothing, and hold and trend are left.
            two = dataclasses.replace(agent.policy, base="half_and_half")
            agent = dataclasses.replace(agent, policy=two)
        # One seed says nothing of how much a seed matters, which the page shows.
        agent = dataclasses.replace(agent, num_seeds=max(agent.num_seeds, LEAST_SEEDS))
        total = planned_steps(agent, args.steps)
        with stage("train"), stop_on_signal("update") as stop:
            # All bars, since features of the first selected bar need those before it.
            select = Selector(bars, job.train_until, job.select_until)
            given = {"steps": args.steps, "seed": args.seed, "select": select}
            run = train(env, agent, path, **given, stop=stop)
        # `train` also returns where it was asked to stop.
        chosen = run.selection
        # A patience that ran out ends training before its steps are done.
        if chosen is not None and (steps_done(run) >= total or bool(chosen.ended)):
            print(selection_line(chosen, agent.selection.patience))
            return _evaluate(args, run, job, select, stage)
    except KeyboardInterrupt:
        # Training that was interrupted twice may have saved nothing yet.
        if not (path / "run.json").exists():
            raise
    print(f"stopped, all is saved; go on with: {command_of(args, resume=path)}")
    end_stopped(args, {"run": str(path), "complete": False})


class Stages:
    """Times the stages of a demo, and shows each one on the terminal while it runs."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, label: str | None = None) -> Iterator[None]:
        """Run a stage; without `label`, the stage shows its own progress."""
        began = time.perf_counter()
        with Progress(None, label, always=True) if label else contextlib.nullcontext():
            yield
        self.seconds[name] = time.perf_counter() - began


def _evaluate(
    args: argparse.Namespace, run: Any, job: DemoJob, select: Any, stage: Stages
) -> dict[str, Any]:
    """Decide on the selection span what is deployed, evaluate it, and write the page."""
    from nca_trader.cli import demo_sections
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.evaluate.evidence.deploy import deployable
    from nca_trader.evaluate.report.contents import Section
    from nca_trader.evaluate.report.page import report_on, write_report
    from nca_trader.paper.session.parity import compare
    from nca_trader.runs import trials
    from nca_trader.runs.manifest import Run

    path, bars = run.path, job.bars
    seeds = list(range(run.agent_config.num_seeds))
    mean = Run(path, force_agent=True)
    agents = [*(Run(path, seed=i, force_agent=True) for i in seeds), mean]
    selecting, testing = job.spans
    with stage("select", f"compare with the baselines on {selecting}"):
        # `look=False`: only test bars count as evaluations.
        edges = ((job.first, job.train_until), (job.train_until, job.select_until))
        before, chosen = (
            [backtest(bars, each, start=start, stop=stop, look=False) for each in agents]
            for start, stop in edges
        )
        # Before the test span is read: what is deployed must not depend on it.
        gate = select.decide(run)
    with stage("backtest", f"backtest {testing}"):
        # The seeds show how much a seed matters. None is chosen, so only the mean counts as an
        # evaluation of the test span.
        names = [*(f"agent, seed {i}" for i in seeds), "agent, mean"]
        results = [
            backtest(bars, each, start=job.select_until, name=name, look=each is mean)
            for each, name in zip(agents, names, strict=True)
        ]
        agent = results[-1]
        agent.save(path / TABLE)
        # On the same bars and at the same costs; `weigh` refuses others.
        # The gate may name any of these, so each of them needs its result.
        baselines = deployable(agent, bars, job.select_until)
        # In the order of what a reader asks first: its base, and what is simplest.
        base = run.base.name if run.base is not None else ""
        wanted = (base, "buy and hold", gate.deployed, "SMA cross 50/200", "always flat")
        first = [name for name in wanted if name in baselines]
        baselines = {name: baselines[name] for name in dict.fromkeys([*first, *baselines])}
    with stage("learn", "train the same network on a market whose optimum is known"):
        learnt = demo_sections.learnt_section(run, args.seed)
    with stage("paper", f"replay {testing} on paper, in another process"):
        paper = _replay(path, job)
        parity = compare(path, path / JOURNAL)
    as_futures = AS_FUTURES if run.env_config.borrow else ""
    checks = demo_sections.checks_section(run, agent, baselines)
    sections = [
        *([demo_sections.tilt_section(agent, baselines[base])] if base else []),
        learnt,
        demo_sections.seeds_section(run, before, chosen, results),
        checks,
        *([] if gate.trades else [demo_sections.advice_section(args, run, job, path / BARS)]),
        Section("Backtest against paper replay", parity.sentence),
    ]
    with stage("page", "write the page"):
        spent = [(name, f"{seconds:.1f} s") for name, seconds in stage.seconds.items()]
        report = dataclasses.replace(
            report_on(bars, agent, baselines, mean, command_of(args)),
            title=job.title,
            deployment=f"{gate.sentence} {job.note}{as_futures}",
            other_seeds=results[:-1],
            sections=[*sections, Section("Wall time", facts=spent)],
        )
        page = write_report(path / PAGE, report)
    rows = [agent, *baselines.values()]
    print(f"\n{testing}\n{_table(rows)}")
    print(f"  {mean.described}", gate.sentence, *sections, sep="\n")
    # Of all runs in the folder on these bars: a search by hand is one as well.
    print(f"Agents trained so far: {trials.count(run.root, 'train', run.manifest.data)}")
    print(f"The page: {page}")
    # After the page, which shows where they differ.
    if not parity.ok:
        raise CheckFailed(parity.sentence)
    return {
        "run": str(path),
        "page": str(page),
        "complete": True,
        "deployed": "the mean agent" if gate.trades else gate.deployed,
        "gate": dataclasses.asdict(gate),
        "checks": dict(checks.facts),
        "parity": parity.ok,
        "paper": paper,
        "results": {result.name: result.metrics for result in rows},
        "seconds": stage.seconds,
    }


def _table(results: list[Any]) -> str:
    """Write the metrics of each result as a table."""
    import pandas as pd

    writers = {"total_return": percent, "sharpe": decimal, "max_drawdown": percent}
    writers |= {"turnover": decimal}
    table = pd.DataFrame([each.metrics for each in results], [each.name for each in results])
    return table[[*writers]].to_string(na_rep="n/a", formatters=writers)


def _replay(path: pathlib.Path, job: DemoJob) -> dict[str, Any]:
    """Paper-trade the test span in another process, from only the run folder and a bar file."""
    from nca_trader.data.bars import write_bars

    write_bars(job.bars, path / BARS)  # all bars: features need those before the span
    command = [
        # This interpreter, since `nca-trader` need not be on the PATH.
        *(sys.executable, "-P", "-m", "nca_trader", "paper", "--run", str(path)),
        *("--feed", f"replay:{path / BARS}", "--broker", "simulated"),
        *("--journal", str(path / JOURNAL), "--start", job.select_until, "--json"),
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
