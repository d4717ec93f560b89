"""The mesh puts arrays where it says."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader import ConfigError, make_mesh
from nca_trader.mesh import DATA, everywhere, replicated


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_data_axis_gives_each_device_its_own_rows_and_replicated_gives_each_all(devices):
    mesh = make_mesh(devices)
    assert mesh.shape == {DATA: devices} and mesh.axis_types == (AxisType.Auto,)
    rows = np.arange(16.0).reshape(16, 1)
    parts = jax.device_put(rows, NamedSharding(mesh, P(DATA))).addressable_shards
    assert [part.data.shape for part in parts] == [(16 // devices, 1)] * devices
    np.testing.assert_array_equal(np.concatenate([part.data for part in parts]), rows)
    copies = jax.device_put(rows, replicated(mesh)).addressable_shards
    assert len({copy.device for copy in copies}) == devices
    for copy in copies:
        np.testing.assert_array_equal(copy.data, rows)


@pytest.mark.parametrize("devices", [0, -1, 9])
def test_a_mesh_that_this_machine_does_not_have_is_refused(devices):
    with pytest.raises(ConfigError, match=rf"mesh.devices = {devices}, .* has 8 cpu .* at most 8"):
        make_mesh(devices)


def test_what_is_everywhere_is_whole_on_each_device():
    mesh = make_mesh(4)
    tree = {"a": np.arange(6.0).reshape(2, 3)}
    copies = everywhere(tree, mesh)["a"].addressable_shards
    assert [copy.data.shape for copy in copies] == [(2, 3)] * 4
