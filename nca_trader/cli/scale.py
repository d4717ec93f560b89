"""`nca-trader plan` and `doctor`: what a run needs, and what is wrong with a machine."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from nca_trader.cli import fail_check, stopped
from nca_trader.cli.options import (
    READING,
    add_options,
    load_bars,
    load_experiment,
    reading_options,
)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the agent, the environment it trains in, and the slice to compile for."""
    add_options(parser, "data", *READING, "set", agent={"required": True})
    add_options(parser, env={"default": "index_daily", "help": "environment (default %(default)s)"})
    parser.add_argument(
        "--topology",
        required=True,
        help="a slice: v5e-8, v5e-256, v6e-256, v5p-768 (N counts cores), tpu7x (one host), or "
        "chips by axis, e.g. v5e:2x4, v5p:4x8x12",
    )
    parser.add_argument(
        "--largest",
        action="store_true",
        help="search for the largest batch that fits, and the smallest that is as fast, which "
        "takes minutes",
    )


def run_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Compile and print; what an interrupt leaves of a search is printed too.

    Raises:
      CheckFailed: it does not fit.
    """
    from nca_trader.scale.chips import slice_of
    from nca_trader.scale.plan import plan
    from nca_trader.scale.words import plan_lines

    env, agent = load_experiment(args)
    # A synthetic market has as many bars as its config says: plan draws none.
    bars = None if env.market and args.data is None else load_bars(args)
    known: dict[str, Any] = {"agent": args.agent, "env": args.env}
    found = None
    try:
        found = plan(
            agent, args.topology, env=env, bars=bars, largest=args.largest, report=known.update
        )
    except KeyboardInterrupt:
        if "largest" not in known:  # the plan itself was not done
            raise
    report = known | (found or {})
    print("\n".join(plan_lines(report)))
    if found is None:
        print("interrupted; the largest batch is the best so far", file=sys.stderr)
        stopped(args, report)
    # After the whole report, which shows what takes the memory.
    if not report["fits"]:
        name = slice_of(args.topology).name
        fail_check(args, report, f"{args.agent} does not fit on a chip of {name}; see above.")
    return report


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add what else to examine: an agent's mesh, bars, a coordinator."""
    add_options(
        parser,
        *READING,
        agent={"default": "", "help": "whose [mesh] to show: preset name or TOML file"},
        data={"default": "", "metavar": "FILE", "help": "a bar file, or shards, to read"},
    )
    parser.add_argument(
        "--coordinator", default="", metavar="HOST:PORT", help="of several hosts, to be reached"
    )


def run_doctor(args: argparse.Namespace) -> dict[str, Any]:
    """Examine the machine; return facts and findings.

    Raises:
      CheckFailed: a finding is an error.
    """
    from nca_trader.scale.doctor import ERROR, examine, mesh_of
    from nca_trader.scale.facts import gather
    from nca_trader.scale.words import doctor_lines

    wanted = None
    if args.agent:
        from nca_trader.agents import load_agent

        wanted = load_agent(args.agent).mesh
    facts = gather(args.data, args.coordinator, reading_options(args))
    findings = examine(facts)
    mesh = mesh_of(facts, wanted)
    print("\n".join(doctor_lines(facts, mesh)))
    for level, name, what, remedy in findings:
        print(f"{level} ({name}): {what}.\n    {remedy}.")
    errors = sum(finding.level == ERROR for finding in findings)
    result = {
        "ok": not errors,
        "mesh": mesh,
        "findings": [finding._asdict() for finding in findings],
        "facts": dataclasses.asdict(facts),
    }
    if errors:
        fail_check(args, result, f"{errors} error(s), see above; each with its remedy.")
    # Warnings alone end with exit code 0.
    print("nothing wrong" if not findings else f"{len(findings)} warning(s), no error")
    return result
