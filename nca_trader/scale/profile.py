"""Says where the time of a training run's updates goes on this machine, and what bounds them.

The profiler's trace names each compiled operation that ran. The text of the compiled program says
to which part of an update that operation belongs, by the named scopes of `learner.update`. So the
split is one of what ran, and not of a model of it.
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from nca_trader.agents.policy import make_policy
from nca_trader.config import AgentConfig
from nca_trader.envs.trading import TradingEnv
from nca_trader.learner.learner import make_learner
from nca_trader.learner.programs import bytes_needed
from nca_trader.machine import make_directory
from nca_trader.scale.chips import rates_of
from nca_trader.scale.hlo import Module, cost_of, part_of, read_module, runs, unknown_loops

LEAST = 0.3  # of an update: the share that names its bound
UPDATE = "update"  # the name under which each traced update is marked
HOST = "host"  # the part in which no operation runs, and the device waits for the host
COARSE: tuple[str, ...] = ("collect", "learn", "replay", "other", HOST)
CONTROL = ("while", "conditional", "call")  # last as long as what runs inside them


class Profiler:
    """Traces and times the updates of a run; it is called after each, with its row of metrics.

    The first update compiles, and is neither traced nor timed. An update lasts from one call to
    the next, so that it has all that training does for it.

    Attributes:
      folder: where the trace is.
      traced: seconds of each update that was traced.
      timed: seconds of each of those after them.
      row: of the newest update; None before the first.
    """

    def __init__(self, folder: pathlib.Path, updates: int):
        """Start nothing yet; `updates` is how many will be traced."""
        self.folder, self._updates = folder, updates
        self.traced: list[float] = []
        self.timed: list[float] = []
        self.row: dict[str, Any] | None = None
        self._since = 0.0
        self._tracing, self._marked = False, contextlib.ExitStack()

    def __call__(self, row: dict[str, Any]) -> None:
        """Take the row of another update."""
        seconds = time.perf_counter() - self._since
        self._marked.close()
        if self.row is None:
            make_directory(self.folder)
            # Without the frames of Python, which would be most of the trace, and of its cost.
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
            self._tracing = True
        else:
            (self.traced if self._tracing else self.timed).append(seconds)
            if len(self.traced) == self._updates:
                self.close()
        self.row = row
        if self._tracing:
            mark = jax.profiler.StepTraceAnnotation(UPDATE, step_num=len(self.traced))
            self._marked.enter_context(mark)
        self._since = time.perf_counter()

    def close(self) -> None:
        """End a running trace."""
        self._marked.close()
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()


def profile(env: TradingEnv, agent: AgentConfig, watched: Profiler) -> dict[str, Any] | None:
    """Say what bounds the updates of a run that has ended.

    Args:
      env: the environment that it trained in.
      agent: its agent, as the run stores it.
      watched: traced its updates.

    Returns:
      The key `profile` of `nca-trader train --json`, see docs/guides/profile.md. Times are in
      seconds. None if no update was traced.
    """
    if watched.row is None or not watched.traced:
        return None
    learner = make_learner(env, make_policy(agent, env.spec), agent)
    # The program that ran, compiled once more: a trace names operations and has no text of them.
    state = jax.eval_shape(learner.init, jax.random.key(0))
    given = (state, learner.market, learner.course)
    compiled: Any = learner.bounded.program.lower(*given).compile()
    module, device = read_module(compiled.as_text()), learner.mesh.devices.flat[0]
    seconds = watched.timed or watched.traced
    update = statistics.median(seconds)
    # Twice where there is one, as quartiles take two.
    each = seconds if seconds[1:] else 2 * seconds
    low, _, high = statistics.quantiles(each, method="inclusive")
    cost, rates = cost_of(module, learner.mesh.size), rates_of(device, agent.precision.matmul)
    traffic = cost.hbm_bytes / update / rates.bytes
    # A CPU has no memory statistics: there only the compiler's account is known.
    sizes, held = compiled.memory_analysis(), device.memory_stats() or {}
    found: dict[str, Any] = {
        "update_s": update,
        "update_quartiles_s": [low, high],
        "updates_timed": len(watched.timed),
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
            "needed": bytes_needed(compiled),
            "arguments": sizes.argument_size_in_bytes,
            "temporaries": sizes.temp_size_in_bytes,
            "outputs": sizes.output_size_in_bytes,
            "peak": held.get("peak_bytes_in_use"),
            "limit": held.get("bytes_limit"),
        },
        "trace_slowdown": statistics.median(watched.traced) / update if watched.timed else None,
        "device": device.device_kind,
        "devices": learner.mesh.size,
    }
    found |= _parts(module, watched, update)
    host = found["parts"][HOST] / update if found["parts"] else 0.0
    found["bound"], found["advice"] = bound(found["flops_share"], found["traffic_share"], host)
    return found


def _parts(module: Module, watched: Profiler, update: float) -> dict[str, Any]:
    """Seconds of an update by part, from the trace.

    Tracing makes small operations longer. So shares are those of the trace, and seconds are those
    of an update without it.
    """
    file = max(watched.folder.glob("plugins/profile/*/*.xplane.pb"))
    updates, intervals = read_trace(file, ops_of(module))
    updates = updates[: len(watched.traced)]  # training may have ended within another
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


class Execution(NamedTuple):
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
) -> tuple[list[tuple[float, float]], list[Execution]]:
    """Read the profiler's file.

    Returns:
      The (begin, end) of each update, and the runs of the operations in `ops` on the first device.
    """
    updates: list[tuple[float, float]] = []
    intervals: list[Execution] = []
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
                            intervals.append(Execution(event.start_ns, end, ops[name]))
    return sorted(updates), intervals


def split(intervals: Iterable[Execution], begin: float, end: float) -> dict[str, float]:
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
