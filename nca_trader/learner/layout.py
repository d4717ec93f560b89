"""The layout of parameters on the mesh, and the collectives of a step.

Inside `shard_map` a device has its own part of the batch, and its own part of every parameter that
`fsdp` splits. The axis `model` is left to the compiler, which splits the products of a hidden
layer whose width is split. All collectives are here: a gather of the parameters, a mean of the
gradients and the loss's terms, and the norm of what is split.

Source of splitting parameters and moments by storage: Rajbhandari et al. 2020, "ZeRO", stage 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nca_trader.agents.policy import Params, Policy
from nca_trader.errors import ConfigError
from nca_trader.parallel.mesh import AXES, BATCH, DATA, FSDP, MODEL


@dataclasses.dataclass(frozen=True)
class Split:
    """The axis of a parameter that `fsdp` splits, and the one that `model` splits, if any."""

    fsdp: int | None = None
    model: int | None = None

    def spec(self, *names: str) -> P:
        """Return the parameter's partition over these axes of the mesh."""
        axes = {axis: name for name in names if (axis := getattr(self, name)) is not None}
        return P(*(axes.get(axis) for axis in range(max(axes, default=-1) + 1)))


WHOLE = Split()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the parameters of one policy on a mesh.

    Attributes:
      splits: a `Split` for each parameter, in their structure; None: each is whole everywhere.
      by_model: whether any is split over `model`.
      deterministic: means are taken in an order that no mesh changes.
    """

    splits: Any = None
    by_model: bool = False
    deterministic: bool = False

    @property
    def by_hand(self) -> set[str]:
        """The axes of the mesh that are manual in a step; the compiler handles the others."""
        return {*BATCH} if self.by_model else {*AXES}

    def pairs(self, params: Any) -> list[tuple[Split, Any]]:
        """Return each parameter's split and leaf, in the order of the tree."""
        # `Split` is not a pytree, so each one is a leaf of `splits`.
        leaves = jax.tree.leaves(params)
        splits = [WHOLE] * len(leaves) if self.splits is None else jax.tree.leaves(self.splits)
        return list(zip(splits, leaves, strict=True))

    def over(self, fn: Callable[[Split, Any], Any], params: Any) -> Any:
        """Return `fn(split, leaf)` of each parameter, in their structure."""
        leaves = [fn(split, leaf) for split, leaf in self.pairs(params)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def specs(self, params: Any, *names: str) -> Any:
        """Return the partition of each parameter over these axes of the mesh."""
        return self.over(lambda split, _: split.spec(*names), params)

    def _within(self, fn: Callable[[Any], Any], params: Any) -> Any:
        """Return `fn(params)`, on each device's part of a layer's width where `model` splits any.

        A collective over `fsdp` then moves only this part. Outside of it, it would move the whole
        width.
        """
        if not self.by_model:
            return fn(params)
        specs = self.specs(params, MODEL)
        return jax.shard_map(fn, in_specs=(specs,), out_specs=specs, axis_names={MODEL})(params)

    def gathered(self, params: Params) -> Params:
        """Return the parameters gathered over `fsdp`, for computing with them."""

        def whole(split: Split, leaf: Array) -> Array:
            if split.fsdp is None:
                return leaf
            return jax.lax.all_gather(leaf, FSDP, axis=split.fsdp, tiled=True)

        return self._within(lambda tree: self.over(whole, tree), params)

    def own(self, params: Params) -> Params:
        """Return the gathered parameters; their gradient is that of the device's own items."""

        def varying(split: Split, leaf: Array) -> Array:
            return jax.lax.pcast(leaf, BATCH if split.fsdp is None else DATA, to="varying")

        return self.over(varying, self.gathered(params))

    def mean(self, gradient: Params, terms: Any) -> tuple[Params, Any]:
        """Return the mean over devices of their gradients and of the loss's terms.

        A device gets its own part of a parameter that `fsdp` splits. The rest and the terms are
        one all-reduce.

        Args:
          gradient: of the parameters that `own` returns, whole over `fsdp`.
          terms: pytree of `[]`.
        """

        def scattered(split: Split, leaf: Array) -> Array:
            if split.fsdp is None:
                return leaf
            return jax.lax.psum_scatter(leaf, FSDP, scatter_dimension=split.fsdp, tiled=True)

        devices = jax.lax.axis_size(BATCH)
        if devices == 1 and self.by_model:
            # XLA drops an axis of one device, and then fails to sum what `model` splits:
            # "Cross-partition allreduce must be in manual partitioning mode".
            total = self._within(lambda tree: jax.lax.psum(tree, BATCH), gradient)
            return total, jax.lax.psum(terms, BATCH)
        parts = self._within(lambda tree: self.over(scattered, tree), gradient)
        whole = [leaf for split, leaf in self.pairs(parts) if split.fsdp is None]
        split = [leaf for split, leaf in self.pairs(parts) if split.fsdp is not None]
        add = functools.partial(jax.lax.psum, axis_name=BATCH)
        # CPU devices synchronise once per array, see `as_one`. The platform is that of lowering: a
        # program compiled for a TPU on a CPU has the TPU's form.
        if devices > 1 and not self.by_model:
            joined = functools.partial(as_one, add)
            whole, terms = jax.lax.platform_dependent((whole, terms), cpu=joined, default=add)
        else:
            whole, terms = add((whole, terms))
        split = jax.lax.psum(split, DATA) if split else []
        # Put both lists back into the order of the tree.
        of = {False: iter(whole), True: iter(split)}
        total = self.over(lambda split, _: next(of[split.fsdp is not None]), parts)
        return jax.tree.map(lambda leaf: leaf / devices, (total, terms))

    def of_all(self, statistics: Any) -> Any:
        """Gather `[N P]` statistics of all devices' pieces, in the order of their numbers.

        Each device adds its own `[P]` to zeros at its own place, in one all-reduce. So this is an
        exact gather, and JAX knows that its result is replicated.
        """
        leaves, structure = jax.tree.flatten(statistics)
        mine = jnp.stack(leaves)
        places = jnp.zeros((jax.lax.axis_size(BATCH), *mine.shape), mine.dtype)
        # Every other device adds zeros to this place, so nothing is rounded.
        every = jax.lax.psum(places.at[jax.lax.axis_index(BATCH)].set(mine), BATCH)
        every = jnp.moveaxis(every, 0, 1).reshape(len(leaves), -1)
        if self.deterministic:  # else the compiler fuses what follows with the gather
            every = one_by_one(lambda numbers: numbers, every[None])[0]
        return jax.tree.unflatten(structure, list(every))

    def norm(self, tree: Any) -> Array:
        """Return the `[]` norm of a whole tree like the parameters, not of a device's part."""

        def squares(of_split: bool) -> list[Array]:
            leaves = [leaf for s, leaf in self.pairs(tree) if (s.fsdp is not None) == of_split]
            return [jnp.sum(leaf * leaf) for leaf in leaves]

        whole, split = squares(False), squares(True)
        # Only split leaves are summed over devices: a whole leaf would be counted on each of them.
        total = sum(whole) + (jax.lax.psum(sum(split), FSDP) if split else 0.0)
        return jnp.sqrt(total)

    def runs(self, logical_shards: int) -> int | None:
        """Return how many logical shards a device computes one by one; None is all at once."""
        return logical_shards // jax.lax.axis_size(BATCH) if self.deterministic else None

    def fan_in(self, split: Split, leaf: Array) -> int:
        """Return n, the inputs of a matrix `[..., n, m]`; a device may have a part of its rows."""
        parts = jax.lax.axis_size(FSDP) if split.fsdp == leaf.ndim - 2 else 1
        return leaf.shape[-2] * parts


EVERYWHERE = Layout()


def as_one(fn: Callable[[Array], Array], tree: Any) -> Any:
    """Apply `fn` to all floats of a tree as one vector of the widest type.

    On a CPU the devices synchronise once for each array of a collective, within a process and
    between processes. For 17 small arrays that takes 20 times as long as for one.
    """
    flat, back = ravel_pytree(tree)
    return back(fn(flat))


def one_by_one(fn: Callable[[Any], Any], items: Any) -> Any:
    """Apply `fn` to each of the `[P, ...]` items in sequence, with the same bits for every P.

    `lax.map` does that where P > 1. The compiler unrolls a map of one item and fuses it with the
    code around it, and a fused product and sum are rounded once instead of twice. Here the compiler
    does not know the number of iterations. There are always at least two rows, so that an item is
    sliced out of two rows as it is out of eight.
    """
    size = jax.tree.leaves(items)[0].shape[0]
    rows = jax.tree.map(lambda a: jnp.concatenate([a, a]) if size == 1 else a, items)
    shapes = jax.eval_shape(fn, jax.tree.map(lambda a: a[0], rows))

    def put(at: Array, every: Any) -> Any:
        one = fn(jax.tree.map(lambda a: a[at], rows))
        return jax.tree.map(lambda whole, own: whole.at[at].set(own), every, one)

    def none(shape: Any) -> Array:
        one = jnp.zeros_like(shape)  # of the same type under `shard_map` as what takes its place
        return jnp.broadcast_to(one[None], (max(size, 2), *one.shape))

    # Behind a barrier the number of iterations is not a constant to the compiler.
    times = jax.lax.optimization_barrier(jnp.int32(size))
    every = jax.lax.fori_loop(0, times, put, jax.tree.map(none, shapes))
    return jax.tree.map(lambda a: a[:size], every)


def mean_in_order(each: Any) -> Any:
    """Return the mean of `[P, ...]` over all devices' pieces, in the order of their numbers."""

    def mean(leaf: Array) -> Array:
        # An all-reduce may sum in another order on another mesh, but a gather does not sum.
        every = jax.lax.all_gather(leaf, BATCH, axis=0, tiled=True, to="invarying")
        return every.mean(0)

    return jax.tree.map(mean, each)


def by_runs(fn: Callable[..., tuple[Any, Any]], count: int | None, *trees: Any) -> tuple[Any, Any]:
    """Apply `fn` to `count` equal runs of the rows of `trees`, `one_by_one`.

    Args:
      fn: `(*trees) -> (pytree of rows, statistics)`.
      count: number of runs; None is all rows at once.
      *trees: pytrees of `[N, ...]` rows.

    Returns:
      The rows, and statistics with an axis `[count]`, or `[1]`, in front.
    """
    if count is None:
        rows, statistics = fn(*trees)
        return rows, jax.tree.map(lambda x: x[None], statistics)
    runs = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), trees)
    rows, statistics = one_by_one(lambda run: fn(*run), runs)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rows), statistics


def make_layout(policy: Policy, mesh: Mesh, deterministic: bool = False) -> Layout:
    """Return the layout of the parameters of `policy` on `mesh`.

    `model` splits the axis that is a hidden layer's width, and `fsdp` the longest of the others. A
    parameter whose size does not divide stays whole.

    Args:
      policy: the policy.
      mesh: the devices.
      deterministic: whether means are taken in an order that no mesh changes.

    Raises:
      ConfigError: a deterministic mesh of more than the axis `data`.
    """
    fsdp, model = mesh.shape[FSDP], mesh.shape[MODEL]
    if deterministic and fsdp * model > 1:
        raise ConfigError(
            f"mesh.deterministic is of the data axis alone, but the mesh has fsdp = {fsdp} and "
            f"model = {model}; set both to 1, or leave it out."
        )

    def split(path: Any, leaf: Any) -> Split:
        wide = policy.hidden_axis(*(key.key for key in path))
        by_model = (
            wide if model > 1 and wide is not None and leaf.shape[wide] % model == 0 else None
        )
        others = [n for n in range(leaf.ndim) if n != by_model and leaf.shape[n] % fsdp == 0]
        longest = max(others, key=lambda n: leaf.shape[n], default=None)
        return Split(longest if fsdp > 1 else None, by_model)

    # Shapes alone: no parameter is drawn.
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    splits = jax.tree_util.tree_map_with_path(split, shapes)
    by_model = any(each.model is not None for each in jax.tree.leaves(splits))
    return Layout(splits, by_model, deterministic)
