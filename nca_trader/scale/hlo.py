"""The text of a compiled TPU program, read: computations, instructions, how often each runs.

A loop's body is written once and runs many times; so does `cost_analysis()` count it, once. Here
what runs is walked, with its number of times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BITS = {"pred": 8, "token": 0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)


class Shape(NamedTuple):
    """One array: dtype, dims, and the memory space it is in; 0 is the chip's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Of its elements; padding to tiles is not counted."""
        bits = BITS.get(self.dtype)
        if bits is None:
            found = re.search(r"\d+", self.dtype)
            bits = int(found[0]) if found else 0
        return math.prod(self.dims) * bits // 8


class Instruction(NamedTuple):
    """One line. shapes: of its result, several if a tuple. attributes: the rest of the line."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """The path of the traced function that it is from, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one time, 0 where it gives none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0

    def called(self, role: str) -> str | None:
        """The computation that it calls as `role`, e.g. "body"."""
        found = [name for kind, name in _CALLED.findall(self.attributes) if kind == role]
        return found[0] if found else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if found:
            return tuple(name.strip().lstrip("%") for name in found[1].split(","))
        either = (self.called("true_computation"), self.called("false_computation"))
        return tuple(name for name in either if name)


Computation = dict[str, Instruction]


class Module(NamedTuple):
    """A program: its computations by name, and the one that starts."""

    computations: dict[str, Computation]
    entry: str


class Run(NamedTuple):
    """An instruction that runs: in which computation, how often, and the path it inherits."""

    instruction: Instruction
    computation: Computation
    times: int
    path: str


def read_module(text: str) -> Module:
    """Reads the text of a compiled program.

    Raises:
      ValueError: there is no program in it.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif current is not None and (found := _LINE.match(line)):
            instruction = _instruction(found[1], line[found.end() :], "ROOT %" in line[:12])
            current[found[1]] = instruction
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    return Module(computations, entry)


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shapes = tuple(_shape(*found) for found in _SHAPE.findall(rest[:end]))
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise ValueError(f"an instruction without an operation: {name} = {rest[:80]}")
    begin = opcode.end() - 1
    close = begin + _closing(rest[begin:])
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[begin:close]))
    if opcode[1] in ("constant", "parameter"):  # what stands there is a value
        operands = (rest[begin + 1 : close - 1],)
    return Instruction(name, shapes, opcode[1], operands, rest[close:], is_root)


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    space = re.search(r"S\((\d+)\)", layout)
    return Shape(dtype, tuple(int(d) for d in dims.split(",") if d), int(space[1]) if space else 0)


def _closing(text: str) -> int:
    """The position after the bracket that closes the one at the start."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"a bracket that never closes: {text[:80]}")


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None where the text does not say.

    A scan counts from 0, by 1, while its counter is below a constant of the condition.
    """
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if found:
        return int(found[1])
    constants = set(_constants(module, loop.called("condition") or ""))
    return constants.pop() if len(constants) == 1 else None


def _constants(module: Module, name: str) -> Iterator[int]:
    for instruction in module.computations.get(name, {}).values():
        if instruction.opcode == "constant" and instruction.operands[0].lstrip("-").isdigit():
            yield int(instruction.operands[0])
        if instruction.opcode == "fusion":
            yield from _constants(module, instruction.called("calls") or "")


def runs(module: Module) -> Iterator[Run]:
    """Every instruction that runs, loops unrolled into numbers, fusions as one.

    Of a conditional it is the branch of most cycles; a loop of unknown length counts once.
    """
    yield from _runs(module, module.entry, 1, "")


def _runs(module: Module, name: str, times: int, path: str) -> Iterator[Run]:
    computation = module.computations[name]
    for instruction in computation.values():
        here = instruction.op_name or path
        yield Run(instruction, computation, times, here)
        if instruction.opcode == "while":
            count = trip_count(module, instruction)
            body = instruction.called("body") or ""
            yield from _runs(module, body, times * (1 if count is None else count), here)
        elif instruction.opcode == "conditional":
            most = max(instruction.branches, key=lambda branch: _cycles(module, branch))
            yield from _runs(module, most, times, here)
        elif instruction.opcode in ("call", "async-start"):
            called = instruction.called("to_apply") or instruction.called("calls")
            if called in module.computations:
                yield from _runs(module, called, times, here)


def _cycles(module: Module, name: str) -> int:
    return sum(run.instruction.cycles * run.times for run in _runs(module, name, 1, ""))


def unknown_loops(module: Module) -> int:
    """Loops whose length the text does not say; `runs` counts their bodies once."""
    loops = (run.instruction for run in runs(module) if run.instruction.opcode == "while")
    return sum(trip_count(module, loop) is None for loop in loops)


COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# Names of arrays, not work on them; a `-done` only waits for what its `-start` moved.
NO_TRAFFIC = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional",
    "call", "partition-id", "replica-id", "after-all", "opt-barrier", "custom-call",
}  # fmt: skip
READS_PART = ("dynamic-slice", "slice", "gather")


class Part(NamedTuple):
    """What one part of an iteration costs a device.

    cycles: the compiler's estimate. flops: of matrix products and convolutions.
    """

    cycles: int
    flops: int


class Collective(NamedTuple):
    """One kind of collective. count: times an iteration; bytes: that a device puts in, in all.

    dtypes: of its operands. group: devices that take part, of the largest.
    """

    count: int
    bytes: int
    dtypes: tuple[str, ...]
    group: int


class Cost(NamedTuple):
    """An iteration. parts: by name, see `part_of`; collectives: by kind.

    hbm_bytes: read from and written to the chip's main memory.
    """

    parts: dict[str, Part]
    collectives: dict[str, Collective]
    hbm_bytes: int

    @property
    def cycles(self) -> int:
        """Of all parts."""
        return sum(part.cycles for part in self.parts.values())

    @property
    def flops(self) -> int:
        """Of all parts."""
        return sum(part.flops for part in self.parts.values())


def cost_of(module: Module, devices: int) -> Cost:
    """The cost of a program that runs on `devices`, each figure of one of them."""
    parts: dict[str, Part] = {}
    collectives: dict[str, Collective] = {}
    traffic = 0
    for run in runs(module):
        instruction, times = run.instruction, run.times
        flops = flops_of(module, instruction, run.computation)
        if instruction.cycles or flops:
            name = part_of(run.path)
            old = parts.get(name, Part(0, 0))
            parts[name] = Part(old.cycles + times * instruction.cycles, old.flops + times * flops)
        traffic += times * traffic_of(module, instruction, run.computation)
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            collectives[kind] = _added(collectives.get(kind), run, devices)
    return Cost(parts, collectives, traffic)


def part_of(path: str) -> str:
    """Which part of an iteration an instruction is of, by the path of the traced function."""
    found = re.search(r"\b(collect|learn|replay)\b", path)
    if found is None:
        return "other"
    encodes = re.search(r"\bencode\b", path) is not None
    if found[1] == "collect":
        return "collect: encoder" if encodes else "collect: accounts"
    if "jvp" not in path:
        return f"{found[1]}: update"
    way = "backward" if "transpose(" in path else "forward"
    return f"{found[1]}: {'encoder' if encodes else 'loss'} {way}"


def _added(before: Collective | None, run: Run, devices: int) -> Collective:
    shapes = [s for name in run.instruction.operands for s in _shapes(run.computation, name)]
    count, size, dtypes, group = before or Collective(0, 0, (), 1)
    return Collective(
        count + run.times,
        size + run.times * sum(shape.bytes for shape in shapes),
        tuple(sorted({*dtypes, *(shape.dtype for shape in shapes)})),
        max(group, group_size(run.instruction, devices)),
    )


def group_size(collective: Instruction, devices: int) -> int:
    """Devices that take part in one group of a collective."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", collective.attributes)
    if listed:
        return listed[1].count(",") + 1
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]", collective.attributes)
    return int(counted[2]) if counted else devices


def wire_seconds(collective: str, cost: Collective, one_way: float) -> float:
    """At least so long a device's links are busy with a kind of collective, latency not counted.

    In a ring of n an all-reduce sends `2 (n - 1) / n` of its bytes, a reduce-scatter or an
    all-to-all `(n - 1) / n`, an all-gather `n - 1` times what it puts in, a permutation once.

    Args:
      one_way: bytes a second out of a chip, over all its links.
    """
    n = max(cost.group, 1)
    share = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1.0, "collective-permute": 1.0}
    return share.get(collective, (n - 1) / n) * cost.bytes / one_way


def _shapes(computation: Computation, name: str) -> tuple[Shape, ...]:
    there = computation.get(name)
    return there.shapes if there else ()


def flops_of(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Floating-point operations of the products in an instruction, those of a fusion included."""
    if instruction.opcode == "fusion":
        inner = module.computations.get(instruction.called("calls") or "", {})
        return sum(flops_of(module, each, inner) for each in inner.values())
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, computation)
    if instruction.opcode == "dot":
        return _dot_flops(instruction, computation)
    return 0


def _dot_flops(dot: Instruction, computation: Computation) -> int:
    (left,) = _shapes(computation, dot.operands[0])
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    over = [int(d) for d in found[1].split(",") if d] if found else []
    return 2 * int(np.prod(dot.shapes[0].dims)) * int(np.prod([left.dims[d] for d in over]))


def _convolution_flops(convolution: Instruction, computation: Computation) -> int:
    """2 for each pair of an output element and an input element that is no padding and no hole."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    (left,), (right,) = (_shapes(computation, name) for name in convolution.operands[:2])
    if labels is None:
        raise ValueError(f"{convolution.name}: a convolution without dim_labels")
    window = _window(convolution.attributes)
    out = dict(zip(labels[3], convolution.shapes[0].dims, strict=True))
    seen = dict(zip(labels[1], left.dims, strict=True))
    kernel = dict(zip(labels[2], right.dims, strict=True))
    total = 2 * out["b"] * out["f"] * kernel["i"]
    for axis in range(len(left.dims) - 2):
        label = str(axis)
        total *= _pairs(out[label], seen[label], {k: v[axis] for k, v in window.items()})
    return total


def _window(attributes: str) -> dict[str, list]:
    """Of each spatial axis: size, pad (low, high), stride, and dilation of both sides."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    given = dict(item.split("=") for item in found[1].split()) if found and found[1] else {}
    rank = given["size"].count("x") + 1 if "size" in given else 0
    one = "x".join("1" * rank)
    window: dict[str, list] = {
        name: [int(n) for n in given.get(name, one).split("x")] if rank else []
        for name in ("size", "stride", "lhs_dilate", "rhs_dilate")
    }
    pads = given.get("pad", "x".join(["0_0"] * rank)).split("x") if rank else []
    window["pad"] = [int(pad.split("_")[0]) for pad in pads]
    return window


def _pairs(out: int, seen: int, window: dict[str, int]) -> int:
    """Pairs of an output place and a kernel place that meet an element of the input."""
    at = (
        np.arange(out)[:, None] * window["stride"]
        + np.arange(window["size"])[None] * window["rhs_dilate"]
        - window["pad"]
    )
    inside = (at >= 0) & (at <= (seen - 1) * window["lhs_dilate"])
    return int((inside & (at % window["lhs_dilate"] == 0)).sum())


def traffic_of(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Bytes that an instruction reads from and writes to main memory.

    What is only sliced, or written in place, counts with the size of the slice.
    """
    opcode = instruction.opcode
    if opcode in NO_TRAFFIC or opcode.endswith(("-done", "-update")):
        return 0
    operands = [_shapes(computation, name) for name in instruction.operands]
    if opcode == "copy-start":
        return sum(s.bytes for s in instruction.shapes[:2] if s.space == 0)
    if opcode == "fusion":
        inner = module.computations[instruction.called("calls") or ""]
        return _fusion_traffic(instruction, operands, inner)
    read = [s for shapes in operands for s in shapes if s.space == 0]
    written = [s for s in instruction.shapes if s.space == 0]
    if opcode in READS_PART:
        return 2 * sum(s.bytes for s in written) + sum(s.bytes for s in read[1:])
    if opcode == "dynamic-update-slice":
        return 2 * operands[1][0].bytes if written else 0
    return sum(s.bytes for s in (*read, *written))


def _fusion_traffic(
    fusion: Instruction, operands: list[tuple[Shape, ...]], inner: Computation
) -> int:
    total = 0
    number = {int(i.operands[0]): i for i in inner.values() if i.opcode == "parameter"}
    for position, shapes in enumerate(operands):
        if any(shape.space == 0 for shape in shapes) and position in number:
            total += _read(number[position], inner)
    root = next(i for i in inner.values() if i.is_root)
    parts = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for shape, part in zip(fusion.shapes, parts, strict=False):
        if shape.space == 0:
            total += min(shape.bytes, _written(part, inner))
    return total


def _read(parameter: Instruction, inner: Computation) -> int:
    """Bytes read of a fusion's parameter: of slices, where nothing else is made of it."""
    whole = parameter.shapes[0].bytes
    total = 0
    for user, position in _users(parameter.name, inner):
        if user.opcode in READS_PART and position == 0:
            total += sum(s.bytes for s in user.shapes)
        elif user.opcode != "dynamic-update-slice" or position != 0:
            return whole
    return min(total, whole)


def _users(name: str, inner: Computation) -> Iterator[tuple[Instruction, int]]:
    """Who takes it, and as which operand; a bitcast of it is it."""
    for user in inner.values():
        if user.opcode in ("parameter", "constant") or name not in user.operands:
            continue
        if user.opcode == "bitcast":
            yield from _users(user.name, inner)
        else:
            yield user, user.operands.index(name)


def _written(part: Instruction, inner: Computation) -> int:
    while part.opcode == "bitcast":
        part = inner[part.operands[0]]
    if part.opcode == "dynamic-update-slice":
        return sum(shape.bytes for shape in inner[part.operands[1]].shapes)
    return sum(shape.bytes for shape in part.shapes)
