"""The device mesh that the learner runs on.

Its axes are (data, fsdp, model). A batch is split over `data` and `fsdp`, the stored parameters and
optimiser state over `fsdp`, the width of hidden layers over `model`. Devices that share parameters
or a layer's width communicate much more per minibatch than those that share a batch. Where the
places of the chips are known, such devices are therefore neighbours.
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
    """Split this machine's CPU into `count` devices; call it before JAX initialises its devices.

    One device per core waits less than threads that share every operation of one device. The call
    has no effect if it comes too late, or if XLA_FLAGS sets the number of devices.

    Args:
      count: number of devices, e.g. of cores.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    # JAX raises it once its devices exist.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def make_mesh(data: int = 1, fsdp: int = 1, model: int = 1) -> Mesh:
    """Make a mesh of `data * fsdp * model` devices.

    Args:
      data: parts of a batch.
      fsdp: parts of a batch and of the stored parameters.
      model: parts of the width of hidden layers.

    Returns:
      A mesh with axes "data", "fsdp" and "model".

    Raises:
      ConfigError: sizes below 1, more devices than there are, or chips that cannot be neighbours.

    Example:
      >>> dict(make_mesh(data=1).shape)
      {'data': 1, 'fsdp': 1, 'model': 1}
    """
    for name, size in {"data": data, "fsdp": fsdp, "model": model}.items():
        expect(name, size, Integral, "a whole number of devices")
    return mesh_over((data, fsdp, model))


def mesh_over(axes: tuple[int, int, int]) -> Mesh:
    """Make the mesh of the axes of a config, see `make_mesh`."""
    (data, fsdp, model), there = axes, jax.devices()
    count = data * fsdp * model
    if min(data, fsdp, model) < 1 or count > len(there):
        more = " (nca_trader.parallel.mesh.use_cores, before JAX begins, makes one of each core)"
        sizes = f" (data {data}, fsdp {fsdp}, model {model})" if fsdp * model != 1 else ""
        raise ConfigError(
            f"mesh.devices = {count}{sizes}, but this machine has {len(there)} "
            f"{there[0].platform} device(s); ask for at most {len(there)}"
            f"{more if there[0].platform == 'cpu' else ''}."
        )
    # Part of a slice may have any shape. There, as on CPUs and GPUs, devices keep the order of the
    # list; a GPU has `coords` as well, without `core_on_chip`.
    if count == len(there) and there[0].platform == "tpu":
        return mesh_of(arrange(there, axes))
    return mesh_of(np.array(there[:count]).reshape(axes))


def mesh_of(devices: np.ndarray) -> Mesh:
    """Make a mesh of these devices, `[data, fsdp, model]`."""
    # Auto: the compiler shards what `shard_map` does not.
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
    """Return the number of parts that a batch is split into."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def is_described(mesh: Mesh) -> bool:
    """Whether its devices are an AOT topology's, which can be compiled for but not run on."""
    return "CompileOnly" in type(mesh.devices.flat[0].client).__name__


def replicate(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that is whole on every device."""
    return NamedSharding(mesh, P())


def everywhere(tree: Any, mesh: Mesh) -> Any:
    """Put arrays whole on every device; return their shapes on an AOT topology."""
    sharding = replicate(mesh)
    if not is_described(mesh):
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Return the compiler options of the learner's program on a mesh; {} is the default."""
    # On the CPU, LLVM's level 1 compiles in two thirds of the time of level 3, and the program runs
    # 1 to 4% slower (docs/lab-notes/learners.md). At level 0, which the jax setting below asks
    # for, it runs 7 times slower.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or jax.config.read("jax_disable_most_optimizations"):
        return {}
    return {"xla_backend_optimization_level": 1}


def arrange(devices: Sequence[Any], axes: tuple[int, int, int]) -> np.ndarray:
    """Arrange devices `[data, fsdp, model]` so that groups along fsdp and model are neighbours.

    The two devices of a chip, where it has two, are neighbours on the data axis.

    Args:
      devices: all of a slice, each with `coords` (the place of its chip) and `core_on_chip`.
      axes: sizes of the axes.

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
    """Yield every place of a block, each next to the one before it."""
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
    """Return the sides of the fsdp block and the model block with the smallest sum of sides."""
    # No axis is in both: two chips of one fsdp group would be a model block apart.
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
