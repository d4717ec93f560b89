"""Names of slices, their shapes, and what their chips can do."""

import itertools
import math

import pytest

from nca_trader.errors import ConfigError
from nca_trader.scale.chips import CHIPS, CUBE, GIB, PLANE, Slice, slice_of


@pytest.mark.parametrize(
    ("name", "chip", "shape", "devices"),
    [
        ("v5e-8", "v5e", (2, 4), 8),
        ("v5e-256", "v5e", (16, 16), 256),
        ("v6e-256", "v6e", (16, 16), 256),
        ("V6E-4", "v6e", (2, 2), 4),
        ("v5p-8", "v5p", (2, 2, 1), 4),  # 8 cores, 4 chips, a device each
        ("v5p-768", "v5p", (4, 8, 12), 384),
        ("v5p:4x8x12", "v5p", (4, 8, 12), 384),
        ("tpu7x", "tpu7x", (2, 2, 1), 8),  # two devices a chip
        ("tpu7x:4x4x4", "tpu7x", (4, 4, 4), 128),
        ("v5e", "v5e", (2, 4), 8),
        ("v5e:2x4", "v5e", (2, 4), 8),
    ],
)
def test_a_name_means_chips_in_a_shape(name, chip, shape, devices):
    there = slice_of(name)
    assert (there.chip, there.shape, there.devices) == (chip, shape, devices)
    assert slice_of(there.name) == there


def test_every_shape_of_the_tables_has_as_many_chips_as_it_says():
    for chips, shape in itertools.chain(PLANE.items(), CUBE.items()):
        assert math.prod(shape) == chips


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e-9", "no slice has 9; the nearest size is v5e-8. Or .* v5e:2x4"),
        ("v5p-4", "counts cores, two per chip, and no slice has 4; .* v5p-8"),
        ("v5p-384", "cores, two per chip, and no slice has 384; .* v5p-256"),
        ("tpu7x-8", "no public table of sizes of tpu7x; give a shape, e.g. tpu7x:2x2x1"),
        ("v5e:2x2x2", "a slice of v5e has 2 axes"),
        ("v5p:8x8", "a slice of v5p has 3 axes"),
        ("v5e:0x4", "at least 1 chip"),
        ("v55e-8", "did you mean 'v5e'"),
        (
            "h100:8",
            'topology="h100:8": plan is of TPU slices; .* profile of `nca-trader train` measures',
        ),
        ("gpu", "plan is of TPU slices"),
        ("v4:2x2x1", "It may be a chip of v5e, v5p, v6e, tpu7x"),
        ("", "It may be a chip of"),
    ],
)
def test_a_slice_that_there_is_not_is_refused_with_one_that_there_is(name, said):
    with pytest.raises(ConfigError, match=said):
        slice_of(name)


@pytest.mark.parametrize(
    ("chip", "gigahertz"), [("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75), ("tpu7x", 2.2)]
)
def test_peak_rate_and_matrix_units_give_a_plausible_clock(chip, gigahertz):
    assert CHIPS[chip].clock == pytest.approx(gigahertz * 1e9, rel=2e-3)


def test_programs_get_less_memory_than_the_vendor_counts():
    for chip in CHIPS.values():
        assert 0.95 * chip.hbm_gb * 1e9 < chip.hbm_usable <= 1.01 * chip.hbm_gb * GIB
    assert Slice("v5p", (2, 2, 1)).of is CHIPS["v5p"]
