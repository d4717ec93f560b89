"""`nca-trader train` trains an agent into a run folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nca_trader.cli import end_stopped, stop_on_signal
from nca_trader.cli.options import (
    COUNT,
    READING,
    SHARED,
    add_old_name,
    add_options,
    load_selection,
    load_training,
    reading_options,
    write_command,
)
from nca_trader.errors import CheckFailed
from nca_trader.progress import say

if TYPE_CHECKING:
    from nca_trader.learner.programs import Compilations
    from nca_trader.runs.manifest import Selection

SWITCHES = {  # option: the setting of jax, its value, what it does
    "debug-nans": ("jax_debug_nans", True, "stop at the first dropped update or NaN outside one"),
    "debug-infs": ("jax_debug_infs", True, "the same, for infinities outside an update too"),
    "disable-jit": ("jax_disable_jit", True, "run operation by operation, as Python; very slow"),
    "log-compiles": ("jax_log_compiles", True, "log each program that is compiled"),
    "full-traceback": ("jax_traceback_filtering", "off", "show jax's own frames in tracebacks"),
}


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Add what is trained, its run folder, the switches of debugging and those of several hosts."""
    required = {"required": True}
    # The shared help, since shards are an input of training alone.
    shards = SHARED["data"]["help"].replace("; without", ", or the shards.json of shards; without")
    add_options(parser, env=required, agent=required, data={"help": shards})
    add_options(parser, *READING, "devices", "set", "until", "steps", "track")
    selecting = "train on bars before FROM, and stop when the mean agent does best on those to TO"
    parser.add_argument("--select", metavar="FROM:TO", help=selecting)
    add_options(
        parser,
        run={"required": True, "help": "the run folder; may be gs:// or s3://"},
        seed={"default": 0, "help": "of everything random, also a synthetic market (default 0)"},
    )
    peers = parser.add_argument_group(
        "several hosts", "the same command on each; see docs/guides/multihost.md"
    )
    detected = "join the other hosts as SLURM, GKE or Cloud TPU describes them"
    peers.add_argument("--distributed", action="store_true", help=detected)
    for name, metavar, default, text in (
        ("coordinator", "HOST:PORT", "", "elsewhere: the address of process 0"),
        ("processes", "N", None, "elsewhere: the number of processes"),
        ("process", "I", None, "elsewhere: the number of this process, from 0"),
        ("heartbeat", "SECONDS", 100, "silence after which a process is lost (default 100)"),
        ("initialization-timeout", "SECONDS", 300, "how long to wait for the others (default 300)"),
    ):
        kind = str if name == "coordinator" else int
        peers.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=text)
    add_old_name(peers, "patience", "initialization-timeout", int)
    for option, (_, _, what) in SWITCHES.items():
        parser.add_argument(f"--{option}", action="store_true", help=what)
    sharding = "after the first update, show how each kind of array lies on the devices"
    parser.add_argument("--show-sharding", action="store_true", help=sharding)
    traced = "trace N (3) updates into RUN/profile, and say at the end what bounds them"
    parser.add_argument("--profile", type=COUNT, nargs="?", const=3, metavar="N", help=traced)


def run_train(args: argparse.Namespace) -> dict[str, Any] | None:
    """Train; return the run's path and its last metrics, in the first process of several."""
    from nca_trader.parallel.processes import join_processes, options

    peers, first = options(args), True
    if peers is None:
        result = _train(args)
        return result if result["complete"] else end_stopped(args, result)
    with join_processes(peers):
        import jax

        from nca_trader.parallel import hosts

        # JAX counts the devices of all processes only once they have joined.
        if args.devices is None:
            args.devices = jax.device_count()
        result, first = _train(args), hosts.first()
    shown = result if first else None
    # After the processes have left each other in order.
    return shown if result["complete"] else end_stopped(args, shown)


def _train(args: argparse.Namespace) -> dict[str, Any]:
    from nca_trader.data.shards import folder_of_shards
    from nca_trader.learner.train import planned_steps, steps_done, train
    from nca_trader.runs.trackers import track_results

    # First, because it sets --until, by which the training bars are cut.
    select = load_selection(args)
    env, agent = load_training(args, args.seed)
    if agent.learner.replay_slots:
        print(replay_line(env, agent))
    steps = planned_steps(agent, args.steps)
    with stop_on_signal("update") as stop, debugged(args) as watch:
        common = {
            "steps": args.steps, "seed": args.seed, "select": select, "track": args.track
        }  # fmt: skip
        run = train(env, agent, args.run_dir, report=watch, stop=stop, **common)
    done, chosen = steps_done(run), run.selection
    ended = chosen is not None and bool(chosen.ended)
    print(watch.sentence)
    profiled = watch.profiled(env, run)
    if chosen is not None and chosen.update is not None:
        print(selection_line(chosen, agent.selection.patience))
    gate = None
    if select is not None and (done >= steps or ended):
        from nca_trader.parallel import hosts

        # One process decides: all share the run folder that keeps the decision.
        found = hosts.on_first(lambda: select.decide(run))
        if found is not None:
            gate = dataclasses.asdict(found) | {"deployed": found.deployed}
            if hosts.first():
                track_results(args.track, run, "gate", found)
            print(found.sentence)
    if done < steps and not ended:
        print(
            f"stopped at {done:,} steps, all is saved in {args.run_dir}; the same command resumes"
        )
    else:
        # A backtest cannot read shards, so the user puts the name of a bar file there.
        shards = args.data and folder_of_shards(args.data) is not None
        data = "FILE" if shards else args.data
        again = write_command("backtest", run_dir=args.run_dir, data=data, **reading_options(args))
        said = "trained" if watch.trained else "nothing was left to do: it had been trained for"
        print(f"{said} {done:,} steps; see `{again}`")
        print(f"its policy trades {run.tradable}")
    # A run that stopped before its first update has no row.
    last = (run.metrics() or [{}])[-1]
    about = {"run": str(run.path), "complete": done >= steps or ended, "trades": run.tradable}
    if chosen is not None:
        about |= {"selected_update": chosen.update, "selection_sharpe": chosen.score}
    if gate is not None:
        about |= {"gate": gate}
    if profiled is not None:
        about |= {"profile": profiled}
    return about | last | watch.figures


def selection_line(found: Selection, patience: int) -> str:
    """Say which update was selected, among how many, and whether training ended there."""
    # None where no update's agent traded on the selection span.
    score = "no trade" if found.score is None else f"Sharpe ratio {found.score:.2f}"
    ended = f"; training ended after {patience} scores without a better one" if found.ended else ""
    if found.scored == 1:
        return f"update {found.update}: {score} of the mean agent on the selection span"
    return (
        f"selected: update {found.update}, the best of {found.scored} scored ({score} of the mean "
        f"agent on the selection span, which is the highest of them and so too good){ended}"
    )


def replay_line(env: Any, agent: Any) -> str:
    """Describe the agent's replay ring, without building anything on the device."""
    import jax

    from nca_trader.agents.policy import make_policy
    from nca_trader.learner.learner import make_learner
    from nca_trader.learner.sampled import describe_ring

    # `eval_shape` below computes shapes and sizes alone.
    learner = make_learner(env, make_policy(agent, env.spec), agent)
    return describe_ring(jax.eval_shape(learner.init, jax.random.key(0)).replay)


@contextlib.contextmanager
def debugged(args: argparse.Namespace) -> Iterator[Watch]:
    """Set the switches while the block runs, and yield the `Watch` of the updates.

    Raises:
      ConfigError: `--profile` of a run that is not on this machine.
      CheckFailed: with `--debug-nans` or `--debug-infs`, an update was dropped.
    """
    import jax

    from nca_trader.learner.programs import Compilations

    switches = [SWITCHES[name] for name in SWITCHES if getattr(args, name.replace("-", "_"))]
    # Restored afterwards: this process may go on, e.g. in a test.
    before = {name: getattr(jax.config, name) for name, _, _ in switches}
    with Compilations() as compiled:
        watch = Watch(args, compiled)
        try:
            for name, value, _ in switches:
                jax.config.update(name, value)
            yield watch
        finally:
            watch.close()
            for name, value in before.items():
                jax.config.update(name, value)


class Watch:
    """Takes the metrics of each update: prints its memory, traces some, and counts compilations.

    Args:
      args: the options of `train`.
      compiled: the compilations of this process, counted from the start.

    Raises:
      ConfigError: `--profile` of a run that is not on this machine.
    """

    def __init__(self, args: argparse.Namespace, compiled: Compilations):
        from nca_trader.cloud import local
        from nca_trader.scale.profile import Profiler

        self._args, self._compiled = args, compiled
        self._rates: list[float] = []
        self._profiler = None
        if args.profile is not None:
            # Refused before training: a trace goes to this machine's disk.
            folder = local(args.run_dir, "the trace of --profile")
            self._profiler = Profiler(folder / "profile", args.profile)

    def __call__(self, row: dict[str, Any]) -> None:
        """Take the row of another update.

        Raises:
          CheckFailed: it was dropped, and `--debug-nans` or `--debug-infs` is on.
        """
        import jax

        from nca_trader.learner.train import dropped_line
        from nca_trader.parallel import hosts

        args = self._args
        if not self._rates and "memory_gb" in row and hosts.first():
            say(f"memory: an update needs {row['memory_gb']:.3g} GB of a device")
        # The guard drops such an update inside the program, where jax would not stop.
        if (args.debug_nans or args.debug_infs) and row["skipped"]:
            raise CheckFailed(f"{dropped_line(row)}.")
        self._rates.append(row["steps_per_s"])
        if len(self._rates) == 1 and args.show_sharding:
            # Arrays of one kind are counted: a population has hundreds of leaves.
            kinds = Counter(
                (array.nbytes, f"{array.dtype}{list(array.shape)}", str(array.sharding))
                for array in jax.live_arrays()
            )
            for (_, what, where), number in sorted(kinds.items(), reverse=True):
                print(f"{number} x {what}  {where}")
        if self._profiler is not None:
            self._profiler(row)

    @property
    def trained(self) -> bool:
        """Whether this process made an update."""
        return bool(self._rates)

    @property
    def figures(self) -> dict[str, float]:
        """Seconds of compiling, programs, those read from the cache; of this process.

        first_over_steady: how much longer the first update took than the median of the others.
        """
        # The first update includes compilation, so it is not in the median.
        first, *rest = self._rates or [0.0]
        ratio = {"first_over_steady": statistics.median(rest) / first} if rest else {}
        done = self._compiled
        found = {"compile_s": done.seconds, "programs": done.count, "cache_hits": done.hits}
        return found | ratio

    @property
    def sentence(self) -> str:
        """`figures` in words."""
        found = self.figures
        ratio = found.get("first_over_steady")
        return (
            f"compiled {found['programs']} programs in {found['compile_s']:.1f} s, "
            f"{found['cache_hits']} of them from the cache"
            + (f"; the first update took {ratio:,.0f} times a later one" if ratio else "")
        )

    def profiled(self, env: Any, run: Any) -> dict[str, Any] | None:
        """Print what bounds the updates of the run, with `--profile`, and return it."""
        from nca_trader.parallel import hosts
        from nca_trader.scale.profile import profile
        from nca_trader.scale.words import profile_lines

        if self._profiler is None:
            return None
        found = profile(env, run.agent_config, self._profiler)
        if hosts.first():
            nothing = "profile: no update came after the first, so none was traced"
            print("\n".join(profile_lines(found) if found else [nothing]))
        return found

    def close(self) -> None:
        """End a running trace."""
        if self._profiler is not None:
            self._profiler.close()
