"""Measures the environment, the policy, the learner, sweeps, the paper loop, and first answers.

python -m benchmarks env
python -m benchmarks all --json
python -m benchmarks ppo --peers .venv-peers/bin/python
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from nca_trader.agents import load_agent
from nca_trader.cli import print_json
from nca_trader.cli.options import COUNT
from nca_trader.errors import ConfigError, NcaTraderError
from nca_trader.machine import cores
from nca_trader.parallel.mesh import use_cores
from nca_trader.progress import Progress, in_pipes, say

BENCHMARKS = ("env", "policy", "ppo", "sweep", "stream", "cold")
# Each option belongs to one benchmark: giving it to another is a mistake, not a no-op.
OPTIONS = (("agent", "policy", "small"), ("envs", "env", 4096))
FIGURES = (
    "first_answer_s cpu_s "
    "difference slower floor_ms over_floor temp_mb p50_us p99_us matmul_share cpu_us bytes_per_bar"
).split()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs benchmarks and returns the exit code: 2 where an option is wrong, 130 at Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", nargs="?", default="all", choices=(*BENCHMARKS, "all"))
    parser.add_argument("--agent", help="agent of `policy` (default small)")
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        help="an interpreter with the peers installed, see `make bench-peers`; also measures them",
    )
    parser.add_argument("--envs", type=COUNT, help="environments of `env` (default 4096)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(argv)
    try:
        with in_pipes():
            measure(args)
    except NcaTraderError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def measure(args: argparse.Namespace) -> None:
    """Prints each row as it is measured.

    Raises:
      ConfigError: an option of another benchmark, or an agent that there is not.
    """
    for option, bench, default in OPTIONS:
        if getattr(args, option) is None:
            setattr(args, option, default)
        elif args.what not in (bench, "all"):
            raise ConfigError(
                f"--{option} {getattr(args, option)} has no effect on `{args.what}`; leave it "
                f"out, or run `python -m benchmarks {bench}`."
            )
    load_agent(args.agent)  # a wrong name is refused before minutes of measuring
    # A program found in the cache would falsify compile_s.
    jax.config.update("jax_enable_compilation_cache", False)
    # A sweep has a thread for each core of one device, as it has for its users.
    if args.what != "sweep":
        use_cores(cores())
    names = BENCHMARKS if args.what == "all" else (args.what,)
    # It does not tick: a thread that draws would be timed as well.
    with Progress(len(names), "bench", "benchmarks", ticks=False) as shown:
        for name in names:
            for row in importlib.import_module(f"benchmarks.{name}").rows(args):
                show_row(name, row, args.json)
                shown.update(0)
            shown.update()


def show_row(name: str, row: dict[str, Any], as_json: bool) -> None:
    """Prints a row of a benchmark."""
    if as_json:
        print_json({"bench": name} | row)
        return
    # A row that another program timed has no compile_s.
    facts = [] if row["compile_s"] is None else [f"compile {row['compile_s']:.1f} s"]
    facts += [f"{row['ratio']:.3g} x {row['peer']}"] if row["ratio"] else []
    facts += [f"{key} {row[key]:.3g}" for key in FIGURES if row.get(key)]
    rate = f"{row['steps_per_s']:>14,.0f} steps/s"
    say(f"{name:<7} {row['name']:<52} {rate}   {'   '.join(facts)}")
    for side in ("ours", "theirs"):
        if row.get(side):
            say(f"{'':<10}{side}: {row[side]}")


if __name__ == "__main__":
    sys.exit(main())
