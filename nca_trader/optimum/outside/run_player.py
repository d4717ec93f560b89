"""A run of ours as `optimum.outside.player` plays it: observations in, target weights out."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nca_trader import __version__
from nca_trader.agents.policy import decide_next
from nca_trader.envs.account.state import open_account
from nca_trader.envs.gym.environment import action_space
from nca_trader.errors import ConfigError
from nca_trader.runs.exported import read_run


def load(path: str, allow_code: bool) -> tuple[Any, dict[str, Any]]:
    """Open a run and return its function of observations `[B, D]` and memory, and its facts.

    The memory is the stream of its policy, one per account. What is returned are the target weights
    `[B, A]` of all agents that act.

    Raises:
      ConfigError: what acts is not an agent, or sees more than the observation has.
      RunError, StateError: see `read_run`.
    """
    run = read_run(path, allow_code=allow_code)
    policy, params, spec = run.policy, run.params(), run.spec
    if run.replacement is not None:
        raise ConfigError(f"{path}: {run.replacement.name} was deployed in the agent's place.")
    if spec.base != "none" or spec.memory:
        raise ConfigError(
            f"{path}: its agent stands on a base rule or sees its reward's memory, which these "
            "markets do not show."
        )
    num_assets, width = spec.num_assets, spec.num_assets * spec.num_features

    def one(stream: Any, seen: Array) -> tuple[Any, Array]:
        features = seen[:width].reshape(num_assets, spec.num_features)
        held, ordered = seen[width : width + num_assets], seen[width + num_assets :][:num_assets]
        account = open_account(held)._replace(ordered=ordered)
        present = jnp.ones(num_assets, bool)
        stream, _, target = decide_next(policy, params, stream, features, present, account)
        return stream, target

    step = jax.jit(jax.vmap(one))

    @functools.cache  # the control without history begins at every bar
    def begun(rows: int) -> Any:
        return jax.tree.map(lambda x: jnp.stack([x] * rows), policy.begin())

    def act(seen: np.ndarray, memory: Any) -> tuple[np.ndarray, Any]:
        memory, targets = step(begun(len(seen)) if memory is None else memory, seen)
        return np.asarray(targets), memory

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    return act, {
        "library": "nca_trader",
        "version": __version__,
        "name": run.agent_config.policy.kind,
        "digest": digest.hexdigest(),
        "observation": width + 2 * num_assets + 1,
        "space": str(action_space(spec)),
        "features": list(spec.features),
        "memory": policy.receptive_field > 1,
        "steps": next((row["steps"] for row in reversed(run.metrics())), None),
    }
