"""The mesh puts arrays where it says."""

import dataclasses
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader import ConfigError, make_mesh
from nca_trader.parallel import mesh
from nca_trader.parallel.mesh import BATCH, DATA, FSDP, MODEL, batch_shards, everywhere, replicate


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_data_axis_gives_each_device_its_own_rows_and_replicated_gives_each_all(devices):
    here = make_mesh(devices)
    assert here.shape == {DATA: devices, FSDP: 1, MODEL: 1}
    assert here.axis_types == (AxisType.Auto,) * 3
    rows = np.arange(16.0).reshape(16, 1)
    parts = jax.device_put(rows, NamedSharding(here, P(DATA))).addressable_shards
    assert [part.data.shape for part in parts] == [(16 // devices, 1)] * devices
    np.testing.assert_array_equal(np.concatenate([part.data for part in parts]), rows)
    copies = jax.device_put(rows, replicate(here)).addressable_shards
    assert len({copy.device for copy in copies}) == devices
    for copy in copies:
        np.testing.assert_array_equal(copy.data, rows)


@pytest.mark.parametrize("devices", [0, -1, 9])
def test_a_mesh_that_this_machine_does_not_have_is_refused(devices):
    with pytest.raises(ConfigError, match=rf"mesh.devices = {devices}, .* has 8 cpu .* at most 8"):
        make_mesh(devices)


@pytest.mark.heavy
def test_a_cpu_has_as_many_devices_as_are_asked_for_before_jax_begins():
    script = (
        "import jax; from nca_trader.parallel.mesh import make_mesh, use_cores; use_cores(3)\n"
        "assert make_mesh(3).size == 3; use_cores(5); assert jax.device_count() == 3"
    )
    flags = {"XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, **flags})
    told = "import jax; from nca_trader.parallel.mesh import use_cores; use_cores(3); "
    told += "assert jax.device_count() == 8"  # as the flag of every test says
    subprocess.run([sys.executable, "-c", told], check=True)


def test_what_is_everywhere_is_whole_on_each_device():
    here = make_mesh(4)
    tree = {"a": np.arange(6.0).reshape(2, 3)}
    copies = everywhere(tree, here)["a"].addressable_shards
    assert [copy.data.shape for copy in copies] == [(2, 3)] * 4


@pytest.mark.parametrize("axes", [(4, 2, 1), (2, 2, 2), (1, 1, 8)])
def test_a_batch_is_split_over_data_and_fsdp_and_a_width_over_model(axes):
    here = make_mesh(*axes)
    assert tuple(here.shape.values()) == axes and batch_shards(here) == axes[0] * axes[1]
    array = np.arange(128.0).reshape(16, 8)
    parts = jax.device_put(array, NamedSharding(here, P(BATCH, MODEL))).addressable_shards
    assert {part.data.shape for part in parts} == {(16 // batch_shards(here), 8 // axes[2])}
    np.testing.assert_array_equal(sum(np.asarray(part.data).sum() for part in parts), array.sum())


def test_three_sizes_that_are_too_many_together_are_refused():
    with pytest.raises(
        ConfigError, match=r"mesh.devices = 16 \(data 4, fsdp 2, model 2\), .* 8 cpu"
    ):
        make_mesh(4, 2, 2)


class Chip(NamedTuple):
    """A device that knows its place, as a TPU's does."""

    coords: tuple
    core_on_chip: int
    platform: str = "tpu"


def test_on_chips_that_know_their_place_fsdp_and_model_are_neighbours(monkeypatch):
    chips = [Chip((x, y, 0), 0) for y in range(4) for x in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: chips)
    monkeypatch.setattr(mesh, "mesh_of", lambda devices: devices)
    for axes in ((2, 2, 2), (2, 4, 1)):
        place = np.array([[[c.coords for c in row] for row in rows] for rows in make_mesh(*axes)])
        for axis in (1, 2):
            assert (np.abs(np.diff(place, axis=axis)).sum(-1) == 1).all()
    # As they are listed, two of four would be two links apart.
    listed = np.array([chip.coords for chip in chips]).reshape(2, 4, 1, 3)
    assert (np.abs(np.diff(listed, axis=1)).sum(-1) == 2).any()


@dataclasses.dataclass
class Card:
    """A GPU: it has a place, as a TPU's chip, and no number of a core."""

    coords: tuple
    platform: str = "gpu"


def test_gpus_keep_the_order_in_which_they_are_listed(monkeypatch):
    cards = [Card((0, 0, place)) for place in (2, 0, 3, 1)]
    monkeypatch.setattr(jax, "devices", lambda: cards)
    monkeypatch.setattr(mesh, "mesh_of", lambda devices: devices)
    assert list(make_mesh(2, 2, 1).flat) == cards
