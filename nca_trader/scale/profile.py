"""Where a training run's time goes on this machine, measured on the learner that `train` runs."""

from __future__ import annotations

import math
import pathlib
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig, CheckpointConfig
from nca_trader.data.synthetic import task_of
from nca_trader.disk import scratch
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import ConfigError, RunError, StateError, argument
from nca_trader.evaluate.backtest import backtest
from nca_trader.learner.compilations import Compilations
from nca_trader.learner.learner import Learner, make_learner
from nca_trader.learner.markets import Markets
from nca_trader.learner.memory import bytes_needed
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.manifest import Run, open_run
from nca_trader.scale.chips import Rates, rates_of
from nca_trader.scale.hlo import Module, cost_of, part_of, read_module, runs, unknown_loops

TIMED = 11  # updates behind the median
LEAST = 0.3  # of an update that names its bound


class Timed(NamedTuple):
    """Seconds of updates: the first, which compiles, and the others."""

    first: float
    others: list[float]

    @property
    def median(self) -> float:
        """Of the others."""
        return statistics.median(self.others)


class _Training:
    """The learner's state and the market it is in; a call is one update, and gives its seconds."""

    def __init__(self, learner: Learner, markets: Markets, seed: int):
        self._learner, self._markets, self.done = learner, markets, 0
        self.state, self.market = learner.init(jax.random.key(seed)), learner.market

    def __call__(self) -> float:
        began = time.perf_counter()
        self.market = self._markets.of(self.done) or self._learner.market
        self.state, metrics = self._learner.step(self.state, self.market)
        jax.device_get(metrics)
        self.done += 1
        return time.perf_counter() - began


def profile(
    env: TradingEnv, agent: AgentConfig, folder: pathlib.Path, steps: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Times updates, then traces `steps` of them into `folder`; the keys: docs/guides/profile.md.

    Raises:
      ConfigError: `steps` below 1; or the agent's or the environment's own, see `make_learner`.
      StateError: the folder cannot be made.
    """
    if steps < 1:
        raise ConfigError(f"{argument('steps', steps)}: trace at least one update.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(
            f"{folder}: cannot be made ({error.strerror}); choose another folder."
        ) from None
    policy = make_policy(agent, env.spec)
    learner = make_learner(env, policy, agent)
    names = [step.__name__ for step in learner.programs.values()]
    with (
        Markets(env, agent.learner, learner.mesh) as markets,
        Compilations(names) as compiled,
    ):
        training = _Training(learner, markets, seed)
        first = training()
        compiled.again()
        found = {
            "compile_s": compiled.seconds,
            "programs": compiled.count,
            "cache_hits": compiled.hits,
        }
        timed = Timed(first, [training() for _ in range(TIMED)])
        traced = trace(training, folder, steps)
        found["retraces"] = compiled.again()
    # The program that ran: jax has it still, and compiles nothing here.
    step = learner.fitting.program.lower(training.state, training.market).compile()
    device = learner.mesh.devices.flat[0]
    rates = rates_of(device, agent.precision.matmul)
    found |= _timing(timed, learner.steps_per_update)
    found |= _work(step, timed.median, rates, learner.mesh.size)
    found |= _parts(step, folder, traced, timed.median)
    found |= {"memory": _memory(step, device)}
    found |= {"cycle": _cycle(env, agent, training, timed.median, found["parts"], seed)}
    host = found["parts"][HOST] / timed.median if found["parts"] else 0.0
    found["bound"], found["advice"] = bound(found["flops_share"], found["traffic_share"], host)
    return found | {"device": device.device_kind, "devices": learner.mesh.size}


def trace(training: Callable[[], float], folder: pathlib.Path, steps: int) -> list[float]:
    """Seconds of each of `steps` updates, which are traced into `folder`."""
    # Without the frames of Python, which would be most of the trace, and of its cost.
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    seconds = []
    with jax.profiler.trace(str(folder), profiler_options=options):
        for number in range(steps):
            with jax.profiler.StepTraceAnnotation(UPDATE, step_num=number):
                seconds.append(training())
    return seconds


def _timing(timed: Timed, steps_per_update: int) -> dict[str, Any]:
    low, _, high = statistics.quantiles(timed.others, n=4, method="inclusive")
    return {
        "first_s": timed.first,
        "first_over_steady": timed.first / timed.median,
        "update_s": timed.median,
        "update_quartiles_s": [low, high],
        "updates_timed": len(timed.others),
        "steps_per_update": steps_per_update,
        "steps_per_s": steps_per_update / timed.median,
    }


def _work(step: Any, seconds: float, rates: Rates, devices: int) -> dict[str, Any]:
    """Operations and traffic of a device in an update, over what it could do in that time."""
    module = read_module(step.as_text())
    cost = cost_of(module, devices)
    traffic = cost.hbm_bytes / seconds / rates.bytes
    return {
        "flops": cost.flops,
        "flops_per_s": cost.flops / seconds,
        "peak_flops_per_s": rates.flops,
        "peak_source": rates.source,
        "flops_share": cost.flops / seconds / rates.flops,
        "loops_of_unknown_length": unknown_loops(module),
        "traffic_bytes": cost.hbm_bytes,
        "peak_bytes_per_s": rates.bytes,
        # Above 1 caches serve it, and the count says nothing of the memory behind them.
        "traffic_share": traffic if traffic <= 1.0 else None,
    }


def _parts(step: Any, folder: pathlib.Path, traced: list[float], median: float) -> dict[str, Any]:
    """Seconds of an update by part: the traced one's shares of an update that is not traced."""
    files = files_of(folder)
    found = read_trace(files["xplane"], ops_of(read_module(step.as_text())))
    fine: dict[str, float] = {}
    for begin, end in found.updates:
        for part, spent in split(found.intervals, begin, end).items():
            fine[part] = fine.get(part, 0.0) + spent
    whole = sum(fine.values())
    # No operation of the program in the trace: this backend names them in another way.
    known = bool(found.intervals) and whole > 0.0
    fine = {part: median * spent / whole for part, spent in sorted(fine.items())} if known else {}
    return {
        "parts": coarse(fine) if known else None,
        "fine_parts": fine or None,
        "updates_traced": len(found.updates),
        "operations_traced": len(found.intervals),
        "trace_slowdown": statistics.median(traced) / median,
        "trace": {name: str(path) for name, path in files.items()},
    }


def _memory(step: Any, device: Any) -> dict[str, Any]:
    """Bytes of a device: what the compiler says of the program, what the device says it holds."""
    sizes, held = step.memory_analysis(), device.memory_stats() or {}
    return {
        "needed": bytes_needed(step),
        "arguments": sizes.argument_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "outputs": sizes.output_size_in_bytes,
        "peak": held.get("peak_bytes_in_use"),
        "limit": held.get("bytes_limit"),
    }


def _cycle(
    env: TradingEnv,
    agent: AgentConfig,
    training: _Training,
    update: float,
    parts: dict[str, float] | None,
    seed: int,
) -> dict[str, Any]:
    """Seconds of the updates between two checkpoints, of saving one, and of a backtest of it.

    Of a save it is what training waits for: the rest is written beside it.
    """
    with scratch() as folder:
        run = open_run(env, agent, folder / "runs" / "profile", seed)
        with Checkpoints(run.path / "checkpoints", agent.checkpoint.keep) as checkpoints:
            # The first one makes the folder and starts the storage's threads.
            checkpoints.save(1, training.state)
            checkpoints.wait()
            save = _seconds(lambda: checkpoints.save(2, training.state))
        evaluate = _evaluation(env, run, seed)
    updates = between_checkpoints(agent.checkpoint, update)
    spent = {part: updates * each for part, each in (parts or {"update": update}).items()}
    spent |= {"save": save} | ({} if evaluate is None else {"evaluate": evaluate})
    return {"updates": updates, "seconds": sum(spent.values()), "parts": spent}


def between_checkpoints(config: CheckpointConfig, update: float) -> int:
    """Updates from one checkpoint to the next, of `update` seconds each; 1 where there is none."""
    by_time = math.ceil(config.every_seconds / update) if config.every_seconds else 0
    return min((n for n in (config.every, by_time) if n), default=1)


def _evaluation(env: TradingEnv, run: Run, seed: int) -> float | None:
    """Seconds of a backtest over the bars that are trained on; None where they are shards."""
    if env.shards is not None:
        return None
    source: Any = task_of(env.config, seed=seed) if env.config.market else env.bars
    # The first one compiles.
    return [_seconds(lambda: backtest(source, run)) for _ in range(2)][1]


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def bound(compute: float, memory: float | None, host: float) -> tuple[str, str]:
    """What an update waits for, and what to try.

    Args:
      compute: achieved over the peak rate of matrix products. memory: traffic over the memory's
        rate, None if not known. host: part of the time in which the device does nothing.
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


UPDATE = "update"  # the name under which each traced update is marked
HOST = "host"  # the part in which no operation runs: the device waits for the host
COARSE: tuple[str, ...] = ("collect", "learn", "replay", "other", HOST)
CONTROL = ("while", "conditional", "call")  # last as long as what runs inside them


class Op(NamedTuple):
    """An operation of a compiled program: the part of an update it is of, and whether it loops."""

    part: str
    control: bool


class Interval(NamedTuple):
    """One run of an operation, from `begin` to `end` in nanoseconds of the trace."""

    begin: float
    end: float
    op: Op


class Trace(NamedTuple):
    """updates: (begin, end) of each. intervals: the operations of the first device."""

    updates: list[tuple[float, float]]
    intervals: list[Interval]


def ops_of(module: Module) -> dict[str, Op]:
    """The operations of a program by name; one without a path has that of the loop around it."""
    paths = {i.name: i.op_name for each in module.computations.values() for i in each.values()}
    paths |= {run.instruction.name: run.path for run in runs(module)}
    return {
        instruction.name: Op(part_of(paths[instruction.name]), instruction.opcode in CONTROL)
        for computation in module.computations.values()
        for instruction in computation.values()
    }


def files_of(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The newest trace in a folder: "xplane" for TensorBoard and "perfetto" for Perfetto.

    Raises:
      RunError: there is none.
    """
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))
    if not found:
        raise RunError(f"{folder}: holds no trace; give the folder that a profile was written to.")
    host = found[-1].name.removesuffix(".xplane.pb")
    return {"xplane": found[-1], "perfetto": found[-1].with_name(f"{host}.trace.json.gz")}


def read_trace(path: pathlib.Path, ops: Mapping[str, Op]) -> Trace:
    """Reads the profiler's file; operations of other programs than `ops` are left out."""
    updates: list[tuple[float, float]] = []
    intervals: list[Interval] = []
    with warnings.catch_warnings():
        # Of jaxlib's own type on Python 3.12; where warnings are errors the process would abort.
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name == UPDATE:
                        updates.append((event.start_ns, event.start_ns + event.duration_ns))
                    elif op := ops.get(_op_of(event, line.name, plane.name)):
                        end = event.start_ns + event.duration_ns
                        intervals.append(Interval(event.start_ns, end, op))
    return Trace(sorted(updates), intervals)


def _op_of(event: Any, line: str, plane: str) -> str:
    """The operation that an event is a run of on the first device, else ""."""
    if event.name.startswith("end: "):  # a mark of the CPU's runtime
        return ""
    stats = dict(event.stats)
    ordinal = plane.rpartition(":")[2] if plane.startswith("/device:") else "0"
    if str(stats.get("device_ordinal", ordinal)) != "0":
        return ""
    # A TPU's line of operations has their text for a name; elsewhere it is said beside.
    text = event.name.split(" ")[0].lstrip("%") if line == "XLA Ops" else ""
    return str(stats.get("hlo_op", text))


def split(intervals: Iterable[Interval], begin: float, end: float) -> dict[str, float]:
    """Nanoseconds of `begin` to `end` by part; they sum to the whole.

    Where operations of several parts run at once, each has its share; time inside a loop in which
    none of its operations runs is the loop's; what is left is `HOST`.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    marks = sorted(_marks(intervals, begin, end), key=lambda mark: mark[0])
    running: Counter[str] = Counter()
    loops: dict[int, str] = {}
    last = begin
    for at, number, op, starts in marks:
        for part, share in _shares(running, loops):
            spent[part] += share * (at - last)
        last = at
        if op.control and starts:
            loops[number] = op.part
        elif op.control:
            loops.pop(number)
        else:
            running[op.part] += 1 if starts else -1
    spent[HOST] += end - last
    return dict(spent)


def _marks(
    intervals: Iterable[Interval], begin: float, end: float
) -> Iterator[tuple[float, int, Op, bool]]:
    for number, each in enumerate(intervals):
        first, last = max(each.begin, begin), min(each.end, end)
        if first < last:
            yield first, number, each.op, True
            yield last, number, each.op, False


def _shares(running: Counter[str], loops: dict[int, str]) -> Iterator[tuple[str, float]]:
    """Who has the present moment: what runs, else the innermost loop, else the host."""
    total = sum(running.values())
    if total:
        for part, count in running.items():
            yield part, count / total
    else:
        yield (next(reversed(loops.values())) if loops else HOST), 1.0


def coarse(parts: Mapping[str, float]) -> dict[str, float]:
    """The same by what stands before the colon: collect, learn, replay, other and host."""
    total: dict[str, float] = dict.fromkeys(COARSE, 0.0)
    for part, amount in parts.items():
        total[part.partition(":")[0]] += amount
    return total
