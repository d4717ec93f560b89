"""The device mesh: where the learner runs is a mesh, not a code path."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.errors import ConfigError

DATA = "data"


def make_mesh(devices: int = 1) -> Mesh:
    """A mesh of `devices` devices on the `data` axis; one device is a mesh of one."""
    there = jax.devices()
    if not 1 <= devices <= len(there):
        raise ConfigError(
            f"mesh.devices = {devices}, but this machine has {len(there)} "
            f"{there[0].platform} device(s); ask for at most {len(there)}."
        )
    return mesh_of(there[:devices])


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh of just these devices, on the `data` axis."""
    return Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))


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

    On the CPU LLVM's first level: the program runs as fast as at its third and is there in two
    thirds of the time, see benchmarks/NOTES.md. (Level 0 runs 7 times slower; whoever asks jax for
    that, by `jax_disable_most_optimizations`, has it.)
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or jax.config.read("jax_disable_most_optimizations"):
        return {}
    return {"xla_backend_optimization_level": 1}
