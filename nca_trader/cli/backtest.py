"""`nca-trader backtest`: a trained run, or a rule, over bars."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

from nca_trader.cli.checks import STRATEGIES
from nca_trader.cli.reading import OPTIONS, typed
from nca_trader.cli.train import add_bar_arguments, load_bars

HELP = "backtest a trained run or a rule, and print its figures"
NOTE = (
    "A run is backtested on the bars after those it was trained or selected on, unless --start "
    "says otherwise. Every such look is counted in trials.jsonl next to the run folder: the more "
    "looks, the less a good one says. On bars that the run has seen the result is called IN SAMPLE."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = NOTE
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", dest="run_dir", help="run folder or exported file; each look counts")
    what.add_argument("--strategy", help=f"a rule: {', '.join(STRATEGIES)}")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="with --run: the agent of that number, from 0"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="K",
        help="with --run: updates of each cell, more or fewer than it was trained with",
    )
    add_bar_arguments(parser)
    parser.add_argument("--start", help="trade from this date; with --run, after the bars it saw")
    parser.add_argument("--stop", help="trade before this date")
    parser.add_argument("--env", help="with --strategy: an environment's costs and limits")
    parser.add_argument("--commission", type=float, help="fraction of notional (default the run's)")
    parser.add_argument("--slippage", type=float, help="fraction of price (default the run's)")
    parser.add_argument("--fill", choices=("next_open", "close"))
    parser.add_argument("--order", choices=("on_change", "rebalance"))
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write a page that compares it with buy and hold, an SMA cross and no position "
        "(.html), or the result by bar (.parquet, .csv)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Backtests; returns its figures."""
    from nca_trader.agents import rules
    from nca_trader.envs.account.state import rules_of
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.runs.exported import read_run

    out = None if args.out is None else pathlib.Path(args.out)
    run = read_run(args.run_dir, args.steps, args.seed) if args.run_dir else None
    target: Any = run or getattr(rules, args.strategy)()
    source: Any = load_bars(args) if args.data or not _draws(run) else _fresh_draw(run)
    bars = getattr(source, "bars", source)
    env = run.env_config if run else _environment(args.env)
    given = {name: getattr(args, name) for name in ("commission", "slippage")}
    costs = dataclasses.replace(
        env.costs, **{name: value for name, value in given.items() if value is not None}
    )
    limits = rules_of(env)._asdict() if args.env else {}
    fill, order = (limits.pop(name, None) for name in ("fill", "order"))
    fill, order = args.fill or fill, args.order or order
    agent = run.described if run else ""
    result = backtest(
        source, target, costs, fill, order, start=args.start, stop=args.stop, **limits
    )
    if out is not None and out.suffix == ".html":
        from nca_trader.evaluate.report.page import report

        report(bars, result, out, run=run, command=_command(args))
    elif out is not None:
        result.save(out)
    shown = show(result)
    if agent:
        print(f"  {agent}")
    if result.looks is not None:
        print(f"  {looks_sentence(result)}")
    if out is not None:
        print(f"The {'page' if out.suffix == '.html' else 'result by bar'}: {out}")
    shown |= {"seed": run.selected if run else None, "looks": result.looks}
    return shown | {"out": None if out is None else str(out)}


def looks_sentence(result: Any) -> str:
    """How often these years were judged, and how many of those times were before any ledger."""
    from nca_trader.data.samples import earlier_looks

    first, last = (str(result.equity.index[end])[:19] for end in (0, -1))
    earlier = earlier_looks(result.targets.columns, first, last)
    shipped = f", at least {earlier} of them before this ledger" if earlier else ""
    return (
        f"Looks at bars of these data after training so far: {result.looks}, by the ledger"
        f"{shipped}."
    )


def show(result: Any) -> dict[str, Any]:
    """Prints a result's figures; returns them."""
    from nca_trader.evaluate.verdict import in_sample_sentence

    first, last = result.equity.index[0].date(), result.equity.index[-1].date()
    print(f"{result.name}, {first} to {last}, fills at {result.fill}, {result.order}")
    if result.in_sample:
        print(f"  {in_sample_sentence(result.in_sample, len(result.equity))}")
    for caution in result.cautions:
        print(f"  {caution}")
    for name, value in result.metrics.items():
        print(f"  {name:<18} {value:,.4f}" if value == value else f"  {name:<18} n/a")
    print("  where equity went, as a fraction of the capital:")
    for item, amount in result.costs["amount"].items():
        if amount or item == "total":
            print(f"    {item:<16} {amount:+,.4f}")
    if result.note:
        print(f"  note: {result.note}")
    figures = {"name": result.name, "start": str(first), "stop": str(last)} | result.metrics
    went = {"costs": result.costs["amount"].to_dict()}
    told = {"in_sample": result.in_sample, "fills": result.num_fills, "cut": result.cut._asdict()}
    return figures | told | went


def _command(args: argparse.Namespace) -> str:
    """The command that makes the page again."""
    names = ("run_dir", "strategy", "seed", "steps", "data", *OPTIONS, "start", "stop", "env")
    names += ("commission", "slippage", "fill", "order", "out")
    return typed("backtest", **{name: getattr(args, name) for name in names})


def _environment(name: str | None) -> Any:
    """The environment of `--env`; without it one that costs nothing and limits nothing."""
    from nca_trader.config import EnvConfig
    from nca_trader.envs import load_env

    return EnvConfig(max_gross=None) if name is None else load_env(name)


def _draws(run: Any) -> bool:
    """Whether a run was trained in a market that its environment draws."""
    return bool(run and run.env_config.market)


def _fresh_draw(run: Any) -> Any:
    """Another draw of the market that a run was trained in."""
    from nca_trader.data.synthetic import seed_of, task_of

    return task_of(run.env_config, seed=seed_of(run.manifest.data.source) + 1)
