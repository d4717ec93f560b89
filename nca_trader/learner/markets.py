"""Which market each update learns from: the environment's own, or shard after shard of a stream.

The data cursor is the number of updates done, which is part of every checkpoint: update u learns
from shard `u // shard_updates`, over and over. So a run that resumes goes on with the shard at
which it stopped.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from nca_trader.agents.policy import Policy
from nca_trader.data.stream import Piece, stream
from nca_trader.envs.sharded import ShardedEnv
from nca_trader.envs.trading import Market, TradingEnv
from nca_trader.errors import ConfigError
from nca_trader.learner.rollout import Segments
from nca_trader.mesh import replicated
from nca_trader.presets import AgentConfig, LearnerConfig


def shard_updates(env: ShardedEnv, config: LearnerConfig) -> int:
    """Updates on a shard before the next: as the config says, or until its bars are met once."""
    if config.shard_updates is not None:
        return config.shard_updates
    return -(-env.rows // (config.num_segments * config.segment_length))


def begun_anew(turn: int, update: Array, segments: Segments) -> Segments:
    """The segments, all of them over where `update` is the first on another shard."""
    return segments._replace(left=jnp.where(update % turn == 0, 0, segments.left))


def check_shards(env: ShardedEnv, policy: Policy, config: AgentConfig) -> None:
    """Refuses what cannot be learnt from shards.

    Raises:
      BarError: a shard that is too short. ConfigError: settings that are about one market.
    """
    learner = config.learner
    env.check_lengths(policy.first_decision + learner.segment_length + 1)
    if learner.replay_slots:
        raise ConfigError(
            "learner.replay_slots: an old rollout is of a shard that is no longer on the device; "
            "set it to 0 to train on shards."
        )
    if learner.advantages == "exact" and env.config.reward == "log_return":
        raise ConfigError(
            "learner.advantages = 'exact' with reward = 'log_return' asks of all bars whether any "
            "is missing, and shards are not all read; take reward = 'pnl', or 'gae'."
        )
    if config.policy.neighbours == "nearest" and not env.one_universe:
        raise ConfigError(
            "policy.neighbours = 'nearest' ranks the assets of one universe, but the shards have "
            "several; take 'ring' or 'all', or shards of the same symbols."
        )


class Markets:
    """The markets of a run's updates, read ahead where they are a stream."""

    def __init__(self, env: TradingEnv, config: LearnerConfig, mesh: Mesh):
        """Reads nothing yet."""
        self._env, self._config, self._mesh = env, config, mesh
        self._stream: Generator[Piece, None, None] | None = None
        self._turn, self._market = -1, None

    def __enter__(self) -> Markets:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def shard(self, update: int) -> int | None:
        """Index of the shard that `update` (from 0) learns from; None where there are none."""
        env = self._env
        if not isinstance(env, ShardedEnv):
            return None
        return update // shard_updates(env, self._config) % len(env.shards)

    def of(self, update: int) -> Market | None:
        """The market of `update` (from 0) on the mesh; None is the environment's own.

        Raises:
          BarError: its shard is missing. StateError: it is not the one that was written.
        """
        env = self._env
        if not isinstance(env, ShardedEnv):
            return None
        turn = update // shard_updates(env, self._config)
        if turn == self._turn:
            return self._market
        self._market = None  # so that the device need not hold it beside the next
        if self._stream is None or turn != self._turn + 1:  # a start, or a way back
            self._close()
            place: Any = replicated(self._mesh)
            first = turn % len(env.shards)
            self._stream = stream(env.shards, env.prepare, start=first, repeat=True, device=place)
        self._market, self._turn = next(self._stream).arrays, turn
        return self._market
