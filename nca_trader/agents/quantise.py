"""Parameters in 4, 8 or 16 bits: matrices on a symmetric grid with one step for each output.

    q = clip(round(w / step), +-(2^(b-1) - 1))    step_o = max_i |w_io| / (2^(b-1) - 1/2)

No weight moves by more than half a step of its channel. In 4 and 8 bits these are the numbers of
`qwix.quantize(w, channelwise_axes=[1])`, but for ties (a test compares them). qwix itself is not
used: it has no 16 bits, and it expects weights on the right of a product, where ours are on the
left. Arrays other than matrices (biases, the head's values) stay float32. Weights are widened once,
when a file is read, so that inference runs the same programs.

Alternatively, groups of D consecutive inputs of one output share the entries of a codebook.
"euclidean": a group, in units of its output's largest weight, is the nearest entry, `w ~ scale
c_k`. "cosine" (gain-shape): entries are directions of length 1, and a group is the direction
nearest in angle times a gain of 8 bits, `w ~ scale gain c_k`. One codebook serves all matrices.

Source: Lloyd 1982, "Least squares quantization in PCM"; Arthur & Vassilvitskii 2007, "k-means++";
Dhillon & Modha 2001, "Concept decompositions", for directions. scipy's `kmeans2` is not used: it
has Euclidean distances only, and always runs its `iter` rounds. The loop here ends as soon as no
group changes its entry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader.agents.lattice import Gauged
from nca_trader.agents.policy import Params, Policy
from nca_trader.errors import ConfigError, argument

BITS = (4, 8, 16)
Leaves = dict[str, np.ndarray]  # by name, e.g. "nca.taps"
Layout = Mapping[str, tuple[type, tuple[int, ...]]]  # type and shape of each array, by name


def leaves_of(params: Params) -> Leaves:
    """Flatten nested dicts of arrays; keys are joined with dots."""
    return {
        f"{module}.{name}": np.asarray(leaf)
        for module, leaves in sorted(params.items())
        for name, leaf in sorted(leaves.items())
    }


def params_of(leaves: Mapping[str, Any]) -> Params:
    """Restore the nested dicts that `leaves_of` flattened."""
    params: Params = {}
    for name, leaf in leaves.items():
        module, key = name.split(".")
        params.setdefault(module, {})[key] = (
            jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
        )
    return params


def largest(bits: int) -> float:
    """Return the largest weight of a channel in steps: half a step beyond the outermost number."""
    # The clip to the outermost number then costs at most half a step, as rounding does.
    return 2.0 ** (bits - 1) - 0.5


def on_grid(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Round `w` `[I, O]` to whole steps, int8 or int16 for 16 bits; return both, steps `[O]`."""
    step = (np.abs(w).max(axis=0) / np.float32(largest(bits))).astype(np.float32)
    # A step of a channel near zero would underflow or divide by zero.
    step = np.where(step < np.finfo(np.float32).tiny ** 0.5, np.float32(1.0), step)
    most = 2 ** (bits - 1) - 1
    whole = np.clip(np.rint(w / step), -most, most)
    return whole.astype(np.int16 if bits == 16 else np.int8), step


def quantised(leaves: Leaves, bits: int) -> Leaves:
    """Return the tensors of a file: "NAME" of each leaf and "NAME:step" of each matrix."""
    tensors: Leaves = {}
    for name, leaf in leaves.items():
        if leaf.ndim != 2:
            tensors[name] = leaf
            continue
        whole, tensors[f"{name}:step"] = on_grid(leaf, bits)
        tensors[name] = pack(whole) if bits == 4 else whole
    return tensors


def layout(shapes: Mapping[str, tuple[int, ...]], bits: int) -> Layout:
    """Return types and shapes of what `quantised` makes of leaves of these shapes."""
    whole, found = {4: np.uint8, 8: np.int8, 16: np.int16}[bits], {}
    for name, shape in shapes.items():
        found[name] = (np.float32, shape)
        if len(shape) == 2:
            packed = (-(-math.prod(shape) // 2),)
            found[name] = (whole, packed if bits == 4 else shape)
            found[f"{name}:step"] = (np.float32, shape[1:])
    return found


def widened(tensors: Leaves, shapes: Mapping[str, tuple[int, ...]], bits: int) -> Leaves:
    """Return the float32 leaves of these shapes that `quantised` made tensors of."""
    leaves: Leaves = {}
    for name, shape in shapes.items():
        leaf = tensors[name]
        if len(shape) == 2:
            whole = unpack(leaf, shape) if bits == 4 else leaf
            leaf = whole.astype(np.float32) * tensors[f"{name}:step"]
        leaves[name] = leaf
    return leaves


def pack(whole: np.ndarray) -> np.ndarray:
    """Pack numbers from -8 to 7 into `[ceil(size / 2)]` uint8, the first in the low half."""
    # Two's complement: the cast keeps the low four bits of a negative number.
    flat = whole.ravel().astype(np.uint8) & 0xF
    flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
    return flat[::2] | flat[1::2] << 4


def unpack(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the int8 numbers of `shape` that `pack` was given."""
    flat = np.stack([packed & 0xF, packed >> 4], axis=-1).ravel()[: int(np.prod(shape))]
    # Extends the sign of four bits: 8 to 15 become -8 to -1.
    return (((flat ^ 8).astype(np.int8)) - 8).reshape(shape)


@dataclasses.dataclass(frozen=True)
class _Watched(Gauged):
    """A weight that records the largest number it is multiplied by; for use outside of jit."""

    seen: list[float]

    def meets(self, x: Array) -> tuple[Array, Array]:
        """Return the operands unchanged."""
        self.seen.append(float(jnp.abs(x).max()))
        return self.weight, x


def ranges(
    policy: Policy, params: Params, x: np.ndarray, present: np.ndarray, chunk: int = 2048
) -> dict[str, float]:
    """Measure the largest absolute value that each matrix of the encoder is multiplied by.

    Args:
      policy: the policy.
      params: its parameters.
      x: `[N, A, F]` features of the training span.
      present: `[N, A]` bool.
      chunk: bars at once.

    Returns:
      The values, by the matrices' names.
    """
    encoder = next(name for name in params if name != "head")
    watched = dict(params[encoder])
    seen: dict[str, list[float]] = {}
    for name, leaf in params[encoder].items():
        if leaf.ndim == 2:
            notes = seen.setdefault(f"{encoder}.{name}", [])
            watched[name] = _Watched(leaf, jnp.ones(()), 0, notes)
    # Each chunk starts with the bars that its first cell sees.
    halo = policy.receptive_field - 1
    with jax.disable_jit():  # the numbers themselves, also in loops and branches
        for begin in range(0, len(x), chunk):
            rows = slice(max(begin - halo, 0), begin + chunk)
            policy.encode({**params, encoder: watched}, x[None, rows], present[None, rows])
    return {name: max(values) for name, values in seen.items()}


def steps_of(found: Mapping[str, float], bits: int) -> dict[str, float]:
    """Return the step of the activations' grid of each matrix, by name."""
    # A matrix whose inputs were all zero gets a step of 1, because a step of 0 would divide by
    # zero.
    return {name: value / largest(bits) or 1.0 for name, value in found.items()}


def gauged(leaves: Leaves, steps: Mapping[str, float], bits: int) -> dict[str, Any]:
    """Return the leaves; matrices with a step round their activations to it."""
    return {
        name: Gauged(jnp.asarray(leaf), jnp.float32(steps[name]), bits) if name in steps else leaf
        for name, leaf in leaves.items()
    }


KINDS = ("euclidean", "cosine")
MOST_GAIN = 255
TRAINED_ON = 2**16  # groups at most: more of them move no entry by much
ROUNDS = 50  # of Lloyd's at most; it ends when no group changes its entry
CHUNK = 2**14  # groups whose distances are computed at once


class Codebook(NamedTuple):
    """A codebook.

    Attributes:
      kind: "euclidean" or "cosine".
      entries: `[K, D]` float32, of length 1 if cosine.
    """

    kind: str
    entries: np.ndarray

    def nearest(self, groups: np.ndarray) -> np.ndarray:
        """Return the nearest entry `[G]` to each of `groups` `[G, D]`; the first of equals."""
        # In float32 the difference of products may exceed the distance between entries.
        entries, found = self.entries.astype(np.float64), []
        for first in range(0, len(groups), CHUNK):
            # For directions the nearest in angle has the largest product.
            near = groups[first : first + CHUNK] @ entries.T
            if self.kind == "euclidean":  # |g - c|^2 less what is the same for all entries
                near -= 0.5 * (entries**2).sum(1)[None]
            found.append(near.argmax(axis=1))
        return np.concatenate(found)


def train_codebook(groups: np.ndarray, kind: str, size: int, seed: int = 0) -> Codebook:
    """Train a codebook by k-means over `groups` `[G, D]`, initialised by k-means++.

    Args:
      groups: rows to be coded.
      kind: "euclidean", or "cosine" for the directions of `groups`.
      size: K, the number of entries.
      seed: of the initial entries, and of the sample if there are more groups than are used.

    Raises:
      ConfigError: fewer different groups than entries, or directions of single numbers.
    """
    rng = np.random.default_rng(seed)
    groups = np.asarray(groups, np.float32)
    if kind == "cosine":
        if groups.shape[1] < 2:
            raise ConfigError(
                f"{argument('group', 1)}: a single weight has no direction; give 2 or more."
            )
        length = np.linalg.norm(groups, axis=1, keepdims=True)
        # A group of zeros has no direction. The floor avoids its division by zero.
        groups = (groups / np.maximum(length, 1e-30))[length[:, 0] > 0]
    if len(groups) > TRAINED_ON:
        groups = groups[rng.choice(len(groups), TRAINED_ON, replace=False)]
    if len(np.unique(groups, axis=0)) < size:
        raise ConfigError(
            f"a codebook of {size} entries for {len(np.unique(groups, axis=0))} different groups "
            f"of weights saves nothing; give fewer {argument('bits')} or a smaller "
            f"{argument('group')}."
        )
    book, entry = Codebook(kind, spread(groups, size, rng)), None
    for _ in range(ROUNDS):
        before, entry = entry, book.nearest(groups)
        # No group changed its entry, so the centres would be the same again.
        if before is not None and (entry == before).all():
            break
        book = Codebook(kind, centres(groups, entry, book))
    return book


def spread(groups: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw entries from the groups by the square of their distance to those before (k-means++)."""
    chosen = [int(rng.integers(len(groups)))]
    distance = np.full(len(groups), np.inf)
    for _ in range(size - 1):
        last = ((groups - groups[chosen[-1]]) ** 2).sum(1, dtype=np.float64)
        distance = np.minimum(distance, last)
        distance[chosen] = 0.0  # rounding may leave more
        chosen.append(int(rng.choice(len(groups), p=distance / distance.sum())))
    return groups[chosen]


def centres(groups: np.ndarray, entry: np.ndarray, book: Codebook) -> np.ndarray:
    """Means of each entry's groups, of length 1 if cosine; an entry without groups stays."""
    total = np.zeros(book.entries.shape, np.float64)
    np.add.at(total, entry, groups)
    count = np.bincount(entry, minlength=len(total))[:, None]
    if book.kind == "cosine":
        # The mean direction is the normalised sum.
        count = np.linalg.norm(total, axis=1, keepdims=True)
    moved = total / np.maximum(count, 1e-30)
    return np.where(count > 0, moved, book.entries).astype(np.float32)


def groups_of(w: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut `w` `[I, O]` into `[O ceil(I / D), D]` groups in units of scales `[O]`, zero-padded."""
    scale = np.abs(w).max(axis=0)
    scale = np.where(scale > 0, scale, np.float32(1.0)).astype(np.float32)
    padded = np.pad((w / scale).T, ((0, 0), (0, -len(w) % size)))
    return padded.reshape(-1, size).astype(np.float32), scale


def coded(leaves: Leaves, kind: str, bits: int, group: int, seed: int) -> Leaves:
    """Return the tensors of a file: indices and scale of matrices, other leaves as they are.

    Args:
      leaves: of the policy, by name.
      kind: "euclidean" or "cosine".
      bits: of an index, 4 or 8; the codebook has 2^bits entries.
      group: weights per entry.
      seed: of the codebook's training.

    Raises:
      ConfigError: too few weights for so many entries.
    """
    if bits > 8:
        raise ConfigError(
            f"{argument('bits', bits)} with {argument('codebook')}: an index has 4 or 8 bits; "
            "give one."
        )
    cut = {name: groups_of(leaf, group) for name, leaf in leaves.items() if leaf.ndim == 2}
    every = np.concatenate([groups for groups, _ in cut.values()])
    book = train_codebook(every, kind, 2**bits, seed)
    tensors = {name: leaf for name, leaf in leaves.items() if leaf.ndim != 2}
    tensors["codebook"] = book.entries
    for name, (groups, scale) in cut.items():
        index = book.nearest(groups)
        tensors[name] = pack(index) if bits == 4 else index.astype(np.uint8)
        if kind == "cosine":
            # The length along the direction, which is stored unsigned.
            gain = np.maximum((groups * book.entries[index]).sum(1), 0.0)
            gain = gain.reshape(len(scale), -1)
            most = np.maximum(gain.max(axis=1), 1e-30)[:, None]
            whole = np.rint(gain / most * MOST_GAIN)
            tensors[f"{name}:gain"] = whole.astype(np.uint8).ravel()
            scale = (scale * most[:, 0] / MOST_GAIN).astype(np.float32)
        tensors[f"{name}:step"] = scale
    return tensors


def coded_layout(shapes: Mapping[str, tuple[int, ...]], kind: str, bits: int, group: int) -> Layout:
    """Return types and shapes of what `coded` makes of leaves of these shapes."""
    found: dict[str, tuple[type, tuple[int, ...]]] = {"codebook": (np.float32, (2**bits, group))}
    for name, shape in shapes.items():
        found[name] = (np.float32, shape)
        if len(shape) == 2:
            count = shape[1] * -(-shape[0] // group)
            found[name] = (np.uint8, (-(-count // 2) if bits == 4 else count,))
            found[f"{name}:step"] = (np.float32, shape[1:])
            if kind == "cosine":
                found[f"{name}:gain"] = (np.uint8, (count,))
    return found


def decoded(tensors: Leaves, shapes: Mapping[str, tuple[int, ...]], kind: str, bits: int) -> Leaves:
    """Return the float32 leaves of these shapes that `coded` made tensors of."""
    entries = tensors["codebook"]
    leaves: Leaves = {}
    for name, shape in shapes.items():
        leaf = tensors[name]
        if len(shape) == 2:
            count = shape[1] * -(-shape[0] // entries.shape[1])
            index = unpack(leaf, (count,)).astype(np.uint8) & 0xF if bits == 4 else leaf
            groups = entries[index]
            if kind == "cosine":
                groups = groups * tensors[f"{name}:gain"][:, None].astype(np.float32)
            # The matrix that `groups_of` cut into groups and scales.
            leaf = groups.reshape(shape[1], -1)[:, : shape[0]].T * tensors[f"{name}:step"]
        leaves[name] = leaf
    return leaves
