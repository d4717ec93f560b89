"""A trace of the learner's updates, read: where the time of each went, part by part.

The profiler names the compiled operation that ran, and the compiled program's text says of which
part of an update that operation is (the named scopes of `learner.iteration`). So the split is of
what ran, not of a model of it; the operations' own recording makes small ones longer than they are.
"""

from __future__ import annotations

import pathlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nca_trader.errors import RunError
from nca_trader.scale.cost import part_of
from nca_trader.scale.hlo import Module, runs

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
    import jax

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
    for time, number, op, starts in marks:
        for part, share in _shares(running, loops):
            spent[part] += share * (time - last)
        last = time
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
