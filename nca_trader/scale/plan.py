"""What a training run would need on a slice, from the compiler's own account of its program.

Everything here is arithmetic over an `Answer`: nothing was run, and seconds are estimates.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from nca_trader.agents.presets import load_agent
from nca_trader.config import AgentConfig, EnvConfig
from nca_trader.data.samples import sample_bars
from nca_trader.envs import load_env
from nca_trader.parallel.mesh import AXES
from nca_trader.scale import compiled
from nca_trader.scale.chips import Chip, Slice, mesh_axes, slice_of
from nca_trader.scale.compiled import Answer, Ask, Question
from nca_trader.scale.hlo import wire_seconds
from nca_trader.types import Bars

Report = dict[str, Any]
Rate = Callable[[Answer, Chip], float]
CLOSE = 0.95  # of the best rate: what a smaller batch may lose
NEAR = 1 / 16  # of the batch, or of the memory: what the largest may leave
STRIDE = 16  # times the first batch is the second, far enough from it to see a slope
FURTHEST = 4 * STRIDE  # times a batch is the next, whatever the line says


class Size(NamedTuple):
    """Of a program: whether it fits, and the share of the memory it needs, None if unknown."""

    fits: bool
    share: float | None


def largest_batch(
    ask: Ask, question: Question, rate: Rate, say: Callable[[str], None], found: Answer | None
) -> Report:
    """The most segments that fit without more micro-batches, and the fewest that are as fast.

    Args:
      question: about the batch to begin with. rate: steps a second, as estimated, of an answer.
      found: what is known of that batch already; None, or what was cut into more micro-batches,
        is asked again.

    Returns:
      `largest` (to a sixteenth, of the segments or of the memory) and `efficient` (the fewest
      segments within 5% of the best estimated rate, to a factor of 2), each a try; `tries`, all
      of them. None where not even the least that the mesh allows fits.
    """
    learner, chip = question.agent.learner, question.there.of
    unit = learner.logical_shards * learner.num_minibatches
    tries: dict[int, Report] = {}

    def attempt(segments: int) -> Size:
        changed = dataclasses.replace(learner, num_segments=segments)
        agent = dataclasses.replace(question.agent, learner=changed)
        known = found if segments == learner.num_segments else None
        if known is None or known.micro_batches != learner.micro_batches:
            say(f"compiling with {segments:,} segments ...")
            known = ask(question._replace(agent=agent, search=False))
        tries[segments] = {
            "num_segments": segments,
            "steps": known.steps,
            "fits": known.fits,
            "hbm_bytes_per_chip": None if known.needed is None else known.needed * chip.devices,
            "steps_per_s": rate(known, chip) if known.fits else None,
        }
        return Size(known.fits, None if known.needed is None else known.needed / known.limit)

    most = most_that_fits(attempt, learner.num_segments, unit)
    fewest = fewest_as_fast(lambda: _rates(tries), attempt, unit) if most else None
    return {
        "largest": tries[most] if most else None,
        "efficient": None if fewest is None else tries[fewest],
        "tries": [each for _, each in sorted(tries.items())],
    }


def _rates(tries: dict[int, Report]) -> dict[int, float]:
    """Of the batches that fit, smallest first."""
    return {n: each["steps_per_s"] for n, each in sorted(tries.items()) if each["fits"]}


def most_that_fits(attempt: Callable[[int], Size], begin: int, unit: int) -> int:
    """The most segments that fit, or `NEAR` below; 0 if not even `unit` does.

    The next is where the line through the two largest batches meets the memory, kept between what
    fits and what does not; a step that leaves more than half of that range is followed by one to
    its middle, so that the search ends soon where bytes are no line.

    Args:
      attempt: tries a number of segments, a multiple of `unit`. begin: the first.
    """
    shares: dict[int, float] = {}
    low, high, segments, halve = 0, 0, begin, False
    while True:
        before, (fits, share) = high - low, attempt(segments)
        if share is not None:
            shares[segments] = share
        low, high = (segments, high) if fits else (low, segments)
        if not low and high > unit:
            segments = unit
            continue
        if not low or (share is not None and fits and share >= 1 - NEAR):
            return low
        if not high:
            segments = _multiple(_meets(shares, STRIDE * low), unit, 2 * low, FURTHEST * low)
            continue
        if high - low <= max(unit, low * NEAR):
            return low
        halve = not halve and 0 < before < 2 * (high - low)
        middle = (low + high) / 2
        aim = middle if halve else _meets(shares, middle)
        segments = _multiple(aim, unit, low + unit, high - unit)


def _meets(shares: dict[int, float], otherwise: float) -> float:
    """Where the line through the two largest batches is half of `NEAR` below the whole memory."""
    if len(shares) < 2:
        return otherwise
    (a, share_a), (b, share_b) = sorted(shares.items())[-2:]
    slope = (share_b - share_a) / (b - a)
    return a + (1 - NEAR / 2 - share_a) / slope if slope > 0 else otherwise


def _multiple(wanted: float, unit: int, least: int, most: int) -> int:
    """The multiple of `unit` at or below `wanted`, within `least` and `most`, two multiples."""
    return min(max(int(wanted // unit) * unit, least), most)


def fewest_as_fast(
    rates: Callable[[], dict[int, float]], attempt: Callable[[int], Size], unit: int
) -> int:
    """The fewest segments within `CLOSE` of the best rate; half as many would be too slow.

    Args:
      rates: of what was tried and fits, by segments, smallest first. attempt: adds one.
    """
    while True:
        tried = rates()
        numbers, enough = list(tried), CLOSE * max(tried.values())
        at = next(i for i, n in enumerate(numbers) if tried[n] >= enough)
        if at == 0 or numbers[at] <= 2 * numbers[at - 1]:
            return numbers[at]
        below, above = numbers[at - 1], numbers[at]
        attempt(_multiple(math.sqrt(below * above), unit, below + unit, above - unit))


REMAT_FROM = 0.25  # of the memory: temporaries of which it is worth knowing what remat saves


def plan(
    agent: AgentConfig | str | os.PathLike[str],
    topology: str,
    *,
    env: EnvConfig | str | os.PathLike[str] = "index_daily",
    bars: Bars | None = None,
    largest: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compiles an agent's update for a TPU slice that is not here: what fits, and what bounds it.

    Args:
      agent, env: a config, a preset's name, or the path of a TOML file.
      topology: a slice, e.g. "v5e-8" (N counts cores) or chips by axis, "v5e:2x4".
      bars: None is some of the sample bars, or the market that `env` draws.
      largest: also search for the largest batch; some seven compilations.
      say: called with what is being compiled.

    Returns:
      What `nca-trader plan --json` prints: `fits`, `hbm_bytes_per_chip`, `hbm_limit` and others.

    Raises:
      ConfigError: shapes that do not divide, an unknown slice, or no TPU compiler here (install
        the extra `tpu-plan`).
    """
    there, config, loaded = slice_of(topology), load_env(env), load_agent(agent)
    if bars is None and not config.market:
        bars = sample_bars("sp500")
    with compiled.compiler() as ask:
        return plan_on(ask, config, loaded, bars, there, largest=largest, say=say)


def plan_on(
    ask: Ask,
    env: EnvConfig,
    agent: AgentConfig,
    bars: Bars | None,
    there: Slice,
    *,
    largest: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """The report of one agent on one slice, as `nca-trader plan --json` prints it.

    Args:
      ask: of `compiler()`. bars: None where `env` draws its own.
      largest: search for the largest batch as well; some seven compilations.
      say: told what is being compiled.

    Raises:
      ConfigError: shapes that do not divide, or a slice that the compiler does not know.
    """
    agent, changes = on_slice(agent, there)
    say(f"compiling the update for {there.name} ...")
    found = ask(Question(env, agent, bars, there))
    report = {
        "topology": there.name,
        "chips": there.chips,
        "devices": there.devices,
        "mesh": dict(zip(AXES, agent.mesh.axes, strict=True)),
        "mesh_from_table": dict(zip(AXES, mesh_axes(there.devices, there.chips), strict=True)),
        "set": changes,
    }
    report |= described(found, there) | {"widths": width_audit(agent, there.of)}
    report["remat"] = remat_advice(ask, Question(env, agent, bars, there), found, say)
    if largest:
        question = Question(env, agent, bars, there)
        report["largest"] = largest_batch(ask, question, rate, say, found)
    return report


def on_slice(agent: AgentConfig, there: Slice) -> tuple[AgentConfig, dict[str, int]]:
    """The agent on all of a slice, with as many segments as it can share, and what was changed.

    The mesh is the agent's own where its file says data, fsdp or model, else that of `mesh_axes`.
    Segments are drawn within logical shards, of which every part of a batch has as many as the
    others.
    """
    learner, mesh, devices = agent.learner, agent.mesh, there.devices
    fsdp, model = mesh.fsdp, mesh.model
    if mesh.data is None:
        _, fsdp, model = mesh_axes(there.devices, there.chips) if fsdp * model == 1 else mesh.axes
        if devices % (fsdp * model) == 0:  # else the slice is refused, with the sizes as given
            mesh = dataclasses.replace(mesh, devices=devices, fsdp=fsdp, model=model)
    parts = mesh.axes[0] * fsdp
    shards = -(-learner.logical_shards // parts) * parts
    unit = shards * learner.num_minibatches
    segments = -(-learner.num_segments // unit) * unit
    wanted = {
        "mesh.devices": (math.prod(agent.mesh.axes), math.prod(mesh.axes)),
        "mesh.fsdp": (agent.mesh.fsdp, fsdp),
        "mesh.model": (agent.mesh.model, model),
        "learner.logical_shards": (learner.logical_shards, shards),
        "learner.num_segments": (learner.num_segments, segments),
    }
    changes = {name: value for name, (before, value) in wanted.items() if value != before}
    if not changes:
        return agent, {}
    learner = dataclasses.replace(learner, logical_shards=shards, num_segments=segments)
    return dataclasses.replace(agent, learner=learner, mesh=mesh), changes


def described(found: Answer, there: Slice) -> Report:
    """The compiler's account, a chip, with what follows from it."""
    chip = there.of
    report: Report = {
        "fits": found.fits,
        "hbm_bytes_per_chip": None if found.needed is None else found.needed * chip.devices,
        "hbm_limit": int(found.limit * chip.devices),
        "bytes_by_kind": {kind: size * chip.devices for kind, size in found.kinds.items()},
        "micro_batches": found.micro_batches,
        "parameters": found.parameters,
        "bars": found.bars,
        "bars_per_parameter": found.bars / found.parameters,
        "compile_s": found.seconds,
        "collectives": {},
        "cycles": {},
        "cycles_over_floor": {},
        "estimate": None,
        "loops_counted_once": found.unknown_loops,
    }
    if found.cost is None:
        return report
    cost = found.cost
    report["collectives"] = {
        kind: each._asdict() | {"dtypes": list(each.dtypes)}
        for kind, each in sorted(cost.collectives.items())
    }
    parts = {name: (part.cycles, part.flops) for name, part in sorted(cost.parts.items())}
    parts["update"] = (cost.cycles, cost.flops)
    report["cycles"] = {name: cycles for name, (cycles, _) in parts.items()}
    report["cycles_over_floor"] = {
        name: cycles * chip.flops_per_cycle / flops
        for name, (cycles, flops) in parts.items()
        if flops
    }
    report["estimate"] = estimate(found, chip)
    return report


def estimate(found: Answer, chip: Chip) -> Report:
    """Seconds of an update and what bounds them, by the compiler's cycles and public rates.

    compute: the compiler's cycles at the chip's clock. memory: traffic with main memory at the
    vendor's rate. communication: bytes over the links, one way, without latency. Compute and
    memory overlap, communication is waited for.
    """
    cost = found.cost
    if cost is None:
        raise ValueError("a program that the compiler refused has no cost")
    one_way = chip.ici_gb_per_s * 1e9 / 2 / chip.devices
    seconds = {
        "compute": cost.cycles / chip.clock,
        "memory": cost.hbm_bytes / (chip.hbm_gb_per_s * 1e9 / chip.devices),
        "communication": sum(
            wire_seconds(kind, each, one_way) for kind, each in cost.collectives.items()
        ),
    }
    whole = max(seconds["compute"], seconds["memory"]) + seconds["communication"]
    return {
        "step_s": whole,
        "steps_per_s": found.steps / whole,
        "steps": found.steps,
        "bound": max(seconds, key=lambda name: seconds[name]),
        "seconds": seconds,
        "matrix_units_busy": cost.flops / chip.flops_per_cycle / chip.clock / whole,
        "hbm_traffic_bytes": cost.hbm_bytes,
    }


def rate(found: Answer, chip: Chip) -> float:
    """Steps a second, as estimated."""
    return estimate(found, chip)["steps_per_s"]


def width_audit(agent: AgentConfig, chip: Chip) -> list[Report]:
    """How much of a matrix unit each width fills, and the next width that fills it whole."""
    names = ["channels", "head_hidden"] + ["hidden"] * (agent.policy.kind != "gru")
    audit = []
    for name in sorted(names):
        width = getattr(agent.policy, name)
        full = -(-width // chip.mxu) * chip.mxu
        row = {"name": f"policy.{name}", "width": width, "fills": width / full}
        audit.append(row | {"full_width": full})
    return audit


def remat_advice(ask: Ask, question: Question, found: Answer, say: Callable[[str], None]) -> Report:
    """Whether `policy.remat` is worth its time here; where it may be, by compiling with it."""
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
    say("compiling with policy.remat = 'step' ...")
    again = dataclasses.replace(policy, remat="step")
    other = ask(question._replace(agent=dataclasses.replace(question.agent, policy=again)))
    advice["with_step"] = {
        "fits": other.fits,
        "temporaries": other.kinds.get("temporaries"),
        "micro_batches": other.micro_batches,
        "cycles": None if other.cost is None else other.cost.cycles,
    }
    if other.fits and not found.fits:
        return advice | {"advice": "policy.remat = 'step' makes it fit"}
    if not other.fits:
        return advice | {"advice": "policy.remat = 'step' does not make it fit either"}
    saved = 1.0 - other.kinds["temporaries"] / (temporaries or 1)
    cycles = found.cost.cycles if found.cost else 1
    more = (other.cost.cycles if other.cost else 1) / cycles - 1.0
    return advice | {
        "advice": f"policy.remat = 'step' saves {saved:.0%} of the temporaries and costs "
        f"{more:+.0%} of the cycles"
    }
