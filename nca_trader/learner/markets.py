"""Which market each update learns from: the environment's own, or shard after shard of a stream.

The data cursor is the number of updates done, which is part of every checkpoint: update u learns
from shard `u // shard_updates`, over and over. So a run that resumes goes on with the shard at
which it stopped.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from nca_trader.agents.policy import Policy
from nca_trader.config import AgentConfig, LearnerConfig
from nca_trader.data.shards import Piece, Shards, stream
from nca_trader.envs.market import Market
from nca_trader.envs.trading import TradingEnv
from nca_trader.errors import BarError, ConfigError
from nca_trader.learner.rollout import Segments
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import replicated


def shard_updates(shards: Shards, config: LearnerConfig) -> int:
    """Updates on a shard before the next: as the config says, or until its bars are met once."""
    if config.shard_updates is not None:
        return config.shard_updates
    longest = max(shard.rows for shard in shards)
    return -(-longest // (config.num_segments * config.segment_length))


def begun_anew(turn: int, update: Array, segments: Segments) -> Segments:
    """The segments, all of them over where `update` is the first on another shard."""
    return segments._replace(left=jnp.where(update % turn == 0, 0, segments.left))


def check_shards(env: TradingEnv, policy: Policy, config: AgentConfig) -> None:
    """Refuses what cannot be learnt from shards.

    Raises:
      BarError: a shard that is too short. ConfigError: settings that are about one market.
    """
    learner = config.learner
    shards = env.shards
    if shards is None:
        return
    need = policy.first_decision + learner.segment_length + 1
    for shard in shards:
        if shard.rows < need:
            raise BarError(
                f"{shards.folder / shard.path}: {shard.rows} bars, but training needs {need} of "
                "each shard; write the shards anew with rows that leave no short last one, or "
                "lower learner.segment_length or policy.dilations."
            )
    empty = [p for p in range(hosts.count()) if not len(own_part(shards, p))]
    if empty:
        raise ConfigError(
            f"{shards.folder}: its {len(shards)} shards, drawn by their names' hashes, "
            f"leave process {empty[0]} of {hosts.count()} without one; write more and shorter "
            "shards, or start fewer processes."
        )
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
    if config.policy.neighbours == "nearest" and len({s.symbols for s in shards}) > 1:
        raise ConfigError(
            "policy.neighbours = 'nearest' ranks the assets of one universe, but the shards have "
            "several; take 'ring' or 'all', or shards of the same symbols."
        )


def own_part(shards: Shards, process: int) -> Shards:
    """The shards that a process of the run reads; all, where it is the only one."""
    return shards.part(process, hosts.count(), by="file") if hosts.count() > 1 else shards


class Markets:
    """The markets of a run's updates, read ahead where they are a stream."""

    def __init__(self, env: TradingEnv, config: LearnerConfig, mesh: Mesh):
        """Reads nothing yet."""
        self._env, self._config, self._mesh = env, config, mesh
        self._stream: Generator[Piece, None, None] | None = None
        self._turn, self._market = -1, None
        self._own = None if env.shards is None else own_part(env.shards, hosts.own())

    def __enter__(self) -> Markets:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def shard(self, update: int) -> int | None:
        """Index of the shard that `update` (from 0) learns from here; None where there are none."""
        env = self._env
        if env.shards is None or self._own is None:
            return None
        shard = self._own[update // shard_updates(env.shards, self._config) % len(self._own)]
        return [other.path for other in env.shards].index(shard.path)

    def of(self, update: int) -> Market | None:
        """The market of `update` (from 0) on the mesh; None is the environment's own.

        Raises:
          BarError: its shard is missing. StateError: it is not the one that was written.
        """
        env = self._env
        if env.shards is None or self._own is None:
            return None
        turn = update // shard_updates(env.shards, self._config)
        if turn == self._turn:
            return self._market
        self._market = None  # so that the device need not hold it beside the next
        if self._stream is None or turn != self._turn + 1:  # a start, or a way back
            self._close()
            place: Any = replicated(_local(self._mesh))
            first = turn % len(self._own)
            self._stream = stream(self._own, env.prepare, start=first, repeat=True, device=place)
        market = next(self._stream).arrays
        self._market, self._turn = jax.tree.map(self._joined, market), turn
        return self._market

    def _joined(self, leaf: Array) -> Array:
        """An array on this process's devices as one on the whole mesh.

        Each device's copy is what its process read. The learner takes the market as something
        that every device has by itself, and never moves it between them.
        """
        if hosts.count() == 1:
            return leaf
        copies = [shard.data for shard in leaf.addressable_shards]
        place = replicated(self._mesh)
        return jax.make_array_from_single_device_arrays(leaf.shape, place, copies)


def _local(mesh: Mesh) -> Mesh:
    """The devices of the mesh that are this process's, in one row."""
    own = [device for device in mesh.devices.flat if device.process_index == hosts.own()]
    return mesh if len(own) == mesh.size else Mesh(np.array(own), ("own",))
