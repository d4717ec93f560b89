"""Several agents in one program: the same learner, mapped over a leading axis of seeds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh


def over_seeds(
    step: Callable[..., Any], init: Callable[[Array], Any], num_seeds: int, mesh: Mesh
) -> tuple[Callable[..., Any], Callable[[Array], Any]]:
    """Maps a learner's step and init over `num_seeds` agents; state and metrics gain an axis.

    Agent i is the one that `init(fold_in(key, i))` alone would be. Initialisation is a `lax.map`
    and not a `vmap`: batched decompositions in one program can deadlock on the CPU.
    """

    def init_all(key: Array) -> Any:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_seeds))
        return jax.lax.map(init, keys)

    # The CPU has no parallelism to gain from a batch of small matrix products, and is twice as
    # fast one agent after the other; it is one program all the same.
    together = None if mesh.devices.flat[0].platform == "cpu" else num_seeds

    def step_all(state: Any, market: Any) -> Any:
        return jax.lax.map(lambda s: step(s, market), state, batch_size=together)

    return step_all, init_all
