"""`nca-trader bench`: how fast the parts run here, one row each."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

HELP = "measure steps a second of the environment, the policy and the learner"
REPEATS = 5  # timed calls of each program; the median counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("what", nargs="?", default="all", choices=("env", "policy", "ppo", "all"))
    parser.add_argument("--agent", default="small", help="agent preset (default %(default)s)")
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        help="an interpreter that has the peers, see `make bench-peers`; `env` and `policy` are "
        "measured beside them, in a checkout",
    )
    parser.add_argument("--envs", type=int, default=4096, help="of `env` (default %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Prints a row a benchmark as it is measured; with --json each is an object on a line."""
    import jax

    from nca_trader.cli import print_json

    # A program found in the cache would make compile_s a lie.
    jax.config.update("jax_enable_compilation_cache", False)
    from nca_trader.cli.bench_env import bench_env
    from nca_trader.cli.bench_policy import bench_policy

    benches = {"env": bench_env, "policy": bench_policy, "ppo": bench_ppo}
    chosen = benches if args.what == "all" else {args.what: benches[args.what]}
    for name, bench in chosen.items():
        for row in bench(args):
            if args.json:
                print_json({"bench": name} | row)
            else:
                beside = f"   {row['ratio']:.3g} x {row['peer']}" if row["peer"] else ""
                told = ("temp_mb", "p50_us", "p99_us")
                beside += "".join(f"   {key} {row[key]:.1f}" for key in told if row.get(key))
                print(
                    f"{name:<7} {row['name']:<44} {row['steps_per_s']:>14,.0f} steps/s   "
                    f"compile {row['compile_s']:.1f} s{beside}"
                )


class Compilations:
    """Counts what jax compiles, and the seconds that tracing, lowering and compiling took."""

    def __init__(self):
        import jax

        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: object) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs
            self.count += event.endswith("backend_compile_duration")


def measure(
    name: str, call: Callable[[Any], Any], carry: Any, steps: int, **facts: Any
) -> dict[str, Any]:
    """Times a jitted `carry -> carry`: its compilation, its first call, and calls after that.

    Args:
      steps: environment steps, or decisions, of one call. facts: keys that the row adds.
    """
    import jax

    compilations = Compilations()
    seconds = []
    for number in range(REPEATS + 1):
        began = time.perf_counter()
        carry = jax.block_until_ready(call(carry))
        seconds.append(time.perf_counter() - began)
        if number == 0:
            compile_s, compiled = compilations.seconds, compilations.count
    first, *rest = seconds
    row = {
        "name": name,
        "envs": None,
        "envs_per_segment": None,
        "steps_per_s": steps / sorted(rest)[REPEATS // 2],
        "compile_s": compile_s,
        "first_call_s": first,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "retraces": compilations.count - compiled,
        "peer": None,
        "ratio": None,
        "device": jax.devices()[0].device_kind,
    }
    return row | facts


def _env(bars: int = 5031) -> Any:
    """The environment that all benchmarks share: two indexes, long or flat, with costs."""
    from nca_trader.data.samples import sample_bars
    from nca_trader.envs.presets import load_env
    from nca_trader.envs.trading import TradingEnv

    return TradingEnv(sample_bars("sp500")[:bars], load_env("index_daily"))


def bench_ppo(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole iterations of the learner, one environment a segment and as the preset has it."""
    import dataclasses

    import jax

    from nca_trader.agents.policy import make_policy
    from nca_trader.agents.presets import load_agent
    from nca_trader.learner.update import make_learner

    env, rows = _env(), []
    agent = load_agent(args.agent)
    for each in sorted({1, agent.learner.envs_per_segment}):
        learn = dataclasses.replace(agent.learner, envs_per_segment=each)
        config = dataclasses.replace(agent, learner=learn, num_seeds=1)
        learner = make_learner(env, make_policy(config, env.spec), config)
        state = learner.init(jax.random.key(0))
        rows.append(
            measure(
                f"{args.agent}, {env.spec.num_assets} assets, {each} env/segment",
                lambda state, step=learner.step: step(state)[0],
                state,
                learner.steps_per_update,
                envs=learn.num_segments * each,
                envs_per_segment=each,
            )
        )
    return rows
