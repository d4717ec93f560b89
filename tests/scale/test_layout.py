"""Meshes over real coordinates: who shares parameters sits side by side."""

import importlib.util
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest

from nca_trader.errors import ConfigError
from nca_trader.parallel.mesh import arrange, snake
from nca_trader.scale.chips import mesh_axes, slice_of

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the extra tpu-plan is not installed"
)
POD_TO_MESH = {
    "v5e-1": (1, 1, 1),
    "v5e-8": (8, 1, 1),
    "v5e-64": (64, 1, 1),
    "v5e-256": (64, 4, 1),
    "v6e-256": (64, 4, 1),
    "v5p-8": (4, 1, 1),
    "v5p-256": (128, 1, 1),
    "v5p-768": (96, 4, 1),
    "tpu7x": (8, 1, 1),
    "tpu7x:4x8x8": (128, 4, 1),
}
MESHES = [
    *((name, axes) for name, axes in POD_TO_MESH.items()),
    ("v5p:4x8x12", (48, 4, 2)),
    ("v5p:4x4x8", (32, 2, 2)),
    ("v5p:2x4x4", (8, 4, 1)),
    ("v5e:2x4", (2, 2, 2)),
    ("v5e:16x16", (16, 16, 1)),
    ("tpu7x:2x2x2", (2, 4, 2)),
]


class Device(NamedTuple):
    coords: tuple
    core_on_chip: int


def described(there):
    """Devices as a topology gives them: host by host of 2 x 2 chips, not row by row."""
    sides = [range(side) for side in there.shape] + [range(1)] * (3 - len(there.shape))
    places = sorted(itertools.product(*sides), key=lambda c: (c[2], c[1] // 2, c[0] // 2, c[1]))
    cores = range(there.of.devices)
    return [Device(place, core) for place in places for core in cores]


def links(devices):
    """Of each pair that follow each other along axis 0: the links between their chips."""
    coords = np.array([[device.coords for device in row] for row in devices])
    return np.abs(np.diff(coords, axis=0)).sum(axis=-1)


def group_links(mesh):
    """All links between fsdp neighbours, then between model neighbours."""
    _, fsdp, model = mesh.shape
    along_fsdp = links(mesh.transpose(1, 0, 2).reshape(fsdp, -1))
    along_model = links(mesh.transpose(2, 0, 1).reshape(model, -1))
    return along_fsdp, along_model


@pytest.mark.parametrize(("name", "axes"), POD_TO_MESH.items())
def test_the_table_from_pod_to_mesh(name, axes):
    there = slice_of(name)
    assert mesh_axes(there.devices, there.chips) == axes
    assert math.prod(axes) == there.devices


@pytest.mark.parametrize(("name", "axes"), MESHES)
def test_those_who_share_parameters_or_width_are_one_link_apart(name, axes):
    there = slice_of(name)
    mesh = arrange(described(there), axes)
    assert mesh.shape == axes
    assert len(set(mesh.flat)) == there.devices  # everyone once
    for apart in group_links(mesh):
        assert (apart == 1).all()


@pytest.mark.parametrize("sides", [(4,), (2, 2), (3, 2, 4), (1, 5, 1)])
def test_a_snake_visits_every_place_once_one_step_at_a_time(sides):
    path = np.array(list(snake(sides)))
    assert len({tuple(place) for place in path.tolist()}) == math.prod(sides) == len(path)
    assert (np.abs(np.diff(path, axis=0)).sum(axis=-1) == 1).all()


def test_a_mesh_of_other_devices_than_the_slice_has_is_refused():
    with pytest.raises(ConfigError, match="16 devices, the slice 8; make data 4"):
        arrange(described(slice_of("v5e-8")), (8, 2, 1))


@pytest.mark.parametrize("axes", [(1, 2, 8), (1, 8, 2)])
def test_neighbours_that_no_block_of_the_slice_holds_are_refused(axes):
    devices = described(slice_of("v5e:4x4"))
    with pytest.raises(ConfigError, match=f"no block of {axes[1]} by {axes[2]} neigh"):
        arrange(devices, axes)


@needs_compiler
@pytest.mark.parametrize("name", ["v5e-256", "v5p-768", "tpu7x:2x2x2"])
def test_the_compiler_describes_the_same_chips(name, environment):
    from nca_trader.scale.compiled import devices_of

    there = slice_of(name)
    devices = devices_of(there)
    assert len(devices) == there.devices
    told = {(tuple(d.coords), d.core_on_chip) for d in devices}
    assert told == {(d.coords, d.core_on_chip) for d in described(there)}
    slices = {each: slice_of(each).name for each, _ in MESHES}
    meshes = {mesh_axes(there.devices, there.chips)} | {
        axes for each, axes in MESHES if slices[each] == there.name
    }
    assert name == "v5e-256" or any(model > 1 for _, _, model in meshes)
    for axes in meshes:
        for apart in group_links(arrange(devices, axes)):
            assert (apart == 1).all()
