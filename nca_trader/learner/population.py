"""Several agents in one program, mapped over a leading axis; hyper-parameters may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from nca_trader.config import AgentConfig
from nca_trader.learner.ppo import Hyper, hyper_of

T = TypeVar("T")

# A value near 1 is drawn by its distance from 1: 0.99 to 0.999 is as wide a step as 0.01 to 0.001.
NEAR_ONE = ("gae_lambda", "discount")


def _inverted(name: str, value: Any) -> Any:
    """Return `value`, or its distance from 1; this is its own inverse."""
    return 1.0 - value if name in NEAR_ONE else value


def draw_hyper(config: AgentConfig, key: Array) -> Hyper | None:
    """Draw one agent's hyper-parameters, uniformly in the logarithm of each range.

    Those without a range are the config's. None where no range is given: then the agents differ
    by their seeds only.
    """
    if not config.population.ranged:
        return None
    drawn = []
    for number, (name, value) in enumerate(hyper_of(config)._asdict().items()):
        if (ends := getattr(config.population, name)) is not None:
            # Sorted, because the distance from 1 turns the ends around.
            low, high = sorted(np.log(_inverted(name, end)) for end in ends)
            # By the field's number, so that a range for one does not change what another draws.
            own = jax.random.fold_in(key, number)
            value = _inverted(name, jnp.exp(jax.random.uniform(own, (), minval=low, maxval=high)))
        drawn.append(jnp.asarray(value, jnp.float32))
    return Hyper._make(drawn)


def init_each(init: Callable[[Array], T], num_agents: int) -> Callable[[Array], T]:
    """Map a learner's init over agents; agent i is what `init(fold_in(key, i))` returns.

    This is a `lax.map` and not a `vmap`: batched decompositions in one program can deadlock on
    the CPU.
    """

    def init_all(key: Array) -> T:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_agents))
        return jax.lax.map(init, keys)

    return init_all


def step_each(step: Callable[[Any, Any], T], num_agents: int, mesh: Mesh) -> Callable[..., T]:
    """Map a learner's step over a leading axis of agents, which move together.

    A CPU gains nothing from a batch of small matrix products: it is twice as fast with one agent
    after the other, still in one program.
    """
    batch_size = None if mesh.devices.flat[0].platform == "cpu" else num_agents

    def step_all(state: Any, market: Any) -> T:
        return jax.lax.map(lambda s: step(s, market), state, batch_size=batch_size)

    return step_all


def number_or_null(value: Any) -> float | None:
    """Return a number of metrics.jsonl; None where it is not finite, since JSON has no NaN."""
    return float(value) if np.isfinite(value) else None
