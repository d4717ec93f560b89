"""`nca-trader paper`: an agent in the live loop, with money that is not there."""

from __future__ import annotations

import argparse
from typing import Any

from nca_trader.cli.reading import add_reading_arguments, reading_options

HELP = "paper-trade a run's agent, every step in a journal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `paper`."""
    parser.add_argument(
        "--run", required=True, dest="run_dir", metavar="DIR", help="run folder or exported file"
    )
    parser.add_argument("--feed", required=True, metavar="FEED", help="replay:FILE, a bar file")
    parser.add_argument("--broker", default="simulated", help="simulated (default)")
    parser.add_argument(
        "--journal", required=True, metavar="FILE", help="SQLite journal; goes on if it exists"
    )
    parser.add_argument("--start", metavar="DATE", help="decide nothing before; default: warm-up")
    parser.add_argument("--seed", type=int, metavar="N", help="the agent of that number, from 0")
    parser.add_argument(
        "--capital", type=float, default=100_000.0, metavar="MONEY", help="default %(default)s"
    )
    add_reading_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the session to the end of its feed, or until it is asked to stop."""
    from nca_trader.cli.interrupt import stop_on_signal
    from nca_trader.evaluate.verdict import in_sample_sentence
    from nca_trader.paper.session import paper_trade  # jax is slow to import: not for --help

    with stop_on_signal("bar") as stop:
        result = paper_trade(
            args.run_dir,
            args.feed,
            args.journal,
            broker=args.broker,
            start=args.start,
            capital=args.capital,
            stop=stop,
            reading=reading_options(args),
            seed=args.seed,
        )
        if stop():
            print(f"stopped; all is in {args.journal}, and the same command goes on from there.")
    if result["agent"]:
        print(result["agent"])
    if result["in_sample"]:
        print(in_sample_sentence(result["in_sample"], result["decisions"]))
    print(
        f"{result['bars']} bars, {result['decisions']} decisions, {result['orders']} orders, "
        f"{result['fills']} fills; equity {result['equity']:.6f} of the start's, "
        f"{result['value']:,.2f} in money; journal {args.journal}, {result['events']} events, "
        f"head {result['head'][:16]}"
    )
    return result
