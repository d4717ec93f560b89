"""`nca-trader backtest`: backtests a trained run or a rule over bars."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from nca_trader.cli.checks import add_subject
from nca_trader.cli.options import (
    ACCOUNT,
    COUNT,
    OF_BACKTESTS,
    READING,
    account_of,
    add_options,
    again,
    load_bars,
    params_of,
)
from nca_trader.progress import Progress

NOTE = (
    "A run is backtested on the bars after those that trained or selected it, unless --start says "
    "otherwise. Each such evaluation is counted in trials.jsonl next to the run folder: the more "
    "there are, the less a good one means. On bars that the run has seen the result is IN SAMPLE."
)


def add_backtest_options(parser: argparse.ArgumentParser) -> None:
    """Add what is backtested, its bars, the account and the page."""
    parser.epilog = NOTE
    add_subject(parser, "run folder or exported file; each look counts")
    add_options(
        parser,
        "param",
        "force_agent",
        "allow_code",
        "data",
        "seed",
        *READING,
        env={"help": "with --strategy: an environment's costs and limits"},
        track={"help": "with --run: show the results where `train --track` showed its metrics"},
    )
    parser.add_argument(
        "--steps",
        type=COUNT,
        metavar="K",
        help="with --run: updates of each cell, more or fewer than it was trained with",
    )
    parser.add_argument(
        "--start", metavar="DATE", help="trade from this date; with --run, after the bars it saw"
    )
    parser.add_argument("--stop", "--until", metavar="DATE", help="trade before this date")
    parser.add_argument(
        "--stress",
        action="store_true",
        help="run it again at 2 and 3 times the costs, with late orders, and with more capital",
    )
    add_options(parser, *ACCOUNT, *OF_BACKTESTS, "trials", "out")


def run_backtest(args: argparse.Namespace) -> dict[str, Any]:
    """Run the backtest; return the metrics."""
    from nca_trader.envs import load_env
    from nca_trader.errors import ConfigError
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.evaluate.combinations import subject_of
    from nca_trader.markets import seed_of, task_of
    from nca_trader.runs.trackers import track_results, tracker_of

    out = None if args.out is None else pathlib.Path(args.out)
    run = None
    if args.run_dir:
        from nca_trader.runs.exported import read_run  # imports Flax, 0.3 s

        run = read_run(args.run_dir, args.steps, args.seed, args.force_agent, args.allow_code)
    if args.track is not None:
        if run is None or not run.path.is_dir():
            raise ConfigError("--track is of a run folder; give --run, or leave it out.")
        tracker_of(args.track)  # refused before the backtest
    # A rule: without --env nothing costs, and nothing limits its weights.
    env = None if args.env is None else load_env(args.env)
    trained = None if run is None else run.env_config
    # A run of a synthetic market has no bar file to fall back on.
    if run is not None and trained is not None and trained.market and not args.data:
        # Another draw of the market that the run was trained in: its own would be in sample.
        source: Any = task_of(trained, seed=seed_of(run.manifest.data.source) + 1)
    else:
        source = load_bars(args)
    # The number of bars is known only after the span is found, so this line counts none.
    with Progress(None, "backtest"):
        result = backtest(
            source,
            run or subject_of(args.strategy, params_of(args)),
            # A run brings its own limits: `check` refuses --env with --run.
            account=account_of(args, env, trained),
            start=args.start,
            stop=args.stop,
            trials=args.trials or "runs",
        )
    if run is not None and args.track is not None:
        track_results(args.track, run, "test", result.metrics)
    # `stress` runs the same backtest again, and its first rows are those of the result.
    stress = result.stress() if args.stress else None
    if out is not None and out.suffix == ".html":
        from nca_trader.evaluate.report.page import report  # imports matplotlib

        # The page shows the command that makes it again, so every option is in it.
        # A task, the draw of a synthetic market, has its bars inside.
        bars = getattr(source, "bars", source)
        report(bars, result, out, run=result.run, command=again(args), stress=stress)
    elif out is not None:
        result.save(out)
    shown = show(result)
    replaced = run is not None and run.replacement is not None
    if run and replaced and run.deployment:
        print("  --force-agent trades the agent.")
    elif run and run.described:
        print(f"  {run.described}")
    if stress is not None:
        print(stress)
        tables = {"costs": stress.costs, "delays": stress.delays, "capacity": stress.capacity}
        shown["stress"] = {
            name: table.reset_index().to_dict("records") for name, table in tables.items()
        } | {"break_even": stress.break_even}
    if result.evaluations is not None:
        so_far = f"{result.evaluations}, by the trial log."
        print(f"  Evaluations on these data after training so far: {so_far}")
    if out is not None:
        print(f"The {'page' if out.suffix == '.html' else 'result by bar'}: {out}")
    shown["symbols"] = list(result.weights.columns)
    shown["trained_symbols"] = run and run.trained_symbols
    return shown | {
        "seed": run and run.selected,
        "looks": result.evaluations,
        "out": out and str(out),
    }


def show(result: Any) -> dict[str, Any]:
    """Print the summary of a `Result` and where equity went; return the metrics."""
    from nca_trader.evaluate.report.summary import caveats, summary_lines

    # The last two lines name attributes of Python, and cut the caveats short that follow here.
    title, *metrics, _, _ = summary_lines(result)
    # Caveats come first and in full: a reader sees the warning before the metrics.
    print("\n  ".join([title, *caveats(result), *metrics]))
    print("  where equity went, as a fraction of the capital:")
    for item, amount in result.costs["amount"].items():
        # Costs that the setting does not have are all 0.
        if amount or item == "total":
            print(f"    {item:<16} {amount:+,.4f}")
    first, last = result.equity.index[0].date(), result.equity.index[-1].date()
    found = {"name": result.name, "start": str(first), "stop": str(last)} | result.metrics
    # For --json, where a reader has to see too that a result is in sample.
    found |= {"in_sample": result.in_sample, "fills": result.num_fills}
    return found | {"cut": result.cut._asdict(), "costs": result.costs["amount"].to_dict()}
