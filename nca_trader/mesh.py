"""The device mesh: where the learner runs is a mesh, not a code path."""

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
    return Mesh(np.array(there[:devices]), (DATA,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, P())
