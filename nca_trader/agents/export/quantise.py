"""Parameters in 4, 8 or 16 bits: matrices on a symmetric grid with one step for each output.

    q = clip(round(w / step), +-(2^(b-1) - 1))    step_o = max_i |w_io| / (2^(b-1) - 1/2)

so no weight moves by more than half a step of its channel. In 4 and 8 bits these are the numbers
of `qwix.quantize(w, channelwise_axes=[1])` (a test compares them). qwix itself is not needed: it
has no 16 bits, and its providers look for weights on the right of a product where ours, in rows,
are on the left. What is no matrix (biases, the readout's values) stays float32.

Weights are widened once, when a file is read, so that inference runs the same programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.export.tensors import Layout
from nca_trader.agents.lattice import Gauged
from nca_trader.agents.policy import Params, Policy

BITS = (4, 8, 16)
Leaves = dict[str, np.ndarray]  # by name, e.g. "nca.taps"


def leaves_of(params: Params) -> Leaves:
    """The arrays of nested dicts, by their keys joined with dots."""
    return {
        f"{module}.{name}": np.asarray(leaf)
        for module, leaves in sorted(params.items())
        for name, leaf in sorted(leaves.items())
    }


def params_of(leaves: Mapping[str, Any]) -> Params:
    """The nested dicts of arrays that `leaves_of` flattened."""
    params: Params = {}
    for name, leaf in leaves.items():
        module, key = name.split(".")
        params.setdefault(module, {})[key] = (
            jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
        )
    return params


def largest(bits: int) -> float:
    """What the largest weight of a channel is, in steps: the outermost step is used whole."""
    return 2.0 ** (bits - 1) - 0.5


def on_grid(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """`w` `[I, O]` in whole steps, `[I, O]` int8 (int16 for 16 bits), and the steps `[O]`."""
    step = (np.abs(w).max(axis=0) / np.float32(largest(bits))).astype(np.float32)
    # A channel of zeros, or nearly, has no step to divide by.
    step = np.where(step < np.finfo(np.float32).tiny ** 0.5, np.float32(1.0), step)
    most = 2 ** (bits - 1) - 1
    whole = np.clip(np.rint(w / step), -most, most)
    return whole.astype(np.int16 if bits == 16 else np.int8), step


def quantised(leaves: Leaves, bits: int) -> Leaves:
    """The tensors of a file: "NAME" for each leaf, and "NAME:step" for each matrix."""
    tensors: Leaves = {}
    for name, leaf in leaves.items():
        if leaf.ndim != 2:
            tensors[name] = leaf
            continue
        whole, tensors[f"{name}:step"] = on_grid(leaf, bits)
        tensors[name] = pack(whole) if bits == 4 else whole
    return tensors


def layout(shapes: Mapping[str, tuple[int, ...]], bits: int) -> Layout:
    """The types and shapes of the tensors that `quantised` makes of leaves of these shapes."""
    whole, found = {4: np.uint8, 8: np.int8, 16: np.int16}[bits], {}
    for name, shape in shapes.items():
        found[name] = (np.float32, shape)
        if len(shape) == 2:
            packed = (-(-math.prod(shape) // 2),)
            found[name] = (whole, packed if bits == 4 else shape)
            found[f"{name}:step"] = (np.float32, shape[1:])
    return found


def widened(tensors: Leaves, shapes: Mapping[str, tuple[int, ...]], bits: int) -> Leaves:
    """The leaves, of these shapes, that `quantised` made tensors of; each a float32 array."""
    leaves: Leaves = {}
    for name, shape in shapes.items():
        leaf = tensors[name]
        if len(shape) == 2:
            whole = unpack(leaf, shape) if bits == 4 else leaf
            leaf = whole.astype(np.float32) * tensors[f"{name}:step"]
        leaves[name] = leaf
    return leaves


def pack(whole: np.ndarray) -> np.ndarray:
    """`[ceil(size / 2)]` uint8: two numbers from -8 to 7 a byte, the first in the low half."""
    flat = whole.ravel().astype(np.uint8) & 0xF
    flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
    return flat[::2] | flat[1::2] << 4


def unpack(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The int8 numbers of `shape` that `pack` was given."""
    flat = np.stack([packed & 0xF, packed >> 4], axis=-1).ravel()[: int(np.prod(shape))]
    return (((flat ^ 8).astype(np.int8)) - 8).reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Watched(Gauged):
    """A weight that notes the largest number it is multiplied with; runs outside of jit."""

    seen: list[float]

    def meets(self, x: Array) -> tuple[Array, Array]:
        """The operands as they are."""
        self.seen.append(float(jnp.abs(x).max()))
        return self.weight, x


def ranges(
    policy: Policy, params: Params, x: np.ndarray, present: np.ndarray, chunk: int = 2048
) -> dict[str, float]:
    """The largest absolute value that meets each matrix of the encoder, by the matrix's name.

    Args:
      x: `[N, A, F]` features of the training span. present: `[N, A]`. chunk: bars at once.
    """
    encoder = next(name for name in params if name != "head")
    watched = dict(params[encoder])
    seen: dict[str, list[float]] = {}
    for name, leaf in params[encoder].items():
        if leaf.ndim == 2:
            notes = seen.setdefault(f"{encoder}.{name}", [])
            watched[name] = _Watched(leaf, jnp.ones(()), 0, notes)
    halo = policy.receptive_field - 1
    with jax.disable_jit():  # the numbers themselves, also in loops and branches
        for begin in range(0, len(x), chunk):
            rows = slice(max(begin - halo, 0), begin + chunk)
            policy.encode({**params, encoder: watched}, x[None, rows], present[None, rows])
    return {name: max(values) for name, values in seen.items()}


def steps_of(found: Mapping[str, float], bits: int) -> dict[str, float]:
    """The step of the grid that the numbers which meet each matrix are rounded to, by name."""
    return {name: value / largest(bits) or 1.0 for name, value in found.items()}


def gauged(leaves: Leaves, steps: Mapping[str, float], bits: int) -> dict[str, Any]:
    """The leaves, where matrices that have a step round what they are multiplied with."""
    return {
        name: Gauged(jnp.asarray(leaf), jnp.float32(steps[name]), bits) if name in steps else leaf
        for name, leaf in leaves.items()
    }
