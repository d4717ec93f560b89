"""Checkpoints: Orbax on disk, one SHA-256 a leaf, restored only if every one agrees.

Orbax restores a flipped byte without an error and with wrong values, so the checksums are ours:
a checkpoint that does not verify is passed over for the newest one that does.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

from nca_trader.errors import StateError

FORMAT = 1
log = logging.getLogger(__name__)


def flatten(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of `tree` by path, copied to the host; typed keys as their data."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.array(_data(leaf)) for path, leaf in leaves}


def unflatten(like: Any, leaves: dict[str, np.ndarray]) -> Any:
    """A tree of the structure, types and shardings of `like` with the values of `leaves`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    if set(names) != set(leaves):
        odd = sorted(set(names) ^ set(leaves))
        raise StateError(f"the checkpoint holds another agent: {odd[0]} is in one of them only.")
    values = [_like(name, leaf, leaves[name]) for name, (_, leaf) in zip(names, paths, strict=True)]
    return jax.tree_util.tree_unflatten(structure, values)


def _data(leaf: Array) -> Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(name: str, leaf: Array, value: np.ndarray) -> Array:
    shape = jax.eval_shape(_data, leaf)
    if value.shape != shape.shape or value.dtype != shape.dtype:
        raise StateError(
            f"the checkpoint holds another agent: {name} is {value.dtype}{list(value.shape)} "
            f"there and {shape.dtype}{list(shape.shape)} here."
        )
    typed = jax.random.wrap_key_data(value) if _is_key(leaf) else value
    return jax.device_put(typed, leaf.sharding)


def _checksum(value: np.ndarray) -> str:
    head = f"{value.dtype}{value.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(value).tobytes()).hexdigest()


class Checkpoints:
    """The checkpoints of one run, by number of updates done."""

    def __init__(self, path: pathlib.Path, keep: int = 3):
        """Opens or creates the folder `path`; the newest `keep` checkpoints stay."""
        self.path = path
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, create=True
        )
        self._manager = ocp.CheckpointManager(path.absolute(), options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, update: int, tree: Any) -> None:
        """Saves every leaf of `tree`; returns once it is on disk."""
        leaves = flatten(tree)
        sums = {name: _checksum(value) for name, value in leaves.items()}
        self._manager.save(
            update,
            args=ocp.args.Composite(
                leaves=ocp.args.StandardSave(leaves),
                sums=ocp.args.JsonSave({"format": FORMAT, "sha256": sums}),
            ),
        )
        self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """Numbers of the checkpoints on disk, oldest first, verified or not."""
        return sorted(self._manager.all_steps())

    def newest(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """The newest checkpoint whose every leaf verifies; None where there is none at all.

        Raises:
          StateError: there are checkpoints and none of them verifies.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, self._verified(step)
            # Orbax and its storage raise many types for a truncated or missing file.
            except Exception as error:
                log.warning("%s: checkpoint %d is damaged (%s)", self.path, step, error)
        if steps:
            raise StateError(
                f"{self.path}: none of the checkpoints {steps} verifies; restore the folder from "
                "a copy, or train into another --run."
            )
        return None

    def _verified(self, step: int) -> dict[str, np.ndarray]:
        read = self._manager.restore(
            step,
            args=ocp.args.Composite(
                leaves=ocp.args.StandardRestore(), sums=ocp.args.JsonRestore()
            ),
        )
        leaves = {name: np.asarray(value) for name, value in read["leaves"].items()}
        if read["sums"]["format"] != FORMAT:
            raise StateError(f"format {read['sums']['format']} is not this version's {FORMAT}")
        sums = read["sums"]["sha256"]
        wrong = [name for name in sums if name not in leaves or _checksum(leaves[name]) != sums[name]]
        if wrong or set(leaves) != set(sums):
            raise StateError(f"SHA-256 of {wrong or sorted(set(leaves) ^ set(sums))} differs")
        return leaves
