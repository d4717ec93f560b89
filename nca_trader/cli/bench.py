"""`nca-trader bench`: how fast the parts run here, one row each."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

HELP = "measure steps a second of the environment, the policy and the learner"
SECONDS = 3.0  # that a program is measured, ours and a peer's
ROUNDS = 5  # in which its calls are timed
ROOT = pathlib.Path(__file__).resolve().parents[2]  # of a checkout, which has the peers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("what", nargs="?", default="all", choices=("env", "policy", "ppo", "all"))
    parser.add_argument("--agent", help="agent of `policy` (default small)")
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        help="an interpreter that has the peers, see `make bench-peers`; measures beside them, "
        "in a checkout",
    )
    parser.add_argument("--envs", type=int, help="environments of `env` (default 4096)")


def run(args: argparse.Namespace) -> None:
    """Prints a row a benchmark as it is measured; with --json each is an object on a line."""
    import jax

    from nca_trader.agents.presets import load_agent
    from nca_trader.cli import print_json
    from nca_trader.errors import ConfigError

    for option, bench, default in (("agent", "policy", "small"), ("envs", "env", 4096)):
        if getattr(args, option) is None:
            setattr(args, option, default)
        elif args.what not in (bench, "all"):
            raise ConfigError(
                f"--{option} {getattr(args, option)} has no effect on `bench {args.what}`; leave "
                f"it out, or run `nca-trader bench {bench}`."
            )
    load_agent(args.agent)  # a wrong name is refused before minutes of measuring
    # A program found in the cache would make compile_s a lie.
    jax.config.update("jax_enable_compilation_cache", False)
    from nca_trader.cli.bench_env import bench_env
    from nca_trader.cli.bench_policy import bench_policy
    from nca_trader.cli.bench_ppo import bench_ppo
    from nca_trader.machine import cores
    from nca_trader.parallel.mesh import use_cores

    use_cores(cores())  # what runs on a mesh has as many devices
    benches = {"env": bench_env, "policy": bench_policy, "ppo": bench_ppo}
    chosen = benches if args.what == "all" else {args.what: benches[args.what]}
    for name, bench in chosen.items():
        for row in bench(args):
            if args.json:
                print_json({"bench": name} | row)
            else:
                peer = f"   {row['ratio']:.3g} x {row['peer']}" if row["ratio"] else ""
                told = ("temp_mb", "p50_us", "p99_us", "matmul_share")
                peer += "".join(f"   {key} {row[key]:.3g}" for key in told if row.get(key))
                spent = row["compile_s"]  # None where another program was timed
                compiled = "" if spent is None else f"compile {spent:.1f} s"
                print(
                    f"{name:<7} {row['name']:<52} {row['steps_per_s']:>14,.0f} steps/s   "
                    f"{compiled}{peer}"
                )
                for side in ("ours", "theirs"):
                    if row.get(side):
                        print(f"{'':<10}{side}: {row[side]}")


class Timing:
    """A jitted `carry -> carry`: its compilation, its first call, and calls after that.

    Those are timed in rounds, so that what it is held against can be timed between them: a
    machine's speed may move by a third within seconds.
    """

    def __init__(self, call: Callable[[Any], Any], carry: Any):
        import jax

        from nca_trader.learner.compilations import Compilations

        self._call, self._carry = call, carry
        self._count, self._ready = Compilations, jax.block_until_ready
        self._seconds: list[float] = []
        self._retraces = 0
        with Compilations() as compilations:
            self._first = self._timed()
        self._compile = compilations.seconds

    def _timed(self) -> float:
        began = time.perf_counter()
        self._carry = self._ready(self._call(self._carry))
        return time.perf_counter() - began

    def rounds(self, between: Callable[[], Any] = lambda: None) -> None:
        """Calls for `SECONDS`, and at least `ROUNDS` times; `between` after each round."""
        for _ in range(ROUNDS):
            self._round()
            between()

    def in_turn(self, *others: Timing) -> None:
        """The rounds of several, each after one of each other's."""
        self.rounds(lambda: [other._round() for other in others])

    def _round(self) -> None:
        end = time.perf_counter() + SECONDS / ROUNDS
        with self._count() as compilations:
            self._seconds.append(self._timed())
            while time.perf_counter() < end:
                self._seconds.append(self._timed())
        self._retraces += compilations.count

    def row(self, name: str, steps: int, **facts: Any) -> dict[str, Any]:
        """What was measured so far; of the calls, the median counts.

        Args:
          steps: environment steps, or decisions, of one call. facts: keys that the row adds.
        """
        import jax

        row = {
            "name": name,
            "envs": None,
            "envs_per_segment": None,
            "steps_per_s": steps / statistics.median(self._seconds),
            "compile_s": self._compile,
            "first_call_s": self._first,
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "retraces": self._retraces,
            "peer": None,
            "ratio": None,
            "device": jax.devices()[0].device_kind,
        }
        return row | facts


def measure(
    name: str, call: Callable[[Any], Any], carry: Any, steps: int, **facts: Any
) -> dict[str, Any]:
    """A row of `Timing` after its rounds."""
    timing = Timing(call, carry)
    timing.rounds()
    return timing.row(name, steps, **facts)


def beside(
    row: dict[str, Any], python: str, module: str, options: dict[str, Any]
) -> dict[str, Any]:
    """`row` beside what a peer measures of itself in a process of its own, right after ours.

    Args:
      module: of `benchmarks.peers`. options: of its `main`.

    Raises:
      ConfigError: the interpreter cannot be run, or has not got the peer.
    """
    return compared(row, measured_by(python, module, options))


def compared(row: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`row` beside what a peer said of itself."""
    return row | {
        "peer": theirs["peer"],
        "peer_steps_per_s": theirs["steps_per_s"],
        "ratio": row["steps_per_s"] / theirs["steps_per_s"],
    }


class Peer:
    """A peer that times itself in turns with us, in a process of its own."""

    def __init__(self, python: str, module: str, options: dict[str, Any]):
        """Starts the program `module` of `benchmarks.peers`, and waits until it has warmed up.

        Raises:
          ConfigError: the interpreter cannot be run, or has not got the peer.
        """
        from nca_trader.errors import ConfigError

        self._python, self._module = python, module
        words = [*_words(python, module, options), "--turns"]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            self._process = subprocess.Popen(words, cwd=ROOT, text=True, **pipes)
        except OSError as error:
            raise ConfigError(f"--peers {python}: cannot be run ({error.strerror}).") from None
        self._said()

    def round(self) -> None:
        """Lets it time a slice."""
        stdin: Any = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it ended: what follows says why
            stdin.write("\n")
            stdin.flush()
        self._said()

    def result(self) -> dict[str, Any]:
        """What it says of itself, once it has ended."""
        out, err = self._process.communicate()
        if self._process.returncode:
            raise _failed(self._python, self._module, err)
        return _named(out)

    def _said(self) -> None:
        stdout: Any = self._process.stdout
        if not stdout.readline():
            raise _failed(self._python, self._module, self._process.communicate()[1])


def measured_by(python: str, module: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the program `module` of `benchmarks.peers` says of itself, run by `python`.

    Raises:
      ConfigError: as `beside`.
    """
    from nca_trader.errors import ConfigError

    command = _words(python, module, options)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"--peers {python}: cannot be run ({error.strerror}).") from None
    if done.returncode:
        raise _failed(python, module, done.stderr)
    return _named(done.stdout)


def _words(python: str, module: str, options: dict[str, Any]) -> list[str]:
    given = {"seconds": SECONDS} | options
    words = [f"--{name}={value}" for name, value in given.items()]
    return [python, "-m", f"benchmarks.peers.{module}", *words]


def _failed(python: str, module: str, err: str) -> Exception:
    from nca_trader.errors import ConfigError

    last = (err.strip().splitlines() or ["no message"])[-1]
    return ConfigError(f"--peers {python}: {module} failed ({last}); run `make bench-peers`.")


def _named(out: str) -> dict[str, Any]:
    said = json.loads(out.splitlines()[-1])
    return said | {"peer": f"{said['peer']} {said['version']}"}
