"""What a training run would need on a TPU slice, by the compiler's account of its program.

Everything here is arithmetic on an `Answer`. Nothing was run, and seconds are estimates.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from nca_trader.agents import load_agent
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.data.bars import sample_bars
from nca_trader.envs import load_env
from nca_trader.parallel.mesh import AXES
from nca_trader.progress import Progress
from nca_trader.scale import compiled
from nca_trader.scale.chips import Chip, Slice, mesh_axes, slice_of
from nca_trader.scale.compiled import Answer, Ask, Question
from nca_trader.scale.hlo import Collective
from nca_trader.types import Bars

Report = dict[str, Any]
# Compiles a number of segments: whether they fit, and their share of the memory, None if unknown.
Attempt = Callable[[int], tuple[bool, float | None]]
CLOSE = 0.95  # of the best rate: what a smaller batch may lose
NEAR = 1 / 16  # of the batch, or of the memory: what the largest batch may leave
STRIDE = 16  # times the first batch is the second, far enough from it to see a slope
FURTHEST = 4 * STRIDE  # times a batch is the next, whatever the line predicts
TRIES = 7  # compilations of a search for the largest batch, about
REMAT_FROM = 0.25  # of the memory: temporaries from which remat is worth a compilation


def plan(
    agent: AgentConfig | str | os.PathLike[str],
    topology: str,
    *,
    env: EnvConfig | str | os.PathLike[str] = "index_daily",
    bars: Bars | None = None,
    largest: bool = False,
) -> Report:
    """Compile an agent's update for a TPU slice that is not here: does it fit, what bounds it.

    Args:
      agent: a config, a preset's name, or the path of a TOML file.
      topology: a slice, e.g. "v5e-8" (the N of "v5p-N" counts cores) or "v5e:2x4", chips by axis.
      env: a config, a preset's name, or the path of a TOML file.
      bars: the bars to train on. None stands for sample bars, or for the market that `env` draws.
      largest: also search for the largest batch, with some seven more compilations.

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
    expected = 1 + TRIES if largest else 1
    with (
        compiled.compiler() as compiler,
        Progress(expected, f"plan for {there.name}", "compilations") as shown,
    ):

        def ask(question: Question) -> Answer:
            answer = compiler(question)
            shown.update()
            return answer

        found = ask(question)
        report = {
            "topology": there.name,
            "chips": there.chips,
            "devices": there.devices,
            "mesh": dict(zip(AXES, loaded.mesh.axes, strict=True)),
            "mesh_from_table": dict(zip(AXES, mesh_axes(there.devices, there.chips), strict=True)),
            "set": changes,
        }
        report |= described(found, there.of) | {"widths": width_audit(loaded, there.of)}
        report["remat"] = remat_advice(ask, question, found)
        if largest:
            report["largest"] = largest_batch(ask, question, found)
        shown.finish()
    return report


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


def described(found: Answer, chip: Chip) -> Report:
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
        "micro_batches": found.micro_batches,
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


def estimate(found: Answer, chip: Chip) -> Report:
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


def remat_advice(ask: Ask, question: Question, found: Answer) -> Report:
    """Return whether `policy.remat` is worth its time here, compiling with it where it may be."""
    policy = question.agent.policy
    temporaries = found.kinds.get("temporaries")
    share = None if temporaries is None else temporaries / found.limit
    advice: Report = {"now": policy.remat, "temporaries_of_hbm": share, "with_step": None}
    if policy.kind != "nca":
        return advice | {"advice": f"policy.kind = {policy.kind!r} has no remat"}
    if found.fits and share is not None and share < REMAT_FROM:
        keep = "not needed" if policy.remat == "none" else f"{policy.remat!r} could be 'none'"
        return advice | {"advice": f"{keep}: temporaries are {share:.2%} of the memory"}
    if policy.remat == "step":
        return advice | {"advice": "on, at every step: no more can be saved by it"}
    agent = dataclasses.replace(question.agent, policy=dataclasses.replace(policy, remat="step"))
    other = ask(question._replace(agent=agent))
    advice["with_step"] = {
        "fits": other.fits,
        "temporaries": other.kinds.get("temporaries"),
        "micro_batches": other.micro_batches,
        "cycles": None if other.cost is None else other.cost.cycles,
    }
    if not other.fits:
        return advice | {"advice": "policy.remat = 'step' does not make it fit either"}
    if not found.fits:
        return advice | {"advice": "policy.remat = 'step' makes it fit"}
    saved = 1.0 - other.kinds["temporaries"] / (temporaries or 1)
    cycles = found.cost.cycles if found.cost else 1
    more = (other.cost.cycles if other.cost else 1) / cycles - 1.0
    return advice | {
        "advice": f"policy.remat = 'step' saves {saved:.0%} of the temporaries and costs "
        f"{more:+.0%} of the cycles"
    }


def largest_batch(ask: Ask, question: Question, found: Answer | None) -> Report:
    """Search for the most segments that fit without more micro-batches.

    Args:
      ask: compiles the update for a question.
      question: about the batch to begin with.
      found: the answer about that batch. It is asked again if this is None, or if the batch was
        cut into more micro-batches.

    Returns:
      `largest`, within a sixteenth of the segments or of the memory. `efficient`, the fewest
      segments within 5% of the best estimated rate, to a factor of 2. `tries`, all of them. The
      first two are None if not even the least that the mesh allows fits.
    """
    learner, chip = question.agent.learner, question.there.of
    unit = learner.logical_shards * learner.num_minibatches
    tries: dict[int, Report] = {}

    def attempt(segments: int) -> tuple[bool, float | None]:
        changed = dataclasses.replace(learner, num_segments=segments)
        agent = dataclasses.replace(question.agent, learner=changed)
        known = found if segments == learner.num_segments else None
        if known is None or known.micro_batches != learner.micro_batches:
            # A search would make any batch fit, by more micro-batches.
            known = ask(question._replace(agent=agent, search=False))
        tries[segments] = {
            "num_segments": segments,
            "steps": known.steps,
            "fits": known.fits,
            "hbm_bytes_per_chip": None if known.needed is None else known.needed * chip.devices,
            "steps_per_s": estimate(known, chip)["steps_per_s"] if known.fits else None,
        }
        return known.fits, None if known.needed is None else known.needed / known.limit

    def rates() -> dict[int, float]:
        return {n: each["steps_per_s"] for n, each in sorted(tries.items()) if each["fits"]}

    most = most_that_fits(attempt, learner.num_segments, unit)
    return {
        "largest": tries[most] if most else None,
        "efficient": tries[fewest_as_fast(rates, attempt, unit)] if most else None,
        "tries": [each for _, each in sorted(tries.items())],
    }


def most_that_fits(attempt: Attempt, begin: int, unit: int) -> int:
    """Return the most segments that fit, or `NEAR` below, 0 if not even `unit` fits.

    Args:
      attempt: tries a number of segments, a multiple of `unit`.
      begin: the first number.
      unit: the least number of segments that the mesh and the minibatches allow.
    """
    shares: dict[int, float] = {}
    low, high, segments, halve = 0, 0, begin, False
    while True:
        before, (fits, share) = high - low, attempt(segments)
        if share is not None:
            shares[segments] = share
        low, high = (segments, high) if fits else (low, segments)
        if not low and high > unit:  # the first batch does not fit: does any?
            segments = unit
            continue
        if not low or (share is not None and fits and share >= 1 - NEAR):
            return low
        if high and high - low <= max(unit, low * NEAR):
            return low
        # Memory is almost linear in the batch: next is where the line through the two largest
        # batches meets the memory, less half of `NEAR`.
        aim = (low + high) / 2 if high else STRIDE * low
        # Where it is not, the line may approach its end in small steps. So a step that leaves more
        # than half of the range is followed by one to the middle.
        halve = bool(high) and not halve and 0 < before < 2 * (high - low)
        if len(shares) > 1 and not halve:
            (a, share_a), (b, share_b) = sorted(shares.items())[-2:]
            slope = (share_b - share_a) / (b - a)
            aim = a + (1 - NEAR / 2 - share_a) / slope if slope > 0 else aim
        least, most = (low + unit, high - unit) if high else (2 * low, FURTHEST * low)
        segments = min(max(int(aim // unit) * unit, least), most)


def fewest_as_fast(rates: Callable[[], dict[int, float]], attempt: Attempt, unit: int) -> int:
    """Return the fewest segments within `CLOSE` of the best rate, to a factor of 2.

    Args:
      rates: steps per second of what was tried and fits, by segments, smallest first.
      attempt: tries one more.
      unit: the numbers tried are multiples of it.
    """
    while True:
        tried = rates()
        numbers, enough = list(tried), CLOSE * max(tried.values())
        at = next(i for i, n in enumerate(numbers) if tried[n] >= enough)
        if at == 0 or numbers[at] <= 2 * numbers[at - 1]:
            return numbers[at]
        below, above = numbers[at - 1], numbers[at]
        aim = int(math.sqrt(below * above) // unit) * unit
        attempt(min(max(aim, below + unit), above - unit))
