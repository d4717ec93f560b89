"""The device mesh: where the learner runs is a mesh, not a code path.

Its axes are (data, fsdp, model). A batch is split over `data` and `fsdp`; parameters and optimiser
state over `fsdp`, as they are kept; the width of hidden layers over `model`. Those who share
parameters or a layer's width talk in every minibatch much more than those who share a batch, so
on chips whose place is known they are neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.config.ranges import expect
from nca_trader.errors import ConfigError

DATA, FSDP, MODEL = AXES = ("data", "fsdp", "model")
BATCH = (DATA, FSDP)  # the axes that a batch is split over


def use_cores(count: int) -> None:
    """Makes `count` devices of this machine's CPU; must come before JAX looks for its devices.

    As many devices as cores wait less for one another than the threads that share every operation
    of one device. Too late, or where XLA_FLAGS say how many devices there are, this does nothing.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def make_mesh(data: int = 1, fsdp: int = 1, model: int = 1) -> Mesh:
    """A mesh of `data * fsdp * model` devices of this machine; one device is (1, 1, 1).

    Raises:
      ConfigError: sizes below 1, more devices than there are, or chips that cannot be neighbours.
    """
    for name, size in {"data": data, "fsdp": fsdp, "model": model}.items():
        expect(name, size, Integral, "a whole number of devices")
    there, count = jax.devices(), data * fsdp * model
    if min(data, fsdp, model) < 1 or count > len(there):
        more = " (nca_trader.parallel.mesh.use_cores, before JAX begins, makes one of each core)"
        sizes = f" (data {data}, fsdp {fsdp}, model {model})" if fsdp * model != 1 else ""
        raise ConfigError(
            f"mesh.devices = {count}{sizes}, but this machine has {len(there)} "
            f"{there[0].platform} device(s); ask for at most {len(there)}"
            f"{more if there[0].platform == 'cpu' else ''}."
        )
    axes = (data, fsdp, model)
    # A part of a slice may have any shape: there, as on a CPU, devices stand as they are listed.
    if count == len(there) and all(hasattr(device, "coords") for device in there):
        return mesh_of(arrange(there, axes))
    return mesh_of(np.array(there[:count]).reshape(axes))


def mesh_of(devices: np.ndarray) -> Mesh:
    """A mesh of just these devices, `[data, fsdp, model]`."""
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts a batch is split."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def is_described(mesh: Mesh) -> bool:
    """Whether its devices are a topology's: programs can be compiled for them, nothing can run."""
    return "CompileOnly" in type(mesh.devices.flat[0].client).__name__


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, P())


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """The arrays, whole on every device; their shapes alone where devices are only described."""
    sharding = replicated(mesh)
    if not is_described(mesh):
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """How the learner's program is compiled on a mesh; {} is the compiler's own choice.

    On the CPU LLVM's first level: the program is there in two thirds of the time and runs 1 to 4%
    slower than at the third, see docs/lab-notes/learners.md. (At level 0 it runs 7 times slower;
    whoever asks jax for that, by `jax_disable_most_optimizations`, has it.)
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or jax.config.read("jax_disable_most_optimizations"):
        return {}
    return {"xla_backend_optimization_level": 1}


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
