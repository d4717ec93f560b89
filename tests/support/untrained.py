"""Runs of agents that never trained, with parameters drawn at random; and what a run saved."""

from typing import Any, NamedTuple

import jax
import numpy as np

from nca_trader.agents.policy import stack
from nca_trader.envs.trading import TradingEnv
from nca_trader.runs.checkpoint import Checkpoints
from nca_trader.runs.manifest import Run
from nca_trader.runs.opening import open_run


class State(NamedTuple):
    """What a run reads of a training state."""

    params: Any


def drawn(policy, seed=1):
    """Parameters that are large enough to change the agent's mind."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: np.asarray(x + 0.5 * rng.standard_normal(x.shape), np.float32),
        policy.init(jax.random.key(seed)),
    )


def leaves(run):
    """The newest checkpoint's number and leaves: parameters, moments, key, cursor, accounts."""
    with Checkpoints(run.path / "checkpoints") as checkpoints:
        return checkpoints.newest()


def untrained_run(path, bars, env, agent, params=None):
    """A run folder with one checkpoint; its parameters are drawn unless they are given."""
    run = open_run(TradingEnv(bars, env), agent, path, seed=0)
    if params is None and agent.num_seeds > 1:
        params = stack([drawn(run.each, seed) for seed in range(agent.num_seeds)])
    elif params is None:
        params = drawn(run.policy)
    with Checkpoints(run.path / "checkpoints") as checkpoints:
        checkpoints.save(1, State(params))
    return Run(path)
