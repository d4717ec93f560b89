"""What a device can do: the table's figures where it has them, else what it does here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nca_trader.numerics import dot32
from nca_trader.scale.chips import CHIPS, KINDS

PASSES = 6  # of bfloat16 products in a TPU's product of float32 operands, at full precision


class Rates(NamedTuple):
    """flops: of matrix products a second. bytes: of memory a second. source: where from."""

    flops: float
    bytes: float
    source: str


def rates_of(device: Any, dtype: str) -> Rates:
    """The peak of a device; measured, for operands of `dtype`, if it is not in the chip table."""
    kind = KINDS.get(device.device_kind)
    if kind is None:
        large = device.platform != "cpu"
        size = 8192 if large else 1536
        source = f"measured here: a product of {size} x {size} matrices, {dtype}"
        with jax.default_device(device):
            flops = matmul_flops_per_s(dtype, size)
            return Rates(flops, memory_bytes_per_s(2**30 if large else 2**26), source)
    chip = CHIPS[kind]
    passes = PASSES if dtype == "float32" else 1
    flops = chip.tflops * 1e12 / chip.devices / passes
    source = f"the vendor's figure for {kind}, bfloat16"
    source += f", over the {passes} passes of a float32 product" * (passes > 1)
    return Rates(flops, chip.hbm_gb_per_s * 1e9 / chip.devices, source)


def matmul_flops_per_s(dtype: str = "float32", size: int = 1536, repeats: int = 11) -> float:
    """Median rate of a product of two matrices here, as the learner's own rate is a median."""
    multiply = jax.jit(lambda a: (dot32(a, a) * 1e-3).astype(a.dtype))
    return 2.0 * size**3 / _median_seconds(multiply, jnp.ones((size, size), dtype), repeats)


def memory_bytes_per_s(size: int = 2**26, repeats: int = 11) -> float:
    """Median rate at which an array of `size` bytes is read and written."""
    # In place: pages that the system hands out anew would be what is timed.
    add = jax.jit(lambda a: a + 1.0, donate_argnums=0)
    return 2.0 * size / _median_seconds(add, jnp.ones(size // 4), repeats)


def _median_seconds(call: Callable[[Any], Any], value: Any, repeats: int) -> float:
    value = jax.block_until_ready(call(value))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        value = jax.block_until_ready(call(value))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
