"""What a training run would need on a TPU slice, by the compiler's account of its program.

Everything here is arithmetic on `Needs`. Nothing was run, and seconds are estimates.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nca_trader.agents import load_agent
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.data.bars import sample_bars
from nca_trader.envs import load_env
from nca_trader.parallel.mesh import AXES
from nca_trader.progress import Progress
from nca_trader.scale import compiled
from nca_trader.scale.chips import Chip, Slice, mesh_axes, slice_of
from nca_trader.scale.compiled import Ask, Needs, Question
from nca_trader.scale.hlo import Collective
from nca_trader.types import Bars

Report = dict[str, Any]
CLOSE = 0.95  # of the best rate: what a smaller batch may lose
NEAR = 1 / 16  # of the batch, or of the memory: what the largest batch may leave
FURTHEST = 4096  # times a batch is the next, whatever the line predicts
FARTHER = 3  # times as many segments have the second batch of the line, and cost as much to compile
MOST = 3  # questions of a search about memory, after that of the agent's own batch


def plan(
    agent: AgentConfig | str | os.PathLike[str],
    topology: str,
    *,
    env: EnvConfig | str | os.PathLike[str] = "index_daily",
    bars: Bars | None = None,
    largest: bool = False,
    report: Callable[[Report], None] = lambda known: None,
) -> Report:
    """Compile an agent's update for a TPU slice that is not here: does it fit, what bounds it.

    Args:
      agent: a config, a preset's name, or the path of a TOML file.
      topology: a slice, e.g. "v5e-8" (the N of "v5p-N" counts cores) or "v5e:2x4", chips by axis.
      env: a config, a preset's name, or the path of a TOML file.
      bars: the bars to train on. None stands for sample bars, or for the market that `env` draws.
      largest: also search for the largest batch, which takes one more compilation and at most three
        questions about memory, of seconds each.
      report: called with what is known after each answer of the search, which takes minutes.

    Returns:
      The keys of `nca-trader plan --json`, see docs/guides/plan.md. `fits` is whether the update
      fits, `hbm_bytes_per_chip` what it needs and `hbm_limit` what there is, in bytes; `estimate`
      has its seconds.

    Raises:
      ConfigError: sizes that do not divide, an unknown slice, or no TPU compiler (install the
        extra `tpu-plan`).
      RunError: the compiler ended its process.

    Example:
      >>> import nca_trader as nca
      >>> nca.plan("nano", "v5e-8")["fits"]  # doctest: +SKIP
      True
    """
    there, config, loaded = slice_of(topology), load_env(env), load_agent(agent)
    if bars is None and not config.market:
        # As `train` does without --data.
        bars = sample_bars("sp500")
    loaded, changes = on_slice(loaded, there)
    question = Question(config, loaded, bars, there)
    number = 0
    with compiled.compiler() as compiler, Progress(None, f"plan for {there.name}"):

        def ask(question: Question) -> Needs:
            nonlocal number
            number += 1
            segments = question.agent.learner.num_segments
            what = "memory" if question.memory_only else "compilation"
            with Progress(None, f"{what} {number}, num_segments = {segments:,}"):
                return compiler(question)

        found = ask(question)
        known = {
            "topology": there.name,
            "chips": there.chips,
            "devices": there.devices,
            "mesh": dict(zip(AXES, loaded.mesh.axes, strict=True)),
            "mesh_from_table": dict(zip(AXES, mesh_axes(there.devices, there.chips), strict=True)),
            "set": changes,
        }
        known |= described(found, there.of) | {"widths": width_audit(loaded, there.of)}
        if largest:
            for batches in largest_batch(ask, question, found):
                known["largest"] = batches
                report(known)
    return known


def on_slice(agent: AgentConfig, there: Slice) -> tuple[AgentConfig, dict[str, int]]:
    """Return the agent on all devices of a slice, and the keys that this changes.

    The mesh is the agent's own if its file sets data, fsdp or model, otherwise that of
    `mesh_axes`. Segments are drawn within logical shards, and every part of a batch has equally
    many of them, so both numbers are rounded up.
    """
    learner, mesh, devices = agent.learner, agent.mesh, there.devices
    if mesh.data is None:
        free = mesh.fsdp * mesh.model == 1
        _, fsdp, model = mesh_axes(devices, there.chips) if free else mesh.axes
        # If it does not divide, the slice is refused later, with the sizes as the file gives them.
        if devices % (fsdp * model) == 0:
            mesh = dataclasses.replace(mesh, devices=devices, fsdp=fsdp, model=model)
    parts = mesh.axes[0] * mesh.fsdp
    shards = -(-learner.logical_shards // parts) * parts
    unit = shards * learner.num_minibatches
    segments = -(-learner.num_segments // unit) * unit
    wanted = {
        "mesh.devices": (math.prod(agent.mesh.axes), math.prod(mesh.axes)),
        "mesh.fsdp": (agent.mesh.fsdp, mesh.fsdp),
        "mesh.model": (agent.mesh.model, mesh.model),
        "learner.logical_shards": (learner.logical_shards, shards),
        "learner.num_segments": (learner.num_segments, segments),
    }
    changes = {name: value for name, (before, value) in wanted.items() if value != before}
    if not changes:
        return agent, {}
    learner = dataclasses.replace(learner, logical_shards=shards, num_segments=segments)
    return dataclasses.replace(agent, learner=learner, mesh=mesh), changes


def described(found: Needs, chip: Chip) -> Report:
    """Return the compiler's account, per chip, with what follows from it."""
    parts = {}
    if found.cost is not None:
        parts = {name: (part.cycles, part.flops) for name, part in sorted(found.cost.parts.items())}
        parts["update"] = (found.cost.cycles, found.cost.flops)
    collectives = sorted(found.cost.collectives.items()) if found.cost else ()
    return {
        "fits": found.fits,
        "hbm_bytes_per_chip": None if found.needed is None else found.needed * chip.devices,
        # The compiler counts by device, and a chip may be several.
        "hbm_limit": int(found.limit * chip.devices),
        "bytes_by_kind": {kind: size * chip.devices for kind, size in found.kinds.items()},
        "parameters": found.parameters,
        "bars": found.bars,
        "bars_per_parameter": found.bars / found.parameters,
        "compile_s": found.seconds,
        "collectives": {k: each._asdict() | {"dtypes": [*each.dtypes]} for k, each in collectives},
        "cycles": {name: cycles for name, (cycles, _) in parts.items()},
        "cycles_over_floor": {
            name: cycles * chip.flops_per_cycle / flops
            for name, (cycles, flops) in parts.items()
            if flops
        },
        "estimate": None if found.cost is None else estimate(found, chip),
        "loops_counted_once": found.unknown_loops,
    }


def estimate(found: Needs, chip: Chip) -> Report:
    """Return seconds of an update and what bounds them, by cycles and public rates.

    compute: the compiler's cycles at the chip's clock. memory: traffic with main memory at the
    vendor's rate. communication: bytes over the links, one way, without latency.
    """
    cost = found.cost
    if cost is None:
        raise ValueError("a program that the compiler refused has no cost")
    # The vendor counts both directions of a link. A ring sends in one.
    one_way = chip.ici_gb_per_s * 1e9 / 2 / chip.devices
    seconds = {
        "compute": cost.cycles / chip.clock,
        "memory": cost.hbm_bytes / (chip.hbm_gb_per_s * 1e9 / chip.devices),
        "communication": sum(
            wire_seconds(k, each, one_way) for k, each in cost.collectives.items()
        ),
    }
    # Compute and memory overlap, communication is waited for.
    whole = max(seconds["compute"], seconds["memory"]) + seconds["communication"]
    return {
        "step_s": whole,
        "steps_per_s": found.steps / whole,
        "steps": found.steps,
        "bound": max(seconds, key=seconds.__getitem__),
        "seconds": seconds,
        "matrix_units_busy": cost.flops / chip.flops_per_cycle / chip.clock / whole,
        "hbm_traffic_bytes": cost.hbm_bytes,
    }


def wire_seconds(collective: str, cost: Collective, one_way: float) -> float:
    """Return the least time that a kind of collective occupies a device's links.

    In a ring of n devices an all-reduce sends `2 (n - 1) / n` of its bytes, a reduce-scatter or an
    all-to-all `(n - 1) / n`, an all-gather `n - 1` times what it contributes, a permutation once.
    Latency is not counted.

    Args:
      collective: its kind as HLO names it, e.g. "all-reduce".
      cost: its bytes, and the number of devices in a group.
      one_way: bytes per second out of a chip, over all its links.
    """
    n = max(cost.group, 1)
    share = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1.0, "collective-permute": 1.0}
    return share.get(collective, (n - 1) / n) * cost.bytes / one_way


def width_audit(agent: AgentConfig, chip: Chip) -> list[Report]:
    """Return how much of a matrix unit each width fills, and the next width that fills it."""
    audit = []
    # A matrix unit works on whole squares, so a width is padded to the next multiple of its side.
    for name in ("channels", "head_hidden", "hidden"):
        if name != "hidden" or agent.policy.kind != "gru":  # a GRU has no hidden layer
            width = getattr(agent.policy, name)
            full = -(-width // chip.mxu) * chip.mxu
            row = {"name": f"policy.{name}", "width": width, "fills": width / full}
            audit.append(row | {"full_width": full})
    return audit


def largest_batch(ask: Ask, question: Question, found: Needs) -> Iterator[Report]:
    """Search for the most segments that fit.

    Their memory is asked for, at most `MOST` times. Their code is not generated: that of a large
    batch takes many minutes. So the seconds of an update are on the line through two compilations,
    of a batch and of `FARTHER` times as many segments. Large ones are slower: their arrays leave
    fast memory.

    Args:
      ask: compiles the update for a question.
      question: about the batch to begin with.
      found: the answer about that batch.

    Yields:
      What is known after each answer. `largest`: the most segments that fit. `efficient`: the
      fewest on the line with 95% of their rate. `tries`, all of them. The first two are None where
      none fits, and the second and the rates until the line is known.
    """
    learner, chip = question.agent.learner, question.there.of
    unit = learner.logical_shards * learner.num_minibatches
    tries: dict[int, Report] = {}
    shares: dict[int, float] = {}
    seconds: dict[int, float] = {}

    def add(segments: int, known: Needs) -> Report:
        needed, code = known.needed, known.kinds.get("code", 0)
        if needed is not None:
            shares[segments] = (needed - code) / known.limit
        if known.cost is not None:
            seconds[segments] = estimate(known, chip)["step_s"]
        tries[segments] = {
            "num_segments": segments,
            "steps": known.steps,
            "fits": known.fits,
            "hbm_bytes_per_chip": None if needed is None else needed * chip.devices,
        }
        return summary(tries, seconds, unit)

    def asked(segments: int, memory_only: bool) -> Needs:
        changed = dataclasses.replace(learner, num_segments=segments)
        agent = dataclasses.replace(question.agent, learner=changed)
        return ask(question._replace(agent=agent, memory_only=memory_only))

    begin, left = learner.num_segments, MOST
    known = add(begin, found)
    yield known
    while left and (segments := next_largest(known["tries"], shares, unit)):
        known, left = add(segments, asked(segments, True)), left - 1
        yield known
    if known["largest"] is None:
        return
    most = known["largest"]["num_segments"]
    # Of a batch that does not fit there are no seconds: the least one is compiled then.
    small = begin if tries[begin]["fits"] else unit
    for segments in (small, min(FARTHER * small, most)):
        if segments not in seconds:
            known = add(segments, asked(segments, False))
            yield known


def summary(tries: Mapping[int, Report], seconds: Mapping[int, float], unit: int) -> Report:
    """Return what is known of a search, with the rates on the line.

    Args:
      tries: what was tried, by segments.
      seconds: of an update, by segments, of those that were compiled.
      unit: the least number of segments that the mesh and the minibatches allow.
    """
    most = max((n for n in tries if tries[n]["fits"]), default=0)
    line, largest, efficient, rows = line_of(seconds, most), None, None, []
    for n in sorted(tries):
        rate = None if line is None else tries[n]["steps"] / (line[0] + line[1] * n)
        rows.append(tries[n] | {"steps_per_s": rate})
        largest = rows[-1] if n == most else largest
    if most and line is not None:
        per_segment = tries[most]["steps"] // most
        placed = {n: tries[n]["hbm_bytes_per_chip"] for n in sorted(tries) if tries[n]["fits"]}
        fewest = max(fewest_as_fast(*line, most, unit), min(seconds))
        efficient = {
            "num_segments": fewest,
            "steps": per_segment * fewest,
            "fits": True,
            "hbm_bytes_per_chip": int(np.interp(fewest, [*placed], [*placed.values()])),
            "steps_per_s": per_segment * fewest / (line[0] + line[1] * fewest),
        }
    return {"largest": largest, "efficient": efficient, "tries": rows}


def next_largest(tries: Sequence[Report], shares: Mapping[int, float], unit: int) -> int:
    """Return the number of segments to try next, 0 where the most that fit are known to `NEAR`.

    Memory is almost linear in the batch, and no batch needs none. So the next is where the line
    through the two largest batches meets the memory, less half of `NEAR`; from one batch the line
    goes through 0. What batches of all sizes need makes that too few and not too many.

    Args:
      tries: what was tried.
      shares: shares of the memory that it needs, as far as they are known.
      unit: the least number of segments that the mesh and the minibatches allow.
    """
    fits = {each["num_segments"]: each["fits"] for each in tries}
    low = max((n for n in fits if fits[n]), default=0)
    high = min((n for n in fits if not fits[n]), default=0)
    if not low:  # the first batch does not fit: does any?
        return unit if high > unit else 0
    if shares.get(low, 0.0) >= 1 - NEAR or (high and high - low <= max(unit, low * NEAR)):
        return 0
    (a, share_a), (b, share_b) = sorted(({0: 0.0} | dict(shares)).items())[-2:]
    slope = (share_b - share_a) / (b - a)
    aim = a + (1 - NEAR / 2 - share_a) / slope if slope > 0 else math.inf
    if high and not low < aim < high:
        aim = (low + high) / 2
    least, most = low + unit, high - unit if high else FURTHEST * low
    aim = min(aim, most)
    step = step_of(aim, unit)
    return min(max(int(aim // step) * step, least), most)


def step_of(segments: float, unit: int) -> int:
    """Return the largest power of two, times `unit`, within half of `NEAR` of the segments.

    Multiples of it fill tiles. The compiler splits a batch by its factors, and one with large prime
    factors may need three times the memory of the next.
    """
    return unit * 2 ** int(math.log2(max(segments * NEAR / 2 / unit, 1.0)))


def line_of(seconds: Mapping[int, float], most: int) -> tuple[float, float] | None:
    """Return seconds of no segment and of each more; None while they are not known.

    One compilation says enough where it is of the largest batch. Of two that differ less than by
    chance, and so do not rise, nothing follows about large ones.
    """
    if len(seconds) < 2:
        return (0.0, seconds[most] / most) if most in seconds else None
    (a, at_a), (b, at_b) = sorted(seconds.items())[-2:]
    slope = (at_b - at_a) / (b - a)
    return (at_a - slope * a, slope) if slope > 0.0 else None


def fewest_as_fast(start: float, slope: float, most: int, unit: int) -> int:
    """Return the fewest segments with `CLOSE` of the rate of `most`, by the line of `line_of`."""
    enough = CLOSE * most / (start + slope * most)  # segments per second
    fewest = enough * start / (1 - enough * slope)
    step = step_of(fewest, unit)
    return min(max(math.ceil(fewest / step), 1) * step, most)
