"""Reads the text of a compiled program: what runs, how often, and what that costs a device.

A loop's body is written once and runs many times. XLA's own `cost_analysis()` counts it once. Here
a program is walked with the number of times that each of its instructions runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# These name arrays and do no work on them. A `-done` waits for what its `-start` moved.
NO_TRAFFIC = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional",
    "call", "partition-id", "replica-id", "after-all", "opt-barrier", "custom-call",
}  # fmt: skip
READS_PART = ("dynamic-slice", "slice", "gather")
BITS = {"pred": 8, "token": 0}
# Keys of a convolution's window, and their values where the text leaves them out.
WINDOW = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")


class Shape(NamedTuple):
    """One array: dtype, dims, and the memory space it is in. Space 0 is the chip's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Bytes of the elements, without the padding to tiles."""
        found = re.search(r"\d+", self.dtype)
        bits = BITS.get(self.dtype, int(found[0]) if found else 0)
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
        """The path of the traced function that it comes from, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one run, 0 where it gives none."""
        # Not `optimal_seconds` of XLA's cost analysis: it can be negative.
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0

    def called(self, *roles: str) -> list[str]:
        """Return the computations that it calls in these roles, e.g. "body", in text order."""
        found = re.findall(rf"\b(?:{'|'.join(roles)})=%?([\w.\-]+)", self.attributes)
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed and "branch_computations" in roles:
            found += re.findall(r"[\w.\-]+", listed[1])
        return found


Computation = dict[str, Instruction]


class Module(NamedTuple):
    """A program: its computations by name, and the name of the one that starts."""

    computations: dict[str, Computation]
    entry: str


class Repeated(NamedTuple):
    """An instruction that runs: in which computation, how often, and the path it inherits."""

    instruction: Instruction
    computation: Computation
    times: int
    path: str


def read_module(text: str) -> Module:
    """Read the text of a compiled program.

    Raises:
      ValueError: the text holds no program.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif current is not None and (found := _LINE.match(line)):
            name, rest = found[2], line[found.end() :]
            # The type of a tuple stands in brackets and holds spaces.
            end = _closing(rest) if rest.startswith("(") else rest.index(" ")
            shapes = []
            for dtype, dims, layout in _SHAPE.findall(rest[:end]):
                space = re.search(r"S\((\d+)\)", layout)
                sizes = tuple(int(size) for size in dims.split(",") if size)
                shapes.append(Shape(dtype, sizes, int(space[1]) if space else 0))
            opcode = _OPCODE.match(rest, end)
            if opcode is None:
                raise ValueError(f"an instruction without an operation: {name} = {rest[:80]}")
            begin = opcode.end()
            close = begin - 1 + _closing(rest[begin - 1 :])
            operands = tuple(re.findall(r"%([\w.\-]+)", rest[begin:close]))
            if opcode[1] in ("constant", "parameter"):  # a value or a number stands there
                operands = (rest[begin : close - 1],)
            current[name] = Instruction(
                name, tuple(shapes), opcode[1], operands, rest[close:], found[1] is not None
            )
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    return Module(computations, entry)


def _closing(text: str) -> int:
    """Return the position after the bracket that closes the one at the start."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"a bracket that never closes: {text[:80]}")


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Return how often the body of a `while` runs, None where the text does not say."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if found:
        return int(found[1])
    # A scan counts from 0, by 1, while its counter is below the only constant of the condition.
    # The comparison, and the constant with it, may be in a fusion.
    constants, names = set(), loop.called("condition")
    while names:
        for each in module.computations.get(names.pop(), {}).values():
            if each.opcode == "constant" and each.operands[0].lstrip("-").isdigit():
                constants.add(int(each.operands[0]))
            if each.opcode == "fusion":
                names += each.called("calls")
    # With two constants it is not clear which one is the length.
    return constants.pop() if len(constants) == 1 else None


def runs(module: Module, name: str = "", times: int = 1, path: str = "") -> Iterator[Repeated]:
    """Yield every instruction that runs; loops are walked once and fusions are one instruction.

    A conditional counts as its branch with the most cycles. A loop of unknown length counts once.

    Args:
      module: the program.
      name: the computation to walk, "" for the whole program.
      times: how often the computation runs.
      path: the path of an instruction that has none of its own.
    """
    computation = module.computations[name or module.entry]
    for instruction in computation.values():
        here = instruction.op_name or path
        yield Repeated(instruction, computation, times, here)
        if instruction.opcode == "while":
            count = trip_count(module, instruction)
            (body,) = instruction.called("body")
            yield from runs(module, body, times * (1 if count is None else count), here)
        elif instruction.opcode == "conditional":
            branches = instruction.called(
                "branch_computations", "true_computation", "false_computation"
            )
            cycles = {
                branch: sum(run.instruction.cycles * run.times for run in runs(module, branch))
                for branch in branches
            }
            # The text does not say which one runs, so the most expensive counts.
            yield from runs(module, max(branches, key=cycles.__getitem__), times, here)
        elif instruction.opcode in ("call", "async-start"):  # a fusion's parts do not run alone
            for called in instruction.called("to_apply", "calls")[:1]:
                if called in module.computations:
                    yield from runs(module, called, times, here)


def unknown_loops(module: Module) -> int:
    """Return the number of loops whose length the text does not say."""
    loops = (run.instruction for run in runs(module) if run.instruction.opcode == "while")
    return sum(trip_count(module, loop) is None for loop in loops)


class Part(NamedTuple):
    """Cost of one part of an update for a device.

    cycles: the compiler's estimate. flops: of matrix products and convolutions.
    """

    cycles: int
    flops: int


class Collective(NamedTuple):
    """One kind of collective.

    count: times per update. bytes: that a device contributes, over all of them. dtypes: of the
    operands. group: devices that take part, of the largest group.
    """

    count: int
    bytes: int
    dtypes: tuple[str, ...]
    group: int


class ProgramCost(NamedTuple):
    """Cost of an update for a device.

    parts: by name, see `part_of`. collectives: by kind. hbm_bytes: read from and written to the
    chip's main memory.
    """

    parts: dict[str, Part]
    collectives: dict[str, Collective]
    hbm_bytes: int

    @property
    def cycles(self) -> int:
        """Cycles of all parts."""
        return sum(part.cycles for part in self.parts.values())

    @property
    def flops(self) -> int:
        """Operations of all parts."""
        return sum(part.flops for part in self.parts.values())


def cost_of(module: Module, devices: int) -> ProgramCost:
    """Return the cost of a program that runs on `devices`, for one of them."""
    parts: dict[str, Part] = {}
    collectives: dict[str, Collective] = {}
    traffic = 0
    for instruction, computation, times, path in runs(module):
        flops = flops_of(module, instruction, computation)
        if instruction.cycles or flops:
            name = part_of(path)
            old = parts.get(name, Part(0, 0))
            parts[name] = Part(old.cycles + times * instruction.cycles, old.flops + times * flops)
        traffic += times * traffic_of(module, instruction, computation)
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            count, size, dtypes, group = collectives.get(kind, Collective(0, 0, (), 1))
            shapes = [s for each in _operands(instruction, computation) for s in each]
            # Groups are listed, {{0,1},{2,3}}, or counted, [2,2]. Without either there is one.
            listed = re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.attributes)
            counted = re.search(r"replica_groups=\[\d+,(\d+)\]", instruction.attributes)
            together = int(counted[1]) if counted else devices
            together = listed[1].count(",") + 1 if listed else together
            collectives[kind] = Collective(
                count + times,
                size + times * sum(shape.bytes for shape in shapes),
                tuple(sorted({*dtypes, *(shape.dtype for shape in shapes)})),
                max(group, together),
            )
    return ProgramCost(parts, collectives, traffic)


def _operands(instruction: Instruction, computation: Computation) -> list[tuple[Shape, ...]]:
    """Return the shapes of each operand, () of one that is not an instruction."""
    found = [computation.get(name) for name in instruction.operands]
    return [each.shapes if each else () for each in found]


def part_of(path: str) -> str:
    """Return the part of an update that an instruction belongs to, by its path."""
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


def flops_of(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Return the operations of the products in an instruction, or in a fusion."""
    if instruction.opcode == "fusion":
        inner = module.computations.get("".join(instruction.called("calls")), {})
        return sum(flops_of(module, each, inner) for each in inner.values())
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    out = instruction.shapes[0].dims
    (left,), (right,) = _operands(instruction, computation)[:2]
    if instruction.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        over = [int(axis) for axis in found[1].split(",") if axis] if found else []
        return 2 * math.prod(out) * math.prod(left.dims[axis] for axis in over)
    # On a TPU a product is a convolution too, with batch axes as spatial ones full of padding and
    # holes. So only pairs of an output place and a kernel place that meet an element count.
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"{instruction.name}: a convolution without dim_labels")
    found = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    given = dict(item.split("=") for item in found[1].split()) if found else {}
    total = 2 * out[labels[3].index("b")] * out[labels[3].index("f")]
    total *= right.dims[labels[2].index("i")]
    for axis in range(len(left.dims) - 2):
        size, stride, pad, left_dilate, right_dilate = (
            # A pad is "low_high", and the low one says where the window starts.
            int(given[key].split("x")[axis].split("_")[0]) if key in given else default
            for key, default in WINDOW.items()
        )
        places = np.arange(out[labels[3].index(str(axis))])[:, None] * stride
        at = places + np.arange(size)[None] * right_dilate - pad
        last = (left.dims[labels[1].index(str(axis))] - 1) * left_dilate
        total *= int(((at >= 0) & (at <= last) & (at % left_dilate == 0)).sum())
    return total


def traffic_of(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Return the bytes that an instruction reads from and write to main memory.

    An array that is only sliced, or written in place, counts with the size of the slice.
    """
    opcode = instruction.opcode
    # Space 0 is main memory. What stays in the chip's other memories costs nothing here.
    if opcode in NO_TRAFFIC or opcode.endswith(("-done", "-update")):
        return 0
    operands = _operands(instruction, computation)
    if opcode == "copy-start":
        return sum(s.bytes for s in instruction.shapes[:2] if s.space == 0)
    if opcode == "fusion":
        inner = module.computations["".join(instruction.called("calls"))]
        return _fusion_traffic(instruction, operands, inner)
    read = [s for shapes in operands for s in shapes if s.space == 0]
    written = [s for s in instruction.shapes if s.space == 0]
    if opcode in READS_PART:  # the slice is read and written, the rest of the array is not touched
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
            whole, sliced = number[position].shapes[0].bytes, 0
            for user, operand in _users(number[position].name, inner):
                if user.opcode in READS_PART and operand == 0:
                    sliced += sum(shape.bytes for shape in user.shapes)
                elif user.opcode != "dynamic-update-slice" or operand != 0:
                    sliced = whole
            total += min(sliced, whole)
    root = next(i for i in inner.values() if i.is_root)
    parts = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for shape, part in zip(fusion.shapes, parts, strict=False):
        while part.opcode == "bitcast":
            part = inner[part.operands[0]]
        if part.opcode == "dynamic-update-slice":
            part = inner[part.operands[1]]  # the rest stays in place
        if shape.space == 0:
            total += min(shape.bytes, sum(each.bytes for each in part.shapes))
    return total


def _users(name: str, inner: Computation) -> Iterator[tuple[Instruction, int]]:
    """Yield the users of an array and its position among their operands, through bitcasts."""
    for user in inner.values():
        if user.opcode in ("parameter", "constant") or name not in user.operands:
            continue
        if user.opcode == "bitcast":
            yield from _users(user.name, inner)
        else:
            yield user, user.operands.index(name)
