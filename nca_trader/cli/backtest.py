"""`nca-trader backtest`: a trained run, or a rule, over bars."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "backtest a trained run or a rule, and print its figures"
STRATEGIES = ("buy_and_hold", "always_flat", "sma_cross", "momentum")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", dest="run_dir", help="a run folder")
    what.add_argument("--strategy", help=f"a rule: {', '.join(STRATEGIES)}")
    parser.add_argument("--data", help="a bar file (CSV, Parquet); without it sample bars")
    parser.add_argument("--symbol", help="of a file that holds several")
    parser.add_argument("--timezone", help="of times without an offset, e.g. America/New_York")
    parser.add_argument("--start", help="trade from this date; with --run, after its training bars")
    parser.add_argument("--stop", help="trade before this date")
    parser.add_argument("--commission", type=float, help="fraction of notional (default the run's)")
    parser.add_argument("--slippage", type=float, help="fraction of price (default the run's)")
    parser.add_argument("--fill", choices=("next_open", "close"))
    parser.add_argument("--order", choices=("on_change", "rebalance"))
    parser.add_argument("--out", help="write the result by bar: .parquet or .csv")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Backtests; returns its figures."""
    import pathlib

    from nca_trader.agents import rules
    from nca_trader.cli.train import load_bars
    from nca_trader.errors import ConfigError
    from nca_trader.evaluate.backtest import backtest
    from nca_trader.runs.manifest import Run
    from nca_trader.types import Costs

    out = pathlib.Path(args.out) if args.out else None
    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"--out {out}: write to a name that ends in .parquet or .csv.")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it first.")
    start, costs = args.start, Costs()
    if args.run_dir:
        target: Any = Run(args.run_dir)
        costs = target.env_config.costs
    else:
        if args.strategy not in STRATEGIES:
            from nca_trader.ranges import nearest

            raise ConfigError(
                f"--strategy {args.strategy}: no such rule; {nearest(args.strategy, STRATEGIES)}"
                f"There are {', '.join(STRATEGIES)}."
            )
        target = getattr(rules, args.strategy)()
    bars = load_bars(args)
    if args.run_dir and start is None:
        start = _after_training(bars, target)
    costs = Costs(
        commission=costs.commission if args.commission is None else args.commission,
        slippage=costs.slippage if args.slippage is None else args.slippage,
    )
    result = backtest(bars, target, costs, args.fill, args.order, start=start, stop=args.stop)
    if out is not None:
        result.save(out)
    return show(result)


def show(result: Any) -> dict[str, Any]:
    """Prints a result's figures; returns them."""
    first, last = result.equity.index[0].date(), result.equity.index[-1].date()
    print(f"{result.name}, {first} to {last}, fills at {result.fill}, {result.order}")
    for name, value in result.metrics.items():
        print(f"  {name:<18} {value:,.4f}" if value == value else f"  {name:<18} n/a")
    if result.note:
        print(f"  note: {result.note}")
    return {"name": result.name, "start": str(first), "stop": str(last)} | result.metrics


def _after_training(bars: Any, run: Any) -> str | None:
    """The first bar after those the run trained on; None, with a warning, where there is none."""
    from nca_trader.evaluate.backtest import training_rows

    row = training_rows(bars, run)
    if row < len(bars):
        return str(bars.time[row])
    print("note: the run trained on all of these bars; what follows is in sample")
    return None
