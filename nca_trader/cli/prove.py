"""`nca-trader prove`: the share of a known optimum that an agent reaches, trained or as it is."""

from __future__ import annotations

import argparse
import secrets
from typing import Any

from nca_trader.cli import fail_check
from nca_trader.cli.options import add_options, again, whole
from nca_trader.progress import say

NUM_SEEDS = 3
SEED_BITS = 63


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
        "agent_seconds",
        "python",
        "steps",
        "workers",
        agent={
            "default": "nano",
            "metavar": "X",
            "help": "agent to train (default %(default)s); or one from outside: a run folder or "
            "exported file, FILE.py:NAME, MODEL.zip[,VECNORMALIZE.pkl] of Stable-Baselines3, "
            "STATE.pkl of rejax",
        },
        seed={
            "type": whole(0, 2**SEED_BITS - 1),
            "help": f"one seed; without it {NUM_SEEDS} are drawn, and of an agent from outside one "
            "after it is loaded",
        },
        set={"help": "change a field of the agent; repeatable"},
        allow_code={
            "help": "load pickled objects, or a run's own code that you have not signed; it runs"
        },
        out={
            "help": "write the curves (.png, .svg), tables (.md) or a page of both (.html), or add "
            "the rows (.jsonl)"
        },
    )
    parser.add_argument(
        "--alone", action="store_true", help="train no controls (agents without history, ...)"
    )


def run_prove(args: argparse.Namespace) -> dict[str, Any]:
    """Prove market by market.

    Raises:
      CheckFailed: a bar is missed.
      ConfigError: an unknown market, agent or kind of output.
    """
    from nca_trader.agents import load_agent
    from nca_trader.optimum.outside.entry import entry_of
    from nca_trader.optimum.prove import prove
    from nca_trader.optimum.rows import add_rows, rows_of

    outside = entry_of(args.agent, args.allow_code, args.python) is not None
    agent = args.agent if outside else load_agent(args.agent, args.set)
    seeds = None if args.seed is None else [args.seed]
    if not outside:
        # Drawn at each call, so that seeds cannot be chosen by their results.
        seeds = seeds or [secrets.randbelow(1_000_000) for _ in range(NUM_SEEDS)]
        # --seed takes one seed, so the command repeats the first.
        first = again(args, *args.markets, seed=seeds[0])
        print(f"seeds {', '.join(map(str, seeds))}; `{first}` repeats the first of them")
    proofs = prove(
        args.markets or None,
        agent,
        allow_code=args.allow_code,
        python=args.python,
        agent_seconds=args.agent_seconds,
        steps=args.steps,
        seeds=seeds,
        controls=not args.alone,
        workers=args.workers,
        say=say,
    )
    if args.out:
        rows = args.out.endswith(".jsonl")
        if rows:
            add_rows(args.out, rows_of(proofs, args.agent, controls=False))
        else:
            from nca_trader.optimum.board import write_board  # imports matplotlib

            write_board(args.out, rows_of(proofs, args.agent))
        print(f"The {'rows' if rows else 'curves'}: {args.out}")
    result = {"results": [proof.row() for proof in proofs]}
    # Judged after all runs, so that one miss does not hide the others.
    played = [proof for proof in proofs if not proof.reason]
    missed = [proof for proof in played if not proof.passed]
    if missed:
        # One name per market, in the order of the runs.
        markets = dict.fromkeys(proof.market for proof in missed)
        what = f"{len(missed)} of {len(played)} runs missed their bar: {', '.join(markets)}."
        # After the curves are written, which show how far the run was from the bar.
        fail_check(args, result, what)
    print(f"all {len(played)} runs reached their bars")
    return result
