"""`nca-trader prove`: trains on markets with a known optimum, and reports the share reached."""

from __future__ import annotations

import argparse
import secrets
from typing import Any

from nca_trader.cli import fail_check
from nca_trader.cli.options import COUNT, add_options, typed
from nca_trader.progress import say

NUM_SEEDS = 3


def add_prove_options(parser: argparse.ArgumentParser) -> None:
    """Add the markets, the agent that learns them, and where the chart goes."""
    parser.add_argument(
        "markets",
        nargs="*",
        metavar="MARKET",
        help="environments with a known optimum, preset names or TOML files (default: all such "
        "presets)",
    )
    add_options(
        parser,
        agent={"default": "nano", "help": "agent (default %(default)s)"},
        seed={"help": f"one seed; without it {NUM_SEEDS} are drawn, and printed"},
        set={"help": "change a field of the agent; repeatable"},
    )
    parser.add_argument("--steps", type=COUNT, help="environment steps of each run")
    parser.add_argument(
        "--alone", action="store_true", help="train no controls (agents without history, ...)"
    )
    parser.add_argument(
        "--workers", metavar="W", help="processes of this machine, or tcp://HOST:PORT of a cluster"
    )
    parser.add_argument("--out", help="write the curves (.png, .svg) or a page of all (.html)")


def run_prove(args: argparse.Namespace) -> dict[str, Any]:
    """Prove market by market.

    Raises:
      CheckFailed: a bar is missed.
      ConfigError: an unknown market, agent or kind of output.
    """
    from nca_trader.agents import load_agent
    from nca_trader.optimum.curves import write_proofs
    from nca_trader.optimum.prove import prove

    agent = load_agent(args.agent, args.set)
    # Drawn at each call, so that seeds cannot be chosen by their results.
    drawn = [secrets.randbelow(1_000_000) for _ in range(NUM_SEEDS)]
    seeds = drawn if args.seed is None else [args.seed]
    kept = {name: getattr(args, name) for name in ("agent", "steps", "alone", "out", "set")}
    # --seed takes one seed, so the command repeats the first.
    again = typed("prove", *args.markets, seed=seeds[0], **kept)
    print(f"seeds {', '.join(map(str, seeds))}; `{again}` repeats the first of them")
    proofs = prove(
        args.markets or None,
        agent,
        steps=args.steps,
        seeds=seeds,
        controls=not args.alone,
        workers=args.workers,
        say=say,
    )
    if args.out:
        write_proofs(args.out, proofs, args.agent)
        print(f"The curves: {args.out}")
    result = {"results": [proof.row() for proof in proofs]}
    # Judged after all runs, so that one miss does not hide the others.
    missed = [proof for proof in proofs if not proof.passed]
    if missed:
        # One name per market, in the order of the runs.
        names = ", ".join(dict.fromkeys(proof.market for proof in missed))
        what = f"{len(missed)} of {len(proofs)} runs missed their bar: {names}."
        # After the curves are written, which show how far the run was from the bar.
        fail_check(args, result, what)
    print(f"all {len(proofs)} runs reached their bars")
    return result
