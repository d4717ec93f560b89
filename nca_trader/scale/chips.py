"""TPU chips, the slices they come in, and the peak rates of a device.

The table holds the vendor's public specifications per chip, for dense bfloat16. Source of each row:
https://cloud.google.com/tpu/docs/ and the name of the generation.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nca_trader.config.ranges import nearest
from nca_trader.errors import ConfigError, argument

GIB = 2.0**30
PASSES = 6  # of bfloat16 products in a TPU's product of float32 operands, at full precision
# Slices from this size on shard parameters and optimiser over squares of four chips. The state of
# an agent is far below the memory of one chip, so smaller slices only share the batch.
FSDP_FROM = 256
SQUARE = 4


class Chip(NamedTuple):
    """One generation of chips.

    Attributes:
      tflops: bfloat16 operations, in 1e12 per second.
      hbm_gb: memory, as the vendor counts it.
      hbm_usable: bytes per chip that the compiler (libtpu 0.0.51) leaves to programs.
      hbm_gb_per_s: rate of the memory, in 1e9 bytes per second.
      ici_gb_per_s: rate of all links to other chips together, both ways, in 1e9 bytes per second.
      mxu: rows and columns of a matrix unit.
      units: matrix units per JAX device.
      devices: JAX devices per chip.
      cores_in_name: cores per chip where the N of a name such as "v5p-N" counts cores, 1 where it
        counts chips, 0 where no such name is public.
      host: chips along each axis of the largest slice that is one machine.
    """

    tflops: float
    hbm_gb: float
    hbm_usable: float
    hbm_gb_per_s: float
    ici_gb_per_s: float
    mxu: int
    units: int
    devices: int
    cores_in_name: int
    host: tuple[int, ...]

    @property
    def flops_per_cycle(self) -> int:
        """Operations per cycle of all matrix units of a device: two for each of their cells."""
        # The compiler's own cycles of a product of 8192 x 8192 matrices are 70 to 90% of this rate
        # on every generation, so units of 256 x 256 count by their cells as well.
        return 2 * self.units * self.mxu**2

    @property
    def clock(self) -> float:
        """Cycles per second at which the matrix units reach `tflops`."""
        return self.tflops * 1e12 / (self.devices * self.flops_per_cycle)


CHIPS = {
    "v5e": Chip(197, 16, 15.75 * GIB, 819, 400, 128, 4, 1, 1, (2, 4)),
    "v5p": Chip(459, 95, 95.73 * GIB, 2765, 1200, 128, 8, 1, 2, (2, 2, 1)),
    "v6e": Chip(918, 32, 31.24 * GIB, 1638, 800, 256, 4, 1, 1, (2, 4)),
    # Two JAX devices per chip, of 94.74 GiB each.
    "tpu7x": Chip(2307, 192, 2 * 94.74 * GIB, 7380, 1200, 256, 4, 2, 0, (2, 2, 1)),
}
# Chips by the name that JAX gives a device.
KINDS = {
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x",
}  # fmt: skip
# Shapes of the slices that a name with a number means, by chips.
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
    """A slice of a pod. chip: its generation, a key of `CHIPS`; shape: chips along each axis."""

    chip: str
    shape: tuple[int, ...]

    @property
    def of(self) -> Chip:
        """The generation of its chips."""
        return CHIPS[self.chip]

    @property
    def chips(self) -> int:
        """The number of chips."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """The number of JAX devices of all chips."""
        return self.chips * self.of.devices

    @property
    def name(self) -> str:
        """The compiler's name of the slice, e.g. "v5e:2x4"."""
        return f"{self.chip}:{'x'.join(map(str, self.shape))}"


def slice_of(name: str) -> Slice:
    """Return the slice that a name means: "v5e-8", "v5e:2x4", or "v5e" for one host.

    The N of "v5p-N" counts cores, two per chip. The N of other names counts chips.

    Raises:
      ConfigError: an unknown chip, a size that no slice has, or a shape of the wrong dimension.

    Example:
      >>> slice_of("v5p-16")
      Slice(chip='v5p', shape=(2, 2, 2))
    """
    given = argument("topology", name)
    kind = re.split(r"[-:]", name.strip().lower())[0]
    found = re.fullmatch(r"[a-z0-9]+?(?:-(\d+)|:(\d+(?:x\d+)*))?", name.strip().lower())
    if GPU.fullmatch(kind):
        raise ConfigError(
            f"{given}: plan is of TPU slices; on a machine with a GPU a profile of "
            "`nca-trader train` measures an update."
        )
    if found is None or kind not in CHIPS:
        raise ConfigError(
            f"{given}: {nearest(kind, CHIPS)}It may be a chip of {', '.join(CHIPS)} with a size "
            "or a shape, e.g. v5e-8, v5e:2x4, v5p-768, tpu7x:2x2x1."
        )
    chip, (number, sizes) = CHIPS[kind], found.groups()
    host = Slice(kind, chip.host)
    if sizes is not None:
        shape, axes = tuple(map(int, sizes.split("x"))), len(chip.host)
        if len(shape) != axes or 0 in shape:
            raise ConfigError(
                f"{given}: a slice of {kind} has {axes} axes of at least 1 chip, e.g. {host.name}."
            )
        return Slice(kind, shape)
    if number is None:  # a generation alone is the largest slice that is one machine
        return host
    if not chip.cores_in_name:
        raise ConfigError(
            f"{given}: there is no public table of sizes of {kind}; give a shape, e.g. {host.name}."
        )
    shapes = CUBE if len(chip.host) == 3 else PLANE
    table = {chips * chip.cores_in_name: shape for chips, shape in shapes.items()}
    if int(number) not in table:
        near = min(table, key=lambda size: abs(size - int(number)))
        counted = "cores, two per chip" if chip.cores_in_name == 2 else "chips"
        raise ConfigError(
            f"{given}: the number counts {counted}, and no slice has {number}; the nearest size "
            f"is {kind}-{near}. Or give a shape, e.g. {Slice(kind, table[near]).name}."
        )
    return Slice(kind, table[int(number)])


def mesh_axes(devices: int, chips: int) -> tuple[int, int, int]:
    """Return the (data, fsdp, model) sizes of a mesh over `devices`, which lie on `chips`."""
    fsdp = SQUARE if chips >= FSDP_FROM and devices % SQUARE == 0 else 1
    return devices // fsdp, fsdp, 1


class Rates(NamedTuple):
    """Peak rates of a device.

    flops: operations of matrix products per second. bytes: of memory per second. source: whether
    they are from the table or measured.
    """

    flops: float
    bytes: float
    source: str


def rates_of(device: Any, dtype: str) -> Rates:
    """Return the peak rates of a JAX device, for products of operands of `dtype`.

    A device that is not in the table, such as a CPU or a GPU, is measured.
    """
    kind = KINDS.get(device.device_kind)
    if kind is None:
        # jax is imported where it is used: `doctor` reads this table, and must also run where
        # jax cannot be imported.
        import jax

        large = device.platform != "cpu"
        size = 8192 if large else 1536
        with jax.default_device(device):
            flops = matmul_flops_per_s(dtype, size)
            rate = memory_bytes_per_s(2**30 if large else 2**26)
        return Rates(flops, rate, f"measured here: a product of {size} x {size} matrices, {dtype}")
    chip = CHIPS[kind]
    passes = PASSES if dtype == "float32" else 1
    source = f"the vendor's figure for {kind}, bfloat16"
    source += f", over the {passes} passes of a float32 product" * (passes > 1)
    flops = chip.tflops * 1e12 / chip.devices / passes
    return Rates(flops, chip.hbm_gb_per_s * 1e9 / chip.devices, source)


def matmul_flops_per_s(dtype: str = "float32", size: int = 1536, repeats: int = 11) -> float:
    """Measure the median rate of a product of two matrices, in operations per second."""
    # jax takes seconds to import, and the table of chips is read without it.
    import jax
    import jax.numpy as jnp

    from nca_trader.numerics import dot32

    multiply = jax.jit(lambda a: (dot32(a, a) * 1e-3).astype(a.dtype))
    return 2.0 * size**3 / _median_seconds(multiply, jnp.ones((size, size), dtype), repeats)


def memory_bytes_per_s(size: int = 2**26, repeats: int = 11) -> float:
    """Measure the median rate at which an array of `size` bytes is read and written."""
    import jax
    import jax.numpy as jnp

    # In place: with a new array each time, what is timed is the system that hands out its pages.
    add = jax.jit(lambda a: a + 1.0, donate_argnums=0)
    return 2.0 * size / _median_seconds(add, jnp.ones(size // 4), repeats)


def _median_seconds(call: Callable[[Any], Any], value: Any, repeats: int) -> float:
    value = call(value).block_until_ready()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        value = call(value).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
