"""`nca-trader plan` and `doctor`: what a run needs, and what is wrong with a machine."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
import sys
from typing import Any

from nca_trader.cli import end_stopped, fail_check
from nca_trader.cli.options import (
    READING,
    add_options,
    load_bars,
    load_experiment,
    reading_options,
    write_command,
)
from nca_trader.errors import ConfigError


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
    job = parser.add_argument_group("the job", "starts the run on the slice, if it fits")
    job.add_argument(
        "--manifest", choices=("jobset", "slurm"), help="write a JobSet for GKE, or a batch script"
    )
    job.add_argument("--run", metavar="DIR", help="folder of the run, which every host sees")
    job.add_argument("--image", help="of the container that has the package, for a JobSet")
    job.add_argument("--out", metavar="FILE", help="of the job (train.yaml, train.sh)")


def run_plan(args: argparse.Namespace) -> dict[str, Any]:
    """Compile and print; what an interrupt leaves of a search is printed too.

    Raises:
      CheckFailed: it does not fit.
    """
    from nca_trader.scale.chips import slice_of
    from nca_trader.scale.plan import plan
    from nca_trader.scale.words import plan_lines

    refuse_half_a_job(args)
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
        end_stopped(args, report)
    # After the whole report, which shows what takes the memory.
    if not report["fits"]:
        name = slice_of(args.topology).name
        fail_check(args, report, f"{args.agent} does not fit on a chip of {name}; see above.")
    if args.manifest:
        report["manifest"] = str(write_job(args, report["set"]))
        print(f"the job: {report['manifest']}")
    return report


def refuse_half_a_job(args: argparse.Namespace) -> None:
    """Refuse what makes no job, before minutes of compilation.

    Raises:
      ConfigError: `--manifest` without `--run`, a JobSet without `--image`, or a slice that no
        machines make up.
    """
    from nca_trader.scale.chips import slice_of
    from nca_trader.scale.manifest import hosts_of

    if args.manifest is None:
        return
    if not args.run:
        raise ConfigError("--manifest needs --run DIR, the folder that the job trains.")
    if args.manifest == "jobset" and not args.image:
        raise ConfigError("--manifest jobset needs --image, a container that has the package.")
    hosts_of(slice_of(args.topology))


def write_job(args: argparse.Namespace, changes: dict[str, Any]) -> pathlib.Path:
    """Write the job that trains what was planned; return its path.

    Args:
      args: of the command.
      changes: keys that the slice needs, and their values.
    """
    from nca_trader.machine import write_atomically
    from nca_trader.scale.chips import slice_of
    from nca_trader.scale.manifest import SUFFIXES, hosts_of, manifest

    there = slice_of(args.topology)
    options = {name: getattr(args, name) for name in ("env", "agent", "data", *READING)}
    options["set"] = [*args.set, *(f"{name}={value}" for name, value in changes.items())]
    options |= {"run_dir": args.run, "distributed": hosts_of(there)[0] > 1}
    words = shlex.split(write_command("train", **options))
    path = pathlib.Path(args.out or f"train{SUFFIXES[args.manifest]}")
    write_atomically(path, manifest(args.manifest, there, words, args.run, args.image or ""))
    return path


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
