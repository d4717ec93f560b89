"""`nca-trader train`: trains an agent into a run folder, or goes on with one."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from nca_trader.cli.checks import agent_of, overrides
from nca_trader.cli.debugging import add_debug_arguments, compile_line, debugged
from nca_trader.cli.reading import add_reading_arguments, reading_options, typed

HELP = "train an agent into a run folder; the same command goes on where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add_experiment_arguments(parser)
    parser.add_argument("--until", help="train on bars before this date, keep the rest unseen")
    parser.add_argument(
        "--run", required=True, dest="run_dir", help="the run folder; may be gs:// or s3://"
    )
    parser.add_argument("--steps", type=int, help="environment steps in all, of each seed")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of everything random, a synthetic market's path too (default 0)",
    )
    add_peer_arguments(parser)
    add_debug_arguments(parser)


def add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says which agent trains where, on which bars: see `load_experiment`."""
    parser.add_argument("--env", required=True, help="an environment: preset name or TOML file")
    parser.add_argument("--agent", required=True, help="an agent: preset name or TOML file")
    add_bar_arguments(parser, also=", or the shards.json of shards larger than memory")
    parser.add_argument(
        "--devices",
        type=int,
        help="devices to train on; on a CPU, up to one a core (default the agent's)",
    )
    add_set_argument(parser)


def add_set_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--set`, which changes fields of the agent and the environment."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="change a field of the agent, or env.KEY of the environment; repeatable",
    )


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a run on several hosts."""
    peers = parser.add_argument_group(
        "several hosts", "the same command on each; see docs/guides/multihost.md"
    )
    peers.add_argument(
        "--distributed",
        action="store_true",
        help="join the other hosts as SLURM, GKE or Cloud TPU says",
    )
    peers.add_argument(
        "--coordinator", default="", metavar="HOST:PORT", help="elsewhere: where process 0 is"
    )
    peers.add_argument("--processes", type=int, metavar="N", help="elsewhere: how many there are")
    peers.add_argument("--process", type=int, metavar="I", help="elsewhere: which this is, from 0")
    peers.add_argument(
        "--heartbeat",
        type=int,
        default=100,
        metavar="SECONDS",
        help="silence after which a process counts as lost and the others end (default 100)",
    )
    peers.add_argument(
        "--patience",
        type=int,
        default=300,
        metavar="SECONDS",
        help="how long to wait for the others at the start (default 300)",
    )


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Trains; returns the run's path and its last metrics, in the first process of several."""
    from nca_trader.parallel.processes import joined, options

    peers = options(args)
    if peers is None:
        return _run(args)
    with joined(peers):
        import jax

        from nca_trader.parallel import hosts

        if args.devices is None:
            args.devices = jax.device_count()
        result = _run(args)
        return result if hosts.first() else None


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from nca_trader.cli.interrupt import stop_on_signal
    from nca_trader.data.shards import folder_of_shards
    from nca_trader.learner.train import planned_steps, steps_done, train

    env_config, agent = load_experiment(args)
    use_cores_for(agent)
    env = load_training_env(args, env_config, args.seed)
    if agent.learner.replay_slots:
        print(replay_line(env, agent))
    steps = planned_steps(agent, args.steps)
    with (
        stop_on_signal() as stop,
        shown(steps, "train") as shows,
        debugged(args, shows) as watch,
    ):
        trained = train(
            env, agent, args.run_dir, steps=args.steps, seed=args.seed, report=watch, stop=stop
        )
    done = steps_done(trained)
    print(compile_line(watch.figures))
    if done < steps:
        print(
            f"stopped at {done:,} steps, all is saved in {args.run_dir}; the same command goes on"
        )
    else:
        shards = args.data and folder_of_shards(args.data) is not None
        data = "FILE" if shards else args.data
        again = typed("backtest", run_dir=args.run_dir, data=data, **reading_options(args))
        print(f"trained {done:,} steps; see `{again}`")
    last = (trained.metrics() or [{}])[-1]
    return {"run": str(trained.path), "complete": done >= steps} | last | watch.figures


def use_cores_for(agent: Any) -> None:
    """On a CPU, as many devices as the agent's mesh has, and at most one a core."""
    from nca_trader.machine import cores
    from nca_trader.parallel.mesh import use_cores

    if (wanted := math.prod(agent.mesh.axes)) > 1:
        use_cores(min(wanted, cores()))


def load_training_env(args: argparse.Namespace, config: Any, seed: int = 0) -> Any:
    """The environment over the bars, the shards or the synthetic market's path of `seed`.

    Raises:
      BarError, StateError, ConfigError: see `read_bars`, `open_shards`, `TradingEnv`.
    """
    from nca_trader.data.shards import folder_of_shards, open_shards
    from nca_trader.data.synthetic import task_of
    from nca_trader.envs.trading import TradingEnv
    from nca_trader.errors import BarError, ConfigError

    if args.data is not None and (folder := folder_of_shards(args.data)) is not None:
        given = [*reading_options(args), *(["until"] if args.until is not None else [])]
        if given:
            raise ConfigError(
                f"--{given[0]} is about a bar file, and {args.data} is shards; choose what is in "
                "them when they are written."
            )
        return TradingEnv(open_shards(folder), config)
    if config.market and args.data is None:  # a path of the run's own seed
        return TradingEnv(task_of(config, seed), config)
    bars = load_bars(args)
    if args.until is not None and bars.row(args.until) == 0:
        raise BarError(
            f"{bars.source}: no bar before --until {args.until}; the first is of {bars.index[0]}."
        )
    return TradingEnv(bars.between(None, args.until), config)


def memory_line(row: dict[str, Any]) -> str:
    """The sizes that were chosen to fit a device, as a row of metrics has them."""
    agents = int(row["agents_at_once"])
    return (
        f"memory: an update needs {row['memory_gb']:.3g} GB of a device, with "
        f"{agents} agent{'s' if agents > 1 else ''} at once and micro_batches = "
        f"{row['micro_batches']:.0f}"
    )


def replay_line(env: Any, agent: Any) -> str:
    """What the agent's replay ring holds; builds nothing on the device."""
    import jax

    from nca_trader.agents.policy import make_policy
    from nca_trader.learner.learner import make_learner
    from nca_trader.learner.sampled import described

    learner = make_learner(env, make_policy(agent, env.spec), agent)
    return described(jax.eval_shape(learner.init, jax.random.key(0)).replay)


@contextlib.contextmanager
def shown(total: int, label: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives the function that shows each row of metrics as progress towards `total` steps."""
    from nca_trader.parallel import hosts
    from nca_trader.watch.progress import Progress

    if not hosts.first():
        yield lambda row: None
        return
    with Progress(total, label) as bar:
        seen: int | None = None

        def report(row: dict[str, Any]) -> None:
            nonlocal seen
            if seen is None:  # a resumed run begins where it was
                if "memory_gb" in row:
                    print(memory_line(row))
                before = row["steps"] - row["steps"] // row["update"]
                bar.skip(before)
                seen = before
            # A figure that is not finite is None.
            known = {name: row[name] for name in ("reward", "entropy") if row[name] is not None}
            bar.update(row["steps"] - seen, **known)
            seen = row["steps"]

        yield report


def load_experiment(args: argparse.Namespace) -> tuple[Any, Any]:
    """The environment's and the agent's configuration, with `--set` and `--devices` applied."""
    from nca_trader.envs import load_env

    return load_env(args.env, overrides(args, "env.")), agent_of(args)


def add_bar_arguments(parser: argparse.ArgumentParser, also: str = "") -> None:
    """Adds the options that `load_bars` reads; `also` says what else `--data` may be."""
    parser.add_argument(
        "--data", help=f"a bar file (CSV, Parquet; may be a URL){also}; without it sample bars"
    )
    add_reading_arguments(parser)


def load_bars(args: argparse.Namespace) -> Any:
    """The bars of `--data`, or the sample bars.

    Raises:
      ConfigError: there is no file for an option that is about one.
      BarError: see `read_bars`.
    """
    from nca_trader.data.bars import read_bars
    from nca_trader.data.samples import sample_bars
    from nca_trader.errors import ConfigError

    if args.data is not None:
        return read_bars(args.data, **reading_options(args))
    for name in reading_options(args):
        if name != "symbol":
            raise ConfigError(f"--{name} is about a bar file; give --data FILE with it.")
    bars = sample_bars("sp500")
    return bars if args.symbol is None else bars.select(args.symbol)
