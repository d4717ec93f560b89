"""Measures where a training run's time goes on this machine, with the learner that `train` runs.

The profiler's trace names each compiled operation that ran. The text of the compiled program says
to which part of an update that operation belongs, by the named scopes of `learner.update`. So the
split is one of what ran, and not of a model of it.
"""

from __future__ import annotations

import math
import pathlib
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, CheckpointConfig
from nca_trader.data.synthetic import task_of
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, argument
from nca_trader.evaluate.backtest import backtest
from nca_trader.learner.learner import make_learner
from nca_trader.learner.programs import Compilations, bytes_needed
from nca_trader.learner.train import Markets
from nca_trader.machine import make_directory, scratch
from nca_trader.progress import Progress
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.opening import open_run
from nca_trader.scale.chips import rates_of
from nca_trader.scale.hlo import Module, cost_of, part_of, read_module, runs, unknown_loops

TIMED = 11  # updates behind the median
LEAST = 0.3  # of an update: the share that names its bound
UPDATE = "update"  # the name under which each traced update is marked
HOST = "host"  # the part in which no operation runs, and the device waits for the host
COARSE: tuple[str, ...] = ("collect", "learn", "replay", "other", HOST)
CONTROL = ("while", "conditional", "call")  # last as long as what runs inside them


def profile(
    env: TradingEnv, agent: AgentConfig, folder: pathlib.Path, steps: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Time updates, then traces some more into a folder.

    Args:
      env: the environment to train in.
      agent: the agent to train.
      folder: where the trace goes.
      steps: number of updates to trace.
      seed: of the training run.

    Returns:
      The keys of `nca-trader profile --json`, see docs/guides/profile.md. Times are in seconds.

    Raises:
      ConfigError: `steps` below 1, or an error of the agent or the environment.
      StateError: the folder cannot be made.
    """
    if steps < 1:
        raise ConfigError(f"{argument('steps', steps)}: trace at least one update.")
    make_directory(folder)
    learner = make_learner(env, make_policy(agent, env.spec), agent)
    names = [step.__name__ for step in learner.programs.values()]
    state, market, done = learner.init(jax.random.key(seed)), learner.market, 0
    with (
        Markets(env, agent.learner, learner.mesh) as markets,
        Compilations(names) as compiled,
        Progress(1 + TIMED + steps, "profile", "updates", compiles=True, ticks=False) as shown,
    ):

        def train() -> None:
            nonlocal state, market, done
            market = markets.of(done) or learner.market
            state, metrics = learner.step(state, market)
            jax.device_get(metrics)  # waits for the update: jax dispatches it asynchronously
            done += 1
            shown.update()

        first = _seconds(train)  # compiles
        compiled.again()
        found: dict[str, Any] = {
            "compile_s": compiled.seconds,
            "programs": compiled.count,
            "cache_hits": compiled.hits,
        }
        timed = [_seconds(train) for _ in range(TIMED)]
        # Without the frames of Python, which would be most of the trace, and of its cost.
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        traced = []
        with jax.profiler.trace(str(folder), profiler_options=options):
            for number in range(steps):
                with jax.profiler.StepTraceAnnotation(UPDATE, step_num=number):
                    traced.append(_seconds(train))
        found["retraces"] = compiled.again()
    # The program that ran: jax has it still, and compiles nothing here.
    program: Any = learner.fitting.program.lower(state, market).compile()
    module, device = read_module(program.as_text()), learner.mesh.devices.flat[0]
    update, (low, _, high) = (
        statistics.median(timed),
        statistics.quantiles(timed, method="inclusive"),
    )
    cost, rates = cost_of(module, learner.mesh.size), rates_of(device, agent.precision.matmul)
    traffic = cost.hbm_bytes / update / rates.bytes
    # A CPU has no memory statistics: there only the compiler's account is known.
    sizes, held = program.memory_analysis(), device.memory_stats() or {}
    found |= {
        "first_s": first,
        "first_over_steady": first / update,
        "update_s": update,
        "update_quartiles_s": [low, high],
        "updates_timed": len(timed),
        "steps_per_update": learner.steps_per_update,
        "steps_per_s": learner.steps_per_update / update,
        "flops": cost.flops,
        "flops_per_s": cost.flops / update,
        "peak_flops_per_s": rates.flops,
        "peak_source": rates.source,
        "flops_share": cost.flops / update / rates.flops,
        "loops_of_unknown_length": unknown_loops(module),
        "traffic_bytes": cost.hbm_bytes,
        "peak_bytes_per_s": rates.bytes,
        # Above 1, caches serve it, and the count says nothing about the memory behind them.
        "traffic_share": traffic if traffic <= 1.0 else None,
        "memory": {
            "needed": bytes_needed(program),
            "arguments": sizes.argument_size_in_bytes,
            "temporaries": sizes.temp_size_in_bytes,
            "outputs": sizes.output_size_in_bytes,
            "peak": held.get("peak_bytes_in_use"),
            "limit": held.get("bytes_limit"),
        },
        "trace_slowdown": statistics.median(traced) / update,
        "device": device.device_kind,
        "devices": learner.mesh.size,
    }
    found |= _parts(module, folder, update)
    found["cycle"] = _cycle(env, agent, state, update, found["parts"], seed)
    host = found["parts"][HOST] / update if found["parts"] else 0.0
    found["bound"], found["advice"] = bound(found["flops_share"], found["traffic_share"], host)
    return found


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _parts(module: Module, folder: pathlib.Path, update: float) -> dict[str, Any]:
    """Seconds of an update by part, from the newest trace in a folder.

    Tracing makes small operations longer. So shares are those of the trace, and seconds are those
    of an update without it.
    """
    file = max(folder.glob("plugins/profile/*/*.xplane.pb"))
    updates, intervals = read_trace(file, ops_of(module))
    fine: Counter[str] = Counter()
    for begin, end in updates:
        fine.update(split(intervals, begin, end))
    # Without an operation of the program in the trace, this backend names them in another way.
    whole = sum(fine.values()) if intervals else 0.0
    seconds = {part: update * spent / whole for part, spent in sorted(fine.items()) if whole}
    perfetto = file.with_name(f"{file.name.removesuffix('.xplane.pb')}.trace.json.gz")
    return {
        "parts": coarse(seconds) if seconds else None,
        "fine_parts": seconds or None,
        "updates_traced": len(updates),
        "operations_traced": len(intervals),
        "trace": {"xplane": str(file), "perfetto": str(perfetto)},
    }


def _cycle(
    env: TradingEnv,
    agent: AgentConfig,
    state: Any,
    update: float,
    parts: dict[str, float] | None,
    seed: int,
) -> dict[str, Any]:
    """Seconds of the updates between two checkpoints, of one save and of one backtest."""
    updates = between_checkpoints(agent.checkpoint, update)
    spent = {part: updates * each for part, each in (parts or {"update": update}).items()}
    with scratch() as folder:
        run = open_run(env, agent, folder / "runs" / "profile", seed)
        with Checkpoints(run.path / "checkpoints", agent.checkpoint.keep) as checkpoints:
            # The first one makes the folder and starts the storage's threads.
            checkpoints.save(1, state)
            checkpoints.wait()
            # Training waits for the copy to the host. The rest is written while it goes on.
            spent["save"] = _seconds(lambda: checkpoints.save(2, state))
        if env.shards is None:
            source: Any = task_of(env.config, seed=seed) if env.config.market else env.bars
            backtest(source, run)  # compiles
            spent["evaluate"] = _seconds(lambda: backtest(source, run))
    return {"updates": updates, "seconds": sum(spent.values()), "parts": spent}


def between_checkpoints(config: CheckpointConfig, update: float) -> int:
    """Return the number of updates between checkpoints, of `update` seconds each, at least 1."""
    by_time = math.ceil(config.every_seconds / update) if config.every_seconds else 0
    return min((n for n in (config.every, by_time) if n), default=1)


def bound(compute: float, memory: float | None, host: float) -> tuple[str, str]:
    """Return what an update waits for, and what to try.

    Args:
      compute: rate of matrix products over its peak.
      memory: traffic over the memory's rate, None if unknown.
      host: share of the time in which the device does nothing.
    """
    if host >= LEAST:
        return "host", (
            "the device waits for the host: raise learner.num_segments or "
            "learner.envs_per_segment, so that an update holds more work"
        )
    if compute >= LEAST and compute >= (memory or 0.0):
        return "compute", (
            "matrix products fill the time: fewer learner.num_epochs, a narrower policy, "
            'precision.matmul = "bfloat16" on an accelerator, or more devices'
        )
    if memory is not None and memory >= LEAST:
        return "memory", (
            "arrays moved fill the time: more learner.micro_batches, wider channels, or "
            'policy.remat, and precision.matmul = "bfloat16" on an accelerator'
        )
    return "dispatch", (
        "operations are too small to fill the device: raise learner.num_segments or "
        "learner.envs_per_segment until steps/s no longer rises, or widen the policy"
    )


class Op(NamedTuple):
    """An operation of a program. part: of an update; control: whether others run inside it."""

    part: str
    control: bool


class Interval(NamedTuple):
    """One run of an operation, from `begin` to `end`, in nanoseconds of the trace."""

    begin: float
    end: float
    op: Op


def ops_of(module: Module) -> dict[str, Op]:
    """Return the operations of a program by name."""
    every = [each for computation in module.computations.values() for each in computation.values()]
    paths = {each.name: each.op_name for each in every}
    # An operation without a path has that of the loop around it.
    paths |= {run.instruction.name: run.path for run in runs(module)}
    return {each.name: Op(part_of(paths[each.name]), each.opcode in CONTROL) for each in every}


def read_trace(
    path: pathlib.Path, ops: Mapping[str, Op]
) -> tuple[list[tuple[float, float]], list[Interval]]:
    """Read the profiler's file.

    Returns:
      The (begin, end) of each update, and the runs of the operations in `ops` on the first device.
    """
    updates: list[tuple[float, float]] = []
    intervals: list[Interval] = []
    with warnings.catch_warnings():
        # Of jaxlib's own type on Python 3.12. Where warnings are errors the process would abort.
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            first = plane.name.rpartition(":")[2] if plane.name.startswith("/device:") else "0"
            for line in plane.lines:
                for event in line.events:
                    end = event.start_ns + event.duration_ns
                    if event.name == UPDATE:
                        updates.append((event.start_ns, end))
                    elif not event.name.startswith("end: "):  # a mark of the CPU's runtime
                        stats = dict(event.stats)
                        # A TPU's line of operations has their text for a name.
                        text = event.name.split(" ")[0].lstrip("%")
                        name = str(stats.get("hlo_op", text if line.name == "XLA Ops" else ""))
                        if name in ops and str(stats.get("device_ordinal", first)) == "0":
                            intervals.append(Interval(event.start_ns, end, ops[name]))
    return sorted(updates), intervals


def split(intervals: Iterable[Interval], begin: float, end: float) -> dict[str, float]:
    """Return the nanoseconds from `begin` to `end` by part; they sum to the whole.

    Operations of several parts that run at once share the time. Time inside a loop in which none
    of its operations runs belongs to the innermost loop. The rest is `HOST`.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    marks: list[tuple[float, int, Op, int]] = []
    for number, each in enumerate(intervals):
        first, last = max(each.begin, begin), min(each.end, end)
        if first < last:
            marks += [(first, number, each.op, 1), (last, number, each.op, -1)]
    running: Counter[str] = Counter()
    loops: dict[int, str] = {}
    before = begin
    for at, number, op, change in sorted(marks, key=lambda mark: mark[0]):
        total = running.total()
        for part, count in running.items():
            spent[part] += (at - before) * count / (total or 1)
        if not total:
            spent[next(reversed(loops.values())) if loops else HOST] += at - before
        before = at
        if not op.control:
            running[op.part] += change
        elif change > 0:
            loops[number] = op.part
        else:
            del loops[number]
    spent[HOST] += end - before
    return dict(spent)


def coarse(parts: Mapping[str, float]) -> dict[str, float]:
    """Add parts up by what stands before the colon: collect, learn, replay, other and host."""
    total: dict[str, float] = dict.fromkeys(COARSE, 0.0)
    for part, amount in parts.items():
        total[part.partition(":")[0]] += amount
    return total
