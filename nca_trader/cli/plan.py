"""`nca-trader plan`: what a training run would need on a TPU slice, before one is paid for."""

from __future__ import annotations

import argparse
from typing import Any

from nca_trader.cli.train import add_bar_arguments, add_set_argument, load_bars

HELP = "compile a run for a TPU slice that is not here: does it fit, and what bounds it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("--agent", required=True, help="an agent: preset name or TOML file")
    parser.add_argument(
        "--topology",
        required=True,
        help="a slice: v5e-8, v5e-256, v6e-256, v5p-768 (N counts cores), tpu7x (one host), or "
        "chips by axis, e.g. v5e:2x4, v5p:4x8x12",
    )
    parser.add_argument(
        "--env",
        default="index_daily",
        help="an environment: preset name or TOML file (default %(default)s)",
    )
    add_bar_arguments(parser)
    parser.add_argument(
        "--largest",
        action="store_true",
        help="search for the largest batch that fits, and the smallest that is as fast; it "
        "compiles some seven times",
    )
    add_set_argument(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles and prints.

    Raises:
      CheckFailed: it does not fit; the JSON line is printed before.
    """
    from nca_trader.cli import print_json
    from nca_trader.cli.plan_page import lines
    from nca_trader.cli.train import load_experiment
    from nca_trader.errors import CheckFailed
    from nca_trader.scale.chips import slice_of
    from nca_trader.scale.plan import plan

    there = slice_of(args.topology)
    args.devices = None  # the slice says
    env, agent = load_experiment(args)
    bars = None if env.market and args.data is None else load_bars(args)
    report = plan(agent, args.topology, env=env, bars=bars, largest=args.largest, say=_say)
    report = {"agent": args.agent, "env": args.env} | report
    print("\n".join(lines(report)))
    if not report["fits"]:
        if args.json:
            print_json(report)
        raise CheckFailed(f"{args.agent} does not fit on a chip of {there.name}; see above.")
    return report


def _say(line: str) -> None:
    print(line, flush=True)
