"""How the devices of a slice become a mesh of the axes (data, fsdp, model).

Those who share parameters (`fsdp`) or a layer's width (`model`) talk in every layer, those who
share a batch (`data`) once a gradient: the first two axes lie on chips that a link joins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nca_trader.errors import ConfigError
from nca_trader.scale.chips import Slice

# From so many chips on, parameters and optimiser are split over the four chips of a square: a
# smaller slice trains agents whose state is far below a chip's memory.
FSDP_FROM = 256
SQUARE = 4


def mesh_axes(there: Slice) -> tuple[int, int, int]:
    """(data, fsdp, model) sizes for all devices of a slice; their product is its devices."""
    fsdp = SQUARE if there.chips >= FSDP_FROM else 1
    return there.devices // fsdp, fsdp, 1


def arrange(devices: Sequence[Any], axes: tuple[int, int, int]) -> np.ndarray:
    """`[data, fsdp, model]` of the devices, neighbours along fsdp and along model.

    Args:
      devices: of a whole slice, each with `coords` (a chip's place) and `core_on_chip`.
      axes: sizes; the two devices of a chip, where it has two, are neighbours of the data axis.

    Raises:
      ConfigError: the sizes do not multiply to the devices, or no block of chips has these sides.
    """
    data, fsdp, model = axes
    if data * fsdp * model != len(devices):
        raise ConfigError(
            f"mesh {axes} has {data * fsdp * model} devices, the slice {len(devices)}; make data "
            f"{len(devices) // (fsdp * model)}."
        )
    of = {(*device.coords, device.core_on_chip): device for device in devices}
    places = sorted(of)
    shape = tuple(max(place[axis] for place in places) + 1 for axis in range(len(places[0])))
    *chips, cores = shape
    fsdp_block, model_block = _blocks(tuple(chips), fsdp, model)
    block = [a * b for a, b in zip(fsdp_block, model_block, strict=True)]
    counts = [side // size for side, size in zip(chips, block, strict=True)]
    out = np.empty((math.prod(counts) * cores, fsdp, model), dtype=object)
    for row, (corner, core) in enumerate(itertools.product(snake(counts), range(cores))):
        for i, up in enumerate(snake(fsdp_block)):
            for j, along in enumerate(snake(model_block)):
                chip = [c * n + u + a for c, n, u, a in zip(corner, block, up, along, strict=True)]
                out[row, i, j] = of[(*chip, core)]
    return out


def snake(sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every place of a block, each next to the one before it."""
    if not sides:
        yield ()
        return
    for number, rest in enumerate(snake(sides[1:])):
        forth = range(sides[0])
        for first in forth if number % 2 == 0 else reversed(forth):
            yield (first, *rest)


def _blocks(
    shape: tuple[int, ...], fsdp: int, model: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sides of the fsdp and the model block: the most compact; no axis is in both.

    Were an axis in both, two chips of one fsdp group would be a model block apart.
    """
    sides = [[n for n in range(1, side + 1) if side % n == 0] for side in shape]
    found = [
        (sum(a) + sum(b), a, b)
        for a in itertools.product(*sides)
        if math.prod(a) == fsdp
        for b in itertools.product(*sides)
        if math.prod(b) == model and all(1 in pair for pair in zip(a, b, strict=True))
    ]
    if not found:
        raise ConfigError(
            f"no block of {fsdp} by {model} neighbouring chips divides a slice of {shape}; take "
            "fsdp and model that divide its sides, e.g. 4 and 1."
        )
    _, a, b = min(found)
    return a, b
