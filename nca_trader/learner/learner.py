"""The learner: `update` as one jitted function over a mesh, in sizes that fit its memory."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nca_trader.agents import load_agent
from nca_trader.agents.policy import Policy
from nca_trader.config import AgentConfig, LearnerConfig
from nca_trader.config.ranges import divides, expect, refuse
from nca_trader.data.shards import Shards
from nca_trader.envs.market import Market
from nca_trader.envs.trading import TradingEnv, begin_dropout
from nca_trader.errors import BarError, ConfigError
from nca_trader.learner.layout import Layout, make_layout
from nca_trader.learner.population import (
    agents_at_once,
    draw_hyper,
    init_each,
    step_each,
)
from nca_trader.learner.programs import NO_RING, Fitting, Held, Sizes, memory_limit, sizes_to_try
from nca_trader.learner.rollout import Segments
from nca_trader.learner.sampled import begin_ring, ring_spec
from nca_trader.learner.update import LearnerState, Metrics, Parts, make_parts, update
from nca_trader.parallel import hosts
from nca_trader.parallel.mesh import (
    BATCH,
    FSDP,
    MODEL,
    batch_shards,
    compiler_options,
    everywhere,
    make_mesh,
    replicated,
)

SEARCHES = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")  # settings, see `advance`


class Learner(NamedTuple):
    """init: `(key) -> state`. step: `(state, market=None) -> (state, metrics)`, donates the state.

    The market is a shard's where the environment is of shards, and on the mesh; None is the
    environment's own. steps_per_update: environment steps of one call of `step`, of all seeds
    together. mesh: where it runs. fitting: the sizes in which it does, and the memory that takes.
    programs: what `step` runs, the first that fits: by sizes, the fastest first, jitted
    `(state, market) -> (state, metrics)`. market: the environment's own, as the mesh has it.
    """

    init: Callable[[Array], LearnerState]
    step: Callable[..., tuple[LearnerState, Metrics]]
    steps_per_update: int
    mesh: Mesh
    fitting: Fitting
    programs: dict[Sizes, Any]
    market: Market


def make_learner(
    env: TradingEnv,
    policy: Policy,
    config: AgentConfig | str | pathlib.Path,
    mesh: Mesh | None = None,
) -> Learner:
    """Builds the learner; compiles nothing until `step` is called.

    Args:
      config: an agent: a config, a preset's name, or the path of a TOML file. mesh: None is the
        config's own.

    Raises:
      BarError: fewer bars than one segment and the receptive field behind it.
      ConfigError: shapes that do not divide, or a mesh larger than this machine.

    On a mesh of devices that are only described (see `scale.plan`) it can be lowered and compiled.
    """
    expect("env", env, TradingEnv, "a TradingEnv", policy=policy, config=config)
    expect("policy", policy, Policy, "a Policy, e.g. of nca.make_policy", env=env, config=config)
    config = load_agent(config, name="config")
    mesh = make_mesh(*config.mesh.axes) if mesh is None else mesh
    shape = config.learner
    layout = make_layout(policy, mesh, config.mesh.deterministic)
    _check(env, policy, config, mesh, layout)
    streamed = env.shards is not None
    if streamed:
        check_shards(env, policy, config)
    steps_per_update = shape.num_segments * shape.segment_length * shape.envs_per_segment
    parts = make_parts(env, policy, layout, -(-shape.steps // steps_per_update), config)
    # One of many shards waits on the host: the markets of a run's updates are handed to `step`.
    market = env.market if streamed else everywhere(env.market, mesh)
    init, placed = _beginning(parts, mesh)
    build = functools.partial(_program, parts, mesh, placed)
    items = _items(shape, mesh, layout)
    sizes = sizes_to_try(agents_at_once(config.num_seeds, mesh), shape.micro_batches, items)
    ring = _ring_held(init, shape.replay_slots, mesh) if shape.replay_slots else NO_RING
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(market))
    limit = memory_limit(shape.memory_gb, mesh, held)
    if limit is not None and streamed:  # beside the shard in use, the next and one on its way
        limit -= 2 * held
    programs = {cut: build(cut) for cut in sizes}
    # Options are for who calls the step, and not for who traces it into a program of his own.
    called = functools.cache(functools.partial(build, options=compiler_options(mesh)))
    step = Fitting(programs.__getitem__, sizes, limit, ring, called)

    def advance(state: LearnerState, given: Market | None = None) -> tuple[LearnerState, Metrics]:
        # Of a whole program jax can't name the operation that made a NaN, and ends with an error
        # of its own; the guard drops the update, and its metrics tell. Without jit it can.
        alone, nans, infs = (getattr(jax.config, name) for name in SEARCHES)
        with jax.debug_nans(alone and nans), jax.debug_infs(alone and infs):
            return step(state, market if given is None else given)

    return Learner(init, advance, steps_per_update * config.num_seeds, mesh, step, programs, market)


def _beginning(parts: Parts, mesh: Mesh) -> tuple[Callable[[Array], LearnerState], LearnerState]:
    """Jitted `key -> state`, of each agent where there are several, and where its leaves lie."""
    seeds = parts.config.num_seeds
    begin = functools.partial(_fresh, parts)
    placed = _spec(parts, FSDP, MODEL)
    if seeds > 1:
        begin = init_each(begin, seeds)
        placed = jax.tree.map(lambda axes: P(None, *axes) if axes else axes, placed)
    placed = jax.tree.map(lambda axes: NamedSharding(mesh, axes), placed)
    return jax.jit(begin, out_shardings=placed), placed


def _fresh(parts: Parts, key: Array) -> LearnerState:
    """One agent's state before its first update."""
    env, config = parts.env, parts.config
    policy, shape = parts.setup.policy, config.learner
    params_key, run_key, hyper_key = jax.random.split(key, 3)
    params = policy.init(params_key)
    none = jnp.zeros(shape.num_segments, jnp.int32)
    each = (shape.num_segments, shape.envs_per_segment)
    # Placeholders: `left` is 0, so the first update draws every segment anew.
    episode = jax.vmap(jax.vmap(env.begin))(jnp.broadcast_to(run_key, each))
    drop = functools.partial(begin_dropout, env.dynamics)
    drop = jax.vmap(drop)(jnp.broadcast_to(run_key, each[:1]))
    segments = Segments(none, none, drop, episode)
    ring = None
    if shape.replay_slots:
        ring = begin_ring(parts.setup, env.market, params, segments)
    opt_state, hyper = parts.optimizer.init(params), draw_hyper(config, hyper_key)
    none_done = jnp.zeros((), jnp.int32)
    return LearnerState(params, opt_state, run_key, none_done, segments, ring, hyper)


def _program(
    parts: Parts,
    mesh: Mesh,
    placed: LearnerState,
    sizes: Sizes,
    options: dict[str, Any] | None = None,
) -> Any:
    """Jitted `(state, market) -> (state, metrics)` over the mesh, in pieces of these sizes."""
    own = _spec(parts, FSDP)
    step = jax.shard_map(
        functools.partial(_update, parts, sizes.micro_batches),
        mesh=mesh,
        in_specs=(own, P()),
        out_specs=(own, P()),
        axis_names=parts.layout.by_hand,
    )
    if parts.config.num_seeds > 1:
        step = step_each(step, sizes.agents)
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(placed, replicated(mesh)),
        compiler_options=options,
    )


def _update(
    parts: Parts, micro_batches: int, state: LearnerState, market: Market
) -> tuple[LearnerState, Metrics]:
    """One update; of shards, every segment starts anew where the update is the first on one."""
    if parts.env.shards is not None:
        turn = shard_updates(parts.env.shards, parts.config.learner)
        state = state._replace(segments=begun_anew(turn, state.update, state.segments))
    return update(parts, micro_batches, state, market)


def _ring_held(init: Callable[[Array], LearnerState], slots: int, mesh: Mesh) -> Held:
    """What the ring of a state that `init` makes takes of each device."""
    ring = jax.eval_shape(init, jax.random.key(0)).replay
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(ring.data))
    return Held(slots, held / batch_shards(mesh) / slots)


def _spec(parts: Parts, *names: str) -> LearnerState:
    """How the state lies over these axes of the mesh; what is not said is whole on each device."""
    optimizer = parts.optimizer
    shapes = jax.eval_shape(parts.setup.policy.init, jax.random.key(0))
    params, states = parts.layout.specs(shapes, *names), jax.eval_shape(optimizer.init, shapes)
    # Moments and averages lie as the parameters that they are of.
    moments = optax.tree_map_params(
        optimizer, lambda _, spec: spec, states, params, transform_non_params=lambda _: P()
    )
    ring = ring_spec(parts.config.learner.replay_slots)
    return LearnerState._make([params, moments, P(), P(), P(BATCH), ring, P()])


def _items(config: LearnerConfig, mesh: Mesh, layout: Layout) -> int:
    """Segments of a minibatch that a device learns from at once."""
    parts = config.logical_shards if layout.deterministic else batch_shards(mesh)
    return config.num_segments // config.num_minibatches // parts


def _check(env: TradingEnv, policy: Policy, agent: AgentConfig, mesh: Mesh, layout: Layout) -> None:
    config = agent.learner
    if config.advantages == "group" and agent.population.gae_lambda is not None:
        raise ConfigError(
            f"population.gae_lambda = {agent.population.gae_lambda} has no effect without "
            "learner.advantages = 'gae' or 'exact'; leave it out, or give one of them."
        )
    need = policy.first_decision + config.segment_length + 1
    if len(env) < need:
        raise BarError(
            f"{env.bars.source or 'bars'}: {len(env)} bars, but training needs {need}: "
            f"{env.spec.warmup} of feature warm-up, {policy.receptive_field} of receptive field "
            f"and segments of {config.segment_length}; give more bars or lower "
            "learner.segment_length or policy.dilations."
        )
    if config.logical_shards % (parts := batch_shards(mesh)):
        raise ConfigError(
            f"learner.logical_shards = {config.logical_shards} is not a multiple of the mesh's "
            f"{parts} devices that share a batch; the nearest that is, is "
            f"{max(1, round(config.logical_shards / parts)) * parts}."
        )
    items = _items(config, mesh, layout)
    refuse(divides("learner.micro_batches", config.micro_batches, "a device's minibatch", items))
    episode = env.config.episode_bars or config.segment_length
    if episode % config.segment_length:
        raise ConfigError(
            f"episode_bars = {episode} is not a multiple of learner.segment_length = "
            f"{config.segment_length}; take "
            f"{max(1, round(episode / config.segment_length)) * config.segment_length}."
        )


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
