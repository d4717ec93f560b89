"""`nca-trader bench`: measures the environment, the policy, the learner and the paper loop."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
import types
from typing import Any

from nca_trader.cli.options import COUNT
from nca_trader.progress import Progress, say

# Each option belongs to one benchmark: giving it to another is a mistake, not a no-op.
BENCHMARKS = ("env", "policy", "ppo", "sweep", "stream")
OPTIONS = (("agent", "policy", "small"), ("envs", "env", 4096))
FIGURES = (
    "difference slower floor_ms over_floor temp_mb p50_us p99_us matmul_share cpu_us bytes_per_bar"
).split()


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("what", nargs="?", default="all", choices=(*BENCHMARKS, "all"))
    parser.add_argument("--agent", help="agent of `policy` (default small)")
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        help="an interpreter with the peers installed, see `make bench-peers`; also measures "
        "them, in a checkout",
    )
    parser.add_argument("--envs", type=COUNT, help="environments of `env` (default 4096)")


def run_bench(args: argparse.Namespace) -> None:
    """Print each row as it is measured; with `--json`, one object per line."""
    from nca_trader.agents import load_agent
    from nca_trader.errors import ConfigError

    for option, bench, default in OPTIONS:
        if getattr(args, option) is None:
            setattr(args, option, default)
        elif args.what not in (bench, "all"):
            raise ConfigError(
                f"--{option} {getattr(args, option)} has no effect on `bench {args.what}`; leave "
                f"it out, or run `nca-trader bench {bench}`."
            )
    load_agent(args.agent)  # a wrong name is refused before minutes of measuring
    import jax

    from nca_trader.machine import cores
    from nca_trader.parallel.mesh import use_cores

    # A program found in the cache would falsify compile_s.
    jax.config.update("jax_enable_compilation_cache", False)
    # A sweep has a thread for each core of one device, as it has for its users.
    if args.what != "sweep":
        use_cores(cores())
    names = BENCHMARKS if args.what == "all" else (args.what,)
    # It does not tick: a thread that draws would be timed as well.
    with Progress(len(names), "bench", "benchmarks", ticks=False) as shown:
        for name in names:
            for row in benchmark(name).rows(args):
                show_row(name, row, args.json)
                shown.update(0)
            shown.update()


def show_row(name: str, row: dict[str, Any], as_json: bool) -> None:
    """Print a row of a benchmark."""
    from nca_trader.cli import print_json

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


def benchmark(name: str) -> Any:
    """Import a benchmark: a wheel has them inside the package, a checkout next to it."""
    package = pathlib.Path(__file__).resolve().parents[1]
    folder = package / "benchmarks"
    # By path: `import benchmarks` could find a folder of that name where the user is.
    benchmarks = types.ModuleType("nca_trader.benchmarks")
    benchmarks.__path__ = [str(folder if folder.is_dir() else package.parent / "benchmarks")]
    sys.modules.setdefault(benchmarks.__name__, benchmarks)
    return importlib.import_module(f"nca_trader.benchmarks.{name}")
