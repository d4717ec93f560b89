"""TPU chips and the slices they come in: what a chip can do, and how a slice's chips lie.

Figures are the vendor's public ones, per chip, dense bfloat16. What a compiler or a machine says
of its own (the memory it leaves to a program) is not in the table but asked, see `compiled`.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from nca_trader.config.ranges import nearest
from nca_trader.errors import ConfigError, argument


class Chip(NamedTuple):
    """One generation of chips.

    Attributes:
      tflops: bfloat16, in 1e12 a second.
      hbm_gb: memory, as the vendor counts it. hbm_usable: bytes that the compiler (libtpu 0.0.51)
        leaves to programs on a chip. hbm_gb_per_s: its rate. ici_gb_per_s: of all links to other
        chips of the slice together, both ways, in 1e9 bytes.
      mxu: rows and columns of a matrix unit. flops_per_cycle: of all matrix units of a device.
      devices: JAX devices a chip. cores_in_name: what the N of "v5p-N" counts is a core of a
        chip, so many of which a chip has; 0 where no such name is public.
      host: chips along each axis of the largest slice that is one machine.
      source: where the figures are from.
    """

    tflops: float
    hbm_gb: float
    hbm_usable: float
    hbm_gb_per_s: float
    ici_gb_per_s: float
    mxu: int
    flops_per_cycle: int
    devices: int
    cores_in_name: int
    host: tuple[int, ...]
    source: str

    @property
    def clock(self) -> float:
        """Cycles a second at which the matrix units give `tflops`."""
        return self.tflops * 1e12 / (self.devices * self.flops_per_cycle)


GIB = 2.0**30
DOCS = "https://cloud.google.com/tpu/docs/"
# flops_per_cycle: 2 for each cell of the matrix units, 4 units of 128 x 128 a core (v5p: two cores
# a device) or of 256 x 256 (v6e, TPU7x: their 256-wide units count as many). The compiler's cycles
# of a product of 8192 x 8192 matrices are 70 to 90% of that rate on each.
CHIPS = {
    "v5e": Chip(
        197, 16, 15.75 * GIB, 819, 400, 128, 4 * 2 * 128**2, 1, 1, (2, 4), DOCS + "v5e"
    ),
    "v5p": Chip(
        459, 95, 95.73 * GIB, 2765, 1200, 128, 8 * 2 * 128**2, 1, 2, (2, 2, 1), DOCS + "v5p"
    ),
    "v6e": Chip(
        918, 32, 31.24 * GIB, 1638, 800, 256, 4 * 2 * 256**2, 1, 1, (2, 4), DOCS + "v6e"
    ),
    "tpu7x": Chip(
        2307, 192, 2 * 94.74 * GIB, 7380, 1200, 256, 4 * 2 * 256**2, 2, 0, (2, 2, 1),
        DOCS + "tpu7x",
    ),
}  # fmt: skip

# Chips by the name that JAX gives a device.
KINDS = {
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x",
}  # fmt: skip

# Shapes of the slices that a name with a number means, by chips. Source: the same pages.
PLANE = {
    1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16),
    256: (16, 16),
}  # fmt: skip
CUBE = {
    4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8),
    256: (4, 8, 8), 384: (4, 8, 12), 512: (8, 8, 8), 1024: (8, 8, 16), 2048: (8, 16, 16),
    4096: (16, 16, 16), 6144: (16, 16, 24),
}  # fmt: skip


GPU = re.compile(r"gpu|cuda|rocm|rtx.*|g?[abhl]\d{2,3}[a-z]*|mi\d+[a-z]*|v100|[lt]4")


class Slice(NamedTuple):
    """A slice of a pod: chip: its generation, a key of `CHIPS`; shape: chips along each axis."""

    chip: str
    shape: tuple[int, ...]

    @property
    def of(self) -> Chip:
        """Its chips."""
        return CHIPS[self.chip]

    @property
    def chips(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """JAX devices of all its chips."""
        return self.chips * self.of.devices

    @property
    def name(self) -> str:
        """As the compiler calls it, e.g. "v5e:2x4"."""
        return f"{self.chip}:{'x'.join(map(str, self.shape))}"


def slice_of(name: str) -> Slice:
    """The slice that a name means: "v5e-8", "v5e:2x4", or "v5e", which is one host.

    The N of "v5p-N" counts cores, two a chip; that of the others counts chips.

    Raises:
      ConfigError: an unknown chip, a number no slice has, or a shape of another dimension.
    """
    found = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+)*))?", name.strip().lower())
    if found is None or found[1] not in CHIPS:
        chip = re.split(r"[-:]", name.strip().lower())[0]
        if GPU.fullmatch(chip):
            raise ConfigError(
                f"{argument('topology', name)}: plan is of TPU slices; on a machine with a "
                "GPU `nca-trader profile` measures an update."
            )
        raise ConfigError(
            f"{argument('topology', name)}: {nearest(chip, CHIPS)}It may be a chip of "
            f"{', '.join(CHIPS)} "
            "with a size or a shape, e.g. v5e-8, v5e:2x4, v5p-768, tpu7x:2x2x1."
        )
    kind, number, shape = found.groups()
    chip = CHIPS[kind]
    if shape is not None:
        return _of_shape(name, kind, tuple(map(int, shape.split("x"))))
    if number is None:
        return Slice(kind, chip.host)
    if not chip.cores_in_name:
        raise ConfigError(
            f"{argument('topology', name)}: there is no public table of sizes of {kind}; give "
            "a shape, e.g. "
            f"{Slice(kind, chip.host).name}."
        )
    table = {n * chip.cores_in_name: s for n, s in (PLANE, CUBE)[len(chip.host) - 2].items()}
    if int(number) not in table:
        near = min(table, key=lambda n: abs(n - int(number)))
        counted = "cores, two a chip" if chip.cores_in_name == 2 else "chips"
        raise ConfigError(
            f"{argument('topology', name)}: the number counts {counted}, and no slice has "
            f"{number}; the "
            f"nearest that there is: {kind}-{near}. Or give a shape, e.g. "
            f"{Slice(kind, table[near]).name}."
        )
    return Slice(kind, table[int(number)])


def _of_shape(name: str, kind: str, shape: tuple[int, ...]) -> Slice:
    axes = len(CHIPS[kind].host)
    if len(shape) != axes or 0 in shape:
        example = Slice(kind, CHIPS[kind].host).name
        raise ConfigError(
            f"{argument('topology', name)}: a slice of {kind} has {axes} axes of at least 1 "
            "chip, e.g. "
            f"{example}."
        )
    return Slice(kind, shape)


# From so many chips on, parameters and optimiser are split over the four chips of a square: a
# smaller slice trains agents whose state is far below a chip's memory.
FSDP_FROM = 256
SQUARE = 4


def mesh_axes(there: Slice) -> tuple[int, int, int]:
    """(data, fsdp, model) sizes for all devices of a slice; their product is its devices."""
    return axes_of(there.devices, there.chips)


def axes_of(devices: int, chips: int) -> tuple[int, int, int]:
    """(data, fsdp, model) sizes for so many devices, which so many chips have."""
    fsdp = SQUARE if chips >= FSDP_FROM and devices % SQUARE == 0 else 1
    return devices // fsdp, fsdp, 1
