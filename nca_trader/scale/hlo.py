"""The text of a compiled TPU program, read: computations, instructions, how often each runs.

A loop's body is written once and runs many times; so does `cost_analysis()` count it, once. Here
what runs is walked, with its number of times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

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
