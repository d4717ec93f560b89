"""`nca-trader doctor`: what this machine has, what is misconfigured, how to fix it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from nca_trader.cli.reading import add_reading_arguments, reading_options

if TYPE_CHECKING:
    from nca_trader.scale.facts import Facts

HELP = "what this machine has, what is misconfigured, and how to fix it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--agent", default="", help="whose [mesh] to show: preset name or TOML file"
    )
    parser.add_argument("--data", default="", metavar="FILE", help="a bar file, or shards, to read")
    add_reading_arguments(parser)
    parser.add_argument(
        "--coordinator", default="", metavar="HOST:PORT", help="of several hosts, to be reached"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Examines the machine; returns facts and findings.

    Raises:
      CheckFailed: a finding is an error.
    """
    from nca_trader.cli import print_json
    from nca_trader.errors import CheckFailed
    from nca_trader.scale.doctor import ERROR, examine, mesh_of
    from nca_trader.scale.facts import gather

    wanted = None
    if args.agent:
        from nca_trader.agents import load_agent

        wanted = load_agent(args.agent).mesh
    facts = gather(args.data, args.coordinator, reading_options(args))
    findings = examine(facts)
    mesh = mesh_of(facts, wanted)
    for line in described(facts, mesh):
        print(line)
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
        if args.json:
            print_json(result)
        raise CheckFailed(f"{errors} error(s), see above; each with its remedy.")
    print("nothing wrong" if not findings else f"{len(findings)} warning(s), no error")
    return result


def described(facts: Facts, mesh: dict[str, int]) -> list[str]:
    """What the machine has, a line each."""
    from nca_trader.scale.doctor import GB, mesh_words

    names = ("nca_trader", "python", "jax", "jaxlib", "flax", "optax", "libtpu")
    kinds = sorted(set(facts.kinds))
    each = next((size for size in facts.device_memory if size), None)
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    lines = [
        "versions  " + ", ".join(f"{n} {facts.versions[n]}" for n in names if n in facts.versions),
        f"devices   {len(facts.kinds)} {facts.platform or 'none'} ({', '.join(kinds)})"
        + (f", {each / GB:.1f} GB each for JAX" if each else ""),
        f"mesh      {sizes}: train {mesh_words(mesh)}",
        f"host      {facts.cores} cores, {facts.memory_free / GB:.1f} GB free of memory's "
        f"{facts.memory / GB:.1f}",
        f"cache     {facts.cache or 'none'}"
        + (f", {facts.cache_bytes / GB:.2f} GB" if facts.cache else ""),
    ]
    if facts.coordinator and not facts.coordinator_error:
        lines.append(f"network   coordinator {facts.coordinator} answers")
    if facts.data_rows is not None:
        lines.append(f"data      {facts.data}: {facts.data_rows:,} bars")
    return lines
